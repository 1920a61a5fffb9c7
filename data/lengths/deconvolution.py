"""Estimate of a distribution from draws with normal noise."""

from __future__ import annotations

import numpy as np

from ..arrays import FloatArray, IntArray

POINTS = 200
"""Fewest grid points over the numbers' range."""

MOST_POINTS = 1200
ITERATIONS = 1000
"""EM steps for the distribution."""

ITERATIONS_OF_A_SAMPLE = 60
"""Further EM steps for reweighted numbers."""

CEILINGS = 12

ITERATIONS_OF_A_CEILING = 200

UNDECIDED = (0.1, 1.2)
"""Tolerated losses of a ceiling's log-likelihood; Akaike charges 1 for a parameter."""

REJECTED = 1.95
"""Critical Kolmogorov-Smirnov distance times the count's root, at 0.001."""


class Deconvolution:
    r"""Nonparametric distribution of ``x`` for numbers :math:`y = x + \sigma z`.

    Here z is standard normal. The maximum-likelihood distribution on a grid (Kiefer and Wolfowitz 1956; Laird
    1978) is found by EM; Bayes' rule then gives each x from its y (empirical Bayes). The data hardly
    determine the largest x: the likelihood is flat above some ceiling and falls steeply below it. The
    estimate takes the lowest ceiling before that fall.

    noisy: Numbers y, shape (count,).
    sd: Standard deviation of the noise.
    ceiling: Largest possible x, used if the data's ceiling is within a deviation below; or None.
    """

    def __init__(self, noisy: FloatArray, sd: float, ceiling: float | None = None) -> None:
        low, high = float(noisy.min()), float(noisy.max())
        top = high if ceiling is None else max(min(high, ceiling), low)
        self._spacing = max(min(sd / 4, (high - low) / POINTS), (high - low) / MOST_POINTS, 1e-6)
        self._grid = top - self._spacing * np.arange(int((top - low) / self._spacing) + 1)
        self._bin = np.rint((noisy - low) / self._spacing).astype(np.int64)
        counts = np.bincount(self._bin)
        self._counts = counts.astype(np.float64)
        centres = low + self._spacing * np.arange(len(counts))
        distance = (centres[:, None] - self._grid[None, :]) / sd
        # Floored, because below a ceiling no x may be near some y.
        self._kernel = np.exp(-0.5 * np.minimum(distance**2, 1000.0))
        self._kernel /= float(sd * np.sqrt(2 * np.pi) / self._spacing)
        self._sd = sd
        self._reach = sd if ceiling is not None and ceiling < high else 0.0
        self._ends, self._losses = self._profile()
        self._prior = self._em(
            self._shares, self._flat(self._ends_at(np.array([sum(UNDECIDED) / 2]))), ITERATIONS
        )

    @property
    def _shares(self) -> FloatArray:
        shares: FloatArray = self._counts[None, :] / self._counts.sum()
        return shares

    def _profile(self) -> tuple[IntArray, FloatArray]:
        """Return candidate ceilings (grid points), and the log-likelihood each loses."""
        middle = np.searchsorted(np.cumsum(self._counts), self._counts.sum() / 2) * self._spacing
        lowest = max(0, min(len(self._grid) - 1, len(self._grid) - 1 - round(middle / self._spacing)))
        ends = np.unique(np.linspace(0, lowest, CEILINGS).astype(np.int64))
        losses = self._lost(ends)
        last = int(np.searchsorted(losses, UNDECIDED[1], side="right")) - 1
        if last + 1 < len(ends):
            finer = np.linspace(ends[last], ends[last + 1], CEILINGS).astype(np.int64)
            ends = np.unique(np.concatenate((ends, finer)))
            losses = self._lost(ends)
        return ends, losses

    def _lost(self, ends: IntArray) -> FloatArray:
        priors = self._em(self._shares, self._flat(ends), ITERATIONS_OF_A_CEILING)
        likelihood = np.log(priors @ self._kernel.T) @ self._counts
        # A higher ceiling never has a lower likelihood, but EM may not have converged.
        best = np.maximum.accumulate(likelihood[::-1])[::-1]
        lost: FloatArray = best[0] - best
        return lost

    def _ends_at(self, losses: FloatArray) -> IntArray:
        """Return the lowest ceiling within each tolerated loss."""
        lowest = self._ends[np.searchsorted(self._losses, UNDECIDED[1], side="right") - 1]
        ends = self._ends[np.searchsorted(self._losses, losses, side="right") - 1]
        # A single outlier may need a high ceiling, but does not determine it.
        ends = np.maximum(ends, lowest - round(self._sd / 2 / self._spacing))
        return np.where(ends * self._spacing <= self._reach, 0, ends)

    def _flat(self, ends: IntArray) -> FloatArray:
        """Return the uniform distribution below each ceiling."""
        below = (np.arange(len(self._grid))[None, :] >= ends[:, None]).astype(np.float64)
        flat: FloatArray = below / below.sum(axis=1, keepdims=True)
        return flat

    def _em(self, weights: FloatArray, start: FloatArray, iterations: int) -> FloatArray:
        """Return the distributions for weighted numbers, shape (weightings, points)."""
        prior = start
        for _ in range(iterations):
            prior = prior * ((weights / (prior @ self._kernel.T)) @ self._kernel)
            prior /= prior.sum(axis=1, keepdims=True)
        return prior

    @property
    def fits(self) -> bool:
        """True if the numbers are plausible with this much noise."""
        cumulative = np.cumsum(self._counts) / self._counts.sum()
        expected = np.cumsum(self._prior[0] @ self._kernel.T)
        return bool(np.abs(cumulative - expected).max() * np.sqrt(self._counts.sum()) <= REJECTED)

    def means(self) -> FloatArray:
        """Return the mean of ``exp(x)`` for each of the numbers, shape (count,)."""
        posterior = self._posterior(self._prior[0])
        means: FloatArray = (posterior @ np.exp(self._grid))[self._bin]
        return means

    def sample(self, rng: np.random.Generator, samples: int) -> FloatArray:
        """Sample ``exp(x)`` for each of the numbers, shape (samples, count).

        The distribution is fitted again to reweighted numbers for every sample (Bayesian bootstrap). Draws
        lie on the grid: many x may be equal, such as completions cut at a limit, and scattered draws would
        lengthen a schedule.
        """
        weights = rng.gamma(np.maximum(self._counts, 1e-9), size=(samples, len(self._counts)))
        weights /= weights.sum(axis=1, keepdims=True)
        ends = self._flat(self._ends_at(rng.uniform(*UNDECIDED, samples)))
        start = ends * (self._prior + 0.01 / len(self._grid))
        priors = self._em(weights, start / start.sum(axis=1, keepdims=True), ITERATIONS_OF_A_SAMPLE)
        drawn = np.empty((samples, len(self._bin)))
        rows = np.arange(len(self._counts))[:, None]
        for row, prior in zip(drawn, priors, strict=True):
            # Each bin's cumulative distribution is shifted by the bin's number, so one search serves all.
            cumulative = (np.cumsum(self._posterior(prior), axis=1) + rows).ravel()
            bins = np.searchsorted(cumulative, self._bin + rng.random(len(self._bin)))
            point = np.clip(bins - self._bin * len(self._grid), 0, len(self._grid) - 1)
            row[:] = self._grid[point]
        return np.exp(drawn)

    def _posterior(self, prior: FloatArray) -> FloatArray:
        joint = self._kernel * prior
        posterior: FloatArray = joint / joint.sum(axis=1, keepdims=True)
        return posterior
