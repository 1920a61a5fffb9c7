"""A lower bound on the makespan, its proof, and the gap to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

PROVEN_WITHIN = 1e-9
"""Largest relative difference between a makespan and an equal bound, for rounding in long sums."""


def gap_above(value: float | None, bound: float | None) -> float | None:
    """Return the gap: a value's excess over a bound, as a fraction of the bound's size."""
    if value is None or not bound:
        return None
    gap = (value - bound) / abs(bound)
    if not math.isfinite(gap):
        return None
    return 0.0 if abs(gap) <= PROVEN_WITHIN else gap


@dataclass(frozen=True, slots=True)
class Bound:
    """
    Seconds that every schedule of the problem takes at least.

    Parameters
    ----------
    seconds
        The bound.
    source
        Name of the argument that proves the bound.
    terms
        Named parts of the bound in seconds, which add up to ``seconds``.
    certificate
        Data from which an independent check derives the bound again; plain JSON values.
    valid
        False for a published formula that is no bound in general: it is shown, and never used in a gap.
    """

    seconds: float
    source: str
    terms: Mapping[str, float] = field(default_factory=dict)
    certificate: Mapping[str, object] = field(default_factory=dict)
    valid: bool = True

    @property
    def proven(self) -> float | None:
        """Proven seconds; None for a published formula that is not valid."""
        return self.seconds if self.valid else None

    def gap(self, makespan: float) -> float:
        """
        Return the gap of a makespan to the bound, as a fraction of the bound.

        Parameters
        ----------
        makespan
            Seconds.

        Raises
        ------
        ValueError
            If the bound is not valid, or there is none.
        """
        gap = gap_above(makespan, self.proven)
        if gap is None:
            raise ValueError(f"the {self.source} bound is not valid and positive, so it has no gap")
        return gap

    def proves(self, makespan: float) -> bool:
        """
        Return whether the bound proves a makespan optimal, up to rounding.

        Parameters
        ----------
        makespan
            Seconds.
        """
        return self.valid and makespan <= self.seconds * (1 + PROVEN_WITHIN)
