"""What stage times ask of slots, as prices that bound it for other stage times too."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from ....data.costs.cost import FloatArray, IntArray
from ....models.programme import Programme
from .slot_flow import LengthProfile, Spans, pairs

LOWER, BASIC, ZERO = 0, 1, 3
"""Where SoPlex has a column or row: at its lower bound, in the basis, or free and outside of it."""

SCALING, ITERATION_LIMIT = 2, 10
"""SCIP's numbers for these settings of an LP."""

ITERATIONS = 20
"""Steps of the simplex method after which it is first asked how far it is."""


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


MANY_SPANS = 700
"""Spans from which on an interior point method is quicker than a simplex from prices nearby."""


def slot_price(
    times: IntArray, profile: LengthProfile, near: SlotPrice | None = None, most: float = np.inf
) -> SlotPrice | None:
    r"""
    Return the fractional slots needed with stages at ``times``, or None if no number is enough.

    The dual of the slot flow: each request pays the cheapest span that holds it, where a span costs the
    slot time that passes in it,

    .. math:: \max_{0 = v_0 \le \dots \le v_S = 1,\; q \ge 0}
        \sum_i \min_{(a, b):\, t_b - t_a \ge n_i} (v_b - v_a + q_a) - Q \sum_a q_a

    with :math:`Q` starts a stage at most (q is zero without such a limit). With the spans ordered by length
    the minimum is the span's own price less a discount :math:`u \ge 0`, and these minima must not fall with
    the length. Hardly any discount is positive in the end, so the simplex method starts where only those are
    that ``near`` asks for, and takes a fraction of the steps it would take from nothing.

    Parameters
    ----------
    times
        The rounds of the stages and the end, not decreasing, shape (stages + 1,).
    near
        Prices for as many stages, best those of similar times; None to begin from nothing.
    most
        Slots beyond which it does not matter how many are needed: then the first prices that prove so much
        are returned, with what they prove.
    """
    spans = Spans.between(times, profile)
    if not spans.hold(profile):
        return None
    if (
        near is None
        or find_spec("pyscipopt") is None
        or (len(spans) > MANY_SPANS and profile.starts_per_stage is None)
    ):
        return _price_from_nothing(times, profile, spans)
    starts = profile.starts_per_stage
    # Columns: the changes of the inner stages' values and of the prices of starts, then the discounts.
    asked = near.start if starts is not None else near.start[:0]
    inner, chosen, count = len(times) - 2, len(times) - 2 + len(asked), len(spans)
    order = np.argsort(spans.rounds, kind="stable")
    first, last = spans.first[order], spans.last[order]
    payers = np.diff(profile.at_most[spans.rounds[order]], prepend=0).astype(np.float64)
    price = near.value[last] - near.value[first]
    takes = np.zeros((count, len(times) + len(asked)))
    row = np.arange(count)
    takes[row, last] = 1.0
    takes[row, first] = -1.0
    if starts is not None:
        price += asked[first]
        takes[row, len(times) + first] = 1.0
    takes = np.delete(takes, (0, inner + 1), axis=1)
    lower = np.concatenate((np.full(inner, -np.inf), -asked))
    cost = -payers @ takes
    cost[inner:] += starts or 0.0
    # Rows: minima rise with the length, values with the stage.
    rising = np.zeros((inner + 1, chosen))
    rising[:, :inner] = np.eye(inner + 1, inner) - np.eye(inner + 1, inner, -1)
    rows = _entries(np.concatenate((np.diff(takes, axis=0), rising)))
    for shorter in range(count - 1):
        rows[shorter] += [(chosen + shorter, 1.0), (chosen + shorter + 1, -1.0)]
    least = np.concatenate((-np.diff(price), -np.diff(near.value)))
    cheapest = np.minimum.accumulate(price[::-1])[::-1]
    discounted = price[:-1] > cheapest[1:]
    basis = (
        [*np.where(lower < 0, ZERO, LOWER).tolist(), *np.where(discounted, BASIC, LOWER).tolist(), LOWER],
        [*np.where(discounted, LOWER, BASIC).tolist(), *[BASIC] * (inner + 1)],
    )
    constant = float(payers @ price) - (starts or 0.0) * float(asked.sum())
    found = _least(
        np.concatenate((cost, payers)),
        np.concatenate((lower, np.zeros(count))),
        rows,
        least,
        basis,
        constant - most,
    )
    if found is None:
        return None
    value, start = near.value.copy(), near.start.copy()
    value[1:-1] += found[1][:inner]
    start[: len(asked)] = np.maximum(asked + found[1][inner:chosen], 0.0)
    return SlotPrice(constant - found[0], np.maximum.accumulate(np.clip(value, 0.0, 1.0)), start)


