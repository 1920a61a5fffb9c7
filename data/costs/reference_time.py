"""How fast a machine was while something was measured: the seconds of a fixed piece of work beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ..files.json_fields import JsonFields
from .cost import FloatArray

PROMPTS, TOKENS, ROUNDS = 16, 32, 4
"""The fixed piece of work, about what a small job has under way: less would hardly leave the caches."""
WORK = f"{PROMPTS} prompts of {TOKENS} tokens, {ROUNDS} rounds"
_FAST, _SLOW = 0.05, 0.95
"""Quantiles: a single reading may be of a moment too short to matter."""


@dataclass(frozen=True, slots=True)
class ReferenceTime:
    """
    What a fixed piece of work took, again and again, while a profile was measured.

    Parameters
    ----------
    seconds
        On average: measured times go with a machine on which it takes as long.
    fast, slow
        The 5th and the 95th percentile, seconds.
    beside
        What it takes while another worker encodes (WAA), over what it takes alone; 1 if there was none.

    Raises
    ------
    ValueError
        If they are not positive and finite, or out of order.
    """

    seconds: float
    fast: float
    slow: float
    beside: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.fast <= self.seconds <= self.slow < float("inf") and 0 < self.beside < float("inf")):
            raise ValueError(f"{self} is no time that a piece of work can take")

    @classmethod
    def of(cls, readings: FloatArray, beside: float = 1.0) -> ReferenceTime:
        """
        Return what readings come to.

        Parameters
        ----------
        readings
            Seconds, shape (readings,).
        beside
            As above.
        """
        mean = float(np.mean(readings))
        fast, slow = np.quantile(readings, (_FAST, _SLOW)).tolist()
        return cls(mean, min(fast, mean), max(slow, mean), beside)

    @property
    def slowness(self) -> float:
        """How many times slower than on average the machine gets."""
        return self.slow / self.seconds

    def slowdown(self, readings: FloatArray, waited: float = 0.0) -> float:
        """
        Return how many times slower a machine was than the one on which the reference was taken.

        Parameters
        ----------
        readings
            Seconds that the same piece of work took, and the share of them in which another worker encoded
            beside it, shape (readings, 2).
        waited
            Share of the time in which other processes held the core.
        """
        seconds, shared = readings.T
        alone = float(np.mean(seconds / (1 + (self.beside - 1) * shared)))
        return alone / self.seconds / (1 - waited)

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
        numbers = {name: read.number(name) for name in ("seconds", "fast", "slow", "beside")}
        if read.get("work") != WORK:
            raise read.error("work", f"{read.get('work')!r} is not {WORK!r}")
        try:
            return cls(**numbers)
        except ValueError as error:
            raise read.error("seconds", str(error)) from None
