"""A batch file in which requests ask for several answers: planned, run, resumed, one line a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.data.plan import Plan
from batchbound.data.readers.completions import (
    answer_line,
    error_line,
    joined_line,
    lengths_by_name,
    read_answer_lengths,
)
from batchbound.data.readers.openai_batch import each_sample, read_batch
from batchbound.data.trace import Trace
from batchbound.executor.jobs.journal import Journal
from batchbound.planning.history import earlier_completions

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

MODEL = ["--model", "tiny:llama"]
TOKENS = 1 + len("prompt number 0")
"""Of each prompt: tiny models count bytes, and one that begins a text."""


def write_batch(folder: Path, *, samples: int = 4, prompts: int = 3, **fields: Any) -> Path:
    path = folder / "prompts.jsonl"
    with path.open("w") as stream:
        for number in range(prompts):
            body = {"prompt": f"prompt number {number}", "n": samples, "max_tokens": 9, **fields}
            stream.write(json.dumps({"custom_id": f"r{number}", "body": body}) + "\n")
        body = {"prompt": "prompt number 0", "max_tokens": 5, **fields}
        stream.write(json.dumps({"custom_id": "alone", "body": body}) + "\n")
    return path


def plan(folder: Path, *options: str) -> Path:
    path = folder / "plan.json"
    words = ["plan", str(folder / "prompts.jsonl"), *MODEL, "--slots", "3", "--time-limit", "0.2"]
    assert main([*words, "-o", str(path), *options]) == 0
    return path


def run(folder: Path, *options: str, name: str = "answers") -> list[dict[str, Any]]:
    out = ["-o", str(folder / f"{name}.jsonl"), "--trace", str(folder / f"{name}.trace.jsonl")]
    assert main(["run", str(folder / "plan.json"), *MODEL, "--dtype", "float64", *out, *options]) == 0
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_each_answer_is_planned_and_its_prompt_is_counted_once(tmp_path: Path) -> None:
    write_batch(tmp_path)
    assert Plan.load(plan(tmp_path)).problem.prefix_cache == TOKENS - 1, "as much as they share"
    planned = Plan.load(plan(tmp_path, "--prefix-cache", "100", "--overwrite"))
    names = planned.workload.ids.tolist()
    assert names[:5] == ["r0#0", "r0#1", "r0#2", "r0#3", "r1#0"]
    assert names[-1] == "alone"
    tree = planned.workload.tree
    assert tree is not None
    assert tree.shared_tokens.tolist() == [TOKENS - 1] * 13, "the prompts differ by their last token"
    assert len(set(planned.workload.group.tolist())) == 3, "the last line joins the first one's group"
    assert planned.schedule.stage_tokens(planned.problem).sum() == TOKENS - 1 + 13


def test_a_line_holds_every_answer_and_counts_its_prompt_once(tmp_path: Path) -> None:
    write_batch(tmp_path, temperature=1.0)
    planned = Plan.load(plan(tmp_path, "--prefix-cache", "100"))
    answers = run(tmp_path)
    assert [answer["custom_id"] for answer in answers] == ["r0", "r1", "r2", "alone"]
    for answer in answers[:3]:
        body = answer["response"]["body"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert len({choice["text"] for choice in body["choices"]}) == 4, "each is drawn on its own"
        assert body["usage"]["prompt_tokens"] == TOKENS
        assert body["usage"]["completion_tokens"] <= 36
        assert body["usage"]["total_tokens"] == TOKENS + body["usage"]["completion_tokens"]
    trace = Trace.load(tmp_path / "answers.trace.jsonl")
    computed = sum(stage.tokens for stage in trace.stages if stage.kind == "prefill")
    assert computed == planned.schedule.stage_tokens(planned.problem).sum() == TOKENS - 1 + 13
    lengths = read_answer_lengths(tmp_path / "answers.jsonl")
    usage = answers[0]["response"]["body"]["usage"]["completion_tokens"]
    assert lengths["r0"] == -(-usage // 4), "the mean of its answers"
    assert run(tmp_path) == answers, "the same command finds the run whole"


def test_a_trace_tells_the_lengths_of_the_next_epoch_where_an_output_cannot(tmp_path: Path) -> None:
    prompts = write_batch(tmp_path, temperature=1.0)
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:3]))
    plan(tmp_path)
    answers = run(tmp_path)
    trace = tmp_path / "answers.trace.jsonl"
    tokens = lengths_by_name(trace)
    for answer in answers:
        each = [tokens[f"{answer['custom_id']}#{k}"] for k in range(4)]
        assert sum(each) == answer["response"]["body"]["usage"]["completion_tokens"]
    again = Plan.load(plan(tmp_path, "--lengths", f"completions:{trace}", "--overwrite")).workload
    assert dict(zip(again.ids.tolist(), again.output_tokens.tolist(), strict=True)) == tokens
    earlier = earlier_completions(trace)
    assert np.bincount(earlier.group).tolist() == [4, 4, 4]
    output = tmp_path / "answers.jsonl"
    said = "line 1: states the tokens of the 4 completions of 'r0' together, not of each. Give the trace"
    with pytest.raises(InputError, match=re.escape(said)):
        earlier_completions(output)


def test_an_answer_is_the_same_beside_others_and_on_its_own_line(tmp_path: Path) -> None:
    write_batch(tmp_path, samples=2)
    plan(tmp_path)
    together = run(tmp_path)
    apart = tmp_path / "apart"
    apart.mkdir()
    write_batch(apart, samples=1)
    plan(apart)
    for one, other in zip(run(apart), together, strict=True):
        text = one["response"]["body"]["choices"][0]["text"]
        assert {choice["text"] for choice in other["response"]["body"]["choices"]} == {text}, "greedy"


def test_what_was_answered_before_a_stop_is_not_answered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_batch(tmp_path, temperature=1.0)
    plan(tmp_path)
    whole = run(tmp_path, name="whole")
    append: Callable[..., None] = Journal.append
    kept: list[str] = []

    def stopping(journal: Journal, name: str, answer: Any) -> None:
        append(journal, name, answer)
        kept.append(name)
        if len(kept) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", stopping)
    out = ["-o", str(tmp_path / "answers.jsonl"), "--trace", str(tmp_path / "answers.trace.jsonl")]
    assert main(["run", str(tmp_path / "plan.json"), *MODEL, "--dtype", "float64", *out]) != 0
    assert len(kept) == 6
    assert not (tmp_path / "answers.jsonl").exists()
    monkeypatch.setattr(Journal, "append", append)
    assert run(tmp_path) == whole
    trace = Trace.load(tmp_path / "answers.trace.jsonl")
    assert len(trace.ids) == 13 - 6
    assert not set(trace.ids) & set(kept)


def test_lengths_of_each_answer_are_pinned_by_a_list(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    line = {"custom_id": "a", "output_tokens": [3, 7], "body": {"prompt": "hello", "n": 2}}
    path.write_text(json.dumps(line) + "\n")
    assert Plan.load(plan(tmp_path)).workload.output_tokens.tolist() == [3, 7]
    answers = run(tmp_path, "--pinned")
    assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 10


def test_a_request_that_is_called_as_an_answer_of_another_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"custom_id": "a", "body": {"prompt": "x", "n": 2, "max_tokens": 2}},
        {"custom_id": "a#1", "body": {"prompt": "y", "max_tokens": 2}},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plan", str(tmp_path / "prompts.jsonl"), *MODEL, "-o", str(tmp_path / "plan.json")]) == 2
    said = capsys.readouterr().err
    assert "line 2, field 'custom_id'" in said
    assert "'a#1' also names one of the completions of line 1" in said


def test_a_prefix_cache_without_shared_prompts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"custom_id": "a", "body": {"prompt": "x", "max_tokens": 2}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    words = ["plan", str(tmp_path / "prompts.jsonl"), *MODEL, "-o", str(tmp_path / "plan.json")]
    assert main([*words, "--prefix-cache", "9"]) == 2
    assert "--prefix-cache 9 has no effect" in capsys.readouterr().err


def test_what_is_kept_is_taken_from_the_kv_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_batch(tmp_path)
    limits = ["--kv-capacity", "90", "--prefix-cache"]
    problem = Plan.load(plan(tmp_path, *limits, "20")).problem
    assert (problem.kv_capacity, problem.prefix_cache) == (70, 20)
    assert len(run(tmp_path)) == 4
    words = ["plan", str(tmp_path / "prompts.jsonl"), *MODEL, "-o", str(tmp_path / "other.json")]
    assert main([*words, *limits, "90"]) == 2
    assert "leaves nothing of a KV capacity of 90 tokens" in capsys.readouterr().err
    assert main([*words, *limits, "85"]) == 2
    said = capsys.readouterr().err
    assert "more than kv_capacity = 5" in said
    assert "the rest of 90 after --prefix-cache" in said
    assert "raise --kv-capacity, lower --prefix-cache" in said


def test_an_answer_that_failed_leaves_the_others_in_the_line(tmp_path: Path) -> None:
    records = each_sample(read_batch(write_batch(tmp_path, samples=3, prompts=1)))[:3]
    counts = {"prompt_tokens": 15, "finish_reason": "stop", "model": "m"}
    lines: list[dict[str, Any]] = [
        answer_line(records[0], "one", completion_tokens=4, **counts),  # type: ignore[arg-type]
        error_line(records[1], "model_failed", "logits are not finite"),
        answer_line(records[2], "three", completion_tokens=2, **counts),  # type: ignore[arg-type]
    ]
    line: Any = joined_line(lines)
    choices = line["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "one"), (2, "three")]
    assert line["response"]["body"]["usage"]["total_tokens"] == 21
    assert line["error"]["message"] == "1 of 3 completions failed; completion 1: logits are not finite"
    lost: Any = joined_line([lines[1]] * 3)
    assert lost["response"] is None
    assert lost["custom_id"] == "r0"
