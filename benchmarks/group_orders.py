"""
Orders of groups to compare ours with: those of Seer and vllm-ascend, and two with foresight.

No policy of the package; ``rollouts.py`` and ``rollout_limits.py`` simulate them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.problem import Problem
from batchbound.heuristics.policy import State
from batchbound.heuristics.queues.admission import Admission
from batchbound.heuristics.queues.ordered import arrival_order
from batchbound.heuristics.queues.prefill_rules import SkiRental
from batchbound.heuristics.queues.queue_policy import QueuedPolicy, QueuePolicy
from batchbound.heuristics.unknown_lengths.groups import group_numbers, place_in_group
from batchbound.heuristics.unknown_lengths.lengths import Observed
from batchbound.heuristics.unknown_lengths.registry import by_arrival

NEWEST = 0.1
"""Weight of a new length in vllm-ascend's moving average."""

MOST_AVERAGED = 10
"""Most requests of a group in that average."""

COLD_START = 128.0
"""Decode steps assumed for a group without a completion."""

Ranking = Callable[[Observed, int], FloatArray]
"""Score of each group from observations, the largest first, shape (groups,)."""


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


def by_groups(problem: Problem, ranking: Ranking, *, scouts: int) -> QueuedPolicy:
    """Return the policy of scouts first, then groups by ranking."""
    numbers, _groups = group_numbers(problem)
    if int(np.bincount(numbers).max()) <= scouts:
        # All requests are scouts, which come by arrival.
        return by_arrival(problem, SkiRental())
    queue = GroupQueue(problem, ranking, scouts=scouts)
    return QueuePolicy(queue, SkiRental(), Admission(problem, "present"))


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


ORDERS: dict[str, Callable[[Problem], QueuedPolicy]] = {
    "moving-average": lambda problem: by_groups(problem, moving_average, scouts=3),
    "scouts": lambda problem: by_groups(problem, longest_seen, scouts=1),
}
"""Orders of others by their names in the tables."""


def told_tendencies(problem: Problem, tendency: FloatArray) -> QueuedPolicy:
    """Return the policy that knows the order of groups' mean lengths.

    Other policies have to learn it, and chance within the groups remains. List order by expected length is
    not the best for every draw, so its gain is an estimate and no bound.

    problem: Its lengths are not read.
    tendency: For each group, any number that grows with its lengths, shape (groups,).
    """
    return by_groups(problem, lambda _observed, _groups: tendency, scouts=0)


def told_lengths(problem: Problem, lengths: IntArray) -> QueuedPolicy:
    """Return the policy that knows each group's set of lengths.

    It does not know their order within the group, and serves the most expected first. Its gain is an estimate
    and no bound.

    problem: Its lengths are not read.
    lengths: True lengths, tokens, shape (requests,).
    """
    numbers, groups = group_numbers(problem)
    total = np.bincount(numbers, lengths, minlength=groups)
    count = np.bincount(numbers, minlength=groups)

    def left(observed: Observed, groups: int) -> FloatArray:
        group, tokens = observed.group[observed.ended], observed.tokens[observed.ended]
        gone = np.bincount(group, minlength=groups)
        rest = total - np.bincount(group, tokens, minlength=groups)
        return np.asarray(rest / np.maximum(count - gone, 1))

    return by_groups(problem, left, scouts=0)
