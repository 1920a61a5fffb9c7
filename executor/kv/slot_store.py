"""KV cache in fixed slots; each row begins at column 0.

Only rows are ever moved, and only held columns have to be read.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..attention.host_kernels import HostKernels, Rows
from .store import KeyValueStore, StoreLayer, zeros


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens in a forward call, and their place.

    offset: Column of its first token: tokens of the same prompt that earlier calls stored.
    begin: Index of the first token in the input of the call.
    """

    row: int
    offset: int
    begin: int
    tokens: int


class SlotLayer(StoreLayer["KeyValueSlots"]):  # type: ignore[no-untyped-call]
    """One layer's KV cache, shape (slots, heads, columns, head size).

    Parameters are those of :class:`~.store.StoreLayer`.
    """

    def _allocated(self, states: torch.Tensor) -> torch.Tensor:
        return zeros(states, self.place.slots, self.place.columns, self.place.dtype)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values; return those to attend to.

        While the store has segments these are the prompts' own, else views of all columns of the rows in use.
        Shapes: (rows, heads, tokens, head size).
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        store = self.place
        store.attending = self
        keys, values = self.buffers
        rows, heads, _, _ = key_states.shape
        if store.kernels is not None and not store.segments:
            for buffer, states in ((keys, key_states), (values, value_states)):
                store.kernels.keep(states, buffer, store.held)
            return self._seen(keys, rows), self._seen(values, rows)
        for buffer, states in ((keys, key_states), (values, value_states)):
            size = states.shape[-1]
            flat = states.transpose(1, 2).reshape(-1, size)
            buffer.view(-1, size).index_copy_(0, store.targets(heads), flat.to(buffer.dtype))
        if store.segments:
            return key_states, value_states
        return self._seen(keys, rows), self._seen(values, rows)

    def _seen(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the view of a buffer for a decode step."""
        return buffer[:rows]

    def get_seq_length(self) -> int:
        """Return the columns held before the coming tokens."""
        return 0 if self.place.segments else self.place.width - 1


class KeyValueSlots(KeyValueStore):
    """KV cache of all layers."""

    _layer_class: ClassVar[type[SlotLayer]] = SlotLayer

    def __init__(self, slots: int, columns: int, sliding_windows: Sequence[int | None]) -> None:
        self.slots = slots
        self.columns = columns
        self.block = 1
        """Tokens that lie together, where rows lie in blocks."""
        self.lengths: list[int] = []
        """Tokens that each row in use holds."""
        self.kernels: HostKernels | None = None
        """Functions that write the KV cache of decode steps; torch's without them."""
        self.dtype: torch.dtype | None = None
        """Number format of the KV cache; None for that of the first keys."""
        self.segments: Sequence[Segment] = ()
        """Token ranges of the prompts that a prefill packs into one sequence."""
        self._rows = torch.empty(0, dtype=torch.int64)
        self._targets: dict[int, torch.Tensor] = {}
        self._positions = torch.empty(0, dtype=torch.int64)
        self._views: dict[int, list[torch.Tensor]] = {}
        self._views_of = 0, 0
        self._slot_layers = [self._layer_class(self, window) for window in sliding_windows]
        self.attending = self._slot_layers[0]
        """The layer that attends next: its KV cache was requested last."""
        super().__init__(layers=list(self._slot_layers))

    @property
    def rows(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Columns of the longest row and its coming token."""
        return max(self.lengths, default=0) + 1

    @property
    def held(self) -> Rows:
        """Places of the rows, and of their next tokens."""
        return Rows(self._positions)

    def begin_steps(self, positions: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Set the places of the coming tokens, shape (tokens,)."""
        self._rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        self._positions = positions
        # Anew rather than cleared: a compiled decode step would be one for what they held before.
        self._targets = {}

    def end_steps(self, decode_steps: int = 1) -> None:
        """Count the tokens of decode steps as held."""
        self.lengths = [tokens + decode_steps for tokens in self.lengths]
        for target in self._targets.values():
            target += decode_steps

    def targets(self, heads: int) -> torch.Tensor:
        """Return the places of coming keys and values, shape (tokens * heads,)."""
        if heads not in self._targets:
            planes = self._rows[:, None] * heads + torch.arange(heads, device=self._rows.device)
            self._targets[heads] = (planes * self.columns + self._positions[:, None]).reshape(-1)
        return self._targets[heads]

    def reserve(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Make room for some tokens in each row."""
        self.make_room(max(tokens))

    def reserve_steps(self, decode_steps: int) -> int:
        """Make room for some decode steps in all rows."""
        longest = max(self.lengths)
        self.make_room(longest + 1)
        return min(decode_steps, self.columns - longest)

    @property
    def table(self) -> torch.Tensor | None:
        """Blocks of each row, or None."""
        return None

    def part(self, buffer: torch.Tensor, first: int, last: int, begin: int, end: int) -> torch.Tensor:
        """Return some columns of some rows.

        Shapes: returned (rows, heads, columns, head size).
        """
        return buffer[first:last, :, begin:end]

    def make_room(self, tokens: int) -> None:
        """Make room for rows of some tokens."""
        if tokens <= self.columns:
            return
        columns = tokens + max(64, tokens // 4)
        grown = []
        # All allocations before any assignment: running out of memory leaves the store as it was.
        for layer in self._slot_layers:
            if layer.is_initialized:
                wider = [zeros(buffer, self.slots, columns) for buffer in layer.buffers]
                for target, buffer in zip(wider, layer.buffers, strict=True):
                    target[:, :, : self.columns] = buffer
                grown.append((layer, wider))
        for layer, (keys, values) in grown:
            layer.keys, layer.values = keys, values
        self.columns = columns

    def tokens_of(self, row: int) -> int:
        """Return the tokens of a row."""
        return self.lengths[row]

    def append_row(self) -> None:
        """Add an empty row."""
        self.lengths.append(0)

    def drop_row(self) -> None:
        """Remove the last row."""
        self.lengths.pop()

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another, which was wiped."""
        tokens = self.lengths[target] = self.lengths[source]
        torch._foreach_copy_(self._row(target, tokens), self._row(source, tokens))

    def wipe_row(self, row: int) -> None:
        """Zero a row's contents."""
        held = self._row(row, self.lengths[row])
        if held:
            torch._foreach_zero_(held)
        self.lengths[row] = 0

    def _row(self, row: int, tokens: int) -> list[torch.Tensor]:
        """Return views of a row's KV cache in all layers.

        They have at least the columns that the row holds, on a GPU all columns: contiguous memory takes one
        launch for all layers. The views are kept, as making them takes longer than the launch.
        """
        layers = [layer for layer in self._slot_layers if layer.is_initialized]
        if not layers or not _takes_launches(layers[0].buffers[0]):
            return [buffer[row, :, :tokens] for layer in layers for buffer in layer.buffers]
        made_of = len(layers), self.columns
        if self._views_of != made_of:
            self._views, self._views_of = {}, made_of
        if row not in self._views:
            self._views[row] = [buffer[row] for layer in layers for buffer in layer.buffers]
        return self._views[row]

    def read_row(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of a row's KV cache, (heads, tokens, head size)."""
        tokens = self.lengths[row]
        views = []
        for layer in self._slot_layers:
            keys, values = layer.buffers
            views.append((keys[row, :, :tokens], values[row, :, :tokens]))
        return views

    def write_row(self, row: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write every layer's KV cache, (heads, tokens, head size), into a row."""
        tokens = layers[0][0].shape[1]
        self.make_room(tokens + 1)
        for layer, (keys, values) in zip(self._slot_layers, layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            for buffer, states in zip(layer.buffers, (keys, values), strict=True):
                buffer[row, :, :tokens] = states
        self.lengths[row] = tokens


def _takes_launches(buffer: torch.Tensor) -> bool:
    return buffer.is_cuda


class SlotMasks:
    """Masks of columns that rows do not hold.

    A decode step updates them by one write.
    """

    def __init__(
        self,
        slots: int,
        columns: int,
        sliding_windows: set[int | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.columns = columns
        self._least = torch.finfo(dtype).min
        # In front of column 0 there is room for as many columns as the window is long, so that the column
        # that leaves the window has a place even while there is none.
        self._front = {window: window or 0 for window in sliding_windows}
        self._masks = {
            window: torch.zeros(slots, front + columns, dtype=dtype, device=device)
            for window, front in self._front.items()
        }
        self._coming: dict[int | None, torch.Tensor] = {}

    def reset(self, positions: torch.Tensor) -> None:
        """Rebuild the masks for rows of some tokens, shape (rows,)."""
        columns = torch.arange(self.columns, device=positions.device)[None, :]
        for window, mask in self._masks.items():
            visible = columns < positions[:, None]
            if window is not None:
                visible &= columns >= positions[:, None] - window
            part = mask[: len(positions), self._front[window] :]
            part.fill_(self._least)
            part.masked_fill_(visible, 0)
            rows = torch.arange(len(positions), device=positions.device)
            self._coming[window] = rows * mask.shape[1] + positions + self._front[window]

    def advance(self) -> None:
        """Show each row's coming column, and hide the one behind its window."""
        for window, mask in self._masks.items():
            flat, at = mask.view(-1), self._coming[window]
            flat.index_fill_(0, at, 0)
            if window is not None:
                flat.index_fill_(0, at - window, self._least)
            at += 1

    def of(self, window: int | None) -> torch.Tensor:
        """Return the mask of a window's layers, shape (slots, columns)."""
        return self._masks[window][:, self._front[window] :]
