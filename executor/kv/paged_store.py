"""KV cache in blocks of one pool.

Rows take blocks as they grow, which may lie anywhere (PagedAttention, Kwon et al. 2023). Attention reads a
copy of the columns it needs, a layer and a group of rows at a time.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..attention.host_kernels import Rows
from .slot_store import KeyValueSlots, SlotLayer
from .store import untouched_zeros

BLOCK = 16
"""Tokens of a block with a capacity; smaller wastes less."""

_LARGE_BLOCK = 64
"""Tokens of a block of a growing pool; larger reads faster."""


class PagedLayer(SlotLayer):  # type: ignore[no-untyped-call]
    """One layer's KV cache, shape (tokens of the pool, heads, head size)."""

    place: PagedSlots

    def _allocated(self, states: torch.Tensor) -> torch.Tensor:
        shape = (self.place.blocks + 1) * self.place.block, states.shape[1], states.shape[3]
        return untouched_zeros(shape, self.place.dtype or states.dtype, states.device)

    def _seen(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        return buffer


class PagedSlots(KeyValueSlots):
    """KV cache of all layers in blocks."""

    _layer_class = PagedLayer

    def __init__(
        self,
        slots: int,
        columns: int,
        sliding_windows: Sequence[int | None],
        *,
        capacity: int | None,
        device: torch.device,
    ) -> None:
        super().__init__(slots, columns, sliding_windows)
        self._grows = capacity is None
        self.block = _LARGE_BLOCK if capacity is None else BLOCK
        self.blocks = self._pool() if capacity is None else capacity // self.block + slots
        self._free = list(range(self.blocks - 1, -1, -1))
        self._blocks_of: list[list[int]] = []
        # Rows out of use that fill a captured decode step up write to the last block, which is no one's.
        self._table = torch.full(
            (slots, -(-columns // self.block)), self.blocks, dtype=torch.int64, device=device
        )
        self._places: dict[tuple[int, int, int, int], torch.Tensor] = {}

    @property
    def held(self) -> Rows:
        """Places of the rows, and of their next tokens."""
        return Rows(self._positions, self._table, self.block)

    @property
    def table(self) -> torch.Tensor:
        """Blocks of each row, shape (slots, blocks)."""
        return self._table

    def begin_steps(self, positions: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Set the places of the coming tokens.

        ``positions`` is read again in every decode step.
        """
        super().begin_steps(positions, rows)
        self._places = {}

    def end_steps(self, decode_steps: int = 1) -> None:
        """Count a decode step's tokens as held."""
        self.lengths = [tokens + decode_steps for tokens in self.lengths]
        self._targets, self._places = {}, {}

    def targets(self, heads: int) -> torch.Tensor:
        """Return the places of coming keys and values, flattened."""
        if heads not in self._targets:
            places = (
                self._table[self._rows, self._positions // self.block] * self.block
                + self._positions % self.block
            )
            planes = places[:, None] * heads + torch.arange(heads, device=places.device)
            self._targets[heads] = planes.reshape(-1)
        return self._targets[heads]

    def reserve(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Take as many blocks as rows need."""
        self.make_room(max(tokens))
        lacking = self._lacking(rows, tokens)
        if sum(lacking) > len(self._free):
            raise MemoryError(f"the rows outgrow the {self.blocks * self.block} tokens of the KV capacity")
        taken = []
        for row, count in zip(rows, lacking, strict=True):
            for _ in range(count):
                blocks = self._blocks_of[row]
                taken.append((row, len(blocks), self._free[-1]))
                blocks.append(self._free.pop())
        if taken:
            places = torch.tensor(taken, device=self._table.device)
            self._table[places[:, 0], places[:, 1]] = places[:, 2]

    def reserve_steps(self, decode_steps: int) -> int:
        """Take the blocks for some decode steps of all rows."""
        decode_steps = super().reserve_steps(decode_steps)
        rows = range(self.rows)
        while decode_steps > 1 and sum(self._lacking(rows, self._after(decode_steps))) > len(self._free):
            decode_steps -= 1
        self.reserve(rows, self._after(decode_steps))
        return decode_steps

    def _after(self, decode_steps: int) -> list[int]:
        return [tokens + decode_steps for tokens in self.lengths]

    def _lacking(self, rows: Sequence[int], tokens: Sequence[int]) -> list[int]:
        return [
            max(0, -(-held // self.block) - len(self._blocks_of[row]))
            for row, held in zip(rows, tokens, strict=True)
        ]

    def make_room(self, tokens: int) -> None:
        """Make room for a row of some tokens."""
        if tokens <= self.columns:
            return
        before = self.columns
        self.columns = tokens + max(64, tokens // 4)
        try:
            if self._grows:
                self._grow_pool(self._pool())
        except BaseException:
            self.columns = before
            raise
        wider = self._table.new_full((self.slots, -(-self.columns // self.block)), self.blocks)
        wider[:, : self._table.shape[1]] = self._table
        self._table = wider

    def _pool(self) -> int:
        return self.slots * -(-self.columns // self.block)

    def _grow_pool(self, blocks: int) -> None:
        held = [block for blocks_ in self._blocks_of for block in blocks_]
        used = torch.tensor(held, dtype=torch.int64, device=self._table.device)
        grown = []
        # All allocations before any assignment: running out of memory leaves the store as it was.
        for layer in self._slot_layers:
            if layer.is_initialized:
                wider = []
                for buffer in layer.buffers:
                    shape = (blocks + 1) * self.block, *buffer.shape[1:]
                    wider.append(untouched_zeros(shape, buffer.dtype, buffer.device))
                    moved = buffer.view(self.blocks + 1, -1)[used]
                    wider[-1].view(blocks + 1, -1).index_copy_(0, used, moved)
                grown.append((layer, wider))
        for layer, (keys, values) in grown:
            layer.keys, layer.values = keys, values
        self._table[self._table == self.blocks] = blocks
        self._free = list(range(blocks - 1, self.blocks - 1, -1)) + self._free
        self.blocks = blocks

    def part(self, buffer: torch.Tensor, first: int, last: int, begin: int, end: int) -> torch.Tensor:
        """Copy some columns of some rows, (rows, heads, columns, head size)."""
        key = (first, last, begin, end)
        if key not in self._places:
            columns = torch.arange(begin, end, device=buffer.device)
            places = self._table[first:last, columns // self.block] * self.block + columns % self.block
            self._places[key] = places.reshape(-1)
        rows = buffer.index_select(0, self._places[key])
        return rows.view(last - first, end - begin, *buffer.shape[1:]).transpose(1, 2)

    def append_row(self) -> None:
        """Add an empty row."""
        super().append_row()
        self._blocks_of.append([])

    def drop_row(self) -> None:
        """Remove the last row."""
        super().drop_row()
        self._blocks_of.pop()
        self._table[self.rows].fill_(self.blocks)

    def move_row(self, source: int, target: int) -> None:
        """Give a wiped row the blocks of another."""
        self.lengths[target] = self.lengths[source]
        self._blocks_of[target], self._blocks_of[source] = self._blocks_of[source], []
        self._table[target] = self._table[source]

    def wipe_row(self, row: int) -> None:
        """Zero a row's contents, and free its blocks."""
        blocks, self._blocks_of[row] = self._blocks_of[row], []
        if blocks:
            freed = torch.tensor(blocks, device=self._table.device)
            for layer in self._slot_layers:
                if layer.is_initialized:
                    for buffer in layer.buffers:
                        buffer.view(self.blocks + 1, -1).index_fill_(0, freed, 0)
        self._free += blocks
        self.lengths[row] = 0

    def read_row(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy a row's KV cache, each of shape (heads, tokens, head size)."""
        self._places = {}
        tokens = self.lengths[row]
        copies = []
        for layer in self._slot_layers:
            keys, values = (self.part(buffer, row, row + 1, 0, tokens)[0] for buffer in layer.buffers)
            copies.append((keys, values))
        return copies

    def write_row(self, row: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write every layer's KV cache, (heads, tokens, head size), into a row."""
        tokens = layers[0][0].shape[1]
        self.reserve([row], [tokens])
        columns = torch.arange(tokens, device=self._table.device)
        places = self._table[row, columns // self.block] * self.block + columns % self.block
        for layer, (keys, values) in zip(self._slot_layers, layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            for buffer, states in zip(layer.buffers, (keys, values), strict=True):
                buffer.index_copy_(0, places, states.to(buffer).transpose(0, 1))
        self.lengths[row] = tokens
