"""Argument that requests do not fit the slots in fewer steps."""

from __future__ import annotations

from typing import Self

import numpy as np

from ..deadline import Deadline
from .argument import Argument, Curve, Known, Task
from .least_counts import COUNTS, COUNTS_SOURCE
from .packing.partition import priced_packing


class PackingBound(Argument):
    """Search for prices of lengths by column generation (Gilmore and Gomory 1961).

    A slot works on one request at a time, so the decode steps are at least the makespan of packing the
    requests over the slots (the hybrid paper's (26)-(30)). Prices refute a number of steps if no requests
    that fit a slot cost more than a limit, but all requests cost more than the limit times the slots. They
    hold for every number of stages.
    """

    name, part, lists_claims = "packing_prices", "decode_steps", False
    kind, source = COUNTS, COUNTS_SOURCE

    def __init__(self, seconds: float) -> None:
        self._seconds, self._done = seconds, False

    @classmethod
    def of(cls, task: Task) -> Self | None:
        """Return the search if slots bind."""
        return cls(task.params.packing_share * task.seconds) if task.prices_lengths else None

    def prove(self, known: Known, deadline: Deadline) -> Curve | None:
        """Return one curve, with equal steps for every number of stages."""
        if self._done:
            return None
        self._done = True
        deadline = deadline.within(self._seconds)
        if deadline.left <= 0:
            return None
        bound = priced_packing(known.problem.decode_steps, known.counts.slots, known.cheapest[1], deadline)
        if bound is None:
            return None
        claim = {"at_least": bound.value, **bound.witness}
        return Curve(self.part, np.full(len(known.prefill), bound.value), claim)
