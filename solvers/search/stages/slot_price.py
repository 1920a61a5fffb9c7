"""The slots that given stage times need, as prices that bound it for other stage times too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....models.programme import Programme
from .slot_flow import LengthProfile, Spans, pairs


@dataclass(frozen=True, slots=True, eq=False)
class SlotPrice:
    """A lower bound on the slots needed, as prices that hold for other stage times too."""

    slots: float
    """Slots needed at the stage times that the prices were made for."""
    value: FloatArray
    """Share of a slot's time spent by each stage, 0 to 1, not decreasing, shape (stages + 1,)."""


def slot_price(times: IntArray, profile: LengthProfile) -> SlotPrice | None:
    r"""
    Return the fractional slots needed with stages at ``times``, or None if no number is enough.

    The dual of the slot flow: each request pays the cheapest span that holds it, where a span costs the
    slot time that passes in it,

    .. math:: \max_{0 = v_0 \le \dots \le v_S = 1} \sum_i \min_{(a, b):\, t_b - t_a \ge n_i} (v_b - v_a)

    The linear programme solved is that of the slots, whose multipliers are the prices: what leaves a stage
    has entered it, and spans of each length or above hold the requests that need them.
    """
    spans = Spans.between(times, profile)
    if not spans.hold(profile):
        return None
    rank, at_least = spans.demand(profile)
    stages, ranks = len(times) - 1, len(at_least)
    held = len(spans) + stages + np.arange(ranks)
    slots = np.array([len(spans) + stages + ranks])
    entries = spans.flow(rank, stages, ranks)
    entries += [(np.array([0]), slots, -1.0), (np.array([stages]), slots, 1.0)]
    cost, lower = np.zeros(slots[0] + 1), np.zeros(slots[0] + 1)
    cost[-1], lower[held] = 1.0, at_least
    balanced = np.zeros(stages + 1 + ranks)
    # From nothing a simplex takes up to twenty times as long as an interior point method.
    found = Programme.of(cost, entries, balanced, balanced, lower).solved(interior=True)
    if found is None:
        return None
    multiplier = found.prices[: stages + 1]
    # They are known but for a constant, and rise from 0 at the first stage to 1 at the end.
    value = np.maximum.accumulate(np.clip(multiplier - multiplier[0], 0.0, 1.0))
    value[-1] = 1.0
    return SlotPrice(found.cost, value)


def slots_at_least(times: IntArray, values: FloatArray, profile: LengthProfile) -> FloatArray:
    """
    Return lower bounds on the slots needed at many stage times, shape (candidates,), from prices of others.

    Any prices bound any stage times: each request pays at least the cheapest span that holds it. The bound
    is infinite where some request fits into no span.

    times: Shape (candidates, stages + 1); no row decreases.
    values: Prices (:class:`SlotPrice`), shape (prices, candidates or 1, stages + 1).
    """
    first, last = pairs(times.shape[1])
    held = times[:, last] - times[:, first]
    reach = (times[:, last - 1] - times[:, first]).min(axis=0)
    useful = (reach < profile.longest) & (held.max(axis=0) >= profile.shortest)
    first, last, decode_steps = first[useful], last[useful], np.minimum(held[:, useful], profile.longest)
    if not len(first):
        return np.full(len(times), np.inf)
    longest_first = np.argsort(-decode_steps, axis=1)
    served = profile.at_most[np.take_along_axis(decode_steps, longest_first, axis=1)]
    lacking = served[:, 0] < profile.requests
    payers = -np.diff(served, axis=1, append=0).astype(np.float64)
    price = values[..., last] - values[..., first]
    if price.shape[1] == 1:
        price = price[:, 0].take(longest_first, axis=1)
    else:
        price = np.take_along_axis(price, longest_first[None], axis=2)
    np.minimum.accumulate(price, axis=2, out=price)
    slots = np.einsum("cs,pcs->pc", payers, price)
    bound = slots.max(axis=0, initial=-np.inf)
    bound[lacking] = np.inf
    return np.asarray(bound, dtype=np.float64)


def slots_by_lengths(times: IntArray, profile: LengthProfile) -> FloatArray:
    """
    Return the slots that requests fill at many stage times if each takes the shortest span that holds it.

    It is the bound of prices that rise evenly with time, and takes a hundredth of the time of a price.

    times: Shape (candidates, stages + 1); no row decreases. The result has shape (candidates,), infinite
        where some request fits into no span.
    """
    first, last = pairs(times.shape[1])
    spans = np.sort(times[:, last] - times[:, first], axis=1)
    served = profile.at_most[np.minimum(spans, profile.longest)]
    filled = np.einsum("cs,cs->c", np.diff(served, axis=1, prepend=0), spans)
    slots = filled / np.maximum(times[:, -1], 1)
    return np.where(served[:, -1] < profile.requests, np.inf, slots)
