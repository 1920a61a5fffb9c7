"""Window tier: BATON's padded batch, for every supported model.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from ..attention.decoder import Mask
from ..attention.functions import aligned
from ..models.families import check_supported
from .batch import RunningBatch
from .kept_prompts import KeptPrompts
from .store import Path
from .window import KeyValueWindow

_PREFILL_TOKENS = 16_384
"""Padded prompt tokens of one forward call."""


class WindowBatch(RunningBatch):
    """Running batch whose rows end at the same column.

    Shorter rows are padded in front. Index distance equals position distance, which sliding windows, ALiBi
    and index-based biases rely on. Parameters are those of :class:`~.batch.RunningBatch`; the buffers are
    somewhat wider than ``capacity``. Rows lie in one piece, so equal prompts are copied and other beginnings
    are computed again.
    """

    tier: ClassVar[str] = "window"
    _store: KeyValueWindow

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse models that the engine cannot run."""
        check_supported(config)

    def _make_store(self, capacity: int) -> KeyValueWindow:
        self._mask: torch.Tensor | None = None
        self._kept = KeptPrompts(self.slots * columns_for(capacity))
        return KeyValueWindow(self.slots, columns_for(capacity), self._decoder.sliding_windows)

    def _changed(self) -> None:
        self._mask = None

    def forget(self, names: Iterable[int] | None = None) -> None:
        """Drop prompts that no further request has, by default all."""
        self._kept.forget(names)

    def _insert(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], paths: Sequence[Path]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        # A prompt of which all but the last token is shared is that of others.
        name_of = [
            path[-1][0] if path and path[-1][1] == len(prompt) - 1 else -1 - index
            for index, (prompt, path) in enumerate(zip(prompts, paths, strict=True))
        ]
        equal: dict[tuple[int, int], list[int]] = {}
        for index, name in enumerate(name_of):
            equal.setdefault((name, prompts[index][-1]), []).append(index)
        new: list[tuple[tuple[int, int], list[int]]] = []
        for key, indices in equal.items():
            kept = self._kept.get(key)
            if kept is None:
                new.append((key, indices))
                continue
            for index in indices:
                self._store.write_row(rows[index], kept.layers)
            yield indices, kept.logits.expand(len(indices), -1)
        first = [indices[0] for _, indices in new]
        self.prefilled = sum(len(prompts[index]) for index in first) + len(prompts) - len(first)
        if not new:
            return
        for done, logits in self._compute([rows[i] for i in first], [prompts[i] for i in first]):
            filled: list[int] = []
            of: list[int] = []
            for at, place in enumerate(done):
                key, indices = new[place]
                for index in indices[1:]:
                    self._store.copy_row(rows[indices[0]], rows[index])
                if key[0] >= 0:
                    self._kept.keep(key, self._store.read_row(rows[indices[0]]), logits[at : at + 1])
                filled += indices
                of += [at] * len(indices)
            yield filled, logits[of]

    def _compute(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        window, device = self._store, self._decoder.device
        lengths = [len(prompt) for prompt in prompts]
        window.make_room_before(max(lengths))
        for group in length_groups(lengths, self._decoder.call_tokens):
            ids, positions, last = padded_prompts([prompts[i] for i in group], device)
            frame = window.frame
            frame.inserting = [(rows[i], lengths[i]) for i in group]
            try:
                logits = self._decoder.forward(window, ids, positions, last=last)
            finally:
                for row, tokens in frame.inserting:
                    frame.starts[row] = frame.end - tokens
                frame.low = min(frame.low, frame.end - ids.shape[1])
                frame.inserting = ()
            yield group, logits

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        window = self._store
        if window.make_room_after():
            self._mask = None
        if self._mask is None:
            window.frame.release_front()
            self._mask = self._padding()
        logits = self._decoder.forward(
            window, tokens[:, None], positions[:, None], mask=self._attention_mask(self._mask)
        )
        width = window.frame.width + 1
        self._count_read({size: window.rows * min(width, size or width) for size in self._layers_of})
        window.frame.end += 1
        return logits

    def _padding(self) -> torch.Tensor:
        visible = self._store.visible(self._decoder.device)
        if self._decoder.padding_mask:
            return visible.long()
        return hiding(visible, self._decoder.dtype)

    def _attention_mask(self, mask: torch.Tensor) -> Mask:
        low, end = self._store.frame.low, self._store.frame.end + 1
        if self._decoder.padding_mask:
            return mask[:, low:end]
        masks = {
            kind: aligned(mask[:, None, None, low if size is None else max(low, end - size) : end])
            for kind, size in self._decoder.windows_by_kind.items()
        }
        return next(iter(masks.values())) if len(masks) == 1 else masks


def columns_for(capacity: int) -> int:
    """Return the columns to allocate for a longest request."""
    return capacity + max(64, capacity // 4)


def hiding(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask to add to attention scores."""
    scores = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return scores.masked_fill_(~visible, torch.finfo(dtype).min)


def padded_prompts(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Pad prompts to one length, given their token ids.

    Padding is on the right: real tokens never see what follows them, so plain causal attention is right.
    Shapes: returned (prompts, longest prompt).
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    ids = torch.tensor([list(prompt) + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    last = torch.arange(len(prompts), device=device), torch.tensor(lengths, device=device) - 1
    return ids, positions, last


def length_groups(
    lengths: Sequence[int], call_tokens: float, most_tokens: int = _PREFILL_TOKENS
) -> list[list[int]]:
    """Split prompts into calls of least cost in padding and calls."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # cheapest[j] is the least cost of the first j prompts: a group is padded to its first, longest prompt.
    cheapest = [0.0] + [float("inf")] * len(order)
    begin = [0] * (len(order) + 1)
    for i, index in enumerate(order):
        for j in range(i + 1, len(order) + 1):
            padded = lengths[index] * (j - i)
            if j > i + 1 and padded > most_tokens:
                break
            if cheapest[i] + padded + call_tokens < cheapest[j]:
                cheapest[j], begin[j] = cheapest[i] + padded + call_tokens, i
    groups: list[list[int]] = []
    j = len(order)
    while j:
        groups.append(order[begin[j] : j])
        j = begin[j]
    return groups[::-1]
