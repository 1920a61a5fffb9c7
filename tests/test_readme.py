"""The README is a promise kept: its snippets run, its commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path

from batchbound.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_snippets_run() -> None:
    names: dict[str, object] = {}
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(snippet, names)


def test_every_command_named_exists() -> None:
    shell = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    named = set(re.findall(r"^batchbound ([a-z]+)", shell, re.MULTILINE))
    named |= set(re.findall(r"`batchbound ([a-z]+)", README))
    assert {"plan", "run", "report"} <= named
    assert named <= set(COMMANDS)


def test_every_file_linked_exists() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_two_commands_are_the_makefiles_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_it_fits_on_a_screen_or_two() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 1200
