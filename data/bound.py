"""A lower bound on the makespan, with what proves it, and the gap to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

PROVEN_WITHIN = 1e-9
"""Relative difference up to which a makespan is what a bound proves: the sums of both are long."""


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
    Seconds no schedule of the problem can go below.

    Parameters
    ----------
    seconds
        The bound.
    source
        The argument that gives it, by name.
    terms
        Seconds by name, which add up to ``seconds``.
    certificate
        What an independent check needs to re-derive the bound; plain JSON values.
    valid
        False for a published formula that is known not to be a bound in general: shown, never used in a gap.
    """

    seconds: float
    source: str
    terms: Mapping[str, float] = field(default_factory=dict)
    certificate: Mapping[str, object] = field(default_factory=dict)
    valid: bool = True

    @property
    def proven(self) -> float | None:
        """Seconds that are proven: None for a published formula that is not valid."""
        return self.seconds if self.valid else None

    def gap(self, makespan: float) -> float:
        """
        Return how far a makespan is above the bound, as a fraction of the bound.

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
            raise ValueError(
                f"the {self.source} bound is not a valid, positive one; no gap can be stated against it"
            )
        return gap

    def proves(self, makespan: float) -> bool:
        """
        Return whether no schedule takes less than a makespan, up to rounding.

        Parameters
        ----------
        makespan
            Seconds.
        """
        return self.valid and makespan <= self.seconds * (1 + PROVEN_WITHIN)
