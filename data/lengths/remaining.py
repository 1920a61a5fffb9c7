"""Remaining tokens of a running completion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray, IntArray
from .prediction_error import PredictionError

KINDS = 32
"""Most kinds of predictions; more is finer and slower."""

LEAST_DRAWN = 4000
"""Least lengths drawn from the error, over all kinds."""


@dataclass(frozen=True, slots=True, eq=False)
class RemainingLengths:
    """Mean remaining tokens of a completion by its tokens so far.

    A completion predicted short that is not over yet is seldom about to end. Its expected remainder grows
    with its tokens, until the longest completions are near.

    kind: Kind of each request, shape (requests,).
    mean: Tokens to come after each number of tokens, by kind, shape (kinds, longest + 1).
    """

    kind: IntArray
    mean: FloatArray

    @classmethod
    def of(
        cls, error: PredictionError, predicted: IntArray, *, longest: IntArray | None = None, seed: int = 0
    ) -> RemainingLengths:
        """Sample remaining lengths for some predictions and their error."""
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
        """Return the remaining lengths of some requests."""
        return RemainingLengths(self.kind[requests], self.mean)

    def tokens(self, requests: IntArray, decoded: IntArray) -> FloatArray:
        """Return the mean remaining tokens, shape (requests,)."""
        at = np.minimum(decoded, self.mean.shape[1] - 1)
        remaining: FloatArray = self.mean[self.kind[requests], at]
        return remaining


def _mean_remaining(lengths: IntArray, size: int) -> FloatArray:
    count = np.bincount(lengths, minlength=size).astype(np.float64)
    longer = count[::-1].cumsum()[::-1] - count
    total = (count * np.arange(size))[::-1].cumsum()[::-1] - count * np.arange(size)
    mean: FloatArray = np.maximum(1.0, total / np.maximum(longer, 1.0) - np.arange(size))
    return mean
