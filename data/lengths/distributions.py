"""Distributions of lengths, fitted to data or to published moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray, IntArray

FAMILIES = ("normal", "censored_normal", "log_normal", "gamma")
"""Families on a range of whole tokens, truncated or, if censored, clipped."""
LONGEST_OBSERVED = 100_000_000
"""Longest observed length in tokens; each takes a probability."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """Distribution over whole numbers of tokens in a range.

    low: Shortest length, tokens.
    probabilities: Probabilities of ``low``, ``low + 1`` and so on, which sum to one, shape (lengths,).
    """

    low: int
    probabilities: FloatArray

    def __post_init__(self) -> None:
        weights = np.array(self.probabilities, dtype=np.float64)
        if self.low < 1 or weights.ndim != 1 or not len(weights):
            raise ValueError(
                f"lengths from {self.low} with {weights.shape} probabilities are no distribution"
            )
        if not (np.isfinite(weights).all() and (weights >= 0).all() and np.isclose(weights.sum(), 1.0)):
            raise ValueError("the probabilities of the lengths must not be negative and must sum to one")
        weights /= weights.sum()
        weights.flags.writeable = False
        object.__setattr__(self, "probabilities", weights)

    @classmethod
    def empirical(cls, lengths: npt.ArrayLike) -> LengthDistribution:
        """Return the distribution of observed lengths (tokens, at least one each)."""
        observed = np.asarray(lengths, dtype=np.int64)
        if observed.size and observed.max() > LONGEST_OBSERVED:
            raise ValueError(f"{observed.max()} tokens are beyond any completion's ({LONGEST_OBSERVED:,})")
        counts = np.bincount(observed)
        low = int(np.flatnonzero(counts)[0]) if counts.any() else 0
        return cls(low, counts[low:] / max(1, counts.sum()))

    @classmethod
    def parametric(
        cls, family: str, mean: float, sd: float, low: int = 1, high: int | None = None
    ) -> LengthDistribution:
        """Return a family's member with some moments before truncation."""
        high = int(mean + 50 * sd) + 1 if high is None else high
        return cls(low, _masses(family, _untruncated(family, mean, sd), low, high))

    @classmethod
    def with_moments(
        cls, family: str, mean: float, sd: float, low: int = 1, high: int | None = None
    ) -> LengthDistribution:
        """Return a family's member with some moments after truncation."""
        from scipy.optimize import root

        high = int(mean + 50 * sd) + 1 if high is None else high

        def error(parameters: FloatArray) -> FloatArray:
            trial = cls(low, _masses(family, parameters, low, high))
            return np.array([trial.mean - mean, trial.sd - sd]) / sd

        start = _untruncated(family, mean, sd)
        problem = f"no {family} distribution on {low}..{high} tokens has mean {mean:g} and deviation {sd:g}"
        if not (low < mean < high and sd > 0):
            raise ValueError(problem)
        try:
            solution = root(error, start, tol=1e-10)
        except ValueError:  # the search reached parameters without mass on the range
            raise ValueError(problem) from None
        if np.abs(error(solution.x)).max() > 1e-6:
            raise ValueError(problem)
        return cls(low, _masses(family, solution.x, low, high))

    @classmethod
    def most_random(cls, mean: float, low: int, high: int) -> LengthDistribution:
        """Return the distribution of largest entropy with this mean."""
        from scipy.optimize import brentq

        steps = np.linspace(0.0, 1.0, high - low + 1)

        def masses(rate: float) -> FloatArray:
            weights = np.exp(-rate * steps if rate > 0 else -rate * (steps - 1))
            return np.asarray(weights / weights.sum())

        def excess(rate: float) -> float:
            return low + float(steps @ masses(rate)) * (high - low) - mean

        span = 10.0 * (high - low)
        return cls(low, masses(brentq(excess, -span, span, xtol=1e-12)))

    @classmethod
    def mixture(cls, parts: Sequence[tuple[float, LengthDistribution]]) -> LengthDistribution:
        """Mix distributions with weights that sum to one."""
        low = min(part.low for _, part in parts)
        total = np.zeros(max(part.high for _, part in parts) - low + 1)
        for weight, part in parts:
            total[part.low - low : part.high - low + 1] += weight * part.probabilities
        return cls(low, total)

    @classmethod
    def fit(cls, lengths: npt.ArrayLike, family: str = "empirical") -> LengthDistribution:
        """Return a distribution fitted to observed lengths."""
        observed = np.asarray(lengths, dtype=np.int64)
        if family == "empirical" or observed.min() == observed.max():
            return cls.empirical(observed)
        high = int(observed.max()) if family == "censored_normal" else None
        return cls.with_moments(family, float(observed.mean()), float(observed.std()), high=high)

    @property
    def high(self) -> int:
        """Longest length, tokens."""
        return self.low + len(self.probabilities) - 1

    @property
    def values(self) -> IntArray:
        """Lengths of the probabilities, tokens, shape (lengths,)."""
        return np.arange(self.low, self.high + 1, dtype=np.int64)

    @property
    def mean(self) -> float:
        """Mean length, tokens."""
        return float(self.values @ self.probabilities)

    @property
    def sd(self) -> float:
        """Standard deviation, tokens."""
        return float(np.sqrt((self.values - self.mean) ** 2 @ self.probabilities))

    def sample(self, rng: np.random.Generator, count: int) -> IntArray:
        """Return ``count`` independent lengths, tokens."""
        return self._inverse(rng.random(count))

    def quantile(self, q: float) -> int:
        """Return the ``q`` quantile in tokens."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is between 0 and 1, not {q}")
        return int(self._inverse(np.array([q]))[0])

    def _inverse(self, shares: FloatArray) -> IntArray:
        cumulative = np.cumsum(self.probabilities)
        # A share above a step only by rounding belongs to that step.
        at = np.searchsorted(cumulative, shares - 1e-12)
        longest = np.flatnonzero(self.probabilities)[-1]
        return np.asarray(self.low + np.minimum(at, longest), dtype=np.int64)


def _untruncated(family: str, mean: float, sd: float) -> FloatArray:
    variation = (sd / mean) ** 2
    if family in ("normal", "censored_normal"):
        return np.array([mean / sd, np.log(sd)])
    if family == "log_normal":
        return np.array([np.log(mean) - np.log1p(variation) / 2, np.log(np.sqrt(np.log1p(variation)))])
    if family == "gamma":
        return np.array([-np.log(variation), np.log(sd * sd / mean)])
    raise ValueError(f"{family!r} is not a family of length distributions; known are {', '.join(FAMILIES)}")


def _masses(family: str, parameters: FloatArray, low: int, high: int) -> FloatArray:
    from scipy.special import gammainc, ndtr

    first, second = float(parameters[0]), float(np.exp(np.clip(parameters[1], -50, 50)))
    edges = np.arange(low, high + 2) - 0.5
    if family == "log_normal":
        cumulative = ndtr((np.log(edges) - first) / second)
    elif family == "gamma":
        cumulative = gammainc(np.exp(min(first, 50.0)), edges / second)
    else:
        cumulative = ndtr(edges / second - first)
    masses = np.diff(cumulative)
    if family == "censored_normal":
        masses[0] += cumulative[0]
        masses[-1] += 1 - cumulative[-1]
    total = masses.sum()
    if not total > 0:
        raise ValueError(f"the {family} distribution has no mass on {low}..{high} tokens")
    return np.asarray(masses / total)
