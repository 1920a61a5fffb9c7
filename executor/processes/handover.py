"""KV cache in host memory between two processes.

Importing this module needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kv.store import Suspended


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a token's KV cache.

    layers: Heads, head size of keys and head size of values of each layer.
    """

    layers: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, request: Suspended) -> Layout:
        """Return the layout of a request's KV cache."""
        layers = zip(request.keys, request.values, strict=True)
        return cls(tuple((keys.shape[0], keys.shape[2], values.shape[2]) for keys, values in layers))


class Blocks:
    """Memory shared with another process, in reusable blocks.

    A fresh block takes longer to share than to fill.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._free: list[int] = []

    def pack(self, requests: Sequence[Suspended]) -> tuple[int, torch.Tensor | None]:
        """Copy the KV cache of requests into a free block."""
        pairs = (zip(each.keys, each.values, strict=True) for each in requests)
        parts = [part.reshape(-1) for each in pairs for pair in each for part in pair]
        size = sum(map(len, parts))
        number = next((free for free in self._free if len(self._blocks[free]) >= size), None)
        known = number is not None
        if number is None:
            number = self._make(size, parts[0].dtype)
        else:
            self._free.remove(number)
        block = self._blocks[number]
        torch.cat(parts, out=block[:size])
        return number, None if known else block

    def free(self, numbers: Sequence[int]) -> None:
        """Mark blocks as free."""
        self._free += numbers

    def _make(self, size: int, dtype: torch.dtype) -> int:
        # Sizes are powers of two: blocks reused in turn soon fit every batch.
        block = torch.empty(1 << (size - 1).bit_length(), dtype=dtype)
        block.share_memory_()  # type: ignore[no-untyped-call]
        if not self._free:
            self._blocks.append(block)
            return len(self._blocks) - 1
        number = self._free.pop()
        self._blocks[number] = block
        return number


def unpack(
    layout: Layout, tokens: Sequence[int], states: Sequence[Sequence[int]], block: torch.Tensor
) -> list[Suspended]:
    """Return requests as views of their block."""
    shapes = [
        (heads, count, size)
        for count in tokens
        for heads, keys, values in layout.layers
        for size in (keys, values)
    ]
    sizes = [heads * count * size for heads, count, size in shapes]
    parts = torch.split(block[: sum(sizes)], sizes)
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    per_request = 2 * len(layout.layers)
    return [
        Suspended(
            tuple(views[first : first + per_request : 2]),
            tuple(views[first + 1 : first + per_request : 2]),
            state,
        )
        for first, state in zip(range(0, len(views), per_request), torch.tensor(states), strict=True)
    ]
