"""Predicted lengths as wrong as the paper reports its predictor's (section 2.3, Figure 5a)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from batchbound.data.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class PredictorErrors:
    """
    What the paper reports of its predicted lengths, raised by the padding it found best.

    Parameters
    ----------
    padding
        Share by which they are raised.
    accuracy
        Share of the answers for which they then suffice.
    over, under
        Means over all answers of what is allocated in vain and of what is lacking, as shares of what is
        allocated.
    """

    padding: float
    accuracy: float
    over: float
    under: float

    def ratios(self, rng: np.random.Generator, count: int) -> FloatArray:
        """
        Return true over predicted lengths, the most random that have these figures, shape (count,).

        On either side of what is allocated nothing but a mean is known: an exponential distribution.
        """
        suffices = rng.random(count) < self.accuracy
        by = rng.exponential(size=count)
        # One allocation in a million would be more than twenty times too long: no predictor's.
        spare = np.minimum(self.over / self.accuracy * by, 0.95)
        lacking = self.under / (1 - self.accuracy) * by
        return (1 + self.padding) * np.where(suffices, 1 - spare, 1 + lacking)

    def log_normal(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Return true over predicted lengths, log-normal about 1, that suffice as often, shape (count,)."""
        deviation = np.log1p(self.padding) / NormalDist().inv_cdf(self.accuracy)
        ratios: FloatArray = np.exp(-deviation * rng.standard_normal(count))
        return ratios
