"""Speed of a machine during a measurement: the seconds of a fixed piece of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray

PROMPTS, TOKENS, DECODE_STEPS = 16, 32, 4
"""The fixed piece of work, about the size of a small job: a smaller one would fit the caches."""
WORK = f"{PROMPTS} prompts of {TOKENS} tokens, {DECODE_STEPS} decode steps"


@dataclass(frozen=True, slots=True)
class ReferenceTime:
    """
    What the fixed piece of work took while a profile was measured.

    seconds: The median of its readings.
    work: What the piece of work is: only times of the same work can be compared.
    """

    seconds: float
    work: str = WORK

    def __post_init__(self) -> None:
        if self.work != WORK:
            raise ValueError(f"the work {self.work!r} is not {WORK!r}: profile again")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"{self.seconds} is no number of seconds that a piece of work can take")

    @classmethod
    def of(cls, readings: Sequence[float] | FloatArray) -> ReferenceTime:
        """Return the reference for readings in seconds, shape (readings,), at least one."""
        return cls(float(np.median(readings)))

    def slowdown(self, readings: Sequence[float] | FloatArray) -> float | None:
        """Return how many times slower a machine was than the one on which the reference was taken."""
        return float(np.median(readings)) / self.seconds if len(readings) else None
