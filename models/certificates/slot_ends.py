"""An independent check of what the first and the last requests of slots waste."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .claims import RefutedError, Work, entries, unreadable, whole

PARTS = 16
"""Parts of a round in which prices are stated."""

Costs = dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class EndClaim:
    """
    A waste proven for given rounds, in parts of a round, as a linear function of what there is.

    Parameters
    ----------
    rounds
        The decode steps it holds for.
    constant
        The waste with no values at all.
    value, end_value
        What each value takes away, one for any request and one for an end request.
    rest
        What each late round adds.
    """

    rounds: int
    constant: int
    value: int
    end_value: int
    rest: int

    def exceeds(self, room: int, values: int, end_values: int, late: int) -> bool:
        """Return whether more is wasted than so many rounds."""
        taken = self.value * values + self.end_value * end_values
        return self.constant - taken + self.rest * late > PARTS * room


def checked_ends(have: list[tuple[int, int]], slots: int, claim: Mapping[str, Any], work: Work) -> EndClaim:
    """
    Return what the prices of a claim prove.

    Parameters
    ----------
    have
        Each length and how many requests have it, ascending.
    slots
        Slots there are.
    claim
        The witness of :class:`~batchbound.models.bounds.slot_ends.EndPrices`.
    work
        What is left of the steps of the check.

    Raises
    ------
    RefutedError
        If the prices are none, or there are too few steps left to check them.
    """
    longest = have[-1][0]
    rounds = whole(claim, "rounds", "ends")
    value, end_value, end = (whole(claim, name, "ends") for name in ("value", "end_value", "end"))
    share = whole(claim, "share", "ends")
    if share > PARTS:
        raise RefutedError("ends", f"a share of {share} is more than all {PARTS} parts")
    work.spend(longest)
    charges = _end_charges(longest, rounds, end_value, claim)
    if not isinstance(claim["filling"], bool):
        raise unreadable("filling", claim["filling"], "true or false")
    filling = have[0][0] if claim["filling"] else 0
    waste: Costs = {(longest, longest): 0}
    number = dict(have)
    for n in range(longest - 1, 0, -1):
        waste = _with(waste, n, value if n in number else None, charges[n])
        if n in number:
            alone = (rounds - n) % longest
            waste = {
                (v, e): cost + number[n] * _wasted(n, v, e, alone, share, end, n == filling)
                for (v, e), cost in waste.items()
            }
        waste = _undominated(waste, work)
    constant = min(waste.values()) + slots * min(2 * end, share * (rounds % longest))
    constant -= share * filling * number.get(filling, 0)
    return EndClaim(rounds, constant, value, end_value, PARTS - share)


def _end_charges(longest: int, rounds: int, end_value: int, claim: Mapping[str, Any]) -> list[int]:
    """Return the price of each end value, of which some are dearer, and those that come with them cheaper."""
    charges = [end_value] * longest
    for pair in entries(claim, "dearer"):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(each) is int for each in pair)):
            raise unreadable("dearer", pair, "an end value and a price")
        dear, more = pair
        cheap = (rounds - dear) % longest
        if not (0 < dear < longest and cheap > 0):
            raise RefutedError("ends", f"no other end value comes with {dear}, so it cannot be dearer")
        charges[dear] += more
        charges[cheap] -= more
    if min(charges) < 0:
        raise RefutedError("ends", "an end value has a negative price")
    return charges


def _with(waste: Costs, n: int, value: int | None, end_value: int) -> Costs:
    """Return the costs with and without a new value, if it has a price, and a new end value."""
    reached = dict(waste)
    for (v, e), cost in waste.items():
        reached[v, n] = min(reached.get((v, n), cost + end_value), cost + end_value)
        if value is not None:
            reached[n, e] = min(reached.get((n, e), cost + value), cost + value)
            both = cost + value + end_value
            reached[n, n] = min(reached.get((n, n), both), both)
    return reached


def _wasted(n: int, v: int, e: int, alone: int, share: int, end: int, filling: bool) -> int:
    """Return what a request of n rounds wastes: as any, as one of two ends of a slot, or as both of them."""
    held, rest = v - n, PARTS - share
    if filling:
        return rest * held
    as_end = rest * held + share * max(held, e - n) - end
    as_both = rest * held + share * max(held, alone) - 2 * end
    return min(PARTS * held, as_end, as_both)


def _undominated(waste: Costs, work: Work) -> Costs:
    """Return the costs without those that values no larger have for no more."""
    kept: Costs = {}
    for (v, e), cost in sorted(waste.items()):
        work.spend(1 + len(kept))
        if not any(a <= v and b <= e and less <= cost for (a, b), less in kept.items()):
            kept[v, e] = cost
    return kept
