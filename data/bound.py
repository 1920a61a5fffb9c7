"""A lower bound on the makespan, with what proves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .files.disk import InputError
from .files.json_fields import is_number

ROUNDING = 1e-12
"""Relative difference that two sums of the same seconds may have in floating point."""

PROVEN_WITHIN = 1e-9
"""Relative difference up to which a makespan is what a bound proves: the sums of both are long."""


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
            If the bound is not valid (or not positive), so that a gap to it would say nothing.
        """
        if not self.valid or self.seconds <= 0:
            raise ValueError(
                f"the {self.source} bound is not a valid, positive one; no gap can be stated against it"
            )
        gap = (makespan - self.seconds) / self.seconds
        return 0.0 if abs(gap) < ROUNDING else gap

    def proves(self, makespan: float) -> bool:
        """
        Return whether no schedule takes less than a makespan, up to rounding.

        Parameters
        ----------
        makespan
            Seconds.
        """
        return self.valid and makespan <= self.seconds * (1 + PROVEN_WITHIN)

    def to_json(self) -> dict[str, object]:
        """Return the bound as plain JSON values."""
        return {
            "seconds": self.seconds,
            "source": self.source,
            "valid": self.valid,
            "terms": dict(self.terms),
            "certificate": dict(self.certificate),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object], *, file: str | None = None) -> Bound:
        """
        Return the bound that :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If a field is missing or of another kind.
        """
        seconds, source, valid = value.get("seconds"), value.get("source"), value.get("valid", True)
        terms, certificate = value.get("terms", {}), value.get("certificate", {})
        if (
            not isinstance(seconds, int | float)
            or not isinstance(source, str)
            or not isinstance(valid, bool)
            or not isinstance(terms, dict)
            or not all(is_number(each) for each in (seconds, *terms.values()))
            or not isinstance(certificate, dict)
        ):
            raise InputError("is not a bound", file=file, where="field 'bound'", hint="Plan again.")
        return cls(float(seconds), source, terms, certificate, valid)
