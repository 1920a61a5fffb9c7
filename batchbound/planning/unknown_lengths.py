"""Simulations of jobs under policies that see no length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..data.arrays import IntArray
from ..data.bound import Bound
from ..data.fleet import Fleet
from ..data.lengths.steps import Way
from ..data.problem import Problem
from ..data.trace import Trace
from ..heuristics.simulate import simulate
from ..heuristics.unknown_lengths.groups import group_numbers
from ..heuristics.unknown_lengths.lengths import Known, LengthModel, Observed
from ..heuristics.unknown_lengths.registry import CHOSEN, hidden_policy, without_lengths, without_sharing
from ..heuristics.unknown_lengths.steps import StepsRun, simulate_steps
from ..models.bounds.fleet import work_bound
from ..models.bounds.prove import proven_bound
from .history import History

SAMPLES = {200: 99, 500: 39}
"""Sampled sets of lengths by the job's most requests; more are more exact and slower."""

SAMPLES_OF_MANY = 19
"""Sampled sets of lengths of larger jobs; the interval is from the least makespan to the largest."""


def samples_of(problem: Problem) -> int:
    """Return the number of sampled sets of lengths of a job."""
    return next((found for most, found in SAMPLES.items() if len(problem) <= most), SAMPLES_OF_MANY)


def drawn_makespans(
    problem: Problem,
    history: History,
    policy: str,
    longest: int | None,
    swap: float | None = None,
    seed: int = 0,
) -> Iterator[float]:
    """Yield the makespans of many sampled sets of lengths, in seconds.

    Each set has an effect of its own, as steps differ.

    history: At least one workload.
    policy: Key of :data:`~batchbound.heuristics.unknown_lengths.registry.WITHOUT_LENGTHS`.
    longest: Cap in decode steps.
    swap: Seconds to move a KV token to the host or back, None if impossible.
    """
    blind, rng = without_lengths(problem), np.random.default_rng(seed)
    known, predictive = history.known(problem, longest), history.predictive(problem, longest)
    for _ in range(samples_of(problem)):
        truth = predictive.draw(rng)
        made = hidden_policy(policy, blind, known, swap)
        yield simulate(blind, made, truth, swap=swap).makespan


def simulate_hidden(
    problem: Problem,
    policy: str = CHOSEN,
    known: Known | None = None,
    swap: float | None = None,
) -> Trace:
    """Simulate a job under a policy that sees no length.

    swap: Seconds to move a KV token to the host or back, None if impossible.
    """
    blind = without_lengths(problem)
    made = hidden_policy(policy, blind, Known() if known is None else known, swap)
    return simulate(blind, made, problem.workload.output_tokens, swap=swap)


def simulate_hidden_steps(
    problem: Problem, step: IntArray, way: Way, policy: str = CHOSEN, known: Known | None = None
) -> StepsRun:
    """Simulate several steps under a policy that sees no length.

    problem: Requests of all steps with true lengths, step by step.
    step: Step of each request, shape (requests,).
    """
    blind = without_lengths(problem)
    made = hidden_policy(policy, without_sharing(blind), Known() if known is None else known)
    return simulate_steps(blind, step, way, made, problem.workload.output_tokens)


def bound_of_runs(problem: Problem, runs: Sequence[Trace]) -> Bound:
    """Bound all runs; allow evictions if any run evicts."""
    if not any(run.evictions for run in runs):
        return proven_bound(problem)
    # A request of unknown length may outgrow the capacities: they are left out.
    free = replace(problem, kv_capacity=None, prefill_token_cap=None, max_position=None)
    return work_bound(Fleet.of(free, 1))


def shared_variance(problem: Problem, trace: Trace) -> float:
    """Return the intraclass correlation of a job's lengths, from 0 to 1."""
    numbers, groups = group_numbers(problem)
    emitted = int(problem.prefill_emits_first_token)
    ended = np.ones(len(problem), dtype=np.bool_)
    return LengthModel.learnt(Observed(numbers, trace.tokens - emitted, ended), groups).share
