"""KV cache of all requests in one flat buffer.

Importing this module needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..kv.store import StoreLayer
from .regions import Span


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a forward call.

    begin: Index of its first token in the call's input.
    held: Tokens of KV cache after the call.
    spans: Places of the tokens, in sequence order.
    """

    begin: int
    tokens: int
    held: int
    spans: tuple[Span, ...]


class FlatLayer(StoreLayer["FlatStore"]):  # type: ignore[no-untyped-call]
    """One layer's KV cache, shape (key-value heads, places, head size)."""

    def _allocated(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(states.shape[1], self.place.places, states.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store both states and return them, shape (1, heads, tokens, head size)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.place.attending = self
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(1, self.place.targets, states[0])
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0, as callers pass positions."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of places."""
        return self.place.places


class FlatStore(Cache):
    """KV cache of all layers.

    places: Capacity in tokens, allocated once.
    sliding_windows: Attention window of each layer in tokens; None for full attention.
    """

    def __init__(self, places: int, sliding_windows: Sequence[int | None]) -> None:
        self.places = places
        self.targets = torch.empty(0, dtype=torch.int64)
        """Places for the next call's tokens, shape (tokens,)."""
        self.rows: Sequence[Row] = ()
        """Rows of the next call."""
        self._flat_layers = [FlatLayer(self, window) for window in sliding_windows]
        self.attending = self._flat_layers[0]
        """Layer stored last: its attention follows at once."""
        super().__init__(layers=list(self._flat_layers))

    def begin(self, rows: Sequence[Row], device: torch.device) -> None:
        """Set the rows of the next call."""
        self.rows = rows
        places = [place for row in rows for place in _last(row.spans, row.tokens)]
        self.targets = torch.tensor(places, dtype=torch.int64, device=device)

    def read(self, spans: Sequence[Span]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy each layer's KV cache, two arrays (heads, tokens, head size)."""
        pairs = (layer.buffers for layer in self._flat_layers)
        return [(joined(keys, spans).clone(), joined(values, spans).clone()) for keys, values in pairs]

    def write(self, spans: Sequence[Span], states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write each layer's KV cache, as :meth:`read` returns it."""
        for layer, pair in zip(self._flat_layers, states, strict=True):
            for buffer, tokens in zip(layer.buffers, pair, strict=True):
                at = 0
                for begin, end in spans:
                    buffer[:, begin:end] = tokens[:, at : at + end - begin]
                    at += end - begin


def joined(buffer: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """Return the spans of a buffer; one span is a view.

    The buffer has shape (heads, places, head size).
    """
    parts = [buffer[:, begin:end] for begin, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _last(spans: Sequence[Span], tokens: int) -> list[int]:
    places: list[int] = []
    for begin, end in reversed(spans):
        taken = min(end - begin, tokens - len(places))
        places = [*range(end - taken, end), *places]
        if len(places) == tokens:
            break
    return places
