"""Standard output that is closed, full, or knows few letters: one line, and the work is not lost."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchbound.cli import main
from batchbound.screen.streams import say

TABLE = "id,input_tokens,output_tokens\na,3,4\nb,5,6\n"
BOUND = ["bound", "table3:0:6", "--slots", "2", "--cost", "paper"]


@pytest.mark.parametrize("words", [BOUND, ["--print-completion", "bash"]])
def test_a_full_disk_under_standard_output_is_named(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 1
    assert capsys.readouterr().err == (
        "batchbound: standard output or a temporary file cannot be written (No space left on device). "
        "Free some space.\n"
    )


def test_a_reader_that_went_away_ends_a_command_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(BOUND) == 1
    assert capsys.readouterr().err == ""


def test_a_closed_standard_output_stops_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.csv").write_text(TABLE)
    assert main(["plan", "lengths.csv", "--slots", "2", "--work", "1", "-o", "plan.json"]) == 0
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["report", "plan.json"]) == 0
    sys.stdout.close()


def test_a_name_that_standard_output_has_no_letters_for_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.csv").write_text(TABLE)
    with open("said.txt", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["plan", "lengths.csv", "--slots", "2", "--work", "1", "-o", "plän.json"]) == 0
    assert Path("said.txt").read_text().startswith("pl\\xe4n.json: 2 requests")


def test_a_file_whose_name_is_no_text_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/l\xe4ngs.csv")
    Path(name).write_text(TABLE)
    with pytest.raises(SystemExit) as ended:
        main(["plan", name, "--slots", "2", "-o", str(tmp_path / "plan.json")])
    assert ended.value.code == 2
    assert "l\\udce4ngs.csv' is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.slow
def test_without_docstrings_plans_are_made_and_a_model_is_refused_by_what_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the engine extra is not installed")
    for words, status, said in (
        ("plan table3:0:20 --slots 4 --cost paper --work 1", 0, ""),
        ("report", 0, ""),
        ("profile --model tiny:llama", 2, "batchbound: running a model needs transformers, which does not"),
    ):
        line = [sys.executable, "-OO", "-m", "batchbound", *words.split()]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr[: len(said)]) == (status, said), done.stderr
        assert len(done.stderr.splitlines()) <= 1


def test_control_characters_of_a_file_never_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("\x1b]0;title\x07\x1b[2J,other\n1,2\n", encoding="utf-8")
    assert main(["plan", str(table), "-o", str(tmp_path / "plan.json")]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert r"\x1b[2J" in said


def test_long_messages_break_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    say("the completion extends beyond the end of the line", terminal)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 30
    assert " ".join(line.strip() for line in lines) == "the completion extends beyond the end of the line"
