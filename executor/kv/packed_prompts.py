"""Prompts packed into forward calls.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from ..attention.decoder import Decoder
from ..attention.functions import AttentionCall, attend_from_latest
from ..attention.host_kernels import Rows
from ..attention.kernels import agree
from .paged_store import PagedSlots, Segment

_LOG = logging.getLogger(__name__)
_LONG = 256
"""Tokens from which a prompt attends by the fastest function."""

_FEW = 4
"""Tokens up to which those after a stored beginning attend as decode steps do."""


def pack(
    lengths: Sequence[int], most_tokens: int, begins: Sequence[int] | None = None
) -> Iterator[list[tuple[int, int, int]]]:
    """Pack prompts into forward calls, splitting those that do not fit.

    begins: First token to compute of each prompt.
    """
    pieces: list[tuple[int, int, int]] = []
    room = most_tokens
    for index, (length, begin) in enumerate(zip(lengths, begins or [0] * len(lengths), strict=True)):
        offset = begin
        while offset < length:
            if room == 0 or (pieces and offset == begin and room < length - begin <= most_tokens):
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

    def __init__(self, decoder: Decoder, store: PagedSlots) -> None:
        self._decoder, self._store = decoder, store
        self._begins: torch.Tensor | None = None
        self._few: tuple[torch.Tensor, Rows] | None = None
        self._long: Sequence[Segment] = ()
        self._flash: dict[int | None, bool] = {}

    def begin(self) -> None:
        """Prepare for a call on the store's segments."""
        store = self._store
        self._begins = _flash_begins(store.segments, self._decoder)
        few = [part for part in store.segments if part.offset and part.tokens <= _FEW]
        if store.kernels is None:
            few = []
        self._few = self._as_rows(few) if few else None
        self._long = [part for part in store.segments if part not in few]

    def _as_rows(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, Rows]:
        """Return the places of tokens in the call, and each token as a row."""
        places = [
            (part.begin + at, part.row, part.offset + at) for part in segments for at in range(part.tokens)
        ]
        at, rows, positions = torch.tensor(places, device=self._decoder.device).T.contiguous()
        shared = self._store.shared_columns(rows.tolist(), (positions + 1).tolist())
        return at, Rows(positions, self._store.table[rows], 1, shared)

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
        store = self._store
        if self._few is not None:
            at, rows = self._few
            output[0, at] = store.kernels.attend(  # type: ignore[union-attr]  # there are few only with kernels
                query[0, :, at].transpose(0, 1),
                *store.attending.buffers,
                rows,
                window=window,
                scale=call.scaling,
            )
        for part in self._long:
            tokens, held = slice(part.begin, part.begin + part.tokens), part.offset + part.tokens
            new_states = [call.key[:, :, tokens], call.value[:, :, tokens]]
            if part.offset:
                pages = store.pages_of(part.row, held)
                new_states = [
                    buffer.index_select(0, pages).transpose(0, 1)[None].to(query.dtype)
                    for buffer in store.attending.buffers
                ]
            attend = self._decoder.attend_long if held >= _LONG else attend_from_latest
            output[:, tokens] = attend(query[:, :, tokens], *new_states, window=window, scale=call.scaling)
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
