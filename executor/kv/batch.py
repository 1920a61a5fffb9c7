"""Running batch of slots on a transformers model.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..attention.decoder import Decoder
from ..models.faults import NotFiniteError, OutOfMemoryError, out_of_memory
from ..models.sampling import Sampler, TokenRule
from .store import KeyValueStore, Path, Suspended


class RunningBatch(ABC):
    """Batch of slots that decode together, whatever the KV layout.

    A slot is the caller's name for a place in the batch; a row is the place of its KV cache. Rows are always
    packed, so a decode step computes exactly the occupied slots.
    """

    tier: ClassVar[str]

    def __init__(self, model: Any, slots: int, capacity: int, *, sampler: TokenRule | None = None) -> None:
        if slots < 1 or capacity < 1:
            raise ValueError(f"slots and capacity must be positive, got {slots} and {capacity}")
        self.check(model.config)
        self.slots = slots
        self._sampler = sampler or Sampler()
        self._decoder = Decoder(model)
        self._store = self._make_store(capacity)
        self._slot_of_row: list[int | None] = []
        self._row_of_slot: dict[int, int] = {}
        self._state = torch.zeros(4, slots, dtype=torch.int64, device=self._decoder.device)
        self._scores: tuple[torch.Tensor, list[int]] = torch.empty(0, 0), []
        self.prefilled = 0
        """Prompt tokens that the latest prefill computed."""
        self._layers_of = Counter(self._decoder.sliding_windows)
        self._padding_columns = 0

    @classmethod
    @abstractmethod
    def check(cls, config: Any) -> None:
        """Raise :class:`~.families.UnsupportedModelError` if this layout would be wrong."""

    @abstractmethod
    def _make_store(self, capacity: int) -> KeyValueStore:
        """Return the empty store."""

    @abstractmethod
    def _insert(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], paths: Sequence[Path]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Fill rows with prompts; yield indices and logits of completed ones."""

    @abstractmethod
    def forget(self, names: Iterable[int] | None = None) -> None:
        """Drop beginnings that no further prompt begins with, by default all."""

    @abstractmethod
    def _step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run one token of every row; return the logits.

        Shapes: tokens, positions (rows,).
        """

    @abstractmethod
    def _changed(self) -> None:
        """Note that rows were added, moved or dropped."""

    def _decoding(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def active(self) -> int:
        """Occupied slots."""
        return len(self._row_of_slot)

    @property
    def occupied(self) -> tuple[int, ...]:
        """The occupied slots, in increasing order."""
        return tuple(sorted(self._row_of_slot))

    @property
    def kv_tokens(self) -> int:
        """Tokens held by the occupied slots, without padding."""
        return sum(self._store.tokens_of(row) for row in self._row_of_slot.values())

    @property
    def padding_read(self) -> float:
        """Columns that attention read without need, averaged over the layers.

        A row needs the tokens that it holds with its new one; in a layer with a sliding window, at most those
        of the window.
        """
        return self._padding_columns / self._layers_of.total()

    @property
    def scores(self) -> NDArray[np.float64]:
        """Logits of the latest greedy call, shape (decode steps, slots)."""
        scores, slots = self._scores
        answer = np.full((len(scores), self.slots), np.nan)
        answer[:, slots] = scores.double().cpu().numpy()
        return answer

    @torch.inference_mode()
    def prefill(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        *,
        request_ids: Sequence[str] | None = None,
        emitted: Sequence[int] | None = None,
        paths: Sequence[Path] | None = None,
        drawn: Sequence[int] | None = None,
    ) -> list[int]:
        """Prefill prompts and let them join; on an error none does.

        ``paths``: beginnings that each prompt shares with others, of this call or not.
        """
        self._check_prefill(slots, prompts)
        if not slots:
            return []
        if request_ids is None:
            if not self._sampler.greedy:
                raise ValueError("sampling needs request_ids, which name the random stream of each request")
            request_ids = [""] * len(slots)
        device = self._decoder.device
        streams = [self._sampler.stream(request_id) for request_id in request_ids]
        lengths = [len(prompt) for prompt in prompts]
        state = torch.tensor([[0] * len(slots), lengths, streams, emitted or [0] * len(slots)], device=device)
        scores = torch.zeros(len(slots), dtype=self._decoder.dtype, device=device)
        settled = None if drawn is None or max(drawn) < 0 else torch.tensor(drawn, device=device)
        rows = [self._take_row(slot) for slot in slots]
        self._changed()
        try:
            for indices, found in self._insert(rows, prompts, paths or [()] * len(rows)):
                logits = found if settled is None else _only(found, settled[indices])
                chosen = self._sampler.choose(logits, state[2, indices], state[3, indices])
                state[0, indices] = chosen
                scores[indices] = score(self._sampler, logits, chosen).to(scores.dtype)
        except BaseException as error:
            for slot in slots:
                self.release(slot)
            self.forget()
            self._raise_out_of_memory(error)
            raise
        state[3] += 1
        self._state[:, rows] = state
        self._changed()
        self._scores = scores[None], list(slots)
        if not scores.isfinite().all():
            for slot in slots:
                self.release(slot)
            raise NotFiniteError(slots[int(scores.isfinite().int().argmin())], 0)
        answer: list[int] = state[0].tolist()
        return answer

    @torch.inference_mode()
    def decode(self, decode_steps: int = 1, *, until: frozenset[int] = frozenset()) -> NDArray[np.int64]:
        """Decode some steps and read the tokens back once.

        Shapes: returned (decode steps run, slots).
        """
        if not self._row_of_slot or decode_steps == 0:
            return np.full((decode_steps, self.slots), -1, dtype=np.int64)
        self._pack()
        rows = self._store.rows
        history = torch.empty(decode_steps, rows, dtype=torch.int64, device=self._decoder.device)
        scores = torch.empty(decode_steps, rows, dtype=self._decoder.dtype, device=self._decoder.device)
        done = 0
        try:
            for done in self._run(history, scores, until):  # noqa: B007
                pass
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise OutOfMemoryError(str(error), self._read_back(history[:done], scores[:done])) from error
        return self._read_back(history[:done], scores[:done])

    def warm_up(self) -> None:  # noqa: B027
        """Prepare before anything is timed; by default do nothing."""

    @torch.inference_mode()
    def allocate(self) -> None:
        """Allocate the buffers before anything is timed.

        Otherwise the first stage would include the allocation.
        """
        rows = [self._take_row(0)]
        try:
            for _ in self._insert(rows, [[0]], [()]):
                pass
        except Exception as error:
            self._raise_out_of_memory(error)
            raise
        finally:
            self.release(0)
            self._changed()

    def reload_weights(self) -> None:
        """Compute with the model's present weights and the old KV cache."""
        self._decoder.reload_weights()

    @torch.inference_mode()
    def release(self, slot: int, keep: tuple[int, int, int] | None = None) -> None:
        """Free the slot of a finished or evicted request.

        ``keep``: name of a beginning that some of its tokens become, their first one and the one after.
        """
        self._check_occupied(slot)
        row = self._row_of_slot.pop(slot)
        self._slot_of_row[row] = None
        if keep is None:
            self._store.wipe_row(row)
        else:
            self._store.keep_row(row, *keep)

    def split(self, name: int, tokens: int, head: int) -> None:
        """Give the first tokens of a beginning a name of their own."""
        self._store.split(name, tokens, head)

    @torch.inference_mode()
    def take(self, slot: int) -> Suspended:
        """Free a slot, and keep its request on the host."""
        self._check_occupied(slot)
        row = self._row_of_slot[slot]
        layers = [(_to_host(keys), _to_host(values)) for keys, values in self._store.read_row(row)]
        state, shared = self._state[:, row].to("cpu", copy=True), self._store.shared_by(row)
        self.release(slot)
        keys, values = (tuple(layer[kind] for layer in layers) for kind in (0, 1))
        return Suspended(keys, values, state, shared)

    @torch.inference_mode()
    def insert(self, slot: int, request: Suspended) -> None:
        """Insert a request's KV cache into a free slot."""
        self._check_free(slot)
        row = self._take_row(slot)
        try:
            layers = list(zip(request.keys, request.values, strict=True))
            self._store.write_row(row, layers, request.shared)
        except Exception as error:
            self.release(slot)
            self._raise_out_of_memory(error)
            raise
        self._state[:, row] = request.state.to(self._decoder.device)
        self._changed()

    def _run(self, history: torch.Tensor, scores: torch.Tensor, until: frozenset[int]) -> Iterator[int]:
        """Run decode steps while results have room; yield their number."""
        tokens, positions, streams, emitted = self._state[:, : self._store.rows].unbind()
        ends = torch.tensor(sorted(until), device=tokens.device)
        with self._decoding():
            for step in range(len(history)):
                logits = self._step(tokens, positions)
                chosen = self._sampler.choose(logits, streams, emitted)
                scores[step] = score(self._sampler, logits, chosen)
                history[step] = chosen
                tokens.copy_(chosen)
                self._state[1::2, : len(tokens)] += 1
                yield step + 1
                if until and bool((chosen[:, None] == ends).any()):
                    return

    def _count_read(self, columns: Mapping[int | None, int]) -> None:
        held = [self._store.tokens_of(row) + 1 for row in range(self._store.rows)]
        for window, read in columns.items():
            self._padding_columns += self._layers_of[window] * (read - needed_columns(held, window))

    def _read_back(self, history: torch.Tensor, scores: torch.Tensor) -> NDArray[np.int64]:
        answer = np.full((len(history), self.slots), -1, dtype=np.int64)
        columns = [slot for slot in self._slot_of_row if slot is not None]
        self._scores = scores, columns
        if not scores.isfinite().all():
            step, row = (~scores.isfinite()).nonzero()[0].tolist()
            raise NotFiniteError(columns[row], step)
        answer[:, columns] = history.cpu().numpy()
        return answer

    def _check_prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        if len(slots) != len(prompts):
            raise ValueError(f"{len(slots)} slots were given for {len(prompts)} prompts")
        if len(set(slots)) != len(slots):
            raise ValueError(f"a slot is named twice: {list(slots)}")
        for slot, prompt in zip(slots, prompts, strict=True):
            self._check_free(slot)
            if not len(prompt):
                raise ValueError(f"the prompt for slot {slot} is empty: give it at least one token")

    def _raise_out_of_memory(self, error: BaseException) -> None:
        if out_of_memory(error):
            raise OutOfMemoryError(str(error), np.empty((0, self.slots), dtype=np.int64)) from error

    def _check_free(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} does not exist: the batch has slots 0 to {self.slots - 1}")
        if slot in self._row_of_slot:
            raise ValueError(f"slot {slot} is taken: release it first")

    def _check_occupied(self, slot: int) -> None:
        if slot not in self._row_of_slot:
            raise ValueError(f"slot {slot} is free already; occupied are {list(self.occupied)}")

    def _take_row(self, slot: int) -> int:
        if None in self._slot_of_row:
            row = self._slot_of_row.index(None)
        else:
            row = len(self._slot_of_row)
            self._slot_of_row.append(None)
            self._store.append_row()
        self._slot_of_row[row] = slot
        self._row_of_slot[slot] = row
        return row

    def _pack(self) -> None:
        """Move the last rows into freed ones."""
        slots = self._slot_of_row
        if None not in slots:
            return
        while None in slots:
            hole, last = slots.index(None), len(slots) - 1
            slot = slots[last]
            if slot is not None:
                self._store.move_row(last, hole)
                self._store.wipe_row(last)
                self._state[:, hole] = self._state[:, last]
                slots[hole], self._row_of_slot[slot] = slot, hole
            slots.pop()
            self._store.drop_row()
        self._changed()


def needed_columns(held: Sequence[int], window: int | None) -> int:
    """Return the columns that rows must read in a decode step."""
    return sum(held) if window is None else sum(min(tokens, window) for tokens in held)


def score(sampler: TokenRule, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return a finite number per row only for sound logits.

    NaN is the largest for both functions used. Shape: returned (rows,).
    """
    if sampler.greedy:
        return logits.gather(-1, chosen[:, None])[:, 0]
    return logits.amax(dim=-1)


def _only(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits that force each row's token, if it is not negative."""
    other = torch.arange(logits.shape[-1], device=logits.device)[None] != tokens[:, None]
    return logits.masked_fill(other & (tokens[:, None] >= 0), -torch.inf)


def _to_host(states: torch.Tensor) -> torch.Tensor:
    return states.to("cpu", copy=True).contiguous()
