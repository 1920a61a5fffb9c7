"""Jobs whose lengths nobody knows: what to expect of them, and what a policy reaches that sees none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..data.bound import Bound
from ..data.costs.cost import IntArray
from ..data.fleet import Fleet
from ..data.lengths.steps_plan import Way
from ..data.problem import Problem
from ..data.trace import Trace
from ..heuristics.simulate import simulate
from ..heuristics.unknown_lengths.lengths import Known, LengthModel, Observed
from ..heuristics.unknown_lengths.oracles import told_lengths
from ..heuristics.unknown_lengths.queues import group_numbers
from ..heuristics.unknown_lengths.registry import CHOSEN, hidden_policy, without_lengths, without_sharing
from ..heuristics.unknown_lengths.steps import StepsRun, simulate_steps
from ..models.bounds.fleet import work_bound
from ..solvers.bounds.proven_bound import proven_bound
from .history import History
from .predictive import Seen

SAMPLES = 99
"""Sampled sets of lengths for the interval; the fifth from either end is its limit."""

SAMPLES_OF_MANY = 39
"""As many for jobs of more than :data:`MANY` requests; the second from either end is the limit."""

MANY = 1000


def drawn_makespans(
    problem: Problem,
    history: History,
    policy: str,
    longest: int | None,
    swap: float | None = None,
    seed: int = 0,
) -> list[float]:
    """
    Return makespans that a job may turn out to have, one for each sampled set of lengths, all alike.

    Each set of lengths that is drawn is longer or shorter by a factor of its own, as steps differ.

    Parameters
    ----------
    problem
        The job; its lengths are not read.
    history
        At least one earlier workload.
    policy
        A key of :data:`~batchbound.heuristics.unknown_lengths.registry.WITHOUT_LENGTHS`.
    longest
        Decode steps after which every completion is cut; None for no limit.
    swap
        Seconds a token of KV cache takes to the host or back; None if it cannot be moved.
    """
    blind, rng = without_lengths(problem), np.random.default_rng(seed)
    known, predictive = history.known(problem, longest), history.predictive(problem, longest)
    step, seen, seconds = np.zeros(len(problem), dtype=np.int64), Seen.nothing(len(problem)), []
    for _ in range(SAMPLES if len(problem) <= MANY else SAMPLES_OF_MANY):
        truth = predictive.draw(step, seen, rng).lengths
        made = hidden_policy(policy, blind, known, swap)
        seconds.append(simulate(blind, made, truth, swap=swap).makespan)
    return seconds


def simulate_hidden(
    problem: Problem,
    policy: str = CHOSEN,
    known: Known | None = None,
    swap: float | None = None,
) -> Trace:
    """
    Return the trace of a job whose policy sees no length.

    Parameters
    ----------
    problem
        The job with its true lengths.
    policy
        A key of :data:`~batchbound.heuristics.unknown_lengths.registry.WITHOUT_LENGTHS`.
    known
        What is known beforehand; nothing by default.
    swap
        Seconds a token of KV cache takes to the host or back; None if it cannot be moved.
    """
    blind = without_lengths(problem)
    made = hidden_policy(policy, blind, Known() if known is None else known, swap)
    return simulate(blind, made, problem.workload.output_tokens, swap=swap)


def simulate_hidden_steps(
    problem: Problem, step: IntArray, way: Way, policy: str = CHOSEN, known: Known | None = None
) -> StepsRun:
    """
    Return what steps come to whose policy sees no length.

    Parameters
    ----------
    problem
        The requests of all steps with their true lengths, step by step.
    step
        The step of each, shape (requests,).
    policy, known
        As of :func:`simulate_hidden`.
    """
    blind = without_lengths(problem)
    made = hidden_policy(policy, without_sharing(blind), Known() if known is None else known)
    return simulate_steps(blind, step, way, made, problem.workload.output_tokens)


def simulate_told(problem: Problem) -> Trace:
    """Return the trace of a job by a policy told which lengths each group has, and not whose."""
    blind, truth = without_lengths(problem), problem.workload.output_tokens
    return simulate(blind, told_lengths(blind, truth), truth)


def bound_of_runs(problem: Problem, runs: Sequence[Trace]) -> Bound:
    """
    Return a bound on the makespan of each of a job's runs.

    Parameters
    ----------
    problem
        The job with its true lengths.
    runs
        Of the job. If requests gave way in one of them, the bound is of runs in which they may.
    """
    if not any(run.evictions for run in runs):
        return proven_bound(problem)
    # Without the capacities: what no policy knew the length of may have outgrown them.
    free = replace(problem, kv_capacity=None, prefill_token_cap=None, max_position=None)
    return work_bound(Fleet.of(free, 1))


def shared_variance(problem: Problem, trace: Trace) -> float:
    """Return the intraclass correlation that the lengths of a finished job show, from 0 to 1."""
    numbers, groups = group_numbers(problem)
    emitted = int(problem.prefill_emits_first_token)
    ended = np.ones(len(problem), dtype=np.bool_)
    return LengthModel.learnt(Observed(numbers, trace.tokens - emitted, ended), groups).share