def _price_from_nothing(times: IntArray, profile: LengthProfile, spans: Spans) -> SlotPrice | None:
    """
    Return the price by an interior point method: from nothing a simplex takes up to twenty times as long.

    The linear programme is that of the slots themselves, whose multipliers are the prices: what leaves each
    stage has entered it, spans of each length or above hold the requests that need them, and no stage starts
    more than it may.
    """
    rank, at_least = spans.demand(profile)
    stages, ranks = len(times) - 1, len(at_least)
    held = len(spans) + stages + np.arange(ranks)
    slots = np.array([len(spans) + stages + ranks])
    entries = spans.flow(rank, stages, ranks)
    entries += [(np.array([0]), slots, -1.0), (np.array([stages]), slots, 1.0)]
    cost, lower = np.zeros(slots[0] + 1), np.zeros(slots[0] + 1)
    cost[-1], lower[held] = 1.0, at_least
    starts = profile.starts_per_stage
    rows = stages + 1 + ranks
    low, high = np.zeros(rows), np.zeros(rows)
    if starts is not None:
        entries.append((rows + spans.first, np.arange(len(spans)), 1.0))
        low = np.concatenate((low, np.full(stages, -np.inf)))
        high = np.concatenate((high, np.full(stages, starts)))
    # From nothing a simplex takes up to twenty times as long.
    found = Programme.of(cost, entries, low, high, lower).solved(interior=True)
    if found is None:
        return None
    multiplier = found.prices[: stages + 1]
    # They are known but for a constant, and rise from 0 at the first stage to 1 at the end.
    value = np.maximum.accumulate(np.clip(multiplier - multiplier[0], 0.0, 1.0))
    value[-1] = 1.0
    price = np.zeros(stages) if starts is None else np.maximum(-found.prices[rows:], 0.0)
    return SlotPrice(found.cost, value, price)


def _least(
    cost: FloatArray,
    lower: FloatArray,
    rows: list[list[tuple[int, float]]],
    least: FloatArray,
    basis: tuple[list[int], list[int]],
    enough: float,
) -> tuple[float, FloatArray] | None:
    """
    Return the least cost and where it is, or the first below ``enough``; None if there is no least.

    Parameters
    ----------
    cost, lower
        Of each column, shape (columns,).
    rows, least
        Entries of each row, and what they must come to at least, shape (rows,).
    basis
        Where the columns and the rows are at first.
    enough
        A cost below which there is no need to go on.
    """
    from pyscipopt import LP

    lp = LP(sense="minimize")
    infinity = lp.infinity()
    lp.addCols(
        [[] for _ in cost],
        objs=cost.tolist(),
        lbs=np.maximum(lower, -infinity).tolist(),
        ubs=[infinity] * len(cost),
    )
    lp.addRows(rows, lhss=least.tolist(), rhss=[infinity] * len(rows))
    lp.setIntParam(SCALING, 0)
    lp.setBase(*basis)
    iterations = ITERATIONS
    while True:
        lp.setIntParam(ITERATION_LIMIT, iterations)
        lp.solve(dual=False)
        if lp.isOptimal() or (lp.isPrimalFeasible() and lp.getObjVal() < enough):
            return lp.getObjVal(), np.array(lp.getPrimal())
        if lp.getNIterations() < iterations:
            return None
        iterations *= 2


def _entries(matrix: FloatArray) -> list[list[tuple[int, float]]]:
    """Return the column and the number of each entry that is not zero, row by row."""
    row, column = np.nonzero(matrix)
    entries = list(zip(column.tolist(), matrix[row, column].tolist(), strict=True))
    ends = np.searchsorted(row, np.arange(len(matrix) + 1)).tolist()
    return [entries[begin:end] for begin, end in itertools.pairwise(ends)]


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

    Returns
    -------
    FloatArray
        Shape (candidates,); infinite where some request fits into no span.
    """
    first, last = pairs(times.shape[1])
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
    price = values[..., last] - values[..., first] + starts[..., first]
    if price.shape[1] == 1:
        price = price[:, 0].take(longest_first, axis=1)
    else:
        price = np.take_along_axis(price, longest_first[None], axis=2)
    np.minimum.accumulate(price, axis=2, out=price)
    slots = np.einsum("cs,pcs->pc", payers, price)
    if profile.starts_per_stage is not None:
        slots -= profile.starts_per_stage * starts.sum(axis=-1)
    bound = slots.max(axis=0, initial=-np.inf)
    bound[lacking] = np.inf
    return np.asarray(bound, dtype=np.float64)


def slots_by_lengths(times: IntArray, profile: LengthProfile) -> FloatArray:
    """
    Return the slots that requests fill at many stage times if each takes the shortest span that holds it.

    The bound of prices that rise evenly with time, for a hundredth of what the slots needed take to find:
    what it lacks of them differs little between similar times.

    Parameters
    ----------
    times
        Shape (candidates, stages + 1); each row not decreasing.

    Returns
    -------
    FloatArray
        Shape (candidates,); infinite where some request fits into no span.
    """
    first, last = pairs(times.shape[1])
    spans = np.sort(times[:, last] - times[:, first], axis=1)
    served = profile.at_most[np.minimum(spans, profile.longest)]
    filled = np.einsum("cs,cs->c", np.diff(served, axis=1, prepend=0), spans)
    slots = filled / np.maximum(times[:, -1], 1)
    return np.where(served[:, -1] < profile.requests, np.inf, slots)
