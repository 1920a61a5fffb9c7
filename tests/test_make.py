"""The targets of the Makefile that pages show are there, and do small work in an environment that is made."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_docs import ROOT, shown

COMMANDS = [shlex.split(command, comments=True) for command in shown("make ")]
BY_THE_FULL_RUN = {"site", "test", "test-all", "test-core"}
INSTALLS = {"test-lowest"}
"""Gigabytes: docs/reliability.md says what was seen."""
SMALL = {
    "demo": [],
    "attack": ["ATTACK=--only plans --kills 3 --seed 3"],
    "mutants": ["MUTANTS=models/certificates/reads.py --every 40"],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The repository, with an environment as ``make`` installs it, which is this one."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name != "demo-output":
            (tmp_path / entry.name).symlink_to(entry)
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    for name, words in {"python": "", "batchbound": "-m batchbound"}.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    for name in ("engine", "dev", "docs"):
        (folder / name).touch()
    return tmp_path


def made(words: list[str], checkout: Path) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["make", "VENV=environment", *words]
    return subprocess.run(
        command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("words", COMMANDS, ids=shlex.join)
def test_a_command_shown_is_a_target(words: list[str], checkout: Path) -> None:
    planned = made(["--dry-run", *words[1:]], checkout)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.strip()


def test_each_target_shown_is_run() -> None:
    assert {words[1] for words in COMMANDS} == SMALL.keys() | BY_THE_FULL_RUN | INSTALLS
    asked = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert {"site", "test-all", "test-core"} <= set(re.findall(r"^make (\S+)", asked, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("target", SMALL)
def test_a_target_does_its_work(target: str, checkout: Path) -> None:
    if target == "mutants" and find_spec("mutmut") is None:
        pytest.skip("needs mutmut")
    done = made([target, *SMALL[target]], checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
