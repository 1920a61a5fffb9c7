"""Groups of rows that share a call of the attention kernel.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from ..attention.decoder import Decoder
from ..attention.functions import AttentionCall, aligned
from .slot_store import KeyValueSlots, SlotMasks

_SEARCH_CALLS = 0.25
"""Cost of the search for groups, in calls per row and step."""
_MOST_KEPT = 8
"""Changes of the rows that groups may outlast."""

Group = tuple[int, int, int, int, torch.Tensor | None]
"""First and last row, first and last column (exclusive), and mask."""


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """Grouping of rows, and its cost since.

    bounds: First row of each group, then the number of rows.
    excess: Cost of calls and padding, in tokens per token held.
    kept: Row changes since then.
    lost: Extra cost since then compared with that excess, in tokens.
    """

    bounds: list[int]
    excess: float = 0.0
    kept: int = 0
    lost: float = 0.0


class RowGroups:
    """Neighbouring rows that attend in one call, with padding."""

    def __init__(self, decoder: Decoder, store: KeyValueSlots) -> None:
        self._decoder, self._store = decoder, store
        self._arranged: dict[int | None, _Arrangement] = {}
        self._groups: dict[int | None, list[Group]] = {}

    def arrange(self) -> None:
        """Choose the groups for the present rows.

        Those chosen before stay until they have cost more than a search would: most changes concern few rows.
        """
        windows = self._decoder.sliding_windows
        call_tokens = self._call_tokens()
        for window in set(windows):
            lengths = [min(tokens, window or tokens) for tokens in self._store.lengths]
            if call_tokens == float("inf"):
                self._arranged[window] = _Arrangement([0, len(lengths)])
                continue
            before = self._arranged.get(window, _Arrangement([0]))
            bounds = [*(bound for bound in before.bounds if bound < len(lengths)), len(lengths)]
            if len(bounds) > 2 and before.bounds[-1] < len(lengths):
                # Rows that joined are a group of their own, or part of the one before them.
                bounds = min(bounds, [*bounds[:-2], bounds[-1]], key=partial(_cost, lengths, call_tokens))
            tokens = sum(lengths)
            waste = _cost(lengths, call_tokens, bounds) - tokens
            search = _SEARCH_CALLS * len(lengths) * call_tokens / windows.count(window)
            lost = before.lost + max(0.0, waste - before.excess * tokens)
            if waste < search:
                self._arranged[window] = _Arrangement(bounds)
                continue
            if before.kept < _MOST_KEPT and lost < search:
                self._arranged[window] = _Arrangement(bounds, before.excess, before.kept + 1, lost)
                continue
            bounds = neighbours(lengths, call_tokens)
            excess = _cost(lengths, call_tokens, bounds) / tokens - 1
            self._arranged[window] = _Arrangement(bounds, excess)

    def _call_tokens(self) -> float:
        if self._decoder.device.type != "cpu":
            # One masked call for all rows: launches would outweigh any padding.
            return float("inf")
        layer = self._store.attending
        if not layer.is_initialized:
            return 256.0
        # 15 microseconds a call, against some 10 GB/s of KV cache read.
        size = sum(buffer.shape[1] * buffer.shape[-1] * buffer.element_size() for buffer in layer.buffers)
        return 15e-6 * 10e9 / size

    def cut(self, masks: SlotMasks) -> None:
        """Cut the masks to each group's rows and columns."""
        self._groups = {}
        for window, arranged in self._arranged.items():
            mask, groups = masks.of(window), []
            for first, last in pairwise(arranged.bounds):
                lengths = self._store.lengths[first:last]
                begin = 0 if window is None else max(0, min(lengths) + 1 - window)
                end = max(lengths) + 1
                alike = min(lengths) == max(lengths)
                hidden = None if alike else aligned(mask[first:last, None, None, begin:end])
                groups.append((first, last, begin, end, hidden))
            self._groups[window] = groups

    def columns_read(self) -> dict[int | None, int]:
        """Return the columns that a decode step reads, by window."""
        return {
            window: sum((last - first) * (end - begin) for first, last, begin, end, _ in groups)
            for window, groups in self._groups.items()
        }

    def attend(self, call: AttentionCall, window: int | None) -> torch.Tensor:
        """Return a layer's output, shape (rows, 1, heads, head size)."""
        rows, heads, _, size = call.query.shape
        query = call.query.reshape(rows, call.key.shape[1], -1, size)
        attend = torch.nn.functional.scaled_dot_product_attention
        parts = [
            attend(
                query[first:last],
                self._store.part(call.key, first, last, begin, end),
                self._store.part(call.value, first, last, begin, end),
                attn_mask=mask,
                scale=call.scaling,
            )
            for first, last, begin, end, mask in self._groups[window]
        ]
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output.reshape(rows, 1, heads, call.value.shape[-1])


def _cost(lengths: Sequence[int], call_tokens: float, bounds: Sequence[int]) -> float:
    return sum(call_tokens + (last - first) * max(lengths[first:last]) for first, last in pairwise(bounds))


def neighbours(lengths: Sequence[int], call_tokens: float) -> list[int]:
    """Split rows into groups of least cost in padding and calls."""
    rows = len(lengths)
    reversed_lengths = np.asarray(lengths, dtype=np.float64)[::-1]
    # cheapest[j] is the least cost of the first j rows; the last run of them is padded to its longest row.
    cheapest = np.zeros(rows + 1)
    begin = np.zeros(rows + 1, dtype=np.int64)
    for j in range(1, rows + 1):
        longest = np.maximum.accumulate(reversed_lengths[rows - j :])
        costs = longest * np.arange(1, j + 1) + call_tokens + cheapest[j - 1 :: -1]
        size = int(costs.argmin()) + 1
        cheapest[j], begin[j] = costs[size - 1], j - size
    bounds = [rows]
    while bounds[-1]:
        bounds.append(int(begin[bounds[-1]]))
    return bounds[::-1]
