"""Choice of the KV capacity that keeps shared prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..data.problem import Problem, ProblemError
from .search.backward import backward_schedule

SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the KV capacity to try; of equals the first is taken."""

MOST_REQUESTS = 8_000
"""Requests up to which all are scheduled; larger jobs are sampled."""


def choose_prefix_cache(problem: Problem) -> Problem:
    """Reserve KV capacity for shared prompts, if that saves time.

    A kept prompt is computed once for its whole group, but leaves less memory for running requests. Each
    share is tried with a schedule made in one pass. Without a KV capacity or shared prompts the problem is
    returned unchanged.
    """
    if problem.kv_capacity is None or problem.prefix_cache or not len(problem.prefix_tokens):
        return problem
    tried = _sample(problem)
    least, best = np.inf, 0
    for kept in dict.fromkeys(_kept(problem, share) for share in SHARES):
        if (split := _split(tried, kept)) is None:
            break
        schedule = backward_schedule(split)
        makespan = 0.0 if schedule is None else schedule.makespan(split)
        if makespan < least and _split(problem, kept) is not None:
            least, best = makespan, kept
    chosen = _split(problem, best)
    assert chosen is not None, "nothing kept fits"
    return chosen


def _kept(problem: Problem, share: float) -> int:
    assert problem.kv_capacity is not None
    return min(int(share * problem.kv_capacity), int(problem.prefix_tokens.sum()))


def _split(problem: Problem, kept: int) -> Problem | None:
    """Return the problem with a prefix cache, if every request still fits."""
    assert problem.kv_capacity is not None
    try:
        return replace(problem, kv_capacity=problem.kv_capacity - kept, prefix_cache=kept)
    except ProblemError:
        return None


def _sample(problem: Problem) -> Problem:
    if len(problem) <= MOST_REQUESTS:
        return problem
    alone = len(problem.prefix_tokens) + np.arange(len(problem))
    _, label = np.unique(np.where(problem.prefix_of >= 0, problem.prefix_of, alone), return_inverse=True)
    every = -(-len(problem) // MOST_REQUESTS)
    return replace(problem, workload=problem.workload.select(np.flatnonzero(label % every == 0)))
