"""Test whether lengths drift from the plan (ExeGPT, section 7.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...data.arrays import IntArray
from ...data.configuration import PlannedConfiguration

LEAST = 0.05
"""Least relative change of the mean for a new plan (Figure 11)."""
_SURE = 3.0
"""Standard errors beyond which a change is no chance."""


@dataclass(frozen=True, slots=True)
class LengthDrift:
    """Planned and observed decode iterations of completions.

    planned, planned_deviation, observed, observed_deviation: Means and standard deviations.
    """

    planned: float
    planned_deviation: float
    observed: float
    observed_deviation: float
    requests: int

    @classmethod
    def of(cls, configuration: PlannedConfiguration, iterations: IntArray) -> LengthDrift:
        """Compare observed iterations with a configuration's plan.

        iterations: Decode iterations of all completions of a period, shape (requests,), at least one. The
            first to finish are short, so none may be left out.
        """
        return cls(
            configuration.iterations,
            configuration.iterations_deviation,
            float(np.mean(iterations)),
            float(np.std(iterations)),
            len(iterations),
        )

    @property
    def change(self) -> float:
        """Observed over planned mean, minus one."""
        return self.observed / self.planned - 1

    @property
    def drifted(self) -> bool:
        """True if the means differ by more than chance and tolerance."""
        error = max(self.planned_deviation, self.observed_deviation) / math.sqrt(self.requests)
        return abs(self.change) > LEAST and abs(self.observed - self.planned) > _SURE * error

    def __str__(self) -> str:
        return (
            f"completions took {self.observed:.1f} decode iterations on average (deviation"
            f" {self.observed_deviation:.1f}), {self.change:+.0%} against the planned {self.planned:.1f}"
            f" ({self.planned_deviation:.1f})"
        )
