"""How much of a KV capacity keeps shared prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload, numbered_ids
from batchbound.solvers.cache_choice import choose_prefix_cache
from batchbound.solvers.search.backward import backward_schedule

DEAR_PROMPTS = CostModel(prefill_base=0.1, prefill_per_token=0.1, decode_base=1.0, decode_per_slot=0.0)


def grouped(groups: int, samples: int, prompt: int, length: int) -> Workload:
    count = groups * samples
    of = np.repeat(np.arange(groups), samples)
    lengths = length + np.arange(count) % 7
    return Workload(
        numbered_ids(count),
        np.full(count, prompt),
        lengths,
        group=of,
        shared_tokens=np.full(count, prompt - 1),
    )


def test_a_prompt_is_kept_where_memory_is_plenty() -> None:
    # Two slots hold 2 x 46 tokens at most; eight samples of the one prompt begin in four stages.
    problem = Problem(grouped(1, 8, 20, 20), DEAR_PROMPTS, 2, kv_capacity=200)
    chosen = choose_prefix_cache(problem)
    assert (chosen.prefix_cache, chosen.kv_capacity) == (19, 181)
    schedule = backward_schedule(chosen)
    assert schedule is not None
    assert schedule.stage_tokens(chosen).sum() == 19 + 8


def test_nothing_is_kept_where_running_requests_need_all_memory() -> None:
    # One more running request saves many decode steps, a prompt of a token next to nothing.
    problem = Problem(grouped(4, 2, 2, 40), replace(DEAR_PROMPTS, prefill_per_token=0.0), 4, kv_capacity=96)
    assert choose_prefix_cache(problem) is not None
    assert choose_prefix_cache(problem).prefix_cache == 0


def test_a_request_that_needs_nearly_all_memory_keeps_its_room() -> None:
    problem = Problem(grouped(2, 2, 20, 20), DEAR_PROMPTS, 2, kv_capacity=45)
    assert choose_prefix_cache(problem).kv_capacity == 45


@pytest.mark.parametrize(("capacity", "kept"), [(None, 0), (100, 5)])
def test_what_is_given_stays(capacity: int | None, kept: int) -> None:
    workload = grouped(2, 2, 20, 20)
    problem = Problem(workload, DEAR_PROMPTS, 2, kv_capacity=capacity, prefix_cache=kept)
    assert choose_prefix_cache(problem) is problem


def test_very_many_requests_are_sampled_by_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(grouped(12, 8, 20, 20), DEAR_PROMPTS, 4, kv_capacity=400)
    monkeypatch.setattr("batchbound.solvers.cache_choice.MOST_REQUESTS", 30)
    seen: list[int] = []

    def quick(part: Problem) -> object:
        seen.append(len(part))
        assert set(np.bincount(part.workload.group)) <= {0, 8}
        return backward_schedule(part)

    monkeypatch.setattr("batchbound.solvers.cache_choice.backward_schedule", quick)
    chosen = choose_prefix_cache(problem)
    assert chosen.kv_capacity is not None
    assert chosen.kv_capacity + chosen.prefix_cache == 400
    assert set(seen) == {24}


def test_plan_says_what_it_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "job.csv"
    rows = "".join(f"{k},{k // 8},400,{20 + k % 9},399\n" for k in range(32))
    table.write_text(f"id,group,input_tokens,output_tokens,shared_tokens\n{rows}", encoding="utf-8")
    words = ["plan", str(table), "--slots", "4", "--kv-capacity", "8000", "--time-limit", "0.2"]
    assert main([*words, "-o", str(tmp_path / "plan.json")]) == 0
    problem = Plan.load(tmp_path / "plan.json").problem
    assert problem.kv_capacity is not None
    assert problem.prefix_cache > 0
    assert problem.kv_capacity + problem.prefix_cache == 8000
    assert f"{problem.prefix_cache:,} of 8,000 tokens of KV capacity keep" in capsys.readouterr().err
