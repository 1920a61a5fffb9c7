"""Independent check of prices of intervals between stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .claims import RefutedError, Work, whole, wholes

PARTS = 65536
"""Parts of a decode step in which prices are stated."""


@dataclass(frozen=True, slots=True)
class IntervalClaim:
    """Claimed prices that bound the decode steps for every number of stages.

    charged: Least sum of slot time and charges of all requests.
    interval: Charge for each interval that a request is held for.
    spans: Charge for each span, by its number of intervals.
    short: Charge for each step of a span of one interval.
    """

    slots: int
    charged: int
    interval: int
    spans: list[int]
    short: int

    def decode_steps(self, stages: int) -> int:
        """Return the least decode steps with this number of stages."""
        charges = self.interval * self.slots * stages
        for number, price in enumerate(self.spans, start=1):
            charges += price * max(0, stages + 1 - number)
        per_step = PARTS * self.slots + self.short
        return max(0, -((charges - self.charged) // per_step))


def checked_intervals(
    have: list[tuple[int, int]], slots: int, claim: Mapping[str, Any], work: Work
) -> IntervalClaim:
    """Return the proof of a claim's prices."""
    interval, short, spans = (
        whole(claim, "interval", "intervals"),
        whole(claim, "decode_step", "intervals"),
        wholes(claim, "spans", "intervals"),
    )
    if not spans:
        raise RefutedError(
            "intervals", "spans of one interval have no price, and would be charged as longer ones"
        )
    # Charges of a span by its intervals: for each request, and once. Longer spans are free.
    kinds = [(interval * number, price) for number, price in enumerate([*spans, 0], start=1)]
    cheapest = [0]
    for i, (length, _) in enumerate(have):
        work.spend(len(kinds))
        ways = [(waste, once + (short * length if k == 0 else 0)) for k, (waste, once) in enumerate(kinds)]
        best, number, wasted = math.inf, 0, 0
        for j in range(i, -1, -1):
            work.spend(len(ways))
            number += have[j][1]
            wasted += have[j][1] * (length - have[j][0]) * PARTS
            if best <= wasted:
                # The more of the shorter requests join, the more they waste.
                break
            best = min(best, cheapest[j] + wasted + min(number * waste + once for waste, once in ways))
        cheapest.append(int(best))
    slot_steps = sum(length * count for length, count in have)
    return IntervalClaim(slots, cheapest[-1] + slot_steps * PARTS, interval, spans, short)
