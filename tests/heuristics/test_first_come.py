"""First come, first served, counted from event to event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import mostly_slow

from batchbound.data.costs.cost import CostModel
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.queues.first_come import EVENTS, can_count, first_come
from batchbound.heuristics.queues.prefill_rules import PrefillRule, SkiRental
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.simulator import KEEPS_KV


def drawn(seed: int) -> Problem:
    """Return 1 to 60 requests, mostly with memory that runs short."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 60))
    prompts, outputs = rng.integers(1, 30, count), rng.integers(1, 40, count)
    largest = int((prompts + outputs).max())
    cost = CostModel(0.5, 0.01, 1.0, 0.1, float(rng.choice([0, 1.0])), float(rng.choice([0, 0.01])))
    return Problem(
        Workload.from_lengths(prompts, outputs),
        cost,
        int(rng.integers(1, 12)),
        kv_capacity=largest + int(rng.integers(0, 3 * largest)) if rng.random() < 0.8 else None,
        prefill_token_cap=int(prompts.max() + rng.integers(0, 60)) if rng.random() < 0.5 else None,
        prefill_emits_first_token=bool(seed % 2),
    )


@pytest.mark.parametrize("seed", mostly_slow(range(300), fast=range(60)))
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("policy", "rule"), [("fcfs", None), ("learned", SkiRental())])
def test_the_counts_are_those_of_the_simulated_policy(
    seed: int, keeps: bool, policy: str, rule: PrefillRule | None
) -> None:
    problem = drawn(seed)
    trace = simulate(problem, policy, swap=KEEPS_KV if keeps else None)
    counted = first_come(problem, keeps_kv=keeps, rule=rule)
    assert counted is not None
    counts = counted.prefill_stages, counted.decode_steps, counted.evictions, counted.seconds
    assert counts == (trace.prefill_stages, trace.decode_steps, trace.evictions, trace.makespan)


@pytest.mark.parametrize("seed", mostly_slow(range(300), fast=range(40)))
def test_shared_beginnings_are_counted_as_the_simulator_does(seed: int) -> None:
    problem, rng = drawn(seed), np.random.default_rng(seed)
    stems = [rng.integers(0, 9, int(rng.integers(3, 20))).tolist() for _ in range(4)]
    prompts = list[list[int]]()
    for tokens in problem.prompt_tokens.tolist():
        stem = stems[int(rng.integers(len(stems)))]
        prompts.append(stem[: int(rng.integers(len(stem) + 1))] + rng.integers(0, 9, tokens).tolist())
    tree = PrefixTree.of_prompts(prompts)
    work = Workload.from_lengths(tree.prompt_tokens, problem.workload.output_tokens).with_tree(tree)
    longest = int((work.input_tokens + work.output_tokens).max())
    capacity = None if problem.kv_capacity is None else longest + int(rng.integers(0, 2 * longest))
    cap = None if problem.prefill_token_cap is None else int(work.input_tokens.max() + rng.integers(0, 60))
    problem = replace(
        problem,
        workload=work,
        kv_capacity=capacity,
        prefill_token_cap=cap,
        prefix_cache=int(rng.choice([0, 10, 10**6])),
    )
    for swap in (None, KEEPS_KV):
        trace, counted = simulate(problem, "fcfs", swap=swap), first_come(problem, keeps_kv=swap is not None)
        assert counted is not None
        counts = counted.prefill_stages, counted.decode_steps, counted.evictions, counted.seconds
        assert counts == (trace.prefill_stages, trace.decode_steps, trace.evictions, trace.makespan)


def test_the_drawn_jobs_evict_requests() -> None:
    runs = [first_come(drawn(seed)) for seed in range(60)]
    assert sum(run is not None and run.evictions > 0 for run in runs) > 20


def test_a_late_run_has_no_counts() -> None:
    long = Problem(Workload.from_lengths([5] * EVENTS, [5] * EVENTS), CostModel.paper(), 1)
    assert first_come(long, lambda: True) is None


def test_jobs_with_arrivals_are_left_to_the_simulator() -> None:
    work = Workload.from_lengths([5, 5], [5, 5])
    assert can_count(Problem(work, CostModel.paper(), 1))
    assert not can_count(Problem(replace(work, arrival=np.array([0.0, 1.0])), CostModel.paper(), 1))
