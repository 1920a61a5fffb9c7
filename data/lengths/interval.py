"""Prediction intervals of makespans over sampled lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

COVERAGE = 0.9
"""Probability of the intervals."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Expected quantity with its prediction interval.

    mean: Mean over the sampled lengths.
    low, high: Limits of the interval with probability :data:`COVERAGE`.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the prediction interval of the next value after exchangeable ones."""
        tails = ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2)
        low, high = np.quantile(values, tails, method="weibull").tolist()
        return cls(float(np.mean(values)), low, high)
