"""The padding that a padded engine reads, foretold from the schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.trace import Trace
from batchbound.data.workload import Workload
from batchbound.models.padding import padding_tokens
from batchbound.screen.plan import plan_summary
from batchbound.solvers.search.constructive import ski_rental_schedule


def test_shorter_rows_are_padded_to_the_longest() -> None:
    # Steps 1 and 2: rows of 3 and 7, then 4 and 8 tokens, padded to 7 and 8; then the long one is alone.
    problem = Problem(Workload.from_lengths([3, 7], [2, 5]), CostModel.paper(), slots=2)
    assert padding_tokens(problem, ski_rental_schedule(problem)) == 4 + 4


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_padding_is_what_counting_it_step_by_step_gives(
    lengths: list[tuple[int, int]], slots: int, first: bool
) -> None:
    prompts, answers = zip(*lengths, strict=True)
    workload = Workload.from_lengths(prompts, answers)
    problem = Problem(workload, CostModel.paper(), slots, prefill_emits_first_token=first)
    schedule = ski_rental_schedule(problem)
    start = schedule.starts[schedule.bin_of]
    padding = 0
    for now in range(int(schedule.decode_steps.sum())):
        runs = (start <= now) & (now < start + problem.decode_steps)
        held = (problem.kv_at_start + now - start)[runs]
        padding += int((held.max(initial=0) - held).sum())
    assert padding_tokens(problem, schedule) == padding


@pytest.mark.slow
def test_a_padded_engine_reads_what_the_plan_foretells(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "prompts.jsonl").open("w") as out:
        for i, size in enumerate(rng.integers(3, 60, 12).tolist()):
            body = {"prompt": "x" * size, "max_tokens": int(rng.integers(2, 20))}
            out.write(json.dumps({"custom_id": str(i), "body": body}) + "\n")
    path, model = tmp_path / "plan.json", ["--model", "tiny:llama"]
    words = [str(tmp_path / "prompts.jsonl"), *model, "--slots", "4", "--time-limit", "0.1"]
    assert main(["plan", *words, "-o", str(path)]) == 0
    files = ["-o", str(tmp_path / "answers.jsonl"), "--trace", str(tmp_path / "trace.jsonl")]
    assert main(["run", str(path), *model, "--tier", "window", "--pinned", *files]) == 0
    plan, trace = Plan.load(path), Trace.load(tmp_path / "trace.jsonl")
    read = sum(s.padded_kv_tokens - s.kv_tokens for s in trace.stages if s.kind == "decode")
    assert read == padding_tokens(plan.problem, plan.schedule)


def test_a_plan_says_what_padding_costs_where_the_engine_pads_and_the_model_prices_it(tmp_path: Path) -> None:
    assert main(["plan", "table3:0:20", "--slots", "4", "-o", str(tmp_path / "plan.json")]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan_summary(plan, 1.0)["padded_s"] is None
    priced = replace(plan.problem, cost=replace(plan.problem.cost, decode_per_kv_token=1e-6))
    padding = 1e-6 * padding_tokens(priced, plan.schedule)
    assert padding > 0
    costly = replace(plan, fleet=Fleet.of(priced, 1))
    assert plan_summary(costly, 1.0)["padded_s"] == pytest.approx(plan.makespan + padding)
    for tier, padded in (("window", plan.makespan + padding), ("ragged", None)):
        source = replace(plan.provenance, cost_source={"engine": {"tier": tier}})
        said = plan_summary(replace(costly, provenance=source), 1.0)["padded_s"]
        assert said == (None if padded is None else pytest.approx(padded))
