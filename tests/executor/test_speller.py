"""The demo's model ends its completions, and most are right, of prompts that it never saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import train_speller

from batchbound.cli import main
from batchbound.data.readers.requests import bundled_prompts_path
from batchbound.executor.models.source import ModelLoadError, load_model

ROWS = [json.loads(line) for line in bundled_prompts_path().read_text(encoding="utf-8").splitlines()]
PROMPTS = [row["body"]["messages"][0]["content"] for row in ROWS]


def test_the_bundled_prompts_are_those_that_the_script_writes_and_never_trained_on() -> None:
    assert train_speller.bundled() == ROWS
    assert len(set(PROMPTS)) == len(PROMPTS) == 48
    assert all(map(train_speller.is_held_out, PROMPTS))


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("Spell 4096.", "four thousand ninety-six"),
        ("Spell 913.", "nine hundred thirteen"),
        ("Spell 17.", "seventeen"),
        ("Reverse banana.", "ananab"),
        ("Spell moon with hyphens.", "m-o-o-n"),
        ("Say moon 3 times.", "moon moon moon"),
        ("Letters from c to f.", "c d e f"),
        ("Is 20 even?", "yes"),
        ("What is the last letter of moon?", "n"),
    ],
)
def test_what_is_right_can_be_told(prompt: str, right: str) -> None:
    assert train_speller.right_answer(prompt) == right


def test_a_prompt_of_no_kind_has_no_right_answer() -> None:
    with pytest.raises(ValueError, match="not a prompt of the speller"):
        train_speller.right_answer("Write a poem.")


@pytest.mark.slow
def test_most_completions_are_right_in_chat_and_plain() -> None:
    right = train_speller.score(load_model("tiny:speller", device="cpu"), PROMPTS, slots=8)
    assert sum(right) >= 46


def test_no_seed_draws_its_weights() -> None:
    with pytest.raises(ModelLoadError, match="its weights are trained"):
        load_model("tiny:speller:1")


@pytest.mark.slow
def test_the_demo_shows_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert PROMPTS[0] in said
    assert train_speller.right_answer(PROMPTS[1]) in said
    told = (tmp_path / "demo-output" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    ends = [json.loads(line)["response"]["body"]["choices"][0]["finish_reason"] for line in told]
    assert ends.count("stop") >= 44
