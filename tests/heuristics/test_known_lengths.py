"""A queue policy followed without the loop: the same schedules as in the loop, and given up in time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.heuristics.loop import execute, schedule_of
from batchbound.heuristics.queues.known_lengths import dispatch_key, dispatch_of, known_schedule
from batchbound.heuristics.registry import POLICIES, policy_named
from batchbound.heuristics.simulator import Simulator


def drawn(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    count, slots = int(rng.integers(1, 60)), int(rng.integers(1, 50))
    prompts, outputs = rng.integers(1, 40, count), rng.integers(1, 50, count)
    peak = int((prompts + outputs).max())
    capacity = peak + int(rng.integers(0, peak * slots + 1) * rng.random())
    cost = CostModel(rng.choice([0.0, 1.0, 10.0]), 0.01, rng.choice([0.5, 1.0]), rng.choice([0.0, 0.01]))
    return Problem(
        Workload.from_lengths(prompts, outputs),
        cost,
        slots,
        kv_capacity=capacity if rng.random() < 0.6 else None,
        prefill_token_cap=int(prompts.max() + rng.integers(0, 100)) if rng.random() < 0.5 else None,
        prefill_emits_first_token=bool(rng.integers(2)),
    )


def looped(problem: Problem, name: str) -> Schedule | None:
    trace = execute(problem, policy_named(name, problem), Simulator(problem))
    return None if trace.evictions else schedule_of(trace)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(sorted(POLICIES)))
def test_a_rule_is_followed_as_the_loop_follows_it(seed: int, name: str) -> None:
    problem = drawn(seed)
    dispatch = dispatch_of(policy_named(name, problem))
    assert dispatch is not None
    served, made = looped(problem, name), known_schedule(problem, dispatch)
    if served is None:
        assert made is None
        return
    assert made is not None
    assert made.starts[made.bin_of].tolist() == served.starts[served.bin_of].tolist()
    assert made.decode_steps.tolist() == served.decode_steps.tolist()


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(sorted(POLICIES)))
def test_a_rule_is_given_up_exactly_where_it_is_no_better(seed: int, name: str) -> None:
    problem = drawn(seed)
    dispatch = dispatch_of(policy_named(name, problem))
    assert dispatch is not None
    made = known_schedule(problem, dispatch)
    if made is None:
        return
    makespan = made.makespan(problem)
    for least, expected in ((makespan * (1 + 1e-9) + 1e-9, True), (makespan * (1 - 1e-9) - 1e-9, False)):
        again = dispatch_of(policy_named(name, problem))
        assert again is not None
        assert (known_schedule(problem, again, least) is not None) is expected


def test_rules_that_come_to_the_same_have_one_key() -> None:
    problem = drawn(3)
    free = Problem(problem.workload, problem.cost, problem.slots)
    keys = {}
    for name in ("fcfs", "priority", "fcfs-ski", "learned", "lpt"):
        dispatch = dispatch_of(policy_named(name, free))
        assert dispatch is not None
        keys[name] = dispatch_key(dispatch)
    assert keys["fcfs"] == keys["priority"]
    assert keys["fcfs-ski"] == keys["learned"]
    assert len(set(keys.values())) == 3


def test_a_key_is_of_the_lists_of_slots_and_not_of_the_policy_that_holds_them() -> None:
    problem = drawn(3)

    def key(name: str, assignment: list[int]) -> object:
        dispatch = dispatch_of(policy_named(name, problem, np.array(assignment)))
        assert dispatch is not None
        return dispatch_key(dispatch)

    one, other = [i % problem.slots for i in range(len(problem))], [0] * len(problem)
    # Each policy is gone before the next is made, and its place in memory taken again.
    keys = [
        key(name, slots) for _ in range(20) for name in ("packing", "algorithm1") for slots in (one, other)
    ]
    assert len(set(keys)) == 4


def test_a_queue_that_looks_at_groups_is_left_to_the_loop() -> None:
    plain = Workload.from_lengths([1] * 8, [2] * 8)
    workload = replace(plain, group=np.array([0] * 4 + [1] * 4))
    assert dispatch_of(policy_named("learned", Problem(workload, CostModel(1.0, 0.0, 1.0, 0.0), 2))) is None
