"""Spans of decode steps between stages in which requests can run."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ....data.arrays import IntArray
from ....models.programme import Entries


@dataclass(frozen=True, slots=True, eq=False)
class LengthProfile:
    """Number of requests by decode steps."""

    at_most: IntArray
    """Requests that need at most L decode steps, shape (longest + 1,)."""
    shortest: int
    """Fewest decode steps that any request needs."""

    @classmethod
    def of(cls, decode_steps: IntArray) -> LengthProfile:
        """Return the profile of the given requests' decode steps, shape (requests,)."""
        return cls(np.cumsum(np.bincount(decode_steps)), int(decode_steps.min()))

    @property
    def longest(self) -> int:
        """Most decode steps any request needs."""
        return len(self.at_most) - 1

    @property
    def requests(self) -> int:
        """Number of requests."""
        return int(self.at_most[-1])


@functools.cache
def pairs(points: int) -> tuple[IntArray, IntArray]:
    """Return the earlier and later point of each pair, shape (pairs,)."""
    first, last = np.triu_indices(points, 1)
    first.flags.writeable = last.flags.writeable = False
    return first, last


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Spans between two stages in which a request can run.

    They are the arcs of the slot flow.

    first, last: Stage that opens each span, and stage (or end) that closes it, shape (spans,).
    decode_steps: Decode steps of each span, cut at the longest request, shape (spans,).
    """

    first: IntArray
    last: IntArray
    decode_steps: IntArray

    @classmethod
    def between(cls, times: IntArray, profile: LengthProfile) -> Spans:
        """Return the useful spans between stage times.

        None is shorter than every request, and none can be replaced by a shorter one.

        times: Decode steps of the stages and the end, not decreasing, shape (stages + 1,).
        """
        begin, count = cls._reach(times, profile)
        first = np.repeat(np.arange(len(times)), count)
        last = np.arange(len(first)) - np.repeat(np.cumsum(count) - count - begin, count)
        decode_steps = times[last] - times[first]
        return cls(first, last, np.minimum(decode_steps, profile.longest))

    @classmethod
    def number_between(cls, times: IntArray, profile: LengthProfile) -> int:
        """Return the number of spans, without listing them."""
        return int(cls._reach(times, profile)[1].sum())

    @staticmethod
    def _reach(times: IntArray, profile: LengthProfile) -> tuple[IntArray, IntArray]:
        """Return the first closing point of each point, and their number."""
        point = np.arange(len(times))
        begin = np.maximum(np.searchsorted(times, times + profile.shortest), point + 1)
        end = np.minimum(np.searchsorted(times, times + profile.longest), len(times) - 1)
        return begin, np.maximum(end - begin + 1, 0)

    def __len__(self) -> int:
        return len(self.first)

    def demand(self, profile: LengthProfile) -> tuple[IntArray, IntArray]:
        """Return each span's rank by length, and requests per rank.

        A request of any length between two ranks needs a span of the upper one, so only the spans' own
        lengths matter. The ranks have shape (spans,), 0 for the shortest. The second array counts requests
        that only spans of this rank or above can hold, shape (ranks,).
        """
        lengths, rank = np.unique(self.decode_steps, return_inverse=True)
        below = np.concatenate(([0], profile.at_most[lengths[:-1]]))
        return rank.astype(np.int64), profile.requests - below

    def hold(self, profile: LengthProfile) -> bool:
        """Return whether the longest request has a span."""
        return len(self) > 0 and bool(self.decode_steps.max() >= profile.longest)

    def of_requests(self, used: IntArray, decode_steps: IntArray) -> IntArray:
        """Return each request's span, the longest to the longest.

        used: Slots in each span, shape (spans,), no fewer than there are requests.
        decode_steps: Decode steps of each request, shape (requests,).
        """
        longest_first = np.argsort(-self.decode_steps, kind="stable")
        span = np.empty(len(decode_steps), dtype=np.int64)
        offered = np.repeat(longest_first, used[longest_first])
        span[np.argsort(-decode_steps, kind="stable")] = offered[: len(decode_steps)]
        return span

    def flow(self, rank: IntArray, stages: int, ranks: int) -> list[Entries]:
        """Return the rows of a flow of slots: rows, columns and factors.

        Columns are slots in the spans, slots that wait from a stage to the next, and spans of each rank or
        above. Rows balance what enters and leaves each stage, shape (stages + 1,), and count spans of a rank
        or above.

        rank, ranks: Ranks of the spans by :meth:`demand`, and their number.
        """
        column, point, level = np.arange(len(self)), np.arange(stages), np.arange(ranks)
        idle, counted = len(self) + point, len(self) + stages + level
        return [
            (self.first, column, 1.0),
            (self.last, column, -1.0),
            (point, idle, 1.0),
            (1 + point, idle, -1.0),
            (stages + 1 + level, counted, -1.0),
            (stages + 1 + level[:-1], counted[1:], 1.0),
            (stages + 1 + rank, column, 1.0),
        ]
