"""The TAB key completes commands, options, choices and files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from batchbound.cli import COMMANDS, main, whole_parser
from batchbound.cli.parser import SHELLS, completion_script

ASK = r"""
source "$1"; shift
ask=$(complete -p batchbound | sed 's/.*-F \([^ ]*\).*/\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMPREPLY=()
"$ask" batchbound "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    path = tmp_path_factory.mktemp("completion") / "batchbound.bash"
    path.write_text(completion_script(whole_parser(), "bash"))
    return path


def completed(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of the words typed."""
    asked = subprocess.run(
        ["bash", "-c", ASK, "bash", str(script), "batchbound", *words],
        cwd=script.parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert asked.stderr == ""
    return asked.stdout.split()


def test_commands_options_and_choices_are_completed(script: Path) -> None:
    assert set(completed(script, "")) >= set(COMMANDS)
    assert completed(script, "pl") == ["plan"]
    assert completed(script, "plan", "--kv") == ["--kv-capacity"]
    assert completed(script, "simulate", "x.csv", "--policy", "fc") == [
        "fcfs",
        "fcfs-paced",
        "fcfs-ski",
    ]
    assert completed(script, "predict", "tr") == ["train"]


def test_files_are_completed_where_a_file_is_named(script: Path) -> None:
    (script.parent / "prompts.jsonl").touch()
    assert completed(script, "plan", "pro") == ["prompts.jsonl"]
    assert completed(script, "run", "plan.json", "--prompts", "pro") == ["prompts.jsonl"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", shell])
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    assert "longest-completion" in printed


def test_another_shell_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--print-completion", "ksh"])
    assert "there are bash, zsh, fish" in capsys.readouterr().err
