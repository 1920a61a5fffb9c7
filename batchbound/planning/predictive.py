"""Lengths of a job, sampled from the posterior given earlier completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ..data.arrays import FloatArray, IntArray
from ..heuristics.unknown_lengths.lengths import SHARES

STEP_SCALE = 0.25
"""Scale of the half-Cauchy prior of steps' deviations, in length scores."""

STEP_DEVIATIONS = np.linspace(0.0, 1.0, 41)
"""Grid of the standard deviation of the steps' effects."""

SHAPES = np.linspace(-0.5, 2.0, 26)
"""Grid of the shape of the generalised Pareto tail."""

SCALES = np.geomspace(0.03, 30.0, 41)
"""Grid of the scale over the mean excess, uniform in the logarithm."""

FEWEST_EXCESSES = 5
"""Fewest lengths above the threshold for fitting a tail."""

LEAST_VARIANCE = 0.01
"""Least variance of the groups' means, and of the requests' own effects."""

LEAST = 1e-300
"""Least probability whose quantile is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """Posterior of a generalised Pareto tail of lengths.

    Of n lengths, the square root of n uncut ones exceed the threshold. Cut lengths count as above the cap.
    The prior is uniform in the shape and in the logarithm of the scale.

    threshold: Least length of the tail, tokens.
    shape, scale: Parameters at the points of the grid, shape (points,).
    weight: Posterior probability of each point, shape (points,).
    """

    threshold: float
    shape: FloatArray
    scale: FloatArray
    weight: FloatArray

    @classmethod
    def fitted(cls, lengths: IntArray, cap: float) -> Self | None:
        """Fit the tail of cut lengths; return None for too few."""
        free = np.sort(lengths[lengths < cap])
        count = math.ceil(math.sqrt(len(lengths)))
        if count < FEWEST_EXCESSES or len(free) <= count:
            return None
        threshold = float(free[-count - 1])
        excess = free[-count:].astype(np.float64) - threshold
        if not excess.any():
            return None
        shape, scale = (axis.ravel() for axis in np.meshgrid(SHAPES, SCALES * excess.mean(), indexing="ij"))
        log = -count * np.log(scale) + _log_survival(excess, shape, scale, density=True).sum(axis=1)
        cut = int((lengths >= cap).sum())
        if cut:
            log += cut * _log_survival(np.array([cap - threshold]), shape, scale)[:, 0]
        weight = np.exp(log - log.max())
        return cls(threshold, shape, scale, weight / weight.sum())


def _log_survival(
    excess: FloatArray, shape: FloatArray, scale: FloatArray, *, density: bool = False
) -> FloatArray:
    """Return log survival or log density, shape (points, excesses).

    The density lacks the scale's term.
    """
    flat = np.abs(shape) < 1e-9
    bend = np.where(flat, 1.0, shape)[:, None]
    ratio = excess / scale[:, None]
    inside = 1.0 + bend * ratio
    power = 1.0 / bend + density
    with np.errstate(divide="ignore", invalid="ignore"):
        bent = np.where(inside > 0, -power * np.log(inside), -np.inf)
    found: FloatArray = np.where(flat[:, None], -ratio, bent)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Margin:
    """Sampled distribution of lengths, with a sampled tail.

    atoms: Zero and the lengths seen, ascending, shape (1 + seen,).
    below: Probability of a length up to each atom, same shape.
    shape, scale: Parameters of the generalised Pareto tail; a scale of 0 means no tail.
    cap: Largest length.
    """

    atoms: FloatArray
    below: FloatArray
    shape: float
    scale: float
    cap: float

    @classmethod
    def drawn(
        cls, lengths: IntArray, group: IntArray, cap: float, tail: Tail | None, rng: np.random.Generator
    ) -> Self:
        """Sample a distribution from its posterior.

        This is the smoothed Bayesian bootstrap (Rubin 1981; Banks 1988). Each gap between neighbouring
        lengths, and the gap beyond the largest, has a standard exponential weight. The lengths of a group
        share one. After n lengths, the next is the largest with probability 1 / (n + 1). An infinite ``cap``
        means none.
        """
        weight = rng.exponential(size=int(group.max()) + 1)[group]
        order = np.argsort(lengths, kind="stable")
        atoms = np.append(0.0, lengths[order])
        below = np.append(0.0, np.cumsum(weight[order])) / (weight.sum() + rng.exponential())
        if tail is None:
            return cls(atoms, below, 0.0, 0.0, cap)
        point = int(rng.choice(len(tail.weight), p=tail.weight))
        shape = float(tail.shape[point])
        scale = float(tail.scale[point]) + shape * (float(atoms[-1]) - tail.threshold)
        return cls(atoms, below, shape, max(scale, 0.0), cap)

    def lengths(self, scores: FloatArray) -> IntArray:
        """Return the length of each score, tokens."""
        from scipy.special import ndtr

        share = ndtr(scores)
        found = np.interp(share, self.below, self.atoms)
        beyond = share > self.below[-1]
        left = np.maximum(ndtr(-scores[beyond]), LEAST) / (1.0 - self.below[-1])
        bent = abs(self.shape) > 1e-9
        far = (left**-self.shape - 1.0) / self.shape if bent else -np.log(left)
        found[beyond] = self.atoms[-1] + self.scale * np.maximum(far, 0.0)
        rounded: IntArray = np.maximum(1, np.rint(np.minimum(found, self.cap))).astype(np.int64)
        return rounded


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Completions that give a distribution of lengths.

    lengths, group: Tokens of the completions, and their groups counted from zero.
    predicted: Correlation of a group's mean score with its prediction by other sources, or 0.
    """

    lengths: IntArray
    group: IntArray
    tail: Tail | None
    predicted: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Predictive:
    """Posterior predictive distribution of a job's lengths.

    This is a Gaussian copula of three levels. The normal score of a length under the earlier distribution is
    a sum of effects of its step, its group and its own: :math:`z_{sij} = d_s + g_{si} + e_{sij}`. The step's
    effect is an addition to :class:`~batchbound.heuristics.unknown_lengths.lengths.LengthModel`. Every
    parameter is sampled from its posterior: the distribution (:class:`Margin`, :class:`Tail`), the groups'
    share of the variance, and the steps' deviation with a half-Cauchy prior (Gelman 2006). Few earlier steps
    therefore make a wide interval.

    sources: Sources of the distribution; each draw takes one at random.
    group: Group of each of the job's requests, shape (requests,).
    steps: Number of steps, or models, in the sources.
    score: Normal score of the prediction of each group, 0 without one, shape (groups,).
    deviation: Posterior probability of each of :data:`STEP_DEVIATIONS`.
    share: Posterior probability of each of :data:`~batchbound.heuristics.unknown_lengths.lengths.SHARES`.
    cap: Largest length, tokens.
    apart: True if each source is a single step or model.
    """

    sources: tuple[Source, ...]
    group: IntArray
    steps: int
    score: FloatArray
    deviation: FloatArray
    share: FloatArray
    cap: float
    apart: bool = False

    def draw(self, rng: np.random.Generator) -> IntArray:
        """Sample one set of lengths (tokens), shape (requests,)."""
        from scipy.special import ndtri

        source = self.sources[int(rng.integers(len(self.sources)))]
        margin = Margin.drawn(source.lengths, source.group, self.cap, source.tail, rng)
        deviation = float(rng.choice(STEP_DEVIATIONS, p=self.deviation))
        total = float(rng.choice(SHARES, p=self.share))
        explained = source.predicted**2
        # The variance of a new step's effect is deviation**2, plus deviation**2 / steps for the unknown mean.
        # If each source is a single step, choosing the source already draws the first part.
        around = deviation * math.sqrt((2.0 if self.apart else self.steps + 1.0) / self.steps)
        between = max(LEAST_VARIANCE, total - explained - (0.0 if self.apart else deviation**2))
        own = math.sqrt(max(LEAST_VARIANCE, 1.0 - max(total, explained)))
        effect = around * float(rng.standard_normal()) if around else 0.0
        means = source.predicted * self.score + effect
        means = means + math.sqrt(between) * rng.standard_normal(len(means))
        mean = means[self.group]
        return margin.lengths(mean - own * ndtri(np.maximum(rng.random(len(mean)), LEAST)))


