"""Model of completion lengths, updated while a job runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray

ATOMS = 48
"""Most distinct lengths; more are finer and slower."""

SHARES = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
"""Grid of intraclass correlations, with equal prior weights."""

EFFECTS = np.linspace(-3.5, 3.5, 41)
"""Grid of group effects in standard deviations, with a normal prior."""

TRUSTS = np.array([0.0, 0.3, 0.5, 0.7, 0.85, 0.95])
"""Grid of correlations between a group's effect and prediction."""

SHARED_LONGEST = 3
"""Completions with the largest length from which a cap is inferred."""

FAR = 9.0
"""Standard deviations at which the normal distribution is cut."""

LEAST = 1e-300
"""Least probability, so that its logarithm is finite."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Observations of started requests.

    group: Group of each, counted from zero, shape (started,).
    tokens: Decode steps of each, shape (started,).
    ended: True if that is its length; otherwise its length is larger (censored), shape (started,).
    """

    group: IntArray
    tokens: IntArray
    ended: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Known:
    """Knowledge of lengths before a job runs.

    longest: Decode steps at which every completion is cut; None for no limit.
    past: Completions of earlier steps, with groups of their own; None for none.
    score: Prediction of each group, such as the lengths of other models or earlier epochs; NaN for none,
        shape (groups,). Only the order of the scores counts. None for no predictions.
    """

    longest: int | None = None
    past: Observed | None = None
    score: FloatArray | None = None

    @cached_property
    def effects(self) -> FloatArray | None:
        """Prior of each group's effect by trust; None without scores.

        Its shape is (groups + 1, trusts, effects). The last row is that of a group without prediction.
        """
        if self.score is None or np.isnan(self.score).all():
            return None
        score = np.append(normal_scores(self.score), np.nan)
        predicted = ~np.isnan(score)
        mean = np.nan_to_num(score)[:, None, None] * TRUSTS[:, None]
        variance = np.where(predicted[:, None], 1.0 - TRUSTS**2, 1.0)[:, :, None]
        prior: FloatArray = np.exp(-((EFFECTS - mean) ** 2) / (2.0 * variance))
        prior /= prior.sum(axis=2, keepdims=True)
        return prior


NOTHING = Known()


