"""Given the rounds at which prefill stages happen, how few slots can serve all requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..data.cost import FloatArray, IntArray

if TYPE_CHECKING:
    from scipy.sparse import csc_array


ROUNDING_NODES = 200
"""Nodes after which a search for whole slots is given up: it succeeds at once or hardly ever."""

SOME_SPANS, FEW_SPANS = 400, 120
"""Spans up to which one slot more is tried in each, and any number in each: both take long."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthProfile:
    """
    How many requests need how many rounds, and how many may start at a stage.

    Parameters
    ----------
    at_most
        Requests that need at most L rounds, shape (longest + 1,).
    shortest
        Fewest rounds any request needs.
    starts_per_stage
        Most requests one stage can start, or None for no limit.
    """

    at_most: IntArray
    shortest: int
    starts_per_stage: float | None = None

    @classmethod
    def of(cls, rounds: IntArray, starts_per_stage: float | None = None) -> LengthProfile:
        """Return the profile of the given requests' rounds, shape (requests,)."""
        return cls(np.cumsum(np.bincount(rounds)), int(rounds.min()), starts_per_stage)

    @property
    def longest(self) -> int:
        """Most rounds any request needs."""
        return len(self.at_most) - 1

    @property
    def requests(self) -> int:
        """Number of requests."""
        return int(self.at_most[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """
    The spans between two stages in which a request can run: the arcs of the slot flow.

    Parameters
    ----------
    first, last
        The stage that opens each span and the one (or the end) that closes it, shape (spans,).
    rounds
        Rounds of each span, cut at the longest request, shape (spans,).
    """

    first: IntArray
    last: IntArray
    rounds: IntArray

    @classmethod
    def between(cls, times: IntArray, profile: LengthProfile) -> Spans:
        """
        Return the spans worth using: no shorter than any request, none that a shorter one replaces.

        Parameters
        ----------
        times
            The rounds of the stages and the end, not decreasing, shape (stages + 1,).
        profile
            The requests' lengths.
        """
        first, last = np.triu_indices(len(times), 1)
        rounds = times[last] - times[first]
        useful = (rounds >= profile.shortest) & (times[last - 1] - times[first] < profile.longest)
        useful |= (last == first + 1) & (rounds >= profile.shortest)
        first, last, rounds = first[useful], last[useful], rounds[useful]
        return cls(first, last, np.minimum(rounds, profile.longest))

    def __len__(self) -> int:
        return len(self.first)

    def demand(self, profile: LengthProfile) -> tuple[IntArray, IntArray]:
        """
        Return each span's rank by length, and the requests that need at least each rank.

        A request of any length between two ranks needs a span of the upper one, so only the spans' own
        lengths matter.

        Returns
        -------
        rank
            Shape (spans,), 0 for the shortest.
        at_least
            Requests that only spans of this rank or above can hold, shape (ranks,).
        """
        lengths, rank = np.unique(self.rounds, return_inverse=True)
        below = np.concatenate(([0], profile.at_most[lengths[:-1]]))
        return rank.astype(np.int64), profile.requests - below


@dataclass(frozen=True, slots=True, eq=False)
class SlotPrice:
    """
    A lower bound on the slots needed, as prices that hold for other stage times too.

    Parameters
    ----------
    slots
        The slots needed at the stage times that the prices were made for.
    value
        The share of a slot's whole time spent by each stage, 0 to 1, not decreasing, shape (stages + 1,).
    start
        The price of one start at each stage, shape (stages,); zero where starts are not limited.
    """

    slots: float
    value: FloatArray
    start: FloatArray


def slot_price(times: IntArray, profile: LengthProfile) -> SlotPrice | None:
    r"""
    Return the fractional slots needed with stages at ``times``, or None if no number is enough.

    The dual of the slot flow: each request pays the cheapest span that holds it, where a span costs the
    slot time that passes in it,

    .. math:: \max_{0 = v_0 \le \dots \le v_S = 1,\; q \ge 0}
        \sum_i \min_{(a, b):\, t_b - t_a \ge n_i} (v_b - v_a + q_a) - Q \sum_a q_a

    with :math:`Q` starts a stage at most (q is zero without such a limit).

    Parameters
    ----------
    times
        The rounds of the stages and the end, not decreasing, shape (stages + 1,).
    profile
        The requests' lengths.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    spans = Spans.between(times, profile)
    if not len(spans) or spans.rounds.max() < profile.longest:
        return None
    rank, at_least = spans.demand(profile)
    stages, ranks = len(times) - 1, len(at_least)
    row = np.arange(len(spans))
    step = len(spans) + np.arange(ranks - 1)
    rising = len(spans) + ranks - 1 + np.arange(stages)
    # Columns: the value of each stage and of the end, then the price of each rank, then of each start.
    entries = [
        (row, spans.last, 1.0),
        (row, spans.first, -1.0),
        (row, stages + 1 + rank, -1.0),
        (step, stages + 2 + np.arange(ranks - 1), 1.0),
        (step, stages + 1 + np.arange(ranks - 1), -1.0),
        (rising, 1 + np.arange(stages), 1.0),
        (rising, np.arange(stages), -1.0),
    ]
    starts = 0
    if profile.starts_per_stage is not None:
        starts = stages
        entries.append((row, stages + 1 + ranks + spans.first, 1.0))
    columns = stages + 1 + ranks + starts
    cost = np.zeros(columns)
    cost[stages + 1 : stages + 1 + ranks] = np.append(at_least[1:], 0) - at_least
    lower, upper = np.zeros(columns), np.ones(columns)
    upper[0], lower[stages] = 0.0, 1.0
    if starts:
        cost[-starts:] = profile.starts_per_stage
        upper[-starts:] = np.inf
        upper[stages + 1 : stages + 1 + ranks] = np.inf
    result = milp(
        cost,
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(_sparse(entries, (rising[-1] + 1, columns)), 0.0, np.inf),
        options={"presolve": False},
    )
    if result.x is None:
        return None
    value = np.maximum.accumulate(np.clip(result.x[: stages + 1], 0.0, 1.0))
    price = np.maximum(result.x[-starts:], 0.0) if starts else np.zeros(stages)
    return SlotPrice(float(-result.fun), value, price)


def slots_at_least(
    times: IntArray, values: FloatArray, starts: FloatArray, profile: LengthProfile
) -> FloatArray:
    """
    Return lower bounds on the slots needed at many stage times, from prices made for similar ones.

    Any prices bound any stage times: each request pays at least the cheapest span that holds it.

    Parameters
    ----------
    times
        Shape (candidates, stages + 1); each row not decreasing.
    values, starts
        Prices (:class:`SlotPrice`), shape (prices, candidates or 1, stages + 1) and (..., stages).
    profile
        The requests' lengths.

    Returns
    -------
    FloatArray
        Shape (candidates,); infinite where some request fits into no span.
    """
    first, last = np.triu_indices(times.shape[1], 1)
    held = times[:, last] - times[:, first]
    reach = (times[:, last - 1] - times[:, first]).min(axis=0)
    useful = (reach < profile.longest) & (held.max(axis=0) >= profile.shortest)
    first, last, rounds = first[useful], last[useful], np.minimum(held[:, useful], profile.longest)
    if not len(first):
        return np.full(len(times), np.inf)
    longest_first = np.argsort(-rounds, axis=1)
    served = profile.at_most[np.take_along_axis(rounds, longest_first, axis=1)]
    lacking = served[:, 0] < profile.requests
    payers = -np.diff(served, axis=1, append=0).astype(np.float64)
    bound = np.full(len(times), -np.inf)
    for value, start in zip(values, starts, strict=True):
        price = value[:, last] - value[:, first] + start[:, first]
        if len(price) == 1:
            price = price[0].take(longest_first)
        else:
            price = np.take_along_axis(price, longest_first, axis=1)
        np.minimum.accumulate(price, axis=1, out=price)
        slots = np.einsum("ij,ij->i", payers, price)
        if profile.starts_per_stage is not None:
            slots -= profile.starts_per_stage * start.sum(axis=-1)
        np.maximum(bound, slots, out=bound)
    bound[lacking] = np.inf
    return bound


def whole_slots(
    times: IntArray, profile: LengthProfile, slots: int, seconds: float, most: IntArray | None = None
) -> tuple[Spans, IntArray] | None:
    """
    Return how many slots pass through each span so that every request has one, or None if not found.

    The fractional flow that holds slots for the fewest rounds is rounded up or down in each span where that
    gives a flow, which it mostly does; else whole numbers are searched farther from it if spans are few.

    Parameters
    ----------
    times
        The rounds of the stages and the end, not decreasing, shape (stages + 1,).
    profile
        The requests' lengths.
    slots
        Slots there are.
    seconds
        Time allowed.
    most
        Most requests that each stage starts, shape (stages,), if there is a limit.

    Returns
    -------
    tuple or None
        The spans, and the slots in each, shape (spans,).
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    spans = Spans.between(times, profile)
    if not len(spans) or spans.rounds.max() < profile.longest:
        return None
    rank, at_least = spans.demand(profile)
    stages, ranks = len(times) - 1, len(at_least)
    column = np.arange(len(spans))
    idle = len(spans) + np.arange(stages)
    held = len(spans) + stages + np.arange(ranks)
    # Rows: what leaves each stage has entered it; spans of a rank or above; starts of a stage.
    entries = [
        (spans.first, column, 1.0),
        (spans.last, column, -1.0),
        (np.arange(stages), idle, 1.0),
        (1 + np.arange(stages), idle, -1.0),
        (stages + 1 + np.arange(ranks), held, -1.0),
        (stages + 1 + np.arange(ranks - 1), held[1:], 1.0),
        (stages + 1 + rank, column, 1.0),
    ]
    low = np.zeros(stages + 1 + ranks)
    low[0], low[stages] = slots, -slots
    high = low.copy()
    rows = stages + 1 + ranks
    if most is not None:
        entries.append((rows + spans.first, column, 1.0))
        rows += stages
        low = np.concatenate((low, np.zeros(stages)))
        high = np.concatenate((high, most))
    columns = len(spans) + stages + ranks
    lower = np.zeros(columns)
    lower[-ranks:] = at_least
    whole = np.ones(columns, dtype=np.int64)
    whole[-ranks:] = 0
    constraints = LinearConstraint(_sparse(entries, (rows, columns)), low, high)
    holding = np.zeros(columns)
    holding[: len(spans)] = spans.rounds
    fractional = milp(
        holding, bounds=Bounds(lower, np.inf), constraints=constraints, options={"time_limit": seconds}
    )
    if fractional.x is None:
        return None
    nearest = lower.copy()
    nearest[: len(spans)] = np.floor(fractional.x[: len(spans)] + 1e-7)
    above = np.full(columns, np.inf)
    above[: len(spans)] = np.ceil(fractional.x[: len(spans)] - 1e-7)
    boxes = [Bounds(nearest, above)]
    if len(spans) <= SOME_SPANS:
        wider = above.copy()
        wider[: len(spans)] = nearest[: len(spans)] + 1.0
        boxes.append(Bounds(nearest, wider))
    if len(spans) <= FEW_SPANS:
        boxes.append(Bounds(lower, np.inf))
    for bounds in boxes:
        result = milp(
            np.zeros(columns),
            integrality=whole,
            bounds=bounds,
            constraints=constraints,
            options={"time_limit": seconds, "node_limit": ROUNDING_NODES},
        )
        if result.x is not None:
            return spans, np.rint(result.x[: len(spans)]).astype(np.int64)
    return None


def stages_of_requests(spans: Spans, used: IntArray, rounds: IntArray) -> IntArray:
    """
    Return the stage at which each request starts: the longest requests take the longest spans.

    Parameters
    ----------
    spans
        The spans.
    used
        Slots in each, shape (spans,).
    rounds
        Rounds each request needs, shape (requests,).
    """
    by_length = np.argsort(-spans.rounds, kind="stable")
    offered = np.repeat(by_length, used[by_length])[: len(rounds)]
    stage = np.empty(len(rounds), dtype=np.int64)
    stage[np.argsort(-rounds, kind="stable")] = spans.first[offered]
    return stage


def _sparse(entries: list[tuple[IntArray, IntArray, float]], shape: tuple[int, int]) -> csc_array[np.float64]:
    from scipy.sparse import csc_array

    row = np.concatenate([rows for rows, _, _ in entries])
    column = np.concatenate([columns for _, columns, _ in entries])
    number = np.concatenate([np.full(len(rows), value) for rows, _, value in entries])
    return csc_array((number, (row, column)), shape=shape)
