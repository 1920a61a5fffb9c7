"""Lower bound on the makespan, with its proof and gap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

PROVEN_WITHIN = 1e-9
"""Relative tolerance between a makespan and an equal bound."""


def gap_above(value: float | None, bound: float | None) -> float | None:
    """Return a value's excess over a bound, as a fraction."""
    if value is None or not bound:
        return None
    gap = (value - bound) / abs(bound)
    if not math.isfinite(gap):
        return None
    return 0.0 if abs(gap) <= PROVEN_WITHIN else gap


@dataclass(frozen=True, slots=True, repr=False)
class Bound:
    """Seconds that every schedule of the problem takes at least.

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

    def __repr__(self) -> str:
        return f"Bound({self.seconds:.6g} s by {self.source}{'' if self.valid else ', not valid'})"

    @property
    def proven(self) -> float | None:
        """Proven seconds; None for a formula that is not valid."""
        return self.seconds if self.valid else None

    def gap(self, makespan: float) -> float:
        """Return a makespan's gap to the bound, as a fraction.

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
        """Return whether a makespan equals the bound, up to rounding.

        Parameters
        ----------
        makespan
            Seconds.
        """
        return self.valid and makespan <= self.seconds * (1 + PROVEN_WITHIN)
