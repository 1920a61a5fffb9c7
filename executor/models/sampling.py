"""How the next token is chosen: greedily, or drawn reproducibly for each request on its own."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


class TokenRule(Protocol):
    """What a batch needs to choose tokens; its parts are those of :class:`Sampler`."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""

    def stream(self, request_id: str) -> int:
        """Name the random stream of one request."""

    def choose(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Choose one token per row, without leaving the device."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """
    The rule that turns logits into tokens; the same for every request of a batch.

    The draw of a token depends only on the seed, the request and the index of the token in its answer, never
    on which other requests share the batch: a run that is resumed, re-planned or preempted gives the same
    answers.

    Parameters
    ----------
    temperature
        Divides the logits; 0 means greedy.
    top_k
        Keep only the ``top_k`` likeliest tokens; 0 keeps all.
    top_p
        Keep the smallest set of likeliest tokens whose probability reaches ``top_p``; 1 keeps all.
    seed
        Seed shared by all requests.

    Raises
    ------
    ValueError
        If a parameter is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    def stream(self, request_id: str) -> int:
        """
        Name the random stream of one request.

        Parameters
        ----------
        request_id
            The request's id.

        Returns
        -------
        int
            A signed 64-bit number that depends on the seed and the id alone.
        """
        digest = hashlib.blake2b(f"{self.seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def choose(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """
        Choose one token per row, without leaving the device.

        Parameters
        ----------
        logits
            Shape (rows, vocabulary).
        streams
            Each row's :meth:`stream`, int64, shape (rows,).
        indices
            How many tokens each row's request has emitted before this one, int64, shape (rows,).

        Returns
        -------
        torch.Tensor
            Token ids, int64, shape (rows,).
        """
        if self.greedy:
            return logits.argmax(dim=-1)
        return drawn(self._weights(logits), streams, indices)

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        scaled = logits.to(torch.float64) / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        weights = scaled.softmax(dim=-1)
        return likely_mass(weights, self.top_p) if self.top_p < 1.0 else weights


@dataclass(frozen=True, slots=True, eq=False)
class RecordingSampler(Sampler):
    """
    A sampler that keeps the log-probability of every token it chooses.

    The probabilities are the model's own, before temperature, top-k and top-p: those a policy gradient
    compares. Each is kept under its request and index: a token chosen again after a preemption counts once.

    Parameters
    ----------
    kept
        Streams, indices and log-probabilities chosen and not read yet, each of shape (3, rows).
    """

    kept: list[torch.Tensor] = field(default_factory=list)
    _read: dict[int, dict[int, float]] = field(default_factory=dict)

    def choose(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Choose as :meth:`Sampler.choose` does, and keep what was chosen."""
        import torch

        # Not super(): slots make the decorated class another one than this method was compiled in.
        chosen = Sampler.choose(self, logits, streams, indices)
        taken = logits.gather(-1, chosen[:, None])[:, 0].double() - logits.double().logsumexp(dim=-1)
        # A stream has 64 bits, which float64 does not hold: its bits go along as they are.
        self.kept.append(torch.stack([streams, indices, taken.view(torch.int64)]))
        return chosen

    def log_probabilities(self, request_id: str, tokens: int) -> tuple[float, ...]:
        """
        Return the log-probability of each token of a finished answer, and forget them.

        Parameters
        ----------
        request_id
            The request's id.
        tokens
            Tokens of its answer.

        Raises
        ------
        KeyError
            If fewer tokens were chosen for it.
        """
        import torch

        if self.kept:
            streams, indices, bits = torch.cat(self.kept, dim=1).cpu()
            self.kept.clear()
            for stream, index, value in zip(
                streams.tolist(), indices.tolist(), bits.view(torch.float64).tolist(), strict=True
            ):
                self._read.setdefault(stream, {})[index] = value
        of_request = self._read.pop(self.stream(request_id))
        return tuple(of_request[index] for index in range(tokens))


def likely_mass(weights: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
    """
    Return the weights with all but the likeliest tokens' set to zero.

    Parameters
    ----------
    weights
        Probabilities, shape (rows, vocabulary).
    share
        The probability that the tokens kept reach: one for all rows, or of shape (rows, 1).
    """
    import torch

    ordered, order = weights.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    left_out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= share)
    return weights.masked_fill(left_out, 0.0)


def drawn(weights: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """
    Return a token per row, drawn by its weight, shape (rows,).

    Inverse transform in vocabulary order needs a single uniform per row; the draw is the first token whose
    cumulated weight exceeds it, so a token of weight zero is never drawn.

    Parameters
    ----------
    weights
        Of each token, not negative, shape (rows, vocabulary).
    streams, indices
        As :meth:`Sampler.choose` takes them.
    """
    cumulated = weights.cumsum(dim=-1)
    threshold = _uniform(streams, indices) * cumulated[:, -1]
    return (cumulated <= threshold[:, None]).sum(dim=-1).clamp_(max=weights.shape[-1] - 1)


def _uniform(streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Hash (stream, index) to a float64 in [0, 1), shape (rows,): SplitMix64 (Steele et al., 2014)."""
    import torch

    state = streams + (indices + 1) * _GOLDEN
    state = (state ^ _logical_right(state, 30)) * _MIX_1
    state = (state ^ _logical_right(state, 27)) * _MIX_2
    state = state ^ _logical_right(state, 31)
    return _logical_right(state, 11).to(torch.float64) * 2.0**-53


def _logical_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)
