"""Schedules at the stages of another one: valid, near it where lengths are alike, refused under limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.solvers.fleet import plan_fleet
from batchbound.solvers.result import Limits
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.schedule_search import search_schedule
from batchbound.solvers.search.stages.reuse_times import reuse_times


def halves(seed: int, slots: int = 32, cost: CostModel | None = None) -> tuple[Problem, Problem]:
    """Return two problems of much the same lengths: every other request of a job, by length."""
    workload = generate("table3", seed, 200)
    order = np.argsort(workload.output_tokens, kind="stable")
    one, other = (
        Problem(workload.select(order[first::2]), cost or CostModel.paper(), slots) for first in (0, 1)
    )
    return one, other


@pytest.mark.slow
def test_requests_of_like_lengths_are_served_at_the_same_stages() -> None:
    served = 0
    for seed in range(3):
        one, other = halves(seed)
        searched = search_schedule(one, iterations=150, seed=seed)
        found = reuse_times(other, searched.schedule, np.inf)
        if found is not None:
            served += 1
            assert found.check(other) is None
            assert found.makespan(other) < searched.makespan * 1.03
    assert served >= 2


def test_other_lengths_and_bends_are_served_all_the_same() -> None:
    bend = replace(CostModel.paper(), prefill_bend=500.0, prefill_per_token_beyond=1e-3)
    served = 0
    for seed in range(20):
        one, other = halves(seed, 5 + seed % 4, bend if seed % 2 else None)
        decode_steps = np.random.default_rng(seed).permutation(other.workload.output_tokens)[:30]
        other = Problem(Workload.from_lengths([40] * 30, decode_steps), other.cost, other.slots)
        found = reuse_times(other, ski_rental_schedule(one), np.inf)
        served += found is not None
        assert found is None or found.check(other) is None
    assert served > 10


def test_limits_and_requests_of_no_step_are_refused() -> None:
    one, other = halves(0)
    schedule = ski_rental_schedule(one)
    peak = int(other.kv_peak.max())
    assert reuse_times(replace(other, prefill_token_cap=512), schedule, np.inf) is None
    assert reuse_times(replace(other, kv_capacity=2 * peak), schedule, np.inf) is None
    few = Workload.from_lengths([5, 5], [1, 4])
    none = Problem(few, CostModel.paper(), 2, prefill_emits_first_token=True)
    assert reuse_times(none, schedule, np.inf) is None
    assert reuse_times(other, schedule, 0.0) is None


@pytest.mark.slow
def test_the_last_replica_takes_over_the_stages_of_the_first() -> None:
    # Four replicas of a hundred requests each, by length in turn: what one gains the others have as well.
    fleet = Fleet.of(Problem(generate("table3", 6, 400), CostModel.paper(), 32), 4)
    result = plan_fleet(fleet, limits=Limits(work=4))
    assert result.schedule.check(fleet) is None
    assert result.makespan < 41.3
