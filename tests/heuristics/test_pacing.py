"""Prefill stages wait only where sampled completions show that it saves seconds."""

from __future__ import annotations

import numpy as np

from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.policy import Policy
from batchbound.heuristics.queues.admission import Admission
from batchbound.heuristics.queues.ordered import Ordered
from batchbound.heuristics.queues.prefill_rules import PacedSkiRental
from batchbound.heuristics.queues.queue_policy import QueuePolicy
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate

COST = CostModel(0.012, 0.00001, 0.008, 0.00002)


def capped(lengths: IntArray, cap: int, slots: int) -> tuple[Problem, IntArray]:
    """Return a job that is planned at its cap, and its true lengths."""
    workload = Workload.from_lengths([40] * len(lengths), [cap] * len(lengths))
    problem = Problem(workload, COST, slots, prefill_emits_first_token=True)
    return problem, np.minimum(lengths, cap)


def seconds(policy: str | Policy, problem: Problem, lengths: IntArray) -> float:
    return simulate(problem, policy, lengths).makespan


def test_jobs_that_mostly_end_at_their_cap_lose_nothing_to_file_order() -> None:
    always, tested = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        problem, lengths = capped(np.where(rng.random(100) < 0.1, rng.integers(1, 64, 100), 64), 64, 16)
        eager = seconds("fcfs", problem, lengths)
        waits = QueuePolicy(Ordered(np.arange(100)), PacedSkiRental(), Admission(problem))
        always.append(seconds(waits, problem, lengths) / eager)
        tested.append(seconds("fcfs-paced", problem, lengths) / eager)
    assert max(always) > 1.03
    assert max(tested) <= 1.001
    assert min(tested) < 0.98


def test_a_long_job_of_different_lengths_waits_and_saves() -> None:
    lengths = np.random.default_rng(1).geometric(0.01, 600)
    problem, lengths = capped(lengths, 256, 32)
    assert seconds("fcfs-paced", problem, lengths) < 0.95 * seconds("fcfs", problem, lengths)


def test_a_short_job_never_waits() -> None:
    lengths = np.random.default_rng(2).geometric(0.05, 40)
    problem, lengths = capped(lengths, 256, 16)
    paced = simulate(problem, policy_named("fcfs-paced", problem), lengths)
    assert paced.stages == simulate(problem, "fcfs", lengths).stages
