"""Ragged tier: fixed slots, packed prompts, attention to held columns.

Attention is a function of our own, which transformers' layers call in place of theirs
(``AttentionInterface.register``); there is no mask tensor for the model to build or to expand.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from ..attention.functions import AttentionCall, attending
from ..attention.kernels import KERNELS, Held, fastest, masked
from ..models.families import UnsupportedModelError, check_ragged
from ..models.faults import OutOfMemoryError, out_of_memory
from .batch import RunningBatch, needed_columns
from .captured import MOST_STEPS, Capture, CapturedSteps, cuda_graph
from .packed_prompts import PackedAttention, pack
from .paged_store import PagedSlots, Segment
from .store import Path

_LOG = logging.getLogger(__name__)
_NAME = "batchbound_ragged"
_CAPTURED_NAME = "batchbound_ragged_captured"
_PREFILL_TOKENS = 4_096
"""Prompt tokens of one forward call; longer prompts are split."""

_SPARE_STEPS = 16
"""Decode steps to capture, beyond those requested."""

_UNHEARD = frozenset({"softcap", "s_aux", "sinks", "position_bias", "alibi", "head_mask"})
"""Arguments of layers that our attention function ignores."""


class RaggedBatch(RunningBatch):
    """Running batch in pages, each row read to its own length.

    Parameters are those of :class:`~.batch.RunningBatch`. ``kv_tokens`` are the pages of the rows, None for
    as many as the slots need; ``shared_tokens`` those of beginnings that no row reads, in addition.
    """

    tier: ClassVar[str] = "ragged"
    _store: PagedSlots

    def __init__(
        self,
        *arguments: Any,
        prefill_tokens: int = _PREFILL_TOKENS,
        capture: Capture | None = None,
        kernel: str | None = None,
        kv_tokens: int | None = None,
        shared_tokens: int = 0,
        **options: Any,
    ) -> None:
        self._kv_tokens, self._shared_tokens = kv_tokens, shared_tokens
        self._capture = capture
        super().__init__(*arguments, **options)
        self._prefill_tokens = prefill_tokens
        self._captured: CapturedSteps | None = None
        self._kernel = kernel
        self._prompts = PackedAttention(self._decoder, self._store)
        if self._capture is not None:
            self._decoder.use_device_kernels()
        self._store.kernels = self._host

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse models with attention outside a registered function."""
        check_ragged(config)

    def _make_store(self, capacity: int) -> PagedSlots:
        device = self._decoder.device
        if self._capture is None and device.type == "cuda" and not self._sampler.on_host:
            self._capture = cuda_graph
        # A capture can only record torch's operations.
        self._host = self._decoder.use_host_kernels() if self._capture is None else None
        store = PagedSlots(
            self.slots,
            capacity + 1,
            self._decoder.sliding_windows,
            capacity=self._kv_tokens,
            device=device,
            shared=self._shared_tokens,
        )
        store.dtype = None if self._host is None else self._decoder.kv_dtype
        return store

    def _changed(self) -> None:
        """Do nothing: a decode step looks at the rows itself."""

    @torch.inference_mode()
    def forget(self, names: Iterable[int] | None = None) -> None:
        """Drop beginnings that no further prompt begins with, by default all."""
        self._store.forget(names)

    def _decoding(self) -> AbstractContextManager[None]:
        return attending(self._decoder.model, _NAME, self._attend)

    @torch.inference_mode()
    def score(
        self, prompts: Sequence[Sequence[int]], paths: Sequence[Path], wanted: Sequence[int]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Compute prompts and drop them; yield the logits after their last ``wanted`` tokens, in order.

        Each yield holds the prompt of each row of logits. No more prompts than slots.
        """
        rows = [self._take_row(slot) for slot in range(len(prompts))]
        try:
            yield from self._insert(rows, prompts, paths, wanted)
        finally:
            for slot in range(len(prompts)):
                self.release(slot)

    def _insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        paths: Sequence[Path],
        wanted: Sequence[int] | None = None,
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        store, device = self._store, self._decoder.device
        lengths = [len(prompt) for prompt in prompts]
        # A row has room for its coming token as well.
        begins = store.begin_rows(rows, [length + 1 for length in lengths], paths)
        self.prefilled = sum(lengths) - sum(begins)
        # A beginning is computed by the first prompt with it, in the same call as later ones at the latest.
        for pieces in pack(lengths, self._prefill_tokens, begins):
            ids: list[int] = []
            positions: list[int] = []
            places: list[int] = []
            segments, done, last = [], [], []
            for index, offset, tokens in pieces:
                segments.append(Segment(rows[index], offset, len(ids), tokens))
                ids += prompts[index][offset : offset + tokens]
                positions += range(offset, offset + tokens)
                places += [rows[index]] * tokens
                first = max(offset, lengths[index] - (wanted[index] if wanted else 1))
                for position in range(first, offset + tokens):
                    done.append(index)
                    last.append(len(ids) - (offset + tokens - position))
            packed = torch.tensor([ids, positions, places], device=device)
            indices = torch.tensor([[0] * len(last), last] if last else [[0], [0]], device=device).unbind()
            store.segments = segments
            store.begin_steps(packed[1], packed[2])
            self._prompts.begin()
            try:
                with self._decoding():
                    logits = self._decoder.forward(
                        store, packed[:1], packed[1:2], last=(indices[0], indices[1])
                    )
            finally:
                store.segments = ()
                for part in segments:
                    store.lengths[part.row] = part.offset + part.tokens
            if done:
                yield done, logits

    def warm_up(self) -> None:
        """Choose the kernel and capture the decode steps."""
        if self._capture is None:
            return
        for active in (self.slots, -(-self.slots // 2), -(-self.slots // 4)):
            slots = list(range(active))
            try:
                self.prefill(slots, [[0]] * active, request_ids=[""] * active)
                self.decode(1)
            except OutOfMemoryError:
                # A caller that runs the batch finds out as well, and knows what to do.
                return
            finally:
                for slot in self.occupied:
                    self.release(slot)

    def _run(self, history: torch.Tensor, scores: torch.Tensor, until: frozenset[int]) -> Iterator[int]:
        done = 0
        while self._capture is not None and done < len(history):
            captured = self._captured_steps(self._capture)
            try:
                with (
                    attending(self._decoder.model, _CAPTURED_NAME, self._attend_held),
                    self._sampler.in_place(self.slots, MOST_STEPS + _SPARE_STEPS),
                ):
                    results = captured.run(min(MOST_STEPS, len(history) - done), until)
            except Exception as error:  # whatever a model does that a graph cannot hold
                if out_of_memory(error):
                    raise
                _LOG.warning("decode steps are not captured: %s: %s", type(error).__name__, error)
                self._capture = None
                break
            self._count_captured(captured, len(results[0]))
            decode_steps = slice(done, done + len(results[0]))
            history[decode_steps], scores[decode_steps] = results
            done = decode_steps.stop
            yield done
            if captured.ended:
                return
        if done < len(history):
            for more in super()._run(history[done:], scores[done:], until):
                yield done + more

    def _captured_steps(self, capture: Capture) -> CapturedSteps:
        if self._captured is None:
            decoder, store = self._decoder, self._store
            if self._kernel is None:
                self._kernel = "masked sdpa"
                keys, values = store.attending.buffers
                if keys.is_cuda:
                    heads = getattr(decoder.model.config, "num_attention_heads", keys.shape[1])
                    query = keys.new_empty(self.slots, heads, keys.shape[-1])
                    held = Held(keys, values, self._state[1], None, None, store.table)
                    self._kernel = fastest(
                        query, held, windows=set(decoder.sliding_windows), capture=cuda_graph
                    )
            self._captured = CapturedSteps(decoder, store, self._sampler, self._state, capture)
        return self._captured

    def _count_captured(self, captured: CapturedSteps, decode_steps: int) -> None:
        store, size = self._store, captured.size
        if self._kernel != "masked sdpa":
            # Rows are read to their lengths; one that only fills the captured size up reads its one column.
            self._padding_columns += self._layers_of.total() * decode_steps * (size - store.rows)
            return
        before = [tokens - decode_steps for tokens in store.lengths]
        for window, layers in self._layers_of.items():
            for step in range(1, decode_steps + 1):
                needed = needed_columns([tokens + step for tokens in before], window)
                self._padding_columns += layers * (size * store.columns - needed)

    def _attend_held(self, call: AttentionCall) -> torch.Tensor:
        """Attend in a captured step, with lengths from the device."""
        assert self._captured is not None
        assert self._kernel is not None
        window = self._store.attending.window
        lengths, table = self._captured.lengths, self._store.table
        held = Held(call.key, call.value, lengths, window, call.scaling, table)
        return KERNELS[self._kernel](call.query[:, :, 0], held)[:, None]

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        store = self._store
        store.reserve(range(store.rows), [tokens + 1 for tokens in store.lengths])
        store.begin_steps(positions)
        logits = self._decoder.forward(store, tokens[:, None], positions[:, None])
        if self._host is None:
            # Torch reads every row to the longest one's length.
            self._count_read(dict.fromkeys(self._layers_of, store.rows * (max(store.lengths) + 1)))
        store.end_steps()
        return logits

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        window = self._store.attending.window
        if self._store.segments:
            # Asked once for each prompt: a layer asks for the same in every decode step.
            self._refuse(call.mask, window, call.others)
            return self._prompts.attend(call, window)
        if self._host is not None:
            query, held = call.query[:, :, 0], self._store.held
            return self._host.attend(query, call.key, call.value, held, window=window, scale=call.scaling)[
                :, None
            ]
        store = self._store
        lengths, table = store._positions + 1, store.table[: store.rows, : max(store.lengths) + 1]
        read = Held(call.key, call.value, lengths, window, call.scaling, table)
        return masked(call.query[:, :, 0], read)[:, None]

    def _refuse(self, mask: torch.Tensor | None, window: int | None, arguments: dict[str, Any]) -> None:
        """Refuse arguments that would need another kind of attention."""
        reason = next((name for name in _UNHEARD if arguments.get(name) is not None), None)
        if mask is not None:
            reason = "a mask of the model's own"
        elif arguments.get("sliding_window") not in (None, window):
            reason = f"a window of {arguments['sliding_window']} tokens where its cache says {window}"
        if reason is not None:
            raise UnsupportedModelError(
                self._decoder.model.config.model_type,
                f"its layers ask the ragged tier for {reason}",
                "use --tier window",
            )
