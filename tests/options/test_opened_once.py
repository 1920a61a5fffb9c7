"""Commands open their input once: every reader gets the bytes of the first."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchbound.cli import main
from batchbound.data.files.sources import opened_once, reading

OPENED: Counter[str] | None = None


def _count(event: str, values: tuple[object, ...]) -> None:
    if event == "open" and OPENED is not None and isinstance(values[0], str | os.PathLike):
        OPENED[Path(values[0]).name] += 1


sys.addaudithook(_count)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Return the number of times that each file is opened."""
    body = {"messages": [{"role": "user", "content": "Name a prime."}], "max_tokens": 3}
    rows = [
        {"custom_id": f"r{k}", "method": "POST", "url": "/v1/chat/completions", "body": body} for k in "ab"
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lengths.csv").write_text("id,input_tokens,output_tokens\na,4,3\nb,5,2\n")
    monkeypatch.chdir(tmp_path)
    global OPENED
    OPENED = Counter()
    yield OPENED
    OPENED = None


@pytest.mark.parametrize("name", ["prompts.jsonl", "lengths.csv"])
def test_plan_opens_its_input_once(name: str, opened: Counter[str]) -> None:
    model = ["--model", "tiny:llama"] if name == "prompts.jsonl" else []
    assert main(["plan", name, "--slots", "2", "--work", "1", *model]) == 0
    assert opened[name] == 1


def test_a_plan_for_an_engine_opens_its_input_once(opened: Counter[str]) -> None:
    assert main(["plan", "lengths.csv", "--slots", "2", "--for", "vllm"]) == 0
    assert opened["lengths.csv"] == 1


def test_run_opens_its_input_once(opened: Counter[str]) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    assert main(["run", "prompts.jsonl", "--model", "tiny:llama", "--slots", "2", "--threads", "1"]) == 0
    assert opened["prompts.jsonl"] == 1


def test_a_file_that_changes_is_opened_again(opened: Counter[str]) -> None:
    with opened_once():
        for text in ("one", "other"):
            Path("lengths.csv").write_text(text)
            opened.clear()
            for _ in range(2):
                with reading("lengths.csv") as stream:
                    assert stream.read() == text.encode()
            assert opened["lengths.csv"] == 1
