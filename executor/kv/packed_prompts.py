"""Prompts packed into forward calls.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from ..attention.decoder import Decoder
from ..attention.functions import AttentionCall, attend_from_latest
from ..attention.kernels import agree
from .slot_store import KeyValueSlots, Segment

_LOG = logging.getLogger(__name__)


def pack(lengths: Sequence[int], most_tokens: int) -> Iterator[list[tuple[int, int, int]]]:
    """Pack prompts into forward calls, splitting those that do not fit."""
    pieces: list[tuple[int, int, int]] = []
    room = most_tokens
    for index, length in enumerate(lengths):
        offset = 0
        while offset < length:
            if room == 0 or (pieces and offset == 0 and room < length <= most_tokens):
                yield pieces
                pieces, room = [], most_tokens
            tokens = min(length - offset, room)
            pieces.append((index, offset, tokens))
            offset, room = offset + tokens, room - tokens
    yield pieces


class PackedAttention:
    """Attention of each packed prompt to itself alone.

    It includes the tokens that earlier calls stored.
    """

    def __init__(self, decoder: Decoder, store: KeyValueSlots) -> None:
        self._decoder, self._store = decoder, store
        self._begins: torch.Tensor | None = None
        self._flash: dict[int | None, bool] = {}

    def begin(self) -> None:
        """Prepare for a call on the store's segments."""
        self._begins = _flash_begins(self._store.segments, self._decoder)

    def attend(self, call: AttentionCall, window: int | None) -> torch.Tensor:
        """Return a layer's output, shape (1, tokens, heads, head size)."""
        if self._begins is None or not self._flash.get(window, True):
            return self._attend_each(call, window)
        if window not in self._flash:
            # The first prompts are computed both ways: devices and releases differ in what they can do.
            expected = self._attend_each(call, window)
            try:
                self._flash[window] = agree(self._flash_attend(call, self._begins, window), expected)
            except RuntimeError as error:
                _LOG.info("prompts are not packed into one call of flash attention: %s", error)
                self._flash[window] = False
            return expected
        return self._flash_attend(call, self._begins, window)

    def _attend_each(self, call: AttentionCall, window: int | None) -> torch.Tensor:
        query = call.query
        output = query.new_empty(1, query.shape[2], query.shape[1], call.value.shape[-1])
        store, buffers = self._store, self._store.attending.buffers
        for part in self._store.segments:
            tokens, held = slice(part.begin, part.begin + part.tokens), part.offset + part.tokens
            own = (call.key[:, :, tokens], call.value[:, :, tokens])
            if part.offset:
                own = (
                    store.part(buffers[0], part.row, part.row + 1, 0, held).to(query.dtype),
                    store.part(buffers[1], part.row, part.row + 1, 0, held).to(query.dtype),
                )
            output[:, tokens] = attend_from_latest(
                query[:, :, tokens],
                *own,
                window=window,
                scale=call.scaling,
            )
        return output

    def _flash_attend(self, call: AttentionCall, begins: torch.Tensor, window: int | None) -> torch.Tensor:
        longest = max(part.tokens for part in self._store.segments)
        output: torch.Tensor = torch.ops.aten._flash_attention_forward(
            *(states[0].transpose(0, 1) for states in (call.query, call.key, call.value)),
            begins,
            begins,
            longest,
            longest,
            0.0,
            True,
            False,
            scale=call.scaling,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0,
        )[0]
        return output[None]


def _flash_begins(segments: Sequence[Segment], decoder: Decoder) -> torch.Tensor | None:
    """Return the prompts' beginnings if flash attention takes them all."""
    if decoder.device.type != "cuda" or decoder.dtype.itemsize != 2 or any(part.offset for part in segments):
        return None
    begins = [part.begin for part in segments] + [segments[-1].begin + segments[-1].tokens]
    return torch.tensor(begins, dtype=torch.int32, device=decoder.device)
