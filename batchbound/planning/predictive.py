"""Lengths that a job may turn out to have, drawn by what earlier completions showed and by what has ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ..data.costs.cost import FloatArray, IntArray
from ..heuristics.unknown_lengths.lengths import SHARES

STEP_SCALE = 0.25
"""Scale of the half-Cauchy prior of how far steps lie apart, in standard deviations of a length's score."""

STEP_DEVIATIONS = np.linspace(0.0, 1.0, 41)
"""Standard deviations of the steps' effects that are weighed against each other."""

SHAPES = np.linspace(-0.5, 2.0, 26)
"""Shapes of the generalised Pareto tail that are weighed against each other, alike before any is seen."""

SCALES = np.geomspace(0.03, 30.0, 41)
"""Its scales beside the mean excess, weighed alike in their logarithm."""

FEWEST_EXCESSES = 5
"""Lengths beyond the threshold from which a tail is fitted."""

MEANS = np.linspace(-5.0, 5.0, 101)
"""Scores that the mean of a group may have, where some of it is seen."""

LEAST_VARIANCE = 0.01
"""Of a group's mean, which keeps it on the grid."""

FAR = 8.0
"""Scores beyond which no length lies."""

LEAST = 1e-300


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """
    What has come out of a job so far.

    Parameters
    ----------
    tokens
        Of each completion so far, 0 of one that has not begun, shape (requests,).
    ended
        Whether that is all of it, shape (requests,).
    """

    tokens: IntArray
    ended: npt.NDArray[np.bool_]

    @classmethod
    def nothing(cls, requests: int) -> Self:
        """Return that nothing has begun."""
        return cls(np.zeros(requests, dtype=np.int64), np.zeros(requests, dtype=np.bool_))


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """
    The posterior of a generalised Pareto distribution of what lies beyond a threshold.

    With n lengths the threshold has the square root of n above it that were not cut; those cut at the cap
    count as longer than it. The prior is uniform in the shape and in the logarithm of the scale.

    Parameters
    ----------
    threshold
        Tokens.
    shape, scale
        Points of the grid, shape (points,).
    weight
        Posterior probability of each, shape (points,).
    """

    threshold: float
    shape: FloatArray
    scale: FloatArray
    weight: FloatArray

    @classmethod
    def fitted(cls, lengths: IntArray, cap: float) -> Self | None:
        """Return the tail of lengths of which those at the cap were cut; None where it cannot be told."""
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
    """Return the logarithm of an excess's survival, or density but for the scale, (points, excesses)."""
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
    """
    One distribution that lengths may have: between those seen by drawn weights, and beyond by a drawn tail.

    Parameters
    ----------
    atoms, below
        Zero and the lengths seen, ascending, and the probability of one no longer, shape (1 + seen,).
    shape, scale
        Of the generalised Pareto distribution of what is longer than all seen; a scale of 0 if nothing is.
    cap
        No length is larger.
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
        """
        Return a distribution drawn from its posterior.

        The smoothed Bayesian bootstrap (Rubin 1981; Banks 1988): what lies between two neighbouring lengths,
        and beyond the largest, has a standard exponential weight, the same one for all lengths of a group. So
        the next length is the largest of all with a probability of one in one more than were seen.

        Parameters
        ----------
        lengths, group
            Of completions, and their groups counted from zero.
        cap
            Tokens after which a completion is cut, infinite for none.
        tail
            Of these lengths, if one was fitted.
        rng
            Draws.
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

    def scores(self, tokens: FloatArray) -> FloatArray:
        """Return the normal score of the probability that a length is no longer, same shape."""
        from scipy.special import ndtri

        # Of a length that several have, all but the first are a jump; numpy takes the last of equals.
        found = np.interp(tokens, self.atoms, self.below)
        beyond = tokens > self.atoms[-1]
        if beyond.any():
            shape, scale = np.array([self.shape]), np.array([max(self.scale, LEAST)])
            longer = np.exp(_log_survival(tokens[beyond] - self.atoms[-1], shape, scale)[0])
            found[beyond] = 1.0 - (1.0 - self.below[-1]) * longer
        found[tokens >= self.cap] = 1.0
        scores: FloatArray = np.clip(ndtri(found), -FAR, FAR)
        return scores

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
    """
    Completions that say how lengths are distributed: of earlier steps together, or of one other model.

    Parameters
    ----------
    lengths, group
        Of its completions, and their groups counted from zero.
    tail
        Of the lengths.
    predicted
        Correlation of a group's mean score with what the other sources predict of it; 0 where they do not.
    """

    lengths: IntArray
    group: IntArray
    tail: Tail | None
    predicted: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """
    A set of lengths that a job may turn out to have.

    Parameters
    ----------
    lengths
        Tokens, shape (requests,).
    tendency
        Mean score of each group's lengths, of which they were drawn, shape (groups,).
    """

    lengths: IntArray
    tendency: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Predictive:
    r"""
    Sets of lengths that a job may turn out to have.

    The normal score of a length under the earlier completions' distribution is the sum of effects of its
    step, of its group and its own, a Gaussian copula of three levels (the model of
    :class:`~batchbound.heuristics.unknown_lengths.lengths.LengthModel` with a step's effect before it):
    :math:`z_{sij} = d_s + g_{si} + e_{sij}`. Nothing of it is taken for known: a draw has a distribution of
    lengths drawn by the Bayesian bootstrap of groups with a generalised Pareto tail
    (:class:`Margin`, :class:`Tail`), a share of the variance of groups drawn from its posterior, and a
    deviation of steps drawn from its posterior with a half-Cauchy prior (Gelman 2006), so that few earlier
    steps make a wide interval. What has ended or been reached in the job conditions its steps' and groups'
    effects, and lengths of what still runs are longer than it has reached.

    Parameters
    ----------
    sources
        Each draw takes one of them.
    group
        The group of each of the job's requests, counted from zero, shape (requests,).
    steps
        Steps, or models, that the sources' completions are of.
    score
        Normal score of what is predicted of each group, 0 where nothing is, shape (groups,).
    deviation
        Posterior probability of each of :data:`STEP_DEVIATIONS`.
    share
        Posterior probability of each intraclass correlation in
        :data:`~batchbound.heuristics.unknown_lengths.lengths.SHARES`.
    cap
        Tokens beyond which no length is expected.
    apart
        Whether each source is of one step or model alone, so that taking one draws an effect of theirs.
    """

    sources: tuple[Source, ...]
    group: IntArray
    steps: int
    score: FloatArray
    deviation: FloatArray
    share: FloatArray
    cap: float
    apart: bool = False

    def draw(self, step: IntArray, seen: Seen, rng: np.random.Generator) -> Drawn:
        """
        Return one set of lengths.

        Parameters
        ----------
        step
            The step of each request, counted from zero, shape (requests,).
        seen
            What has come out so far.
        rng
            Draws.
        """
        source = self.sources[int(rng.integers(len(self.sources)))]
        margin = Margin.drawn(source.lengths, source.group, self.cap, source.tail, rng)
        deviation = float(rng.choice(STEP_DEVIATIONS, p=self.deviation))
        total = float(rng.choice(SHARES, p=self.share))
        explained = source.predicted**2
        # In all an effect varies as the posterior of a new one after so many: the deviation's square, and
        # that of their mean. Of a source that is a step of its own, as much is in its having been taken.
        around = deviation * math.sqrt((2.0 if self.apart else self.steps + 1.0) / self.steps)
        between = max(LEAST_VARIANCE, total - explained - (0.0 if self.apart else deviation**2))
        own = math.sqrt(max(LEAST_VARIANCE, 1.0 - max(total, explained)))
        centre = source.predicted * self.score
        low, high = self._interval(margin, seen)
        means = np.empty(len(self.score))
        for number in np.unique(step).tolist():
            mine = np.flatnonzero(step == number)
            groups, local = np.unique(self.group[mine], return_inverse=True)
            informed = seen.ended[mine] | (seen.tokens[mine] > 0)
            log = _log_likelihood(
                local[informed], low[mine][informed], high[mine][informed], len(groups), own
            )
            effect = _drawn_effect(log, centre[groups], around, between, rng)
            means[groups] = _drawn_means(log, centre[groups] + effect, between, rng)
        scores = _truncated(means[self.group], own, low, rng)
        found = np.maximum(margin.lengths(scores), np.minimum(seen.tokens + 1, self.cap).astype(np.int64))
        return Drawn(np.where(seen.ended, seen.tokens, found), means)

    def _interval(self, margin: Margin, seen: Seen) -> tuple[FloatArray, FloatArray]:
        """Return between which scores each length is, by what has been seen of it."""
        tokens = seen.tokens.astype(np.float64)
        low = np.where(tokens > 0, margin.scores(np.where(seen.ended, tokens - 1.0, tokens)), -np.inf)
        return low, np.where(seen.ended, margin.scores(tokens), np.inf)


