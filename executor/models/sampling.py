"""Choice of the next token, reproducible for each request."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685

LEAST_TEMPERATURE = 1e-30
"""Smallest divisor of logits; smaller overflows."""

STEP = 2.0**-52
"""Distance between the uniform numbers that tokens are drawn by."""

STREAM = "\x1f"
"""Separates the name of a random stream from what makes a request's name unique."""

_BLOCK = 256
"""Tokens summed in the weights' type; larger is less exact."""

_LIKELIEST = 256
"""Tokens that a CPU searches for ``top_p`` before it sorts all."""


class TokenRule(Protocol):
    """Rule by which a batch chooses tokens."""

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""

    @property
    def on_host(self) -> bool:
        """True if the host takes part, which prevents capture."""

    def in_place(self, rows: int, decode_steps: int) -> AbstractContextManager[None]:
        """Keep entries in fixed device memory within a context."""

    @property
    def ends(self) -> frozenset[int]:
        """Further tokens that may end a completion."""

    @property
    def watches_text(self) -> bool:
        """True if every token is checked for the end of a text."""

    def ended(self, request_id: str, tokens: Sequence[int]) -> bool | None:
        """Return whether the last token ends a completion, if known."""

    def stream(self, request_id: str) -> int:
        """Return the random stream of a request."""

    def choose(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Choose one token per row on the device."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Rule that is equal for every request of a batch.

    The draw of a token depends only on the seed, the request and the token's index, never on other requests
    in the batch. So a resumed, re-planned or preempted run gives the same completions.

    temperature: Divisor of the logits; 0 means greedy.
    top_k: Keep only the ``top_k`` likeliest tokens; 0 keeps all.
    top_p: Keep the smallest set of likeliest tokens with a probability of ``top_p``; 1 keeps all.
    min_p: Keep tokens at least ``min_p`` times as likely as the likeliest; 0 keeps all.
    seed: Seed shared by all requests.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def on_host(self) -> bool:
        """False: tokens are chosen on the device."""
        return False

    def in_place(self, rows: int, decode_steps: int) -> AbstractContextManager[None]:
        """Do nothing: no entries are kept."""
        return nullcontext()

    @property
    def ends(self) -> frozenset[int]:
        """Empty: the engine's end tokens decide."""
        return frozenset()

    @property
    def watches_text(self) -> bool:
        """False: no text ends a completion."""
        return False

    def ended(self, request_id: str, tokens: Sequence[int]) -> None:
        """Return None: the engine decides."""

    def stream(self, request_id: str) -> int:
        """Return the random stream of a request."""
        name = request_id if self.greedy else request_id.rpartition(STREAM)[2]
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def choose(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Choose one token per row on the device.

        Shapes: logits (rows, vocabulary), streams (rows,), indices (rows,), returned (rows,).
        """
        if self.greedy:
            return likeliest(logits)
        return drawn(self._weights(logits), streams, indices)

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        scaled = computable(logits) / max(self.temperature, LEAST_TEMPERATURE)
        if 0 < self.top_k < scaled.shape[-1]:
            smallest = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
        weights = scaled.softmax(dim=-1)
        if self.top_p < 1.0:
            weights = likely_mass(weights, self.top_p)
        return likely_enough(weights, self.min_p) if self.min_p > 0.0 else weights


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the first likeliest token of each row, shape (rows,).

    On a CPU it is sought in the block with the largest logit: torch's search of whole rows is slow.
    """
    import torch

    vocabulary = logits.shape[-1]
    if logits.device.type != "cpu" or vocabulary < 2 * _BLOCK:
        return logits.argmax(dim=-1)
    whole = logits[:, : vocabulary // _BLOCK * _BLOCK]
    blocks = whole.reshape(len(logits), -1, _BLOCK).amax(dim=-1)
    # The last block overlaps the one before, where the blocks are not whole.
    largest = torch.cat([blocks, logits[:, -_BLOCK:].amax(dim=-1, keepdim=True)], dim=-1)
    begin = (largest.argmax(dim=-1, keepdim=True) * _BLOCK).clamp(max=vocabulary - _BLOCK)
    within = logits.gather(1, begin + torch.arange(_BLOCK))
    return within.argmax(dim=-1) + begin[:, 0]


def computable(logits: torch.Tensor) -> torch.Tensor:
    """Return logits as float32, or float64 if they are."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def likely_mass(weights: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
    """Keep the likeliest tokens up to a total probability.

    Others become zero, shape (rows, vocabulary). ``share`` is one number, or shape (rows, 1); infinite keeps
    all.
    """
    import torch

    limited = None
    if isinstance(share, torch.Tensor):
        share, limited = share.to(torch.float64), share.isfinite()
    few = min(_LIKELIEST, weights.shape[-1])
    ordered, order = (
        weights.topk(few, dim=-1) if weights.device.type == "cpu" else weights.sort(descending=True)
    )
    if len(ordered[0]) < weights.shape[-1]:
        lacking = ordered.sum(dim=-1, keepdim=True, dtype=torch.float64) < share
        if bool((lacking if limited is None else lacking & limited).any()):
            ordered, order = weights.sort(descending=True)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    mass = torch.zeros_like(weights).scatter(-1, order, ordered.masked_fill(before >= share, 0.0))
    return mass if limited is None else mass.where(limited, weights)


def likely_enough(weights: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
    """Set weights below a share of their row's largest to zero.

    ``share`` is a number or shape (rows, 1).
    """
    return weights.masked_fill(weights < share * weights.amax(dim=-1, keepdim=True), 0.0)


def drawn(weights: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Draw a token per row by its weight, shape (rows,).

    Inverse transform in vocabulary order: the first token with a cumulated weight above a uniform number
    times the total. Blocks of 256 tokens are summed in the type of the weights; block sums, and the weights
    within the drawn block, are cumulated in float64. A token of weight zero is never drawn.
    """
    import torch

    lacking = -weights.shape[-1] % _BLOCK
    if lacking:
        weights = torch.nn.functional.pad(weights, (0, lacking))
    blocks = weights.view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=-1)
    before = sums.cumsum(dim=-1, dtype=torch.float64)
    # Below the total, however the product is rounded: the block drawn has a weight.
    threshold = _uniform_whole(streams, indices)[:, None] * before[:, -1:] * STEP
    block = torch.searchsorted(before, threshold, right=True)
    within = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0]
    cumulated = within.cumsum(dim=-1, dtype=torch.float64)
    rest = threshold - (before - sums).gather(-1, block)
    # Block sums in the weights' type may exceed those in float64 by their rounding.
    rest = rest.minimum(cumulated[:, -1:] * (1 - STEP))
    at = torch.searchsorted(cumulated, rest, right=True)
    tokens: torch.Tensor = at.add(block, alpha=_BLOCK)[:, 0]
    return tokens


def _uniform_whole(streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Hash (stream, index) below 2**52 by SplitMix64, shape (rows,)."""
    import torch

    state = torch.add(streams, indices, alpha=_GOLDEN) + _GOLDEN
    state = (state ^ _logical_right(state, 30)) * _MIX_1
    state = (state ^ _logical_right(state, 27)) * _MIX_2
    state = state ^ _logical_right(state, 31)
    return _logical_right(state, 12)


def _logical_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)
