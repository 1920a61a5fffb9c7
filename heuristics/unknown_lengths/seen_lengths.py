"""Distribution of completions' lengths, of which some still run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SeenLengths:
    """Kaplan-Meier distribution of lengths; running completions may become longer.

    at: Lengths, ascending; the last one is the mean of all lengths beyond those seen.
    below: Probability of each length or a shorter one.
    """

    at: FloatArray
    below: FloatArray

    @classmethod
    def of(cls, lengths: IntArray, ended: npt.NDArray[np.bool_], cap: float) -> SeenLengths:
        """Return the distribution of ended and running completions."""
        order = np.lexsort((~ended, lengths))
        at, last = lengths[order].astype(np.float64), ended[order]
        surviving = np.cumprod(1 - last / np.arange(len(at), 0, -1))
        longest = float(at[-1]) if len(at) else 1.0
        # Nothing is known between the longest and the cap.
        return cls(np.append(at, (longest + max(cap, longest)) / 2), np.append(1 - surviving, 1.0))

    @property
    def mean(self) -> float:
        """Mean length."""
        return float(np.diff(self.below, prepend=0.0) @ self.at)

    def sample(self, rng: np.random.Generator, reached: FloatArray) -> FloatArray:
        """Return a length beyond each of those reached."""
        first = np.searchsorted(self.at, reached, side="right")
        lowest = np.where(first > 0, self.below[np.maximum(first - 1, 0)], 0.0)
        share = lowest + rng.random(len(reached)) * (1 - lowest)
        at = np.minimum(np.searchsorted(self.below, share), len(self.at) - 1)
        longest = self.at[-2] if len(self.at) > 1 else 0.0
        # Equal lengths would fill the slots evenly, so that no order could save anything.
        beyond_seen = longest + 2 * (self.at[-1] - longest) * rng.random(len(reached))
        lengths = np.where(at == len(self.at) - 1, beyond_seen, self.at[at])
        beyond: FloatArray = np.maximum(lengths, reached + 1)
        return beyond
