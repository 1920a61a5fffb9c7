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
    return divisions(problem)[0]


def divisions(problem: Problem) -> list[Problem]:
    """Return divisions of the KV capacity, the most promising first.

    The others are the second best and the one that keeps nothing: a search may find a better schedule there.
    A problem whose memory the user divided is returned alone.
    """
    if problem.kv_capacity is None or not len(problem.prefix_tokens):
        return [problem]
    if problem.memory_divided:
        whole = problem.kv_capacity + problem.prefix_cache
        problem = replace(problem, kv_capacity=whole, prefix_cache=0, memory_divided=False)
    if problem.prefix_cache:
        return [problem]
    tried, makespans = _sample(problem), dict[int, float]()
    for kept in dict.fromkeys(_kept(problem, share) for share in SHARES):
        if (split := _split(tried, kept)) is None:
            break
        schedule = backward_schedule(split)
        if _split(problem, kept) is not None:
            makespans[kept] = 0.0 if schedule is None else schedule.makespan(split)
    best = sorted(makespans, key=lambda kept: makespans[kept])
    chosen = [_split(problem, kept) for kept in dict.fromkeys((*best[:2], 0))]
    return [split for split in chosen if split is not None]


def _kept(problem: Problem, share: float) -> int:
    assert problem.kv_capacity is not None
    return min(int(share * problem.kv_capacity), int(problem.prefix_tokens.sum()))


def _split(problem: Problem, kept: int) -> Problem | None:
    """Return the problem with a prefix cache, if every request still fits."""
    assert problem.kv_capacity is not None
    try:
        rest = problem.kv_capacity - kept
        return replace(problem, kv_capacity=rest, prefix_cache=kept, memory_divided=True)
    except ProblemError:
        return None


def _sample(problem: Problem) -> Problem:
    if len(problem) <= MOST_REQUESTS:
        return problem
    alone = len(problem.prefix_tokens) + np.arange(len(problem))
    _, label = np.unique(np.where(problem.prefix_of >= 0, problem.prefix_of, alone), return_inverse=True)
    every = -(-len(problem) // MOST_REQUESTS)
    return replace(problem, workload=problem.workload.select(np.flatnonzero(label % every == 0)))
