"""Kernels for decode attention over padded slots.

Every kernel takes one token per row and reads the lengths from the device, so that a captured graph stays
right while rows grow. The fastest one is chosen on the device.

This module needs torch when it is imported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

_LOG = logging.getLogger(__name__)
_REPEATS, _CALLS = 3, 20


class Held(NamedTuple):
    """KV cache of rows, and options of attention to it.

    keys, values: Shape (rows, key-value heads, columns, head size), views of contiguous buffers.
    lengths: Columns that each row holds, with its new token's, int64, shape (rows,).
    window: Number of latest columns to attend to; None for all.
    scale: Multiplies the scores; one over the root of the head size if None.
    table: Block numbers of each row in a pool, int64, shape (rows, blocks). The KV cache then has the shape
        (tokens of the pool, key-value heads, head size).
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    window: int | None
    scale: float | None
    table: torch.Tensor | None = None
    block: int = 1

    @property
    def columns(self) -> int:
        """Most tokens that a row may hold."""
        return self.keys.shape[2] if self.table is None else self.table.shape[1] * self.block

    def in_one_piece(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous keys and values; rows in blocks are copied.

        Both have shape (rows, key-value heads, columns, head size).
        """
        if self.table is None:
            return self.keys, self.values
        rows = len(self.lengths)
        pages = self.table[:rows]
        if self.block > 1:
            within = torch.arange(self.block, device=self.table.device)
            pages = pages[:, :, None] * self.block + within
        places = pages.reshape(-1)
        keys, values = (
            states.index_select(0, places).view(rows, self.columns, *states.shape[1:]).transpose(1, 2)
            for states in (self.keys, self.values)
        )
        return keys, values


Call = Callable[[], object]

Kernel = Callable[[torch.Tensor, Held], torch.Tensor]
"""Attention of one token per row, shape (rows, heads, head size)."""


def masked(query: torch.Tensor, held: Held) -> torch.Tensor:
    """Attend by torch's scaled dot products and a mask."""
    keys, values = held.in_one_piece()
    lengths, window, scale = held.lengths, held.window, held.scale
    rows, heads, size = query.shape
    columns = torch.arange(keys.shape[2], device=query.device)[None, :]
    visible = columns < lengths[:, None]
    if window is not None:
        visible &= columns >= lengths[:, None] - window
    # The query heads that share a key head are taken for queries of one sequence: nothing is repeated.
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, keys.shape[1], -1, size),
        keys,
        values,
        attn_mask=visible[:, None, None],
        scale=scale,
    )
    return output.reshape(rows, heads, values.shape[-1])


def flash_decoding(query: torch.Tensor, held: Held) -> torch.Tensor:
    """Attend by the Triton kernel of :mod:`.flash_decoding`."""
    from .flash_decoding import attend

    blocks = None if held.table is None else (held.table, held.block)
    return attend(query, *held[:3], blocks=blocks, window=held.window, scale=held.scale)


KERNELS: Mapping[str, Kernel] = {
    "flash decoding (Triton)": flash_decoding,
    "masked sdpa": masked,
}


def fastest(
    query: torch.Tensor,
    held: Held,
    *,
    windows: set[int | None],
    kernels: Mapping[str, Kernel] = KERNELS,
    capture: Callable[[Call], Call] | None = None,
    seconds_of: Callable[[Call, torch.device], float] | None = None,
) -> str:
    """Return the fastest correct kernel here, by measurement."""
    seconds_of = seconds_of or _seconds_of
    device = query.device
    # A generator of its own: a caller that trains has seeded torch's.
    generator = torch.Generator(device).manual_seed(0)
    query, keys, values = (
        torch.empty_like(states).normal_(generator=generator) for states in (query, held.keys, held.values)
    )
    # Half full on average, from a single column to all.
    lengths = torch.linspace(1, held.columns, len(query), device=device).long()
    table = held.table
    if table is not None:
        blocks, shape = len(keys) // held.block, table[: len(query)].shape
        table = torch.randint(blocks, shape, device=device, generator=generator)
    best, shortest = "masked sdpa", float("inf")
    for name, kernel in kernels.items():

        def call(kernel: Kernel = kernel, window: int | None = None) -> torch.Tensor:
            return kernel(query, Held(keys, values, lengths, window, None, table, held.block))

        try:
            for window in windows:
                if not agree(call(window=window), call(masked, window)):
                    raise ValueError("its output is wrong")

            def calls(call: Call = call) -> None:
                for _ in range(_CALLS):
                    call()

            replay = capture(calls) if capture else calls
            seconds = min(seconds_of(replay, device) for _ in range(_REPEATS)) / _CALLS
        except Exception as error:  # whatever a kernel raises on a device or release it was not made for
            _LOG.info("attention by %s is left out: %s: %s", name, type(error).__name__, error)
            continue
        _LOG.info("attention by %s takes %.1f microseconds", name, 1e6 * seconds)
        if seconds < shortest:
            best, shortest = name, seconds
    return best


def agree(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two results differ only by rounding."""
    off = (output - expected).abs().max()
    return bool(off <= torch.finfo(expected.dtype).eps ** 0.75 * expected.abs().max())


def _seconds_of(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start
