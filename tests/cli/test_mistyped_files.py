"""A file that is missing, or of another kind, is named for what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchbound.cli import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = {"custom_id": "a", "body": {"prompt": "x", "max_tokens": 2}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "texts.txt").write_text("How many?\nWhy?\n")
    response = {"status_code": 200, "body": {"choices": [], "usage": {}}}
    line = {"id": "1", "custom_id": "a", "response": response, "error": None}
    (tmp_path / "answers.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


@pytest.mark.parametrize("slots", [[], ["--slots", "8"]])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("promts.jsonl", "promts.jsonl: no such file. Did you mean prompts.jsonl?"),
        ("quite_another.jsonl", "quite_another.jsonl: no such file. Check the path."),
        (
            "texts.txt",
            "texts.txt: is a text file; prompts are JSONL, CSV or Parquet. A prompt a line",
        ),
    ],
)
def test_run_names_a_file_for_what_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, said: str, slots: list[str]
) -> None:
    assert main(["run", name, "--model", "tiny:llama", *slots]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_report_of_completions_names_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "answers.jsonl"]) == 2
    error = capsys.readouterr().err
    assert "holds completions and is not a plan. Give the plan of that run, by default answers.plan" in error
    assert main(["report", "prompts.jsonl"]) == 2
    assert "Make a plan from it" in capsys.readouterr().err


def test_a_missing_trace_of_a_run_that_has_not_ended_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for other, trace, said in (
        ("", "trace.jsonl", "A run writes its trace when it ends. Check the path."),
        ("old.trace.jsonl", "olt.trace.jsonl", "Did you mean old.trace.jsonl?"),
        ("new.parquet.journal", "new.trace.jsonl", "that of new.parquet.journal continues with the same"),
        ("answers.jsonl.journal", "trace.jsonl", "that of answers.jsonl.journal continues with the same"),
    ):
        if other:
            (folder / other).touch()
        assert main(["audit", trace]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
