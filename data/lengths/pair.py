"""Joint distribution of input and output lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray
from ..workload import Workload
from .distributions import LengthDistribution


@dataclass(frozen=True, slots=True, eq=False)
class LengthPair:
    """Distributions of input and output lengths, and their dependence.

    inputs, outputs: ExeGPT's :math:`P_E(S)` and :math:`P_D(S)`, tokens.
    input_given_output: Mean input tokens by output length, shape (output lengths,); None if independent.
    correlation: Pearson's correlation of the observed pairs; 0 if assumed independent.
    """

    inputs: LengthDistribution
    outputs: LengthDistribution
    input_given_output: FloatArray | None = None
    correlation: float = 0.0

    @classmethod
    def observed(cls, workload: Workload, *, independent: bool = False) -> LengthPair:
        """Return a workload's pair of distributions."""
        lengths, answers = workload.input_tokens, workload.output_tokens
        inputs, outputs = LengthDistribution.empirical(lengths), LengthDistribution.empirical(answers)
        if independent or lengths.min() == lengths.max() or answers.min() == answers.max():
            return cls(inputs, outputs)
        at = answers - outputs.low
        count = np.bincount(at, minlength=len(outputs.probabilities))
        total = np.bincount(at, weights=lengths, minlength=len(count))
        means = np.where(count > 0, total / np.maximum(count, 1), inputs.mean)
        return cls(inputs, outputs, means, float(np.corrcoef(lengths, answers)[0, 1]))

    def survival(self) -> FloatArray:
        """Return the share of requests that reach each token, shape (longest,)."""
        probabilities = np.concatenate((np.zeros(self.outputs.low - 1), self.outputs.probabilities))
        return np.cumsum(probabilities[::-1])[::-1]

    def surviving_input(self) -> FloatArray:
        """Return the mean input of requests that reach each token."""
        longest = self.outputs.high
        if self.input_given_output is None:
            return np.full(longest, self.inputs.mean)
        weights = np.zeros(longest)
        weights[self.outputs.low - 1 :] = self.outputs.probabilities * self.input_given_output
        survival = self.survival()
        return np.cumsum(weights[::-1])[::-1] / np.where(survival > 0, survival, 1.0)
