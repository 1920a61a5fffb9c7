"""A model of completion lengths that learns from what a job has generated so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.costs.cost import FloatArray, IntArray

ATOMS = 48
"""Lengths told apart, at most: neighbours of the lengths that finished are taken together."""

SHARES = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
"""Intraclass correlations weighed against each other; alike before anything is seen."""

EFFECTS = np.linspace(-3.5, 3.5, 41)
"""Group effects weighed against each other, in standard deviations; normal before anything is seen."""

FAR = 9.0
"""Standard deviations beyond which a normal variable does not lie."""

LEAST = 1e-300
"""What a probability counts as at least, so that its logarithm is finite."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """
    What has been seen of requests that have started: first those that ended, in the order they did.

    Parameters
    ----------
    group
        The group of each, counted from zero, shape (started,).
    tokens
        Decode steps each has had, shape (started,).
    ended
        Whether that was all of it; otherwise its length is larger (censored), shape (started,).
    """

    group: IntArray
    tokens: IntArray
    ended: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class LengthModel:
    r"""
    Lengths whose normal scores are the sum of a group's effect and of the request's own.

    The score of a length is :math:`z = \Phi^{-1}(F(\text{length}))` with the pooled distribution ``F`` by
    Kaplan and Meier (1958), which allows for requests that still run. Then
    :math:`z_{ij} = \sqrt{\rho}\, g_i + \sqrt{1-\rho}\, e_{ij}` with independent standard normal parts, a
    Gaussian copula; :math:`\rho` is the intraclass correlation. Its posterior and that of each effect are
    summed over grids (:data:`SHARES`, :data:`EFFECTS`), so that an order of groups is worth no more than what
    the data say of :math:`\rho`. Lengths that many share, as those cut at a cap, are one atom of ``F``.

    Parameters
    ----------
    lengths
        The atoms' lengths (decode steps, ascending), shape (atoms,).
    mass
        Probability of each atom by share of variance and group effect, shape (shares, effects, atoms).
    share_weight
        Posterior probability of each of :data:`SHARES`, shape (shares,).
    effect_weight
        Posterior probability of each effect, shape (groups, shares, effects).
    """

    lengths: FloatArray
    mass: FloatArray
    share_weight: FloatArray
    effect_weight: FloatArray

    @classmethod
    def learnt(cls, observed: Observed, groups: int) -> LengthModel:
        """
        Return the model after what was observed.

        Parameters
        ----------
        observed
            Requests that have started, of which at least one has ended.
        groups
            How many groups there are, seen or not.

        Raises
        ------
        ValueError
            If nothing has ended: no length is known.
        """
        if not observed.ended.any():
            raise ValueError("no request has ended, so that nothing is known of lengths")
        lengths, tops, survival = _pooled(observed)
        mass = _mass(survival)
        log = _log_likelihood(observed, tops, mass)
        per_group = np.zeros((groups, *mass.shape[:2]))
        np.add.at(per_group, observed.group, log)
        prior = np.exp(-(EFFECTS**2) / 2)
        scores = per_group + np.log(prior / prior.sum())
        peak = scores.max(axis=2, keepdims=True)
        weight = np.exp(scores - peak)
        total = weight.sum(axis=2, keepdims=True)
        evidence = (np.log(total) + peak)[:, :, 0].sum(axis=0)
        share_weight = np.exp(evidence - evidence.max())
        return cls(lengths, mass, share_weight / share_weight.sum(), weight / total)

    @property
    def share(self) -> float:
        """Posterior mean of the intraclass correlation of the lengths' normal scores."""
        return float(self.share_weight @ SHARES)

    def probability_of_share(self, least: float) -> float:
        """Return the posterior probability that the intraclass correlation is at least so large."""
        return float(self.share_weight[least <= SHARES].sum())

    def expected(self, group: IntArray) -> FloatArray:
        """Return the expected length (decode steps) of requests of these groups yet to start, same shape."""
        mean = self.mass @ self.lengths
        weight = self.effect_weight * self.share_weight[:, None]
        found: FloatArray = (weight * mean).sum(axis=(1, 2))[group]
        return found

    def remaining(self, group: IntArray, tokens: IntArray) -> FloatArray:
        """
        Return the expected decode steps left of requests that have not ended, same shape.

        Parameters
        ----------
        group
            The group of each; what is known of it already holds that this request has come so far.
        tokens
            Decode steps each has had. A request that outlived every length seen has at least one left.
        """
        weight = self.effect_weight * self.share_weight[:, None]
        by_atom = np.einsum("gsn,sna->ga", weight, self.mass)[group]
        later = self.lengths > np.asarray(tokens)[:, None]
        by_atom = np.where(later, by_atom, 0.0)
        total = by_atom.sum(axis=1)
        left = by_atom @ self.lengths / np.maximum(total, LEAST) - tokens
        found: FloatArray = np.where(total > LEAST, np.maximum(left, 1.0), 1.0)
        return found


def _pooled(observed: Observed) -> tuple[FloatArray, FloatArray, FloatArray]:
    """
    Return the pooled distribution: mean length of each atom, its longest, and survival from its start on.

    The last atom stands for what is longer than all that ended, as far as some still run: as if they ended
    at the rate of the whole job (the exponential distribution's estimate, tokens over ends).
    """
    ended = np.sort(observed.tokens[observed.ended])
    values, ends = np.unique(ended, return_counts=True)
    at_risk = len(observed.tokens) - np.searchsorted(np.sort(observed.tokens), values, side="left")
    after = np.cumprod(1.0 - ends / at_risk)
    mass = np.concatenate(([1.0], after[:-1])) - after
    bin_of = np.minimum((np.cumsum(ends) - ends) * ATOMS // len(ended), ATOMS - 1)
    last = np.flatnonzero(np.append(np.diff(bin_of) > 0, True))
    first = np.append(0, last[:-1] + 1)
    weight = np.add.reduceat(mass, first)
    lengths = np.add.reduceat(mass * values, first) / weight
    survival = np.append(1.0, after[last])
    tops = values[last].astype(np.float64)
    if survival[-1] > 0:
        beyond = float(observed.tokens.max()) + observed.tokens.sum() / len(ended)
        lengths, tops = np.append(lengths, beyond), np.append(tops, np.inf)
        survival = np.append(survival, 0.0)
    return lengths, tops, survival


def _mass(survival: FloatArray) -> FloatArray:
    """Return the probability of each atom by share and effect, shape (shares, effects, atoms)."""
    from scipy.special import ndtr, ndtri

    edges = np.clip(ndtri(1.0 - survival), -FAR, FAR)
    mean = np.sqrt(SHARES)[:, None, None] * EFFECTS[:, None]
    below: FloatArray = ndtr((edges - mean) / np.sqrt(1.0 - SHARES)[:, None, None])
    below[..., 0], below[..., -1] = 0.0, 1.0
    return np.diff(below, axis=2)


def _log_likelihood(observed: Observed, tops: FloatArray, mass: FloatArray) -> FloatArray:
    """Return the logarithm of each observation's probability, shape (started, shares, effects)."""
    atom = np.searchsorted(tops, observed.tokens, side="left")
    longer = mass[..., ::-1].cumsum(axis=2)[..., ::-1]
    ended = np.log(np.maximum(mass, LEAST))
    running = np.log(np.maximum(longer, LEAST))
    found: FloatArray = np.where(
        observed.ended[:, None, None], *(np.moveaxis(table, 2, 0)[atom] for table in (ended, running))
    )
    return found
