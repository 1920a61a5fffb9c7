"""Speed of a machine, as seconds of a fixed piece of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray

PROMPTS, TOKENS, DECODE_STEPS = 16, 32, 4
"""Fixed piece of work; a smaller one would fit into the caches."""
WORK = f"{PROMPTS} prompts of {TOKENS} tokens, {DECODE_STEPS} decode steps"


@dataclass(frozen=True, slots=True)
class ReferenceTime:
    """Seconds of the fixed piece of work during a profile's measurement.

    seconds: Median of the readings.
    work: Description of the work; only times of the same work are comparable.
    """

    seconds: float
    work: str = WORK

    def __post_init__(self) -> None:
        if self.work != WORK:
            raise ValueError(f"the work {self.work!r} is not {WORK!r}: profile again")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"{self.seconds} is not a possible number of seconds for the work")

    @classmethod
    def of(cls, readings: Sequence[float] | FloatArray) -> ReferenceTime:
        """Return the reference for some readings in seconds."""
        return cls(float(np.median(readings)))

    def slowdown(self, readings: Sequence[float] | FloatArray) -> float | None:
        """Return how much slower a machine was than the reference."""
        return float(np.median(readings)) / self.seconds if len(readings) else None
