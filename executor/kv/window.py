"""KV cache of a padded batch, end-aligned in one buffer per layer.

BATON's vector embedding (Section IV): a request is prefilled apart and its KV cache is embedded into the
running batch so that all rows end at the same column; rows shorter than the longest are padded in front.
Unlike the published method nothing is concatenated: a decode step writes column ``end`` in place and
attention reads a view.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .store import KeyValueStore, StoreLayer, zeros


class Frame:
    """Places of the rows in the buffers of a window size."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.end = 0
        """The column the next token is written to: one past the last token of every row."""
        self.starts: list[int] = []
        """The column of each row's first token."""
        self.low = 0
        """The first column that any row uses; what lies before it is released."""
        self.inserting: Sequence[tuple[int, int]] = ()
        """While prompts are prefilled: the row and the number of tokens of each."""

    @property
    def width(self) -> int:
        """Columns in use."""
        return self.end - self.low

    def release_front(self) -> None:
        """Release the common padding by moving the view's start."""
        self.low = min(self.starts, default=self.end)


class WindowLayer(StoreLayer[Frame]):  # type: ignore[no-untyped-call]
    """One layer's KV cache, shape (slots, heads, columns, head size)."""

    def __init__(self, frame: Frame, slots: int, sliding_window: int | None) -> None:
        super().__init__(frame, sliding_window)
        self.slots = slots

    def _allocated(self, states: torch.Tensor) -> torch.Tensor:
        return zeros(states, self.slots, self.place.columns)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values; return those to attend to.

        While the frame is inserting these are the right-padded prompts' own, else a view of the window.
        Shapes: (rows, heads, tokens, head size).
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        frame = self.place
        end = frame.end
        keys, values = self.buffers
        if frame.inserting:
            for index, (row, tokens) in enumerate(frame.inserting):
                keys[row, :, end - tokens : end] = key_states[index, :, :tokens]
                values[row, :, end - tokens : end] = value_states[index, :, :tokens]
            return key_states, value_states
        rows = key_states.shape[0]
        first = frame.low if self.window is None else max(frame.low, end + 1 - self.window)
        keys = keys[:rows, :, first : end + 1]
        values = values[:rows, :, first : end + 1]
        keys[:, :, -1:] = key_states
        values[:, :, -1:] = value_states
        return keys, values

    def get_seq_length(self) -> int:
        """Return the columns held before the coming tokens."""
        return 0 if self.place.inserting else self.place.width

    def move_row(self, source: int, target: int) -> None:
        """Copy a row's used columns over another's."""
        used = slice(self.place.low, self.place.end)
        for buffer in self._buffers():
            buffer[target, :, used] = buffer[source, :, used]

    def wipe_row(self, row: int) -> None:
        """Zero a row's contents."""
        for buffer in self._buffers():
            buffer[row, :, self.place.starts[row] : self.place.end] = 0

    def shift(self, rows: int, end: int) -> None:
        """Move the used columns so that they end at ``end``."""
        first, last = self.place.low, self.place.end
        start = end - (last - first)
        for buffer in self._buffers():
            used = buffer[:rows, :, first:last]
            if start < last and first < end:
                used = used.clone()
            buffer[:rows, :, start:end] = used
            vacated = slice(max(first, end), last) if start < first else slice(first, min(start, last))
            buffer[:rows, :, vacated] = 0

    def grown(self, rows: int, end: int, columns: int) -> list[torch.Tensor]:
        """Return wider buffers, with the used columns ending at ``end``."""
        first, last = self.place.low, self.place.end
        wider = []
        for buffer in self._buffers():
            target = zeros(buffer, self.slots, columns)
            target[:rows, :, end - (last - first) : end] = buffer[:rows, :, first:last]
            wider.append(target)
        return wider

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]


class KeyValueWindow(KeyValueStore):
    """KV cache of all layers, with its masks."""

    def __init__(self, slots: int, columns: int, sliding_windows: Sequence[int | None]) -> None:
        self.frame = Frame(columns)
        self._window_layers = [WindowLayer(self.frame, slots, window) for window in sliding_windows]
        super().__init__(layers=list(self._window_layers))

    @property
    def rows(self) -> int:
        """Rows in use."""
        return len(self.frame.starts)

    def tokens_of(self, row: int) -> int:
        """Return the tokens of a row."""
        return self.frame.end - self.frame.starts[row]

    def append_row(self) -> None:
        """Add an empty row."""
        self.frame.starts.append(self.frame.end)

    def drop_row(self) -> None:
        """Remove the last row."""
        self.frame.starts.pop()

    def make_room_before(self, tokens: int) -> None:
        """Make room for a prompt before the end column."""
        frame = self.frame
        if all(start == frame.end for start in frame.starts):
            # Nothing is held: begin again.
            frame.starts = [0] * len(frame.starts)
            frame.end = frame.low = 0
        if frame.end < tokens:
            self._shift(tokens)

    def make_room_after(self) -> bool:
        """Make room for the end column."""
        frame = self.frame
        if frame.end < frame.columns:
            return False
        frame.release_front()
        self._shift(frame.width)
        return True

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another."""
        self.frame.starts[target] = self.frame.starts[source]
        for layer in self._window_layers:
            layer.move_row(source, target)

    def wipe_row(self, row: int) -> None:
        """Zero a row's contents."""
        for layer in self._window_layers:
            layer.wipe_row(row)
        self.frame.starts[row] = self.frame.end

    def read_row(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of a row's KV cache, (heads, tokens, head size)."""
        start, end = self.frame.starts[row], self.frame.end
        views = []
        for layer in self._window_layers:
            keys, values = layer.buffers
            views.append((keys[row, :, start:end], values[row, :, start:end]))
        return views

    def write_row(
        self, row: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], shared: Sequence[Any] = ()
    ) -> None:
        """Write every layer's KV cache, (heads, tokens, head size), into a row."""
        tokens = layers[0][0].shape[1]
        self.make_room_before(tokens)
        start, end = self.frame.end - tokens, self.frame.end
        for layer, (keys, values) in zip(self._window_layers, layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            for buffer, states in zip(layer.buffers, (keys, values), strict=True):
                buffer[row, :, start:end] = states
        self.frame.starts[row] = start
        self.frame.low = min(self.frame.low, start)

    def visible(self, device: torch.device) -> torch.Tensor:
        """Return the columns that hold a token of their row, or will.

        Shapes: returned (rows, columns).
        """
        starts = torch.tensor(self.frame.starts, device=device)
        return torch.arange(self.frame.columns, device=device)[None, :] >= starts[:, None]

    def _shift(self, end: int) -> None:
        frame = self.frame
        rows = len(frame.starts)
        columns = frame.columns
        # Compaction has to gain an eighth of the buffer, or it would be due again in a few decode steps.
        if end + columns // 8 < columns:
            for layer in self._window_layers:
                layer.shift(rows, end)
        else:
            # A quarter of slack keeps compactions rare: a column is copied for every four attention reads.
            columns = end + max(64, end // 4)
            # All allocations before any assignment: running out of memory leaves the window as it was.
            grown = [layer.grown(rows, end, columns) for layer in self._window_layers]
            for layer, buffers in zip(self._window_layers, grown, strict=True):
                if buffers:
                    layer.keys, layer.values = buffers
        offset = end - frame.end
        frame.starts = [start + offset for start in frame.starts]
        frame.low, frame.end, frame.columns = frame.low + offset, end, columns
