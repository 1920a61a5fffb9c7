"""Orders of waiting requests by their group's completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ..policy import State
from ..queues.ordered import arrival_order
from .lengths import LengthModel, Observed

NEWEST = 0.1
"""Weight of a new length in vllm-ascend's moving average."""

MOST_AVERAGED = 10
"""Most requests of a group in that average."""

COLD_START = 128.0
"""Decode steps assumed for a group without a completion."""

LEAST_SHARE = 0.05
"""Least intraclass correlation for an order of groups."""

SURE = 0.5
"""Least probability of that correlation."""


class Ranking(Protocol):
    """Score of groups from observations."""

    def __call__(self, observed: Observed, groups: int) -> FloatArray:
        """Return each group's score, the largest first, shape (groups,)."""
        ...


class GroupQueue:
    """Queue of a few requests per group, then groups by score.

    Ties go by arrival. It sees the groups, the started requests, their decoded tokens and which have ended,
    but no length. A request without a group is a group of its own.

    problem: Its groups, arrivals and prompts are read, its lengths are not.
    scouts: Requests of each group that start before any other.
    """

    def __init__(self, problem: Problem, ranking: Ranking, *, scouts: int) -> None:
        self._group, self._groups = group_numbers(problem)
        self._ranking = ranking
        self._arrival_rank = np.argsort(arrival_order(problem))
        self._scouts = scouts
        self._started = np.zeros(len(problem), dtype=np.bool_)
        self._ended: list[int] = []
        self._seen: Observed | None = None
        self._score: FloatArray | None = None

    def propose(self, state: State, free: IntArray) -> tuple[list[int], list[int]]:
        """Return the next waiting requests, one per free slot."""
        waiting = np.flatnonzero(state.waiting)
        waiting = waiting[np.argsort(self._arrival_rank[waiting])]
        observed, changed = self._observed(state)
        if changed or self._seen is None:
            self._seen, self._score = observed, None
        group = self._group[waiting]
        # Evicted requests have begun, and go before all others.
        seen = np.bincount(observed.group, minlength=self._groups)
        first = self._started[waiting] | (place_in_group(group) + seen[group] < self._scouts)
        if np.count_nonzero(first) >= min(len(free), len(waiting)):
            # Scouts fill the slots, so the scores, which take milliseconds, are not needed yet.
            order = np.flatnonzero(first)
        else:
            if self._score is None:
                self._score = self._ranking(self._seen, self._groups)
            order = np.lexsort((np.where(first, 0.0, -self._score[group]), ~first))
        requests: list[int] = waiting[order][: len(free)].tolist()
        return requests, free[: len(requests)].tolist()

    def take(self, requests: Sequence[int]) -> None:
        """Record that these requests are prefilled."""
        self._started[requests] = True

    def put_back(self, requests: Sequence[int]) -> None:
        """Record that these requests wait again."""

    def _observed(self, state: State) -> tuple[Observed, bool]:
        """Return the observations, and whether a request has ended since."""
        under_way = state.waiting.copy()
        under_way[state.running] = True
        over = self._started & ~under_way
        known = len(self._ended)
        over[self._ended] = False
        self._ended += np.flatnonzero(over).tolist()
        begun = np.concatenate((self._ended, np.flatnonzero(self._started & under_way))).astype(np.int64)
        ended = np.arange(len(begun)) < len(self._ended)
        return Observed(self._group[begun], state.decoded[begun], ended), len(self._ended) > known


def group_numbers(problem: Problem) -> tuple[IntArray, int]:
    """Return each request's group from zero, and their number."""
    number = problem.workload.group_numbers()
    return number, int(number.max()) + 1


def has_groups(problem: Problem) -> bool:
    """Return whether any group has two requests."""
    numbers, groups = group_numbers(problem)
    return groups < len(numbers)


def place_in_group(group: IntArray) -> IntArray:
    """Return each request's position in its group, same shape."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    place = np.empty(len(group), dtype=np.int64)
    place[order] = np.arange(len(group)) - np.searchsorted(ordered, ordered, side="left")
    return place


def longest_seen(observed: Observed, groups: int) -> FloatArray:
    """Return each group's longest completion, infinite if none, shape (groups,).

    This is Seer's estimate (Qin et al. 2025, arXiv:2511.14617): a group counts as long until it shows
    otherwise.
    """
    score = np.full(groups, -1.0)
    ended = observed.ended
    np.maximum.at(score, observed.group[ended], observed.tokens[ended])
    score[score < 0] = np.inf
    return score


def moving_average(observed: Observed, groups: int) -> FloatArray:
    """Return each group's moving average of lengths, shape (groups,).

    This is the estimate of vllm-ascend's ``BatchJobAwareScheduler``, where a group is a job. A new length
    weighs a tenth, the first ten count, and a job without ended requests has 128 tokens.
    """
    score = np.full(groups, COLD_START)
    seen = np.zeros(groups, dtype=np.int64)
    ended = observed.ended
    for group, tokens in zip(observed.group[ended].tolist(), observed.tokens[ended].tolist(), strict=True):
        if seen[group] < MOST_AVERAGED:
            newest = 1.0 if seen[group] == 0 else NEWEST
            score[group] += newest * (tokens - score[group])
            seen[group] += 1
    return score


def expected_length(observed: Observed, groups: int) -> FloatArray:
    """Return each group's expected length of a new request, shape (groups,).

    All scores are equal, so arrival decides, until a request has ended and the groups differ. They differ if
    their intraclass correlation is at least :data:`LEAST_SHARE` with probability :data:`SURE`.
    """
    if not observed.ended.any():
        return np.zeros(groups)
    model = LengthModel.learnt(observed, groups)
    if model.probability_of_share(LEAST_SHARE) < SURE:
        return np.zeros(groups)
    return model.expected(np.arange(groups))
