"""
The ways that BATON's experiments compare: static batches, PD, vector shaping, vector embedding on each tier.

Each serves the same queries and takes down the decode steps, the idle rows and when queries end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from engine_speed import Job, left_padded, static_generate
from gpu_decode import compiled
from transformers import DynamicCache

from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.store import Suspended
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.models.families import cache_argument

BASELINE = "static generate"
COMPILED = "vector embedding, planned and compiled"


@dataclass(slots=True)
class Record:
    """What a way did: steps and rows computed, when queries ended, what was held, what insertions took."""

    answers: list[list[int]]
    rows: int = 0
    idle_rows: int = 0
    tail_idle_rows: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    insertions: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    held: list[tuple[float, int, int, int]] = field(default_factory=list)
    """CPU seconds, tokens that queries hold, tokens allocated or padded, tokens answered so far."""
    origin: float = field(default_factory=time.process_time)

    @property
    def now(self) -> float:
        """CPU seconds since the start."""
        return time.process_time() - self.origin

    def note_held(self, held: int, kept: int) -> None:
        """Take note of the tokens that queries hold and of those kept for it."""
        self.held.append((self.now, held, kept, sum(len(answer) for answer in self.answers)))


Way = Callable[[Any, Sequence[Job], int], Record]


class Padded:
    """A padded batch on transformers' own cache, as the paper's static benchmark and its vector shaping."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache_argument = cache_argument(type(model))
        self.cache: Any = DynamicCache()
        self.mask = torch.zeros(0, 0, dtype=torch.long)
        self.positions = torch.zeros(0, dtype=torch.long)

    def forward(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Append columns of which only ``real`` count, and return the logits of all of them."""
        self.mask = torch.cat([self.mask, real], dim=1)
        positions = self.positions[:, None] + (real.cumsum(1) - 1).clamp(min=0)
        self.positions = self.positions + real.sum(1)
        logits: torch.Tensor = self.model(
            ids, attention_mask=self.mask, position_ids=positions, **{self.cache_argument: self.cache}
        ).logits
        return logits

    def release_front(self) -> None:
        """Drop the columns that are padding in all rows."""
        front = int(self.mask.argmax(1).min())
        if front:
            self.mask = self.mask[:, front:]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, front:], layer.values[:, :, front:]


@torch.inference_mode()
def run_static(model: Any, queries: Sequence[Job], slots: int, *, apart: bool = False) -> Record:
    """
    Run one full batch after the other, each until its longest answer ends.

    ``apart``: prompts of similar length are prefilled together beforehand and batches are drawn from the
    shuffled queries (the paper's PD); else every batch prefills its own prompts, padded together.
    """
    record = Record([[] for _ in queries])
    order = list(range(len(queries)))
    prefilled: dict[int, Suspended] = {}
    if apart:
        for index, suspended in prefill_apart(model, queries, order, record):
            prefilled[index] = suspended
        np.random.default_rng(0).shuffle(order)
    for begin in range(0, len(order), slots):
        chosen = order[begin : begin + slots]
        batch = Padded(model)
        ids, real = left_padded([queries[i].prompt for i in chosen])
        batch.positions = torch.zeros(len(chosen), dtype=torch.long)
        batch.mask = torch.zeros(len(chosen), 0, dtype=torch.long)
        if apart:
            embed(batch, [prefilled.pop(i) for i in chosen], real)
            tokens = torch.tensor([record.answers[i][0] for i in chosen])
        else:
            tokens = batch.forward(ids, real)[:, -1].argmax(-1)
            for i, token in zip(chosen, tokens.tolist(), strict=True):
                record.answers[i].append(token)
        for _ in range(max(queries[i].tokens for i in chosen) - 1):
            start = time.process_time()
            tokens = batch.forward(tokens[:, None], torch.ones(len(chosen), 1, dtype=torch.long))[
                :, -1
            ].argmax(-1)
            record.decode_seconds += time.process_time() - start
            note_step(record, queries, chosen, tokens.tolist(), width=batch.mask.shape[1], waiting=True)
    return record


def run_generate(model: Any, queries: Sequence[Job], slots: int) -> Record:
    """Run transformers' own ``generate`` on one full batch after the other: the paper's benchmark."""
    record = Record([[] for _ in queries])
    for begin in range(0, len(queries), slots):
        chosen = queries[begin : begin + slots]
        longest = max(query.tokens for query in chosen)
        start = time.process_time()
        record.answers[begin : begin + slots] = static_generate(model, chosen, slots)
        record.decode_seconds += time.process_time() - start
        record.decode_steps += longest - 1
        record.rows += (longest - 1) * len(chosen)
        record.idle_rows += sum(longest - query.tokens for query in chosen)
        record.finished += [record.now] * len(chosen)
    return record


def embed(batch: Padded, suspended: Sequence[Suspended], real: torch.Tensor) -> None:
    """Put prefilled keys and values into a padded batch, end-aligned."""
    width = real.shape[1]
    pad = torch.nn.functional.pad
    batch.mask, batch.positions = real, real.sum(1)
    for layer in range(len(suspended[0].keys)):
        keys = torch.stack([pad(each.keys[layer], (0, 0, width - each.tokens, 0)) for each in suspended])
        values = torch.stack([pad(each.values[layer], (0, 0, width - each.tokens, 0)) for each in suspended])
        batch.cache.update(keys, values, layer)


def prefill_apart(
    model: Any, queries: Sequence[Job], which: Sequence[int], record: Record, together: int = 8
) -> list[tuple[int, Suspended]]:
    """Prefill queries of similar length together and keep their keys and values on the host."""
    done = []
    ordered = sorted(which, key=lambda i: len(queries[i].prompt))
    for begin in range(0, len(ordered), together):
        group = ordered[begin : begin + together]
        batch = RaggedBatch(model, len(group), max(len(queries[i].prompt) for i in group))
        first = batch.prefill(list(range(len(group))), [queries[i].prompt for i in group])
        for slot, (i, token) in enumerate(zip(group, first, strict=True)):
            record.answers[i].append(token)
            done.append((i, batch.take(slot)))
    return done


def note_step(
    record: Record,
    queries: Sequence[Job],
    rows: Sequence[int],
    tokens: Sequence[int],
    *,
    width: int,
    waiting: bool,
) -> None:
    """Count a decode step and the rows of it that were computed for a query that is done."""
    record.decode_steps += 1
    held = 0
    for i, token in zip(rows, tokens, strict=True):
        record.rows += 1
        if len(record.answers[i]) < queries[i].tokens:
            record.answers[i].append(token)
            held += len(queries[i].prompt) + len(record.answers[i]) - 1
            if len(record.answers[i]) == queries[i].tokens:
                record.finished.append(record.now)
        else:
            record.idle_rows += 1
            record.tail_idle_rows += not waiting
    record.note_held(held, width * len(rows))


@torch.inference_mode()
def run_shaping(model: Any, queries: Sequence[Job], slots: int) -> Record:
    """
    BATON without decoupling (Section 4.1), equivalent to Orca: a new query is prefilled inside a decode step.

    The other rows are padded to its length meanwhile: that is the idle computation the paper avoids by
    embedding.
    """
    record = Record([[] for _ in queries])
    waiting = list(range(len(queries)))
    rows = [waiting.pop(0) for _ in range(min(slots, len(waiting)))]
    batch = Padded(model)
    width = max(len(queries[i].prompt) for i in rows)
    batch.positions = torch.zeros(len(rows), dtype=torch.long)
    batch.mask = torch.zeros(len(rows), 0, dtype=torch.long)
    ids, real = left_padded([queries[i].prompt for i in rows])
    tokens = batch.forward(ids, real)[:, -1].argmax(-1)
    fresh = dict(enumerate(rows))
    while True:
        for row, i in fresh.items():
            record.answers[i].append(int(tokens[row]))
        fresh = {}
        for row, i in enumerate(rows):
            if len(record.answers[i]) == queries[i].tokens and waiting:
                fresh[row] = rows[row] = waiting.pop(0)
        if not waiting and all(len(record.answers[i]) >= queries[i].tokens for i in rows) and not fresh:
            return record
        start = time.process_time()
        width = max((len(queries[i].prompt) for i in fresh.values()), default=1)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        real = torch.zeros(len(rows), width, dtype=torch.long)
        for row, i in enumerate(rows):
            new = queries[i].prompt if row in fresh else [int(tokens[row])]
            ids[row, width - len(new) :] = torch.tensor(new)
            real[row, width - len(new) :] = 1
            if row in fresh:
                # The query before left its columns: they become padding of the new one.
                batch.mask[row] = 0
                batch.positions[row] = 0
        if fresh:
            batch.release_front()
        tokens = batch.forward(ids, real)[:, -1].argmax(-1)
        record.decode_seconds += time.process_time() - start
        record.idle_rows += (width - 1) * (len(rows) - len(fresh))
        record.rows += (width - 1) * (len(rows) - len(fresh))
        others = [row for row in range(len(rows)) if row not in fresh]
        note_step(
            record,
            queries,
            [rows[row] for row in others],
            [int(tokens[row]) for row in others],
            width=batch.mask.shape[1],
            waiting=bool(waiting),
        )


def compiled_ragged(model: Any, slots: int, capacity: int) -> RunningBatch:
    """Return a ragged batch whose decode steps are compiled, as they can be on a GPU; kept for reuse."""
    key = id(model), slots, capacity
    if key not in _COMPILED:
        batch = RaggedBatch(model, slots, capacity, capture=compiled(lambda step: step))
        batch.warm_up()
        _COMPILED[key] = batch
    return _COMPILED[key]


_COMPILED: dict[tuple[int, int, int], RunningBatch] = {}


def embedding(make: Callable[[Any, int, int], RunningBatch], *, ahead: int = 8, planned: bool = False) -> Way:
    """
    Return BATON with decoupling on a tier: prefilled queries wait and are embedded in freed slots.

    ``planned``: the longest answer first, as batchbound plans a job whose lengths it knows.
    """

    def way(model: Any, queries: Sequence[Job], slots: int) -> Record:
        batch = make(model, slots, max(len(query.prompt) + query.tokens for query in queries))
        record = Record([[] for _ in queries])
        waiting = list(range(len(queries)))
        if planned:
            waiting.sort(key=lambda i: -queries[i].tokens)
        ready: list[tuple[int, Suspended]] = []
        free, running = list(range(slots)), dict[int, int]()
        while waiting or ready or running:
            while free and (waiting or ready):
                if not ready:
                    next_ones = [waiting.pop(0) for _ in range(min(ahead, len(waiting)))]
                    ready = prefill_apart(model, queries, next_ones, record)
                    ready.sort(key=lambda pair: next_ones.index(pair[0]))
                i, suspended = ready.pop(0)
                if len(record.answers[i]) == queries[i].tokens:
                    continue
                slot = free.pop()
                start = time.process_time()
                batch.insert(slot, suspended)
                record.insertions.append(time.process_time() - start)
                running[slot] = i
            if not running:
                continue
            start = time.process_time()
            decode_steps = min(queries[i].tokens - len(record.answers[i]) for i in running.values())
            held, padding = batch.kv_tokens, batch.padding_read
            tokens = batch.decode(decode_steps)
            padded = held + round((batch.padding_read - padding) / decode_steps)
            record.decode_seconds += time.process_time() - start
            record.decode_steps += decode_steps
            record.rows += decode_steps * len(running)
            record.note_held(held, padded)
            for slot, i in list(running.items()):
                record.answers[i] += tokens[:, slot].tolist()
                if len(record.answers[i]) == queries[i].tokens:
                    record.finished.append(record.now)
                    batch.release(slot)
                    free.append(slot)
                    del running[slot]
        return record

    return way


def run_pd(model: Any, queries: Sequence[Job], slots: int) -> Record:
    """Run the paper's PD: prefill decoupled, static batches."""
    return run_static(model, queries, slots, apart=True)


WAYS: dict[str, Way] = {
    BASELINE: run_generate,
    "static": run_static,
    "PD": run_pd,
    "vector shaping": run_shaping,
    "vector embedding, window": embedding(WindowBatch),
    "vector embedding, ragged": embedding(RaggedBatch),
    "vector embedding, planned": embedding(RaggedBatch, planned=True),
    COMPILED: embedding(compiled_ragged, planned=True),
}
