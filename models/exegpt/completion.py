"""When queries complete in the decode iterations between two encodings (ExeGPT, section 6)."""

from __future__ import annotations

import numpy as np

from ...data.costs.cost import FloatArray
from ...data.lengths.distributions import LengthDistribution
from ...data.lengths.pair import LengthPair

_NEVER = 1e-300


def completion(outputs: LengthDistribution, rounds: int, *, as_printed: bool = False) -> FloatArray:
    r"""
    Return :math:`P_D(U)`: the chance that a query of the decode batch completes in each iteration of a phase.

    The paper prints :math:`P_D(U) = \sum_S P_D(U \mid S) P_D(S)`, with the lengths of queries that *arrive*.
    Those in the batch are longer: one of :math:`m = \lceil S / N_D \rceil` phases is met :math:`m` times as
    often. So the lengths are weighted by :math:`m`, which makes :math:`\sum_U P_D(U) = 1 / E[m]` instead of
    :math:`E[1 / m]`, and agrees with the paper's own :math:`B_D = B_E S_D` where :math:`N_D = 1`.

    Parameters
    ----------
    outputs
        :math:`P_D(S)`.
    rounds
        :math:`N_D`.
    as_printed
        Weigh the lengths as the paper prints.

    Returns
    -------
    FloatArray
        Shape (rounds,).
    """
    phases = -(-outputs.values // rounds)
    weights = outputs.probabilities / phases
    if not as_printed:
        weights = outputs.probabilities / float(outputs.probabilities @ phases)
    chances = np.bincount((outputs.values - 1) % rounds, weights=weights, minlength=rounds)
    return chances.astype(np.float64)


def decode_batch(
    outputs: LengthDistribution, encode_batch: float, rounds: int, *, as_printed: bool = False
) -> float:
    r"""Return :math:`B_D = B_E / \sum_U P_D(U)`, the queries a phase starts with."""
    return encode_batch / float(completion(outputs, rounds, as_printed=as_printed).sum())


def encode_batch(
    outputs: LengthDistribution, decode_batch: float, rounds: int, *, as_printed: bool = False
) -> float:
    r"""Return :math:`B_E = B_D \sum_U P_D(U)`, the queries that complete in a phase."""
    return decode_batch * float(completion(outputs, rounds, as_printed=as_printed).sum())


class Occupancy:
    r"""
    What one query encoded a phase keeps in the decode batch, on average over the iterations of a phase.

    In iteration :math:`u` decode the queries whose :math:`d`-th token is due, :math:`d = u, u + N_D, ...`:
    of those encoded so many phases ago a share :math:`P(S \ge d)` is left.

    Parameters
    ----------
    lengths
        Inputs and outputs.
    rounds
        Iterations of a phase.

    Attributes
    ----------
    queries
        Decoding queries in each iteration, shape (rounds,).
    tokens
        Tokens they hold, the new one included, shape (rounds,).
    context
        Tokens each of them holds, shape (rounds,).
    variance, spread
        Of those tokens, and of those queries, shape (rounds,).
    idle
        Logarithm of the chance that no query is left to decode, shape (rounds,).
    """

    def __init__(self, lengths: LengthPair, rounds: int) -> None:
        survival, inputs = lengths.survival(), lengths.surviving_input()
        held = inputs + np.arange(1, len(survival) + 1)
        mean = survival * held
        square = survival * (held**2 + lengths.inputs.sd**2)
        self.queries = _folded(survival, rounds)
        self.tokens = _folded(mean, rounds)
        self.context = self.tokens / np.where(self.queries > 0, self.queries, 1.0)
        self.variance = _folded(np.maximum(0.0, square - mean**2), rounds)
        self.idle = _folded(np.log(np.maximum(_NEVER, 1 - survival)), rounds)
        self.spread = _folded(np.maximum(0.0, survival * (1 - survival)), rounds)


def _folded(per_token: FloatArray, rounds: int) -> FloatArray:
    phases = -(-len(per_token) // rounds)
    padded = np.zeros(phases * rounds)
    padded[: len(per_token)] = per_token
    return np.asarray(padded.reshape(phases, rounds).sum(axis=0))
