"""Decode steps captured on the device and replayed.

A decode step is the model's forward call, the choice of a token, and the update in place of tokens,
positions, counts and a ring of results. The ring is read back once per burst. Python runs while a decode step
is captured and never again, so a decode step depends on tensors alone.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..attention.decoder import Decoder
from ..models.sampling import TokenRule
from .batch import score
from .paged_store import PagedSlots

DecodeStep = Callable[[], Any]

Capture = Callable[[DecodeStep], DecodeStep]
"""Function that captures a decode step and returns its replay."""

MOST_STEPS = 256
"""Decode steps that keep their results on the device."""

LAG = 2
"""Decode steps launched before the host looks for an end."""

_ENDS = 64
"""Room for tokens that end a call."""

_WARM_UPS = 2
"""Decode steps before the capture, for the libraries' workspaces."""


def cuda_graph(step: DecodeStep) -> DecodeStep:
    """Capture a decode step in a CUDA graph."""
    stream, outside = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            step()
    outside.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    # A graph of before that is collected meanwhile, its memory freed, makes this one's capture fail.
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            step()
    except BaseException:
        # A capture that fails leaves its stream the current one, and torch's random numbers to the graph.
        torch.cuda.set_stream(outside)
        generator = torch.cuda.default_generators[outside.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        if collecting:
            gc.enable()
    return graph.replay


class CapturedSteps:
    """Captured steps for all, half and a quarter of the slots.

    Shapes: state (4, slots).
    """

    def __init__(
        self,
        decoder: Decoder,
        store: PagedSlots,
        sampler: TokenRule,
        state: torch.Tensor,
        capture: Capture,
    ) -> None:
        slots, device = state.shape[1], state.device
        self._decoder, self._store, self._sampler = decoder, store, sampler
        self._state, self._capture = state, capture
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        """While a decode step runs: the columns that each row holds, its new token's among them."""
        self.ended = False
        """True if a token ended the latest call."""
        self.size = 0
        """Rows of the latest call's decode steps."""
        self._sizes = sorted({slots, -(-slots // 2), -(-slots // 4)})
        self._replays: dict[int, DecodeStep] = {}
        self._columns = 0
        self._moving = torch.zeros(slots, dtype=torch.int64, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(MOST_STEPS, slots, dtype=torch.int64, device=device)
        self._scores = torch.zeros(MOST_STEPS, slots, dtype=decoder.dtype, device=device)
        self._until: frozenset[int] = frozenset()
        self._ends = torch.full((_ENDS,), -1, dtype=torch.int64, device=device)
        self._ended = torch.zeros(MOST_STEPS, dtype=torch.bool, device=device)
        on_gpu = device.type == "cuda"
        self._lag = LAG if on_gpu else 0
        self._ended_on_host = torch.zeros(MOST_STEPS, dtype=torch.bool, pin_memory=on_gpu)
        self._copied: list[Any] = [torch.Event(device) for _ in range(MOST_STEPS)] if on_gpu else []

    def run(self, decode_steps: int, until: frozenset[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run decode steps over the rows in use.

        Shapes: returned (decode steps, rows).
        """
        store, rows = self._store, self._store.rows
        self.ended = False
        decode_steps = store.reserve_steps(decode_steps)
        size = next(size for size in self._sizes if size >= rows)
        # Rows that fill a captured size up compute a token at column 0 of a free row, and stay there.
        self._state[:, rows:size] = 0
        self._look_for(until)
        replay = self._replay(size)
        self._moving[:rows] = 1
        self._moving[rows:] = 0
        self._cursor.zero_()
        done = self._launch(replay, decode_steps, until)
        self.size = size
        store.end_steps(done)
        return self._tokens[:done, :rows], self._scores[:done, :rows]

    def _launch(self, replay: DecodeStep, decode_steps: int, until: frozenset[int]) -> int:
        """Launch decode steps ahead of their results; return how many ran."""
        if not until:
            for _ in range(decode_steps):
                replay()
            return decode_steps
        launched = 0
        while launched < decode_steps and not (
            launched > self._lag and self._has_ended(launched - self._lag - 1)
        ):
            replay()
            self._ended_on_host[launched].copy_(self._ended[launched], non_blocking=True)
            if self._copied:
                self._copied[launched].record()
            launched += 1
        # Decode steps launched beyond the end count: only what the row that ended gave in them is of no use.
        self.ended = any(self._has_ended(at) for at in range(launched))
        return launched

    def _has_ended(self, step: int) -> bool:
        if self._copied:
            self._copied[step].synchronize()
        return bool(self._ended_on_host[step])

    def _look_for(self, until: frozenset[int]) -> None:
        if until == self._until:
            return
        if len(until) > len(self._ends):
            self._replays.clear()
            self._ends = self._ends.new_empty(len(until))
        self._ends.fill_(-1)
        self._ends[: len(until)] = torch.tensor(sorted(until), device=self._ends.device)
        self._until = until

    def _replay(self, size: int) -> DecodeStep:
        if self._columns != self._store.columns:
            # Wider buffers are other tensors.
            self._replays.clear()
            self._columns = self._store.columns
        if size not in self._replays:
            before = self._state.clone()
            self._moving.zero_()
            self._cursor.zero_()
            try:
                self._replays[size] = self._capture(partial(self._step, size))
            finally:
                self._state.copy_(before)
                # The capture wrote its own state there.
                self._store.begin_steps(self._state[1])
        return self._replays[size]

    def _step(self, size: int) -> None:
        tokens, positions, streams, emitted = self._state[:, :size].unbind()
        self._store.begin_steps(positions)
        self.lengths = positions + 1
        logits = self._decoder.forward(self._store, tokens[:, None], positions[:, None])
        chosen = self._sampler.choose(logits, streams, emitted)
        scores = score(self._sampler, logits, chosen).to(self._scores.dtype)
        self._tokens[:, :size].index_copy_(0, self._cursor, chosen[None])
        self._scores[:, :size].index_copy_(0, self._cursor, scores[None])
        moving = self._moving[:size]
        ended = ((chosen[:, None] == self._ends).any(dim=1) & (moving > 0)).any()
        self._ended.index_copy_(0, self._cursor, ended[None])
        tokens.copy_(chosen)
        positions += moving
        emitted += moving
        self._cursor += 1
