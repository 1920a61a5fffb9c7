"""Progress of a run ticks inside of long stages, promises no end by caps, and names runaways."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.trace import Stage
from batchbound.data.workload import Workload
from batchbound.executor.engines import huggingface
from batchbound.executor.engines.huggingface import DecodeOptions, HuggingFaceEngine
from batchbound.executor.jobs.plan_clock import PlanClock, Standing
from batchbound.executor.models.source import load_model
from batchbound.screen import progress, watching
from batchbound.screen.progress import standing_text
from batchbound.solvers.search.constructive import ski_rental_schedule

COST = CostModel(1.0, 0.0, 1.0, 0.0)


def clock_of(caps: list[int], **more: Any) -> PlanClock:
    work = Workload.from_lengths([4] * len(caps), caps)
    problem = Problem(work, COST, len(caps), prefill_emits_first_token=True)
    return PlanClock(problem, ski_rental_schedule(problem), range(len(caps)), **more)


def part(steps: int, active: int, start: float = 1.0) -> Stage:
    return Stage("decode", start, start + steps, steps, active, steps * active, 0, 0)


def test_a_part_of_a_stage_moves_the_clock_and_leaves_no_mark() -> None:
    clock = clock_of([101, 101])
    clock.begun([0, 1])
    clock.after(Stage("prefill", 0.0, 1.0, 0, 2, 8, 8, 8), 0)
    half, again = clock.during(part(50, 2), 0), clock.during(part(50, 2), 0)
    assert half == again
    assert half.left == pytest.approx(50.0)
    assert half.speed == pytest.approx(100 / 51)
    whole = clock.after(part(100, 2), 2)
    assert whole.left == 0.0


def test_no_end_is_promised_of_unknown_lengths_and_it_does_not_jump() -> None:
    ended = list[tuple[int, int]]()
    clock = clock_of([8_000] * 10, ended=lambda: [ended.pop(0) for _ in list(ended)], unknown=True)
    assert clock.begin.left == math.inf
    clock.begun(range(10))
    assert clock.after(Stage("prefill", 0.0, 1.0, 0, 10, 40, 40, 40), 0).left == math.inf
    ended += [(k, 20) for k in range(9)]
    clock.after(part(19, 10), 9)
    clock.after(part(1, 1, start=20.0), 9)
    left = [clock.during(part(steps, 1, start=21.0), 9).left for steps in (10, 30, 100, 300, 1000)]
    assert max(left) < 3_000  # the cap is 8,000 steps away
    assert left == sorted(left)


def test_a_speed_of_zero_and_an_unknown_end_are_left_out() -> None:
    assert standing_text(Standing(0.0, 1.0, 1.0, 5.0, None, 0, 3, 30, 0.0)) == "3/30 prompts"
    assert (
        standing_text(Standing(0.0, 1.0, 1.0, math.inf, None, 0, 3, 30, 12.4)) == "3/30 prompts  12 tokens/s"
    )
    assert standing_text(Standing(0.0, 1.0, 1.0, 5.0, None, 0, 3, 30, 12.4)).endswith("tokens/s  0:05 left")


def test_parts_of_a_stage_change_no_token() -> None:
    model = load_model("tiny:llama", dtype="float32", device="cpu")
    problem = Problem(Workload.from_lengths([3, 4], [60, 40]), COST, 2, prefill_emits_first_token=True)
    answers, parts = [], list[Stage]()
    for watched in (False, True):
        engine = HuggingFaceEngine(
            problem, model, [[1, 2, 3], [4, 5, 6, 7]], np.array([60, 40]), decoding=DecodeOptions()
        )
        engine.on_part = parts.append if watched else None
        engine._part_steps = 7
        engine.prefill([0, 1], [0, 1])
        stage, finished = engine.decode(1000, float("inf"))
        assert (stage.decode_steps, finished) == (39, [1])
        answers.append([list(tokens) for tokens in engine.answers])
    assert answers[0] == answers[1]
    assert parts[0].decode_steps == 7
    assert all(one.decode_steps < 39 for one in parts)


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 4), (3600.0, 0)])
def test_a_pipe_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, lines: int
) -> None:
    assert progress.BETWEEN_LINES == 30.0
    monkeypatch.setattr(progress, "BETWEEN_LINES", seconds)
    with progress.progress(4, "requests") as advance:
        for done in range(1, 5):
            advance(done)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"batchbound: {done}/4 requests" for done in range(1, 1 + lines)]


def test_what_no_cap_limits_is_named_before_and_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"custom_id": f"r{k}", "body": {"prompt": f"say {k}"}} for k in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watching, "LONG", 100)
    monkeypatch.setattr(huggingface, "PART_SECONDS", 0.0)
    model = ["--model", "tiny:llama", "--threads", "1", "--slots", "2"]
    assert main(["run", "prompts.jsonl", *model]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "no max_tokens: completions may take up to 506 tokens; --longest-completion limits them" in said
    lengths = [
        json.loads(line)["response"]["body"]["usage"]["completion_tokens"]
        for line in Path("answers.jsonl").read_text().splitlines()
    ]
    assert min(lengths) > 100
    assert said.count("passed 100 tokens") == 1
    assert "r0, r1 passed 100 tokens; Ctrl-C, and the same command with --longest-completion N" in said
    assert main(["run", "prompts.jsonl", *model, "--longest-completion", "9", "-o", "short.jsonl"]) == 0
    assert "no max_tokens" not in capsys.readouterr().err
