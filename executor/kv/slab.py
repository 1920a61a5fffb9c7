"""
The slab tier: fixed slots, each row at its own offset, masked attention over the columns in use.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ..attention.decoder import Mask
from ..models.families import check_slab
from .batch import RunningBatch
from .slot_store import KeyValueSlots, Segment, SlotMasks
from .window_batch import length_groups, padded_prompts


class SlotBatch(RunningBatch):
    """A running batch in fixed slots; what the slab and the ragged tier have in common."""

    _store: KeyValueSlots
    _whole: ClassVar[bool] = False
    """Whether layers attend to views of all columns."""

    def _make_store(self, capacity: int) -> KeyValueSlots:
        self._masks: SlotMasks | None = None
        self._stale = True
        return KeyValueSlots(self.slots, capacity + 1, self._decoder.sliding_windows, whole=self._whole)

    def _changed(self) -> None:
        self._stale = True

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        store = self._store
        store.make_room(store.width)
        if self._masks is None or self._masks.columns != store.columns:
            windows = set(self._decoder.sliding_windows)
            self._masks = SlotMasks(
                self.slots, store.columns, windows, self._decoder.dtype, self._decoder.device
            )
            self._stale = True
        if self._stale:
            self._masks.reset(positions)
            self._arrange()
            store.begin_rounds(positions)
        # Until the round is over, masks and targets are ahead of the lengths: one that fails begins anew.
        self._stale = True
        self._masks.advance()
        logits = self._decoder.forward(store, tokens[:, None], positions[:, None], mask=self._mask())
        store.end_rounds()
        self._stale = False
        return logits

    def _arrange(self) -> None:
        """Prepare for rounds over the rows as they are now."""

    def _mask(self) -> Mask | None:
        return None


class SlabBatch(SlotBatch):
    """
    A running batch in fixed slots, with a mask over as many columns as the longest row has.

    Parameters are those of :class:`~.running.RunningBatch`.
    """

    tier: ClassVar[str] = "slab"

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse models whose attention depends on the index of a column."""
        check_slab(config)

    def _insert(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        store, device = self._store, self._decoder.device
        lengths = [len(prompt) for prompt in prompts]
        store.make_room(max(lengths) + 1)
        for group in length_groups(lengths, self._decoder.call_tokens):
            ids, positions, last = padded_prompts([prompts[i] for i in group], device)
            store.segments = [Segment(rows[i], 0, at, 0, lengths[i]) for at, i in enumerate(group)]
            try:
                logits = self._decoder.forward(store, ids, positions, last=last)
            finally:
                store.segments = ()
                for i in group:
                    store.lengths[rows[i]] = lengths[i]
            yield group, logits

    def _mask(self) -> Mask | None:
        assert self._masks is not None
        rows, width = self._store.rows, self._store.width
        if self._decoder.padding_mask:
            return (self._masks.of(None)[:rows, :width] == 0).long()
        masks = {
            kind: self._masks.of(window)[:rows, None, None, :width]
            for kind, window in self._decoder.windows_by_kind.items()
        }
        return next(iter(masks.values())) if len(masks) == 1 else masks
