"""Requests that take no decode step, put into the stages of others that are solved back from the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...data.costs.cost import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ..result import Limits, StoppedBy
from .from_the_end import best_from_the_end, can_search_from_the_end
from .outcome import ExactOutcome
from .request_sets import PRECISION


def can_leave_out_roundless(problem: Problem) -> bool:
    """Return whether some requests take no round, none shares a prompt, and the others can be solved."""
    rounds = problem.rounds
    if len(problem.prefix_tokens) or (rounds > 0).all() or not rounds.any():
        return False
    return can_search_from_the_end(_others(problem))


def best_around_roundless(problem: Problem, limits: Limits, start: Schedule) -> ExactOutcome:
    r"""
    Return an optimal schedule, or the best one found; ``GAVE_UP`` where what is proven is less than it costs.

    Without the requests that take no round any schedule is one of the others. As the seconds :math:`f` of a
    stage are convex in its tokens, it is cheaper by at least :math:`f(p) - f(0)` for each one of p prompt
    tokens: that and the others' optimum are the least. It is met where a stage has room for each.

    Parameters
    ----------
    problem
        One that :func:`can_leave_out_roundless` accepts.
    limits
        Work is in states.
    start
        A schedule to beat.
    """
    others, busy = _others(problem), np.flatnonzero(problem.rounds > 0)
    found = best_from_the_end(others, limits, _compact(others, start.bin_of[busy], start.rounds))
    cost, prompts = problem.cost, problem.prompt_tokens[problem.rounds == 0]
    saved = float((cost.prefill_seconds(prompts) - cost.prefill_seconds(0)).sum())
    least = found.schedule.makespan(others) + saved
    best = min(start, _put_back(problem, found.schedule), key=lambda schedule: schedule.makespan(problem))
    stopped_by = found.stopped_by
    if stopped_by is StoppedBy.PROOF and best.makespan(problem) > least * (1 + PRECISION):
        stopped_by = StoppedBy.GAVE_UP
    return ExactOutcome(best, stopped_by, found.steps, "orders")


def _others(problem: Problem) -> Problem:
    return replace(problem, workload=problem.workload.select(np.flatnonzero(problem.rounds > 0)))


def _compact(problem: Problem, bin_of: IntArray, rounds: IntArray) -> Schedule:
    """Return a schedule without the bins in which no request is prefilled."""
    used, at = np.unique(bin_of, return_inverse=True)
    return Schedule.from_bins(problem, at, np.add.reduceat(rounds, used))


def _put_back(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule of all requests, each that takes no round in the cheapest stage with room for it."""
    left_out = np.flatnonzero(problem.rounds == 0)
    left_out = left_out[np.argsort(-problem.prompt_tokens[left_out], kind="stable")]
    bin_of = np.empty(len(problem), dtype=np.int64)
    bin_of[problem.rounds > 0] = schedule.bin_of
    # At the end there is room for any.
    bin_of[left_out] = schedule.bins + np.arange(len(left_out))
    rounds = np.concatenate((schedule.rounds, np.zeros(len(left_out), dtype=np.int64)))
    best = _compact(problem, bin_of, rounds)
    for request in left_out:
        for stage in range(len(rounds)):
            moved = bin_of.copy()
            moved[request] = stage
            try:
                found = _compact(problem, moved, rounds)
            except ValueError:
                continue
            if found.check(problem) is None and found.makespan(problem) < best.makespan(problem):
                best, bin_of = found, moved
    return best
