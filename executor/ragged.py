"""
The ragged tier: fixed slots, packed prompts, and attention that reads only what a row holds.

Attention is a function of our own, which transformers' layers call in place of theirs
(``AttentionInterface.register``); there is no mask tensor for the model to build or to expand.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch

from .attention import attending
from .attention_kernels import KERNELS, agree, fastest, packed_flash
from .captured import MOST_ROUNDS, Capture, CapturedRounds, cuda_graph
from .decoder import Decoder
from .families import UnsupportedModelError, check_ragged
from .faults import RanOutError, out_of_memory
from .sampling import Sampler
from .slab import SlotBatch
from .slots import Segment

_LOG = logging.getLogger(__name__)
_NAME = "batchbound_ragged"
_CAPTURED_NAME = "batchbound_ragged_captured"
_PREFILL_TOKENS = 4_096
"""Prompt tokens of one forward call: bounds the activations. Longer prompts are prefilled in chunks."""

_UNHEARD = frozenset({"softcap", "s_aux", "sinks", "position_bias", "alibi", "head_mask"})
"""What some layers tell their attention function that this one does not act on."""

_SEARCH_CALLS = 0.25
"""What the search for shared calls costs per row, in calls of the attention kernel, spread over rounds."""

Group = tuple[int, int, int, int, torch.Tensor | None]
"""First row and row past the last, first column and column past the last, and what hides some of them."""


class RaggedBatch(SlotBatch):
    """
    A running batch in fixed slots whose rows are read to their own lengths.

    Parameters are those of :class:`~.running.RunningBatch`.

    Parameters
    ----------
    prefill_tokens
        The most prompt tokens of one forward call.
    capture
        Captures whole decode rounds, so that the host only launches them; a CUDA graph on a GPU if left out,
        none on a CPU.
    kernel
        Of :data:`~.attention_kernels.KERNELS`, for captured rounds; the fastest on a GPU if left out.
    """

    tier: ClassVar[str] = "ragged"
    _whole: ClassVar[bool] = True

    def __init__(
        self,
        *arguments: Any,
        prefill_tokens: int = _PREFILL_TOKENS,
        capture: Capture | None = None,
        kernel: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._prefill_tokens = prefill_tokens
        if capture is None and self._decoder.device.type == "cuda":
            capture = cuda_graph
        # Another sampler may keep what it chooses in lists of the host's, which a replay would not reach.
        self._capture = capture if type(self._sampler) is Sampler else None
        self._captured: CapturedRounds | None = None
        self._kernel = kernel
        self._begins: torch.Tensor | None = None
        self._flash: dict[int | None, bool] = {}
        self._bounds: dict[int | None, list[int]] = {}
        self._groups: dict[int | None, list[Group]] = {}

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse models whose layers do not leave their whole attention to a registered function."""
        check_ragged(config)

    def _decoding(self) -> AbstractContextManager[None]:
        return attending(self._decoder.model, _NAME, self._attend)

    def _insert(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        store, device = self._store, self._decoder.device
        store.make_room(max(len(prompt) for prompt in prompts) + 1)
        for pieces in pack([len(prompt) for prompt in prompts], self._prefill_tokens):
            ids: list[int] = []
            positions: list[int] = []
            places: list[int] = []
            segments, done, last = [], [], []
            for index, offset, tokens in pieces:
                segments.append(Segment(rows[index], offset, 0, len(ids), tokens))
                ids += prompts[index][offset : offset + tokens]
                positions += range(offset, offset + tokens)
                places += [rows[index]] * tokens
                if offset + tokens == len(prompts[index]):
                    done.append(index)
                    last.append(len(ids) - 1)
            packed = torch.tensor([ids, positions, places], device=device)
            wanted = torch.tensor([[0] * len(last), last] if last else [[0], [0]], device=device).unbind()
            store.segments, store.packed = segments, True
            store.begin_rounds(packed[1], packed[2])
            self._begins = _flash_begins(segments, self._decoder)
            try:
                with self._decoding():
                    logits = self._decoder.forward(
                        store, packed[:1], packed[1:2], last=(wanted[0], wanted[1])
                    )
            finally:
                store.segments, store.packed = (), False
                for part in segments:
                    store.lengths[part.row] = part.offset + part.tokens
            if done:
                yield done, logits

    @property
    def kernel(self) -> str | None:
        """What attends in captured rounds, of :data:`~.attention_kernels.KERNELS`; None before the first."""
        return self._kernel

    @property
    def padded_kv_tokens(self) -> int:
        """Columns that attention reads in the next round over all occupied slots."""
        if self._capture is not None and self._kernel not in (None, "masked sdpa"):
            return self.kv_tokens
        return super().padded_kv_tokens

    def warm_up(self) -> None:
        """Choose the kernel and capture the rounds, on prompts of one token."""
        if self._capture is None:
            return
        for active in (self.slots, -(-self.slots // 2), -(-self.slots // 4)):
            slots = list(range(active))
            try:
                self.prefill(slots, [[0]] * active, request_ids=[""] * active)
                self.decode(1)
            except RanOutError:
                # Whoever runs the batch finds out as well, and knows what to do.
                return
            finally:
                for slot in self.occupied:
                    self.release(slot)

    def _run(self, history: torch.Tensor, scores: torch.Tensor, until: frozenset[int]) -> Iterator[int]:
        done = 0
        while self._capture is not None and done < len(history):
            captured = self._captured_rounds(self._capture)
            try:
                with attending(self._decoder.model, _CAPTURED_NAME, self._attend_held):
                    results = captured.run(min(MOST_ROUNDS, len(history) - done), until)
            except Exception as error:  # whatever a model does that a graph cannot hold
                if out_of_memory(error):
                    raise
                _LOG.warning("decode rounds are not captured: %s: %s", type(error).__name__, error)
                self._capture = None
                break
            rounds = slice(done, done + len(results[0]))
            history[rounds], scores[rounds] = results
            self._stale = True
            done = rounds.stop
            yield done
            if captured.ended:
                return
        if done < len(history):
            for more in super()._run(history[done:], scores[done:], until):
                yield done + more

    def _captured_rounds(self, capture: Capture) -> CapturedRounds:
        if self._captured is None:
            decoder, store = self._decoder, self._store
            if self._kernel is None:
                self._kernel = "masked sdpa"
                keys, values = store.attending.buffers
                if keys.is_cuda:
                    heads = getattr(decoder.model.config, "num_attention_heads", keys.shape[1])
                    query = keys.new_empty(self.slots, heads, keys.shape[-1])
                    self._kernel = fastest(query, keys, values, windows=set(decoder.sliding_windows))
            self._captured = CapturedRounds(decoder, store, self._sampler, self._state, self._score, capture)
        return self._captured

    def _attend_held(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend in a captured round: lengths are read from the device."""
        assert self._captured is not None
        assert self._kernel is not None
        output = KERNELS[self._kernel](
            query[:, :, 0],
            key,
            value,
            self._captured.lengths,
            window=self._store.attending.window,
            scale=scaling,
        )
        return output[:, None], None

    def _arrange(self) -> None:
        """Choose which neighbouring rows share a call: padding against calls."""
        windows = self._decoder.sliding_windows
        call_tokens = self._call_tokens()
        for window in set(windows):
            lengths = [min(tokens, window or tokens) for tokens in self._store.lengths]
            waste = len(lengths) * max(lengths) - sum(lengths)
            if waste * windows.count(window) < _SEARCH_CALLS * len(lengths) * call_tokens:
                # Not worth the search: it would take longer than it saves in the rounds until the next one.
                self._bounds[window] = [0, len(lengths)]
            else:
                self._bounds[window] = neighbours(lengths, call_tokens)

    def _call_tokens(self) -> float:
        """Estimate what a call of the attention kernel costs beyond its columns, in columns."""
        if self._decoder.device.type != "cpu":
            # One masked call for all rows: launches would outweigh any padding.
            return float("inf")
        layer = self._store.attending
        if not layer.is_initialized:
            return 256.0
        # 15 microseconds a call, against some 10 GB/s of keys and values read.
        size = sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in layer.buffers)
        return 15e-6 * 10e9 / size

    def _mask(self) -> None:
        """Cut the masks to the rows of each group; the model itself gets none."""
        assert self._masks is not None
        self._groups = {}
        for window, bounds in self._bounds.items():
            mask, groups = self._masks.of(window), []
            for first, last in pairwise(bounds):
                lengths = self._store.lengths[first:last]
                begin = 0 if window is None else max(0, min(lengths) + 1 - window)
                end = max(lengths) + 1
                alike = min(lengths) == max(lengths)
                hidden = None if alike else mask[first:last, None, None, begin:end]
                groups.append((first, last, begin, end, hidden))
            self._groups[window] = groups

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = self._store.attending
        if self._store.segments:
            # Asked once for each prompt: what a layer asks for does not change from round to round.
            self._refuse(attention_mask, layer.window, arguments)
            return self._attend_prompts(query, key, value, layer.window, scaling), None
        rows, heads, _, size = query.shape
        query = query.reshape(rows, key.shape[1], -1, size)
        attend = torch.nn.functional.scaled_dot_product_attention
        parts = [
            attend(
                query[first:last],
                key[first:last, :, begin:end],
                value[first:last, :, begin:end],
                attn_mask=mask,
                scale=scaling,
            )
            for first, last, begin, end, mask in self._groups[layer.window]
        ]
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output.reshape(rows, 1, heads, value.shape[-1]), None

    def _attend_prompts(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Let each packed prompt attend to itself, and to what earlier calls stored of it."""
        if self._begins is None or not self._flash.get(window, True):
            return self._attend_each_prompt(query, key, value, window, scaling)
        longest = max(part.tokens for part in self._store.segments)
        packed = [states[0].transpose(0, 1) for states in (query, key, value)]
        if window not in self._flash:
            # The first prompts are computed both ways: devices and releases differ in what they can do.
            expected = self._attend_each_prompt(query, key, value, window, scaling)
            try:
                output = packed_flash(packed, self._begins, longest, window=window, scale=scaling)
                self._flash[window] = agree(output, expected[0])
            except RuntimeError as error:
                _LOG.info("prompts are not packed into one call of flash attention: %s", error)
                self._flash[window] = False
            return expected
        return packed_flash(packed, self._begins, longest, window=window, scale=scaling)[None]

    def _attend_each_prompt(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
    ) -> torch.Tensor:
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        keys, values = self._store.attending.buffers
        for part in self._store.segments:
            tokens, held = slice(part.begin, part.begin + part.tokens), part.offset + part.tokens
            own = (key[:, :, tokens], value[:, :, tokens])
            stored = (keys[None, part.row, :, :held], values[None, part.row, :, :held])
            plain = part.offset == 0 and (window is None or held <= window)
            output[:, tokens] = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, tokens],
                *(stored if part.offset else own),
                attn_mask=None if plain else _band(part.offset, part.tokens, window, query.device),
                is_causal=plain,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            ).transpose(1, 2)
        return output

    def _refuse(self, mask: torch.Tensor | None, window: int | None, arguments: dict[str, Any]) -> None:
        """Refuse to compute another attention than the layer asks for: its answers would be wrong."""
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


def _flash_begins(segments: Sequence[Segment], decoder: Decoder) -> torch.Tensor | None:
    """Return where each packed prompt begins, if flash attention takes them all in one call."""
    if decoder.device.type != "cuda" or decoder.dtype.itemsize != 2 or any(part.offset for part in segments):
        return None
    begins = [part.begin for part in segments] + [segments[-1].begin + segments[-1].tokens]
    return torch.tensor(begins, dtype=torch.int32, device=decoder.device)


def _band(offset: int, tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which of the tokens held each of the latest ``tokens`` sees, bool, shape (tokens, held)."""
    at = torch.arange(offset, offset + tokens, device=device)[:, None]
    columns = torch.arange(offset + tokens, device=device)[None, :]
    seen = columns <= at
    return seen if window is None else seen & (columns > at - window)


def pack(lengths: Sequence[int], most_tokens: int) -> Iterator[list[tuple[int, int, int]]]:
    """
    Pack prompts into forward calls, splitting those that do not fit.

    Parameters
    ----------
    lengths
        Tokens of each prompt.
    most_tokens
        The most tokens of a call.

    Yields
    ------
    list of tuple of int
        Of each call, the pieces in it: the prompt's index, the piece's offset in it, and its tokens.
    """
    pieces: list[tuple[int, int, int]] = []
    room = most_tokens
    for index, length in enumerate(lengths):
        offset = 0
        while offset < length:
            if room == 0 or (pieces and offset == 0 and room < length <= most_tokens):
                yield pieces
                pieces, room = [], most_tokens
            tokens = min(length - offset, room)
            pieces.append((index, offset, tokens))
            offset, room = offset + tokens, room - tokens
    yield pieces


def neighbours(lengths: Sequence[int], call_tokens: float) -> list[int]:
    """
    Split rows into runs of neighbours so that padding and calls together cost least.

    Parameters
    ----------
    lengths
        Tokens of each row; at least one row.
    call_tokens
        What a call costs beyond its padded tokens, in tokens.

    Returns
    -------
    list of int
        The rows at which runs begin, and the number of rows.
    """
    rows = len(lengths)
    if call_tokens == float("inf"):
        return [0, rows]
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
