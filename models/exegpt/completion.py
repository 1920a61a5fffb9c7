"""Completions within the decode iterations between two encodings (ExeGPT, section 6)."""

from __future__ import annotations

import numpy as np

from ...data.arrays import FloatArray
from ...data.lengths.pair import LengthPair

_NEVER = 1e-300


class Occupancy:
    r"""Mean share of the decode batch of one query per phase.

    In iteration :math:`u` each running query decodes its :math:`d`-th token, :math:`d = u, u + N_D, ...`. A
    share :math:`P(S \ge d)` of the queries that were encoded in the same phase is left. In the first
    iteration they are :math:`B_D / B_E`, the mean number of phases of a query.

    The paper's :math:`B_D = B_E / \sum_U P_D(U)` differs, as its :math:`P_D(U) = \sum_S P_D(U \mid S) P_D(S)`
    takes the lengths of *arriving* queries. Those in the batch are longer: a query of :math:`m = \lceil S /
    N_D \rceil` phases is met :math:`m` times as often. Weighted by :math:`m`, the paper's formula agrees with
    its own :math:`B_D = B_E S_D` at :math:`N_D = 1`, and with this one.

    lengths: Inputs and outputs.
    decode_steps: Iterations of a phase.
    queries: Decoding queries in each iteration, shape (decode_steps,).
    tokens: Tokens they hold, the new one included, shape (decode_steps,).
    context: Mean tokens per query, shape (decode_steps,).
    variance, spread: Variances of those tokens and of those queries, shape (decode_steps,).
    idle: Logarithm of the chance that no query is left to decode, shape (decode_steps,).
    """

    def __init__(self, lengths: LengthPair, decode_steps: int) -> None:
        survival, inputs = lengths.survival(), lengths.surviving_input()
        context = inputs + np.arange(1, len(survival) + 1)
        mean = survival * context
        square = survival * (context**2 + lengths.inputs.sd**2)
        self.queries = _folded(survival, decode_steps)
        self.tokens = _folded(mean, decode_steps)
        self.context = self.tokens / np.where(self.queries > 0, self.queries, 1.0)
        self.variance = _folded(np.maximum(0.0, square - mean**2), decode_steps)
        self.idle = _folded(np.log(np.maximum(_NEVER, 1 - survival)), decode_steps)
        self.spread = _folded(np.maximum(0.0, survival * (1 - survival)), decode_steps)


def _folded(per_token: FloatArray, decode_steps: int) -> FloatArray:
    phases = -(-len(per_token) // decode_steps)
    padded = np.zeros(phases * decode_steps)
    padded[: len(per_token)] = per_token
    return np.asarray(padded.reshape(phases, decode_steps).sum(axis=0))