@dataclass(frozen=True, slots=True, eq=False)
class LengthModel:
    r"""Model in which lengths have a group effect and their own.

    The score of a length is :math:`z = \Phi^{-1}(F(\text{length}))` with the pooled distribution ``F`` by
    Kaplan and Meier (1958), which allows for running requests. Then :math:`z_{ij} = \sqrt{\rho}\, g_i +
    \sqrt{1-\rho}\, e_{ij}` with independent standard normal parts, a Gaussian copula; :math:`\rho` is the
    intraclass correlation. With a prediction for the group, :math:`g_i = c\, h_i + \sqrt{1-c^2}\, u_i`, where
    :math:`h_i` is its normal score. The posterior of :math:`\rho`, :math:`c` and each effect is summed over
    grids (:data:`SHARES`, :data:`TRUSTS`, :data:`EFFECTS`), so the data decide how much an order of groups is
    worth. Lengths shared by many requests, such as those cut at a cap, are one atom of ``F``.

    lengths: The atoms' lengths (decode steps, ascending), shape (atoms,).
    mass: Probability of each atom for a new request of each group, shape (groups, atoms).
    share_weight: Posterior probability of each of :data:`SHARES`, shape (shares,).
    predicted_share: Posterior mean of the share of the scores' variance that predictions explain; 0 without
        any.
    capped: Probability that a new request is cut at the cap, over all groups; 0 if none is known.
    """

    lengths: FloatArray
    mass: FloatArray
    share_weight: FloatArray
    predicted_share: float
    capped: float

    @classmethod
    def learnt(
        cls,
        observed: Observed,
        groups: int,
        known: Known = NOTHING,
        wanted: npt.NDArray[np.bool_] | None = None,
    ) -> LengthModel:
        """Update the model by observations.

        observed: Started requests; at least one must have ended, here or in earlier steps.
        groups: Number of groups, seen or not.
        known: Earlier knowledge.
        wanted: True for the groups that will be asked for, shape (groups,); all by default. If lengths are
            predicted, the atoms of other groups are zero.

        Raises ValueError if no request has ended, so that no length is known.
        """
        observations = observed if known.past is None else _joined(observed, known.past, groups)
        if not observations.ended.any():
            raise ValueError("no request has ended, so no length is known")
        cap = _cap(observations, known.longest)
        lengths, tops, survival = _pooled(observations, cap)
        table = _mass(survival)
        every = groups if known.past is None else int(max(observations.group.max() + 1, groups))
        log, of_group = _log_likelihood(observations, tops, table, every)
        wanted = np.ones(groups, dtype=np.bool_) if wanted is None else wanted
        if known.effects is None:
            mass, joint = _posterior(log, of_group[:groups], np.bincount(of_group), table)
            trusts = np.zeros(1)
        else:
            mass, joint = _predicted_posterior(log, of_group, known.effects, table, wanted)
            trusts = TRUSTS
        capped = 0.0 if cap is None else float(mass[:, lengths > cap - 0.5].sum(axis=1).mean())
        return cls(lengths, mass, joint.sum(axis=0), float((trusts**2) @ joint @ SHARES), capped)

    @property
    def share(self) -> float:
        """Posterior mean of the intraclass correlation."""
        return float(self.share_weight @ SHARES)

    def probability_of_share(self, least: float) -> float:
        """Return the probability that the correlation is at least ``least``."""
        return float(self.share_weight[least <= SHARES].sum())

    def expected(self, group: IntArray) -> FloatArray:
        """Return new requests' expected decode steps, same shape."""
        means: FloatArray = (self.mass @ self.lengths)[group]
        return means

    def remaining(self, group: IntArray, tokens: IntArray) -> FloatArray:
        """Return unfinished requests' expected decode steps left, same shape.

        group: Group of each; its posterior already includes that this request has come this far.
        tokens: Decode steps each has had. A request longer than every length seen has at least one left.
        """
        by_atom, total = self._yet_to_come(group, tokens)
        means = by_atom @ self.lengths / np.maximum(total, LEAST) - tokens
        steps: FloatArray = np.where(total > LEAST, np.maximum(means, 1.0), 1.0)
        return steps

    def remaining_at_most(self, group: IntArray, tokens: IntArray, probability: float) -> FloatArray:
        """Return a quantile of the decode steps left, same shape.

        group, tokens: As for :meth:`remaining`.
        """
        by_atom, total = self._yet_to_come(group, tokens)
        below = by_atom.cumsum(axis=1) < probability * total[:, None]
        atom = np.minimum(below.sum(axis=1), len(self.lengths) - 1)
        return np.where(total > LEAST, np.maximum(self.lengths[atom] - tokens, 1.0), 1.0)

    def _yet_to_come(self, group: IntArray, tokens: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the probability of each longer length, and their sum."""
        by_atom = np.where(self.lengths > np.asarray(tokens)[:, None], self.mass[group], 0.0)
        return by_atom, by_atom.sum(axis=1)


def _joined(observed: Observed, past: Observed, groups: int) -> Observed:
    """Join observations of this job and earlier ones.

    Earlier groups come after this job's.
    """
    _, number = np.unique(past.group, return_inverse=True)
    return Observed(
        np.concatenate((observed.group, number + groups)),
        np.concatenate((observed.tokens, past.tokens)),
        np.concatenate((observed.ended, past.ended)),
    )


def _cap(observed: Observed, longest: int | None) -> int | None:
    if longest is not None:
        return longest
    longest_seen = int(observed.tokens.max())
    cut = observed.ended & (observed.tokens == longest_seen)
    return longest_seen if int(cut.sum()) >= SHARED_LONGEST else None


def _pooled(observed: Observed, cap: int | None) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the pooled distribution: atoms' mean and longest, survival.

    If requests longer than all that ended still run, the last atom represents them. They are taken to end at
    the rate of the whole job (the exponential distribution's estimate, tokens over ends), and no later than
    the cap.
    """
    ended = np.sort(observed.tokens[observed.ended])
    if cap is not None:
        # A longer completion of an earlier step is cut in this one.
        ended = np.minimum(ended, cap)
    values, ends = np.unique(ended, return_counts=True)
    at_risk = len(observed.tokens) - np.searchsorted(np.sort(observed.tokens), values, side="left")
    after = np.cumprod(1.0 - ends / at_risk)
    mass = np.concatenate(([1.0], after[:-1])) - after
    bin_of = np.minimum((np.cumsum(ends) - ends) * ATOMS // len(ended), ATOMS - 1)
    if cap is not None:
        bin_of[values == cap] = ATOMS
    last = np.flatnonzero(np.append(np.diff(bin_of) > 0, True))
    first = np.append(0, last[:-1] + 1)
    weight = np.add.reduceat(mass, first)
    lengths = np.add.reduceat(mass * values, first) / weight
    survival = np.append(1.0, after[last])
    tops = values[last].astype(np.float64)
    if survival[-1] > 0:
        beyond = float(observed.tokens.max()) + observed.tokens.sum() / len(ended)
        if cap is not None:
            beyond = max(min(beyond, float(cap)), float(values[-1]) + 1.0)
        lengths, tops = np.append(lengths, beyond), np.append(tops, np.inf)
        survival = np.append(survival, 0.0)
    return lengths, tops, survival


def _mass(survival: FloatArray) -> FloatArray:
    """Return each atom's probability, shape (shares, effects, atoms)."""
    from scipy.special import ndtr, ndtri

    edges = np.clip(ndtri(1.0 - survival), -FAR, FAR)
    mean = np.sqrt(SHARES)[:, None, None] * EFFECTS[:, None]
    below: FloatArray = ndtr((edges - mean) / np.sqrt(1.0 - SHARES)[:, None, None])
    below[..., 0], below[..., -1] = 0.0, 1.0
    return np.diff(below, axis=2)


def _log_likelihood(
    observed: Observed, tops: FloatArray, mass: FloatArray, groups: int
) -> tuple[FloatArray, IntArray]:
    """Return the observations' log-likelihood, and each group's row.

    Their shapes are (rows, shares, effects) and (groups,). Groups with the same observations share a row, and
    those without any the last one, of zeros.
    """
    atoms = mass.shape[2]
    # An ended request lies within an atom; a running one is only known to have reached it.
    atom = np.minimum(np.searchsorted(tops, observed.tokens, side="left"), atoms - 1)
    longer = mass[..., ::-1].cumsum(axis=2)[..., ::-1]
    shown, row = np.unique(observed.group, return_inverse=True)
    cell = (2 * row + ~observed.ended) * atoms + atom
    count = np.bincount(cell, minlength=2 * atoms * len(shown)).reshape(len(shown), 2 * atoms)
    # A dictionary is twenty times as fast as np.unique(axis=0).
    numbers: dict[bytes, int] = {}
    row_of = [numbers.setdefault(counts.tobytes(), len(numbers)) for counts in count]
    distinct = np.frombuffer(b"".join(numbers), dtype=count.dtype).reshape(-1, 2 * atoms)
    probability = np.concatenate((mass, longer), axis=2).reshape(-1, 2 * atoms)
    logs = np.zeros((len(distinct) + 1, SHARES.size * EFFECTS.size))
    logs[:-1] = distinct @ np.log(np.maximum(probability, LEAST)).T
    of_group = np.full(groups, len(distinct), dtype=np.int64)
    of_group[shown] = row_of
    return logs.reshape(-1, SHARES.size, EFFECTS.size), of_group


def _posterior(
    log: FloatArray, of_group: IntArray, count: IntArray, mass: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return probabilities of atoms by group, and of shares.

    There are no predictions; the shapes are (groups, atoms) and (1, shares).

    log: As returned by :func:`_log_likelihood`, with the number of groups that share each row (``count``).
    of_group: Row of each group to return atoms for, shape (groups,).
    mass: Probability of each atom by share and effect.
    """
    peak = log.max(axis=2, keepdims=True)
    likelihood = np.exp(log - peak)
    prior = np.exp(-(EFFECTS**2) / 2)
    prior /= prior.sum()
    total = np.maximum(likelihood @ prior, LEAST)
    count = np.pad(count, (0, len(log) - len(count)))
    joint = _shares((count @ (np.log(total) + peak[:, :, 0]))[None])
    mine = np.unique(of_group)
    weight = likelihood[mine] * prior * (joint[0] / total[mine])[:, :, None]
    by_row = np.zeros((len(log), mass.shape[2]))
    by_row[mine] = weight.reshape(len(mine), -1) @ mass.reshape(-1, mass.shape[2])
    return by_row[of_group], joint


def _predicted_posterior(
    log: FloatArray, of_group: IntArray, effects: FloatArray, mass: FloatArray, wanted: npt.NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """Return probabilities of atoms by group, and of trusts and shares.

    Their shapes are (wanted groups, atoms) and (trusts, shares).

    log, of_group: As returned by :func:`_log_likelihood`.
    effects: Prior of each group's effect (:attr:`Known.effects`).
    mass: Probability of each atom by share and effect.
    wanted: True for the groups to return atoms for, from the first group on; other rows are zero.
    """
    atoms, nothing, last = mass.shape[2], len(log) - 1, len(effects) - 1
    peak = log.max(axis=2, keepdims=True)
    likelihood = np.exp(log - peak)
    shown = np.argsort(of_group, kind="stable")[: np.count_nonzero(of_group < nothing)]
    prior = effects[np.minimum(shown, last)]
    whole = np.empty((len(shown), effects.shape[1], SHARES.size))
    edges = np.searchsorted(of_group[shown], np.arange(nothing + 1))
    for part, first, end in zip(likelihood, edges[:-1].tolist(), edges[1:].tolist(), strict=False):
        np.matmul(
            prior[first:end].reshape(-1, EFFECTS.size), part.T, out=whole[first:end].reshape(-1, SHARES.size)
        )
    np.maximum(whole, LEAST, out=whole)
    joint = _shares(np.log(whole).sum(axis=0) + np.diff(edges) @ peak[:-1, :, 0])
    posterior = np.zeros((len(wanted), atoms))
    # A group without observations has its prior: sum over the shares first.
    fresh = np.flatnonzero(wanted & (of_group[: len(wanted)] == nothing))
    by_trust = (joint @ mass.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(-1, atoms)
    posterior[fresh] = effects.reshape(len(effects), -1)[np.minimum(fresh, last)] @ by_trust
    mine = np.flatnonzero(shown < len(wanted))
    mine = mine[wanted[shown[mine]]]
    weight = likelihood[of_group[shown[mine]]] * ((joint / whole[mine]).transpose(0, 2, 1) @ prior[mine])
    posterior[shown[mine]] = weight.reshape(len(mine), mass[..., 0].size) @ mass.reshape(-1, atoms)
    return posterior, joint


def _shares(evidence: FloatArray) -> FloatArray:
    joint = np.exp(evidence - evidence.max())
    shares: FloatArray = joint / joint.sum()
    return shares


def normal_scores(values: FloatArray) -> FloatArray:
    """Return numbers' normal scores by rank.

    Equal numbers have equal scores, and NaN stays NaN.
    """
    from scipy.special import ndtri

    scores = np.full(len(values), np.nan)
    present = ~np.isnan(values)
    _, place, count = np.unique(values[present], return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - count / 2
    scores[present] = ndtri((middle / max(1, count.sum()))[place])
    return scores
