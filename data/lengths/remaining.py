"""Remaining tokens of a completion, given its prediction and the tokens it has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray, IntArray
from .prediction_error import PredictionError

KINDS = 32
"""Most kinds of predictions: equal ones, or neighbours. More is finer and slower."""

LEAST_DRAWN = 4000
"""Lengths drawn from the error, at least; they are shared out among the kinds."""


@dataclass(frozen=True, slots=True, eq=False)
class RemainingLengths:
    """
    Mean tokens still to come of a completion that has outlived its first ones.

    A completion predicted short that is not over yet is seldom about to end: what remains of it grows with
    what it has, until the longest completions are near.

    kind: Kind of each request, shape (requests,).
    mean: Tokens to come after each number of tokens, by kind, shape (kinds, longest + 1).
    """

    kind: IntArray
    mean: FloatArray

    @classmethod
    def of(
        cls, error: PredictionError, predicted: IntArray, *, longest: IntArray | None = None, seed: int = 0
    ) -> RemainingLengths:
        """Return what remains of completions with these predictions and such an error."""
        samples = max(1, -(-LEAST_DRAWN // len(predicted)))
        drawn = error.sample(predicted, np.random.default_rng(seed), samples, longest)
        values = np.unique(predicted)
        edges = (
            np.unique(np.quantile(predicted, np.linspace(0, 1, KINDS + 1)[1:-1]))
            if len(values) > KINDS
            else values[1:]
        )
        kind = np.searchsorted(edges, predicted, side="right")
        mean = np.empty((len(edges) + 1, int(drawn.max()) + 1))
        for k, row in enumerate(mean):
            row[:] = _mean_remaining(drawn[:, kind == k].ravel(), len(row))
        return cls(kind, mean)

    def select(self, requests: IntArray) -> RemainingLengths:
        """Return what remains of some of the requests, in that order."""
        return RemainingLengths(self.kind[requests], self.mean)

    def tokens(self, requests: IntArray, decoded: IntArray) -> FloatArray:
        """Return the mean number of tokens that completions still get, shape (requests,)."""
        at = np.minimum(decoded, self.mean.shape[1] - 1)
        found: FloatArray = self.mean[self.kind[requests], at]
        return found


def _mean_remaining(lengths: IntArray, size: int) -> FloatArray:
    """Return the mean of ``length - age`` over the lengths above each age, at least one, shape (size,)."""
    count = np.bincount(lengths, minlength=size).astype(np.float64)
    longer = count[::-1].cumsum()[::-1] - count
    total = (count * np.arange(size))[::-1].cumsum()[::-1] - count * np.arange(size)
    mean: FloatArray = np.maximum(1.0, total / np.maximum(longer, 1.0) - np.arange(size))
    return mean
