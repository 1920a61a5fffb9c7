"""Prompts that begin alike: screens, report and bound say that each is computed whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.cli import main
from batchbound.data.plan import Plan
from batchbound.data.prefix_cache import distinct_tokens

WORDS = "192 prompt tokens, 67 of them distinct: the rest is computed again, and the bound counts it"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    # A token begins each prompt: 6 x 32 tokens, of which 1 + 30 + 5 + 31 are distinct.
    texts = [*("a" * 30 + end for end in "bcdef"), "g" * 31]
    lines = [
        {"custom_id": f"r{k}", "body": {"prompt": text, "max_tokens": 2 + k}} for k, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_a_beginning_counts_once(prompts: list[list[int]]) -> None:
    beginnings = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert distinct_tokens(prompts) == len(beginnings)


def test_bound_report_and_screens_name_what_is_computed_again(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prompts.parent)
    model = ["--model", "tiny:llama", "--slots", "2"]
    assert main(["plan", "prompts.jsonl", *model, "--lengths", "constant:3", "--work", "1"]) == 0
    plan = Plan.load("plan.json")
    assert plan.repeats == WORDS
    assert plan.bound_of == "every schedule that computes each prompt whole"
    assert main(["verify", "plan.json"]) == 0
    assert main(["report", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert "no schedule that computes each prompt whole takes less than" in said
    assert said.count("67 of them distinct") == 3  # plan, verify, report
    assert main(["run", "plan.json", "--model", "tiny:llama", "--threads", "1"]) == 0
    screen = capsys.readouterr().out
    assert "67 of them distinct" in screen
    assert "  bound counts it\n" in screen or "  the bound counts it\n" in screen  # in lines of 80 columns


def test_prompts_that_begin_differently_say_nothing(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"custom_id": f"r{k}", "body": {"prompt": [k, 9, 9, 9], "max_tokens": 2}} for k in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = str(prompts.with_name("p.json"))
    assert main(["plan", str(prompts), "--slots", "2", "-o", output, "--work", "1"]) == 0
    assert "distinct" not in capsys.readouterr().out
    assert Plan.load(output).bound_of is None
