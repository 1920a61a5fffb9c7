"""How fast a machine was while something was measured: the seconds of a fixed piece of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..files.json_fields import JsonFields
from .cost import FloatArray

PROMPTS, TOKENS, ROUNDS = 16, 32, 4
"""The fixed piece of work, about what a small job has under way: less would hardly leave the caches."""
WORK = f"{PROMPTS} prompts of {TOKENS} tokens, {ROUNDS} rounds"


@dataclass(frozen=True, slots=True)
class ReferenceTime:
    """
    What the fixed piece of work took while a profile was measured.

    Parameters
    ----------
    seconds
        The median of its readings.

    Raises
    ------
    ValueError
        If it is not positive and finite.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"{self.seconds} is no number of seconds that a piece of work can take")

    @classmethod
    def of(cls, readings: Sequence[float] | FloatArray) -> ReferenceTime:
        """Return the reference for readings in seconds, shape (readings,), at least one."""
        return cls(float(np.median(readings)))

    def slowdown(self, readings: Sequence[float] | FloatArray) -> float | None:
        """
        Return how many times slower a machine was than the one on which the reference was taken.

        Parameters
        ----------
        readings
            Seconds that the same piece of work took, shape (readings,).

        Returns
        -------
        float or None
            None where there is no reading.
        """
        return float(np.median(readings)) / self.seconds if len(readings) else None

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain JSON values, with what the work is."""
        return {**asdict(self), "work": WORK}

    @classmethod
    def from_json(cls, value: object, *, file: str | None = None) -> ReferenceTime:
        """
        Return the reference that :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If a field is missing, of another kind, or none that can be, or the time is of other work.
        """
        read = JsonFields(value, file, "reference", "Profile again, and search again with that profile.")
        seconds = read.number("seconds")
        if read.get("work") != WORK:
            raise read.error("work", f"{read.get('work')!r} is not {WORK!r}")
        try:
            return cls(seconds)
        except ValueError as error:
            raise read.error("seconds", str(error)) from None