def _log_likelihood(
    group: IntArray, low: FloatArray, high: FloatArray, groups: int, own: float
) -> FloatArray:
    """Return the logarithm of the probability of what each group showed, by its mean, (groups, means)."""
    from scipy.special import ndtr

    found = np.zeros((groups, MEANS.size))
    if len(group):
        within = ndtr((high[:, None] - MEANS) / own) - ndtr((low[:, None] - MEANS) / own)
        np.add.at(found, group, np.log(np.maximum(within, LEAST)))
    return found


def _drawn_effect(
    log: FloatArray, centre: FloatArray, around: float, between: float, rng: np.random.Generator
) -> float:
    """Return a step's effect, drawn from its posterior by what its groups showed."""
    if around == 0.0:
        return 0.0
    some = log.any(axis=1)
    if not some.any():
        return around * float(rng.standard_normal())
    grid = around * np.linspace(-4.0, 4.0, 81)
    peak = log[some].max(axis=1, keepdims=True)
    likelihood = np.exp(log[some] - peak)
    total = -((grid / around) ** 2) / 2
    for at, effect in enumerate(grid.tolist()):
        prior = _normal(MEANS - (centre[some] + effect)[:, None], between)
        total[at] += np.log(np.maximum((likelihood * prior).sum(axis=1), LEAST)).sum()
    weight = np.exp(total - total.max())
    return float(rng.choice(grid, p=weight / weight.sum()))


