"""Commands that read a file once read it from standard input, too."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from batchbound.cli import main

LENGTHS = b"input_tokens,output_tokens\n4,5\n4,2\n9,7\n"


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(LENGTHS)))


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_bound_of_a_stream_is_that_of_the_file(
    name: str, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(f"{tmp_path}/lengths.csv", "wb") as file:
        file.write(LENGTHS)
    assert main(["bound", f"{tmp_path}/lengths.csv", "--slots", "2", "--cost", "paper"]) == 0
    of_file = capsys.readouterr().out
    assert main(["bound", name, "--slots", "2", "--cost", "paper"]) == 0
    assert capsys.readouterr().out == of_file


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_command_whose_file_is_read_again_later_says_so(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--model", "tiny:llama"] if command == "run" else []
    assert main([command, "-", "--slots", "2", *more]) == 2
    assert "-: standard input is not read. Write it to a file" in capsys.readouterr().err
