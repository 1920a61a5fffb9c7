"""
The keys and values of a running padded batch, end-aligned in one preallocated buffer per layer.

BATON's vector embedding (Section IV): a request is prefilled apart and its keys and values are embedded into
the running batch so that all rows end at the same column; rows shorter than the longest are padded in front.
Unlike the published method nothing is concatenated: a decode step writes column ``end`` in place and
attention reads a view.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Frame:
    """
    Where the rows lie; shared by the layers of one window.

    Parameters
    ----------
    columns
        Width of the buffers, tokens.
    """

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
        """Release the padding that all rows have in common: no copy, the view only starts later."""
        self.low = min(self.starts, default=self.end)


class WindowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """
    One layer's keys and values, each of shape (slots, key-value heads, columns, head size).

    Parameters
    ----------
    frame
        Where the rows lie.
    slots
        Rows to allocate.
    sliding_window
        How many of the latest tokens this layer attends to; None for all.
    """

    is_compileable = False

    def __init__(self, frame: Frame, slots: int, sliding_window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.frame = frame
        self.slots = slots
        self.window = sliding_window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers in the shape, type and place of the first keys and values."""
        # Zeros, because a masked column still enters the weighted sum: 0 * NaN is NaN.
        self.keys = _zeros(key_states, self.slots, self.frame.columns)
        self.values = _zeros(value_states, self.slots, self.frame.columns)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Store new keys and values and return those to attend to.

        Parameters
        ----------
        key_states, value_states
            Shape (rows, key-value heads, tokens, head size): whole right-padded prompts while the frame is
            inserting, one token for every row otherwise.
        *args, **kwargs
            What some models pass besides; unused.

        Returns
        -------
        tuple of torch.Tensor
            Keys and values: the prompts' own while inserting, else a view of the window.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        frame = self.frame
        end = frame.end
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that ``query_length`` new tokens see, and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the columns held before the coming tokens."""
        return 0 if self.frame.inserting else self.frame.width

    def get_max_length(self) -> int:
        """Return -1: the buffer grows when it has to."""
        return -1

    def move_row(self, source: int, target: int) -> None:
        """Copy the used columns of a row over those of another."""
        for buffer in self._buffers():
            buffer[target, :, self.frame.low : self.frame.end] = buffer[
                source, :, self.frame.low : self.frame.end
            ]

    def shift(self, rows: int, end: int, columns: int) -> None:
        """Move the used columns so that they end at ``end``, in buffers of ``columns`` columns."""
        first, last = self.frame.low, self.frame.end
        start = end - (last - first)
        moved = []
        for buffer in self._buffers():
            used = buffer[:rows, :, first:last]
            if columns != buffer.shape[2]:
                target = _zeros(buffer, self.slots, columns)
            else:
                target = buffer
                if start < last and first < end:
                    used = used.clone()
            target[:rows, :, start:end] = used
            moved.append(target)
        if moved:
            self.keys, self.values = moved

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]


class KeyValueWindow(Cache):
    """
    The keys and values of all layers, and the masks that go with them.

    Parameters
    ----------
    slots
        Rows to allocate.
    columns
        Columns to allocate, tokens; more are allocated when they run out.
    sliding_windows
        For each layer how many of the latest tokens it attends to; None for all.
    """

    def __init__(self, slots: int, columns: int, sliding_windows: Sequence[int | None]) -> None:
        self.frame = Frame(columns)
        self._window_layers = [WindowLayer(self.frame, slots, window) for window in sliding_windows]
        super().__init__(layers=list(self._window_layers))

    @property
    def rows(self) -> int:
        """Rows in use."""
        return len(self.frame.starts)

    @property
    def tokens(self) -> int:
        """Tokens held by the rows in use, without padding."""
        frame = self.frame
        return frame.end * len(frame.starts) - sum(frame.starts)

    def make_room_before(self, tokens: int) -> None:
        """
        See to it that a prompt fits in before the end column.

        Parameters
        ----------
        tokens
            Tokens of the longest prompt to insert.
        """
        frame = self.frame
        if not frame.starts:
            frame.end = frame.low = 0
        if frame.end < tokens:
            self._shift(tokens)

    def make_room_after(self) -> bool:
        """
        See to it that the end column exists.

        Returns
        -------
        bool
            Whether the rows had to move to the front of the buffer, or to a wider one, for it.
        """
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

    def visible(self, device: torch.device) -> torch.Tensor:
        """
        Return which columns hold a token of their row or will hold one.

        Parameters
        ----------
        device
            Where to put the answer.

        Returns
        -------
        torch.Tensor
            bool, shape (rows, columns).
        """
        starts = torch.tensor(self.frame.starts, device=device)
        return torch.arange(self.frame.columns, device=device)[None, :] >= starts[:, None]

    def _shift(self, end: int) -> None:
        frame = self.frame
        # A quarter of slack keeps compactions rare: one column is copied for every four that attention reads.
        columns = frame.columns if end < frame.columns else end + max(64, end // 4)
        for layer in self._window_layers:
            layer.shift(len(frame.starts), end, columns)
        offset = end - frame.end
        frame.starts = [start + offset for start in frame.starts]
        frame.low, frame.end, frame.columns = frame.low + offset, end, columns


def _zeros(like: torch.Tensor, slots: int, columns: int) -> torch.Tensor:
    _, heads, _, size = like.shape
    return torch.zeros(slots, heads, columns, size, dtype=like.dtype, device=like.device)