def _drawn_means(log: FloatArray, centre: FloatArray, between: float, rng: np.random.Generator) -> FloatArray:
    """Return the mean score of each group, drawn from its posterior, shape (groups,)."""
    found = centre + math.sqrt(between) * rng.standard_normal(len(centre))
    some = np.flatnonzero(log.any(axis=1))
    if some.size:
        seen = log[some]
        weight = np.exp(seen - seen.max(axis=1, keepdims=True)) * _normal(MEANS - centre[some, None], between)
        below = np.cumsum(weight / np.maximum(weight.sum(axis=1, keepdims=True), LEAST), axis=1)
        chosen = (below < rng.random((len(some), 1))).sum(axis=1)
        found[some] = MEANS[np.minimum(chosen, MEANS.size - 1)]
    return found


def _normal(distance: FloatArray, variance: float) -> FloatArray:
    """Return the normal density but for its factor."""
    found: FloatArray = np.exp(-(distance**2) / (2 * variance))
    return found


def _truncated(mean: FloatArray, own: float, low: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return a normal score of each request above a limit, shape (requests,)."""
    from scipy.special import ndtr, ndtri

    longer = ndtr(-(low - mean) / own)
    found: FloatArray = mean - own * ndtri(np.maximum(longer * rng.random(len(mean)), LEAST))
    return found


def ranked_scores(values: npt.ArrayLike, among: npt.ArrayLike) -> FloatArray:
    """Return the normal score of each value's rank among numbers; equals have the middle one, same shape."""
    from scipy.special import ndtri

    ordered = np.sort(np.asarray(among))
    rank = np.searchsorted(ordered, values, side="left") + np.searchsorted(ordered, values, side="right")
    half = 0.5 / len(ordered)
    scores: FloatArray = ndtri(np.clip(rank * half, half, 1.0 - half))
    return scores


def deviation_of_steps(scores: Sequence[FloatArray], groups: Sequence[IntArray]) -> FloatArray:
    """
    Return the posterior probability of each of :data:`STEP_DEVIATIONS`.

    Parameters
    ----------
    scores
        Normal scores of each step's lengths, under the distribution of all.
    groups
        Their groups, counted from zero.

    Notes
    -----
    The marginal posterior of a normal hierarchical model with a flat prior of the mean (Gelman et al.,
    Bayesian Data Analysis, eq. 5.21), and a half-Cauchy prior of the deviation. How well a step's mean is
    known goes by its groups, whose requests are not independent.
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
    """Return the sampling variance of a mean score, by groups."""
    size = np.bincount(group)
    if len(size) < 2:
        return 1.0
    total = np.bincount(group, weights=scores - scores.mean())
    count = len(size)
    return max(1e-6, float((total**2).sum()) * count / (count - 1) / len(scores) ** 2)