def ranked_scores(values: npt.ArrayLike, among: npt.ArrayLike) -> FloatArray:
    """Return the normal score of each value's mid-rank in a sample."""
    from scipy.special import ndtri

    ordered = np.sort(np.asarray(among))
    rank = np.searchsorted(ordered, values, side="left") + np.searchsorted(ordered, values, side="right")
    half = 0.5 / len(ordered)
    scores: FloatArray = ndtri(np.clip(rank * half, half, 1.0 - half))
    return scores


def deviation_of_steps(scores: Sequence[FloatArray], groups: Sequence[IntArray]) -> FloatArray:
    """Return the posterior probability of each of :data:`STEP_DEVIATIONS`.

    This is the marginal posterior of a normal hierarchical model (Gelman et al., Bayesian Data Analysis, eq.
    5.21) with a flat prior of the mean and a half-Cauchy prior of the deviation. The error of a step's mean
    comes from its groups, as requests of a group depend on each other. ``scores`` and ``groups`` hold each
    step's normal scores and groups.
    """
    mean = np.array([float(each.mean()) for each in scores])
    error = np.array([_squared_error(each, group) for each, group in zip(scores, groups, strict=True)])
    log = -np.log1p((STEP_DEVIATIONS / STEP_SCALE) ** 2)
    for at, deviation in enumerate(STEP_DEVIATIONS.tolist()):
        weight = 1.0 / (error + deviation**2)
        centre = float(weight @ mean / weight.sum())
        log[at] += (np.log(weight).sum() - np.log(weight.sum()) - float(weight @ (mean - centre) ** 2)) / 2
    found = np.exp(log - log.max())
    posterior: FloatArray = found / found.sum()
    return posterior


def _squared_error(scores: FloatArray, group: IntArray) -> float:
    """Return the sampling variance of a mean score, clustered by group."""
    size = np.bincount(group)
    if len(size) < 2:
        return 1.0
    total = np.bincount(group, weights=scores - scores.mean())
    count = len(size)
    return max(1e-6, float((total**2).sum()) * count / (count - 1) / len(scores) ** 2)
