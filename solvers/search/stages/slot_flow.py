"""Fewest slots that serve all requests with given stage times."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....models.programme import Entries, Programme
from .parameters import STANDARD, StageTimeParameters


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
        idle, held = len(self) + point, len(self) + stages + level
        return [
            (self.first, column, 1.0),
            (self.last, column, -1.0),
            (point, idle, 1.0),
            (1 + point, idle, -1.0),
            (stages + 1 + level, held, -1.0),
            (stages + 1 + level[:-1], held[1:], 1.0),
            (stages + 1 + rank, column, 1.0),
        ]


def stretched(times: IntArray, decode_steps: float) -> IntArray:
    """Return stage times with more steps, spread evenly."""
    return times + np.rint(np.linspace(0, decode_steps, len(times))).astype(np.int64)


def whole_slots(
    times: IntArray,
    profile: LengthProfile,
    slots: int,
    seconds: float,
    values: StageTimeParameters = STANDARD,
) -> tuple[Spans, IntArray] | None:
    """Return a whole flow of slots that serves every request, or None.

    The fractional flow that holds slots for the fewest decode steps is rounded up or down in each span. If
    that gives no flow, whole numbers are searched farther from it for few spans. For many spans, or if none
    is found, some spans may be a little too short: the times then have to be shifted
    (:func:`~batchbound.solvers.search.stages.rounding.shift_times`).

    times: Decode steps of the stages and the end, not decreasing, shape (stages + 1,).
    seconds: Time limit.

    The result is the spans, and the slots in each, shape (spans,).
    """
    from .rounding import round_flow

    end = time.perf_counter() + seconds
    spans = Spans.between(times, profile)
    if not spans.hold(profile):
        return None
    rank, at_least = spans.demand(profile)
    stages, ranks = len(times) - 1, len(at_least)
    entries = spans.flow(rank, stages, ranks)
    balance = np.zeros(stages + 1 + ranks)
    balance[0], balance[stages] = slots, -slots
    columns = len(spans) + stages + ranks
    lower = np.zeros(columns)
    lower[-ranks:] = at_least
    whole = np.ones(columns, dtype=np.int64)
    whole[-ranks:] = 0
    holding = np.zeros(columns)
    holding[: len(spans)] = spans.decode_steps
    programme = Programme.of(holding, entries, balance, balance, lower)
    optimum = programme.solved(seconds, interior=True)
    if optimum is None:
        return None
    fractional = optimum.x[: len(spans)]
    rounding = seconds > values.quick_seconds
    share = values.box_share if rounding else 1.0
    for least, greatest in _boxes(fractional, lower, rounding, values):
        boxed = replace(programme, cost=np.zeros(columns), lower=least, upper=greatest)
        left = (end - time.perf_counter()) * share
        found = boxed.solved_whole(whole, left, mip_max_nodes=values.rounding_nodes) if left > 0 else None
        if found is not None:
            return spans, np.rint(found[: len(spans)]).astype(np.int64)
    left = end - time.perf_counter()
    if not rounding or left <= 0:
        return None
    used = round_flow(spans, profile, slots, stages, fractional, left, values)
    return None if used is None else (spans, used)


def _boxes(
    fractional: FloatArray, lower: FloatArray, rounding: bool, values: StageTimeParameters
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield lower and upper bounds on a whole flow, each pair wider."""
    spans = len(fractional)
    nearest, above = lower.copy(), np.full(len(lower), np.inf)
    nearest[:spans] = np.floor(fractional + 1e-7)
    above[:spans] = np.ceil(fractional - 1e-7)
    if not rounding or spans <= values.some_spans:
        yield nearest, above
    if spans <= values.some_spans:
        wider = above.copy()
        wider[:spans] = nearest[:spans] + 1.0
        yield nearest, wider
    if spans <= values.few_spans:
        yield lower, np.full(len(lower), np.inf)
