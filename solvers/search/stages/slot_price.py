"""Prices that bound the slots of stage times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....models.programme import BASIC, LOWER, ZERO, Entries, Programme
from .spans import LengthProfile, Spans, pairs


@dataclass(frozen=True, slots=True, eq=False)
class SlotPrice:
    """Lower bound on the slots, as prices for all stage times."""

    slots: float
    """Slots needed at the priced stage times."""
    value: FloatArray
    """Share of a slot's time at each stage, rising, shape (stages + 1,)."""


def slot_price(times: IntArray, profile: LengthProfile, most: float = np.inf) -> SlotPrice | None:
    r"""Return the fractional slots of some stage times, or None.

    The dual of the slot flow: each request pays the cheapest span that holds it, where a span costs the
    slot time that passes in it,

    .. math:: \max_{0 = v_0 \le \dots \le v_S = 1} \sum_i \min_{(a, b):\, t_b - t_a \ge n_i} (v_b - v_a)

    With the spans ordered by length, the minimum is a span's own price less a discount, and it rises with the
    length. The simplex method starts from prices that rise evenly with time, where few discounts are above
    zero.

    most: Slots beyond which the exact number does not matter: prices that prove as many are enough.
    """
    spans = Spans.between(times, profile)
    if not spans.hold(profile):
        return None
    order = np.argsort(spans.decode_steps, kind="stable")
    first, last = spans.first[order], spans.last[order]
    payers = np.diff(profile.at_most[spans.decode_steps[order]], prepend=0).astype(np.float64)
    even = times / times[-1]
    price = even[last] - even[first]
    programme, basis = _discounts(first, last, payers, price, even)
    columns = programme.solved_from(basis, float(payers @ price) - most)
    if columns is None:
        return None
    value = even.copy()
    value += columns[: len(times)]
    value = np.maximum.accumulate(np.clip(value, 0.0, 1.0))
    cheapest = np.minimum.accumulate((value[last] - value[first])[::-1])[::-1]
    return SlotPrice(float(payers @ cheapest), value)


def _discounts(
    first: IntArray, last: IntArray, payers: FloatArray, price: FloatArray, value: FloatArray
) -> tuple[Programme, tuple[IntArray, IntArray]]:
    """Return the programme of the discounts, and its initial basis.

    Columns: changes of the inner stages' values, a discount for each span. Rows: the discounted prices rise
        from span to span, the values from stage to stage.

    first, last, payers, price: Of the spans by length, shape (spans,).
    value: Values from which changes count, shape (stages + 1,).
    """
    spans, stages = len(first), len(value) - 1
    span, stage = np.arange(spans - 1), np.arange(stages)
    discount = stages + 1 + np.arange(spans)
    entries: list[Entries] = [
        (span, last[1:], 1.0),
        (span, first[1:], -1.0),
        (span, last[:-1], -1.0),
        (span, first[:-1], 1.0),
        (span, discount[:-1], 1.0),
        (span, discount[1:], -1.0),
        (spans - 1 + stage, stage + 1, 1.0),
        (spans - 1 + stage, stage, -1.0),
    ]
    paid = np.bincount(last, payers, stages + 1) - np.bincount(first, payers, stages + 1)
    cost = np.concatenate((-paid, payers))
    lower, upper = np.zeros(len(cost)), np.full(len(cost), np.inf)
    lower[1:stages], upper[[0, stages]] = -np.inf, 0.0
    discounts = -np.concatenate((np.diff(price), np.diff(value)))
    programme = Programme.of(cost, entries, discounts, np.full(len(discounts), np.inf), lower, upper)
    discounted = price[:-1] > np.minimum.accumulate(price[::-1])[-2::-1]
    inner = np.full(stages + 1, ZERO)
    inner[[0, stages]] = LOWER
    columns = np.concatenate((inner, np.where(discounted, BASIC, LOWER), [LOWER]))
    rows = np.concatenate((np.where(discounted, LOWER, BASIC), np.full(stages, BASIC)))
    return programme, (columns, rows)


def slots_at_least(times: IntArray, values: FloatArray, profile: LengthProfile) -> FloatArray:
    """Bound the slots at many stage times by prices of others.

    Any prices bound any stage times: each request pays at least the cheapest span that holds it. The bound,
    shape (candidates,), is infinite where some request fits into no span.

    times: Shape (candidates, stages + 1); no row decreases.
    values: Prices (:class:`SlotPrice`), shape (prices, candidates or 1, stages + 1).
    """
    first, last = pairs(times.shape[1])
    spans = times[:, last] - times[:, first]
    reach = (times[:, last - 1] - times[:, first]).min(axis=0)
    useful = (reach < profile.longest) & (spans.max(axis=0) >= profile.shortest)
    first, last, decode_steps = first[useful], last[useful], np.minimum(spans[:, useful], profile.longest)
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
    """Bound the slots at many stage times by lengths alone.

    Each request takes the shortest span that holds it. This is weaker than a bound by prices, and a hundred
    times faster. The result, shape (candidates,), is infinite where some request fits into no span.

    times: Shape (candidates, stages + 1); no row decreases.
    """
    first, last = pairs(times.shape[1])
    spans = np.sort(times[:, last] - times[:, first], axis=1)
    served = profile.at_most[np.minimum(spans, profile.longest)]
    filled = np.einsum("cs,cs->c", np.diff(served, axis=1, prepend=0), spans)
    slots = filled / np.maximum(times[:, -1], 1)
    return np.where(served[:, -1] < profile.requests, np.inf, slots)
