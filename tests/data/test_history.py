"""Lengths that completions of each prompt had, kept from step to step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.data.lengths.history import LengthHistory, prompt_key
from batchbound.data.plan import Plan


def test_a_prompt_is_expected_to_be_as_long_as_it_was_and_a_new_one_as_the_others() -> None:
    history = LengthHistory()
    with pytest.raises(ValueError, match="no length yet"):
        history.expected(["a"])
    prompts = [f"prompt {k}" for k in range(12)]
    for _ in range(3):
        history.saw((prompt, 400 if k < 4 else 40) for k, prompt in enumerate(prompts))
    expected = history.expected([*prompts, "new"])
    assert expected[:4].tolist() == pytest.approx([400] * 4, rel=0.05)
    assert expected[4:12].tolist() == pytest.approx([40] * 8, rel=0.05)
    assert 40 < expected[12] < 400
    assert history.error == pytest.approx(0, abs=1e-9)


def test_a_prompt_is_the_same_whatever_gives_it() -> None:
    chat = [{"role": "user", "content": "hello"}]
    assert prompt_key(chat) == prompt_key([{"content": "hello", "role": "user", "name": "x"}])
    assert prompt_key((1, 2)) == prompt_key(np.array([1, 2]))
    assert len({prompt_key(one) for one in ("a", "b", [1, 2], chat)}) == 4
    assert prompt_key(prompt_key("a")) == prompt_key("a")


def test_it_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    history = LengthHistory.at(tmp_path / "history.jsonl")
    assert len(history) == 0
    rng = np.random.default_rng(0)
    for _ in range(20):
        history.saw((f"p{k}", int(rng.integers(1, 50))) for k in range(9))
    history.save(tmp_path / "history.jsonl")
    again = LengthHistory.load(tmp_path / "history.jsonl")
    prompts = [f"p{k}" for k in range(10)]
    assert again.expected(prompts).tolist() == history.expected(prompts).tolist()
    assert again.error == history.error
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert max(len(json.loads(line).get("lengths", ())) for line in lines) == 16


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"batchbound_length_history": 1',
            '"batchbound_length_history": 2',
            "not a history of lengths of version 1",
        ),
        ('"prompts": 2', '"prompts": 3', "ends before the history does"),
        ("[5]", "[0]", "line 2, field 'lengths': are no numbers of tokens"),
        ("[5]", "5", "line 2, field 'lengths'"),
        ('"missed": []', '"missed": [-1.0]', "field 'missed'"),
        ('"prompt": ', '"prompt": 7, "was": ', "line 2, field 'prompt': 7 names no prompt"),
    ],
)
def test_a_damaged_history_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "history.jsonl"
    history = LengthHistory()
    history.saw([("a", 5), ("b", 6)])
    history.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        LengthHistory.load(path)


def test_a_plan_takes_its_lengths_from_the_history_of_its_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = LengthHistory()
    history.saw((f"prompt {k}", 5 + 20 * (k % 3)) for _ in range(4) for k in range(12))
    history.save(tmp_path / "history.jsonl")
    with (tmp_path / "in.jsonl").open("w") as stream:
        for k in range(12):
            body: dict[str, Any] = {"prompt": f"prompt {k}", "max_tokens": 30}
            stream.write(json.dumps({"custom_id": f"r{k}", "body": body}) + "\n")
    words = ["plan", str(tmp_path / "in.jsonl"), "--tokenizer", "bytes", "--slots", "4", "--cost", "paper"]
    words += ["-o", str(tmp_path / "plan.json"), "--time-limit", "0.2"]
    assert main([*words, "--lengths", f"history:{tmp_path / 'history.jsonl'}"]) == 0
    planned = Plan.load(tmp_path / "plan.json").workload.output_tokens
    assert planned.tolist() == [5, 25, 30] * 4
    capsys.readouterr()
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n3,2\n")
    words[1] = str(tmp_path / "lengths.csv")
    assert main([*words, "--overwrite", "--lengths", f"history:{tmp_path / 'history.jsonl'}"]) == 2
    assert "is of prompts, and there are only lengths" in capsys.readouterr().err


def test_on_public_rollouts_half_of_a_groups_completions_tell_of_the_other_half(public_data: Path) -> None:
    table = pd.read_csv(public_data / "rollouts" / "deepcoder14b.csv")
    first = table.groupby("group").cumcount() < 4
    history = LengthHistory()
    history.saw(zip(table["group"][first], table["output_tokens"][first], strict=True))
    rest = table[~first]
    expected = history.expected(rest["group"].tolist())
    ranks = pd.Series(expected).rank().corr(rest["output_tokens"].reset_index(drop=True).rank())
    assert ranks > 0.8
