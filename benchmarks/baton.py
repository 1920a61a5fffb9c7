"""
BATON's experiments at the scale of this machine, beside the figures it published.

The paper (Section 5) runs Llama-2-7B on an A6000 and a 4090 over two made-up data sets: 120 queries (long
input and short output, short input and long output, short and short, 1:1:2) and 30 short queries. Here the
queries have the same shape with lengths scaled down, a random Llama takes the place of the 7B model, answers
have pinned lengths, and CPU seconds are counted. Absolute seconds say nothing about the paper's machine;
ratios between ways on one machine do.

Run: ``python benchmarks/baton.py --repeats 1`` (a few minutes on one CPU thread)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from transformers import AutoConfig, DynamicCache

from batchbound.executor.batch import WindowBatch
from batchbound.executor.captured import compiled
from batchbound.executor.model_source import build_random
from batchbound.executor.ragged import RaggedBatch
from batchbound.executor.running import RunningBatch
from batchbound.executor.slab import SlabBatch
from batchbound.executor.store import Suspended

BASELINE = "static generate"
COMPILED = "vector embedding, planned and compiled"

TABLE_1 = {
    4: {"static generate": 21_901, "PD": 21_781, "vector shaping": 20_549, "vector embedding": 11_771},
    8: {"static generate": 6_619, "PD": 6_577, "vector shaping": 3_424, "vector embedding": 2_654},
}
"""BATON, Table 1: seconds by batch size, on the 120 queries (twice as long at batch size 4)."""
TABLE_2 = {2: (161.77, 83.43), 4: (92.68, 49.61), 6: (61.70, 37.25), 8: (50.07, 31.08), 10: (40.45, 30.99)}
"""BATON, Table 2: seconds of the static benchmark and of BATON by batch size, on the 30 queries."""


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt and the number of tokens to answer it with."""

    prompt: list[int]
    tokens: int


@dataclass(slots=True)
class Record:
    """What a way did: rounds and rows computed, when queries ended, what was held, what insertions took."""

    answers: list[list[int]]
    rows: int = 0
    idle_rows: int = 0
    tail_idle_rows: int = 0
    decode_seconds: float = 0.0
    rounds: int = 0
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


Way = Callable[[Any, Sequence[Query], int], Record]


def mixed_queries(vocabulary: int, scale: float, seed: int = 0) -> list[Query]:
    """Return the 120 queries: long is about 4,000 words, short a few dozen to 400, all times ``scale``."""
    rng = np.random.default_rng(seed)
    kinds = rng.permutation([0] * 30 + [1] * 30 + [2] * 60)

    def length(long: bool) -> int:
        words = rng.integers(3_600, 4_401) if long else rng.integers(24, 401)
        return max(2, round(float(words) * scale))

    return [
        Query(rng.integers(0, vocabulary, length(kind == 0)).tolist(), length(kind == 1)) for kind in kinds
    ]


def short_queries(vocabulary: int, scale: float, seed: int = 0) -> list[Query]:
    """Return the 30 queries: input and answer of a few dozen to 200 words, times ``scale``."""
    rng = np.random.default_rng(seed)

    def length() -> int:
        return max(2, round(float(rng.integers(24, 201)) * scale))

    return [Query(rng.integers(0, vocabulary, length()).tolist(), length()) for _ in range(30)]


def left_padded(prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts end-aligned, and 1 where they are, each of shape (prompts, longest)."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


class Padded:
    """A padded batch on transformers' own cache, as the paper's static benchmark and its vector shaping."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = DynamicCache()
        self.mask = torch.zeros(0, 0, dtype=torch.long)
        self.positions = torch.zeros(0, dtype=torch.long)

    def forward(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Append columns of which only ``real`` count, and return the logits of all of them."""
        self.mask = torch.cat([self.mask, real], dim=1)
        positions = self.positions[:, None] + (real.cumsum(1) - 1).clamp(min=0)
        self.positions = self.positions + real.sum(1)
        logits: torch.Tensor = self.model(
            ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache
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
def run_static(model: Any, queries: Sequence[Query], slots: int, *, apart: bool = False) -> Record:
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
            note_round(record, queries, chosen, tokens.tolist(), width=batch.mask.shape[1], waiting=True)
    return record


def run_generate(model: Any, queries: Sequence[Query], slots: int) -> Record:
    """Run transformers' own ``generate`` on one full batch after the other: the paper's benchmark."""
    record = Record([[] for _ in queries])
    for begin in range(0, len(queries), slots):
        chosen = range(begin, min(begin + slots, len(queries)))
        width = max(len(queries[i].prompt) for i in chosen)
        longest = max(queries[i].tokens for i in chosen)
        ids, mask = left_padded([queries[i].prompt for i in chosen])
        start = time.process_time()
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
        record.decode_seconds += time.process_time() - start
        record.rounds += longest - 1
        record.rows += (longest - 1) * len(chosen)
        for row, i in enumerate(chosen):
            record.answers[i] = out[row, width : width + queries[i].tokens].tolist()
            record.idle_rows += longest - queries[i].tokens
            record.finished.append(record.now)
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
    model: Any, queries: Sequence[Query], which: Sequence[int], record: Record, together: int = 8
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


def note_round(
    record: Record,
    queries: Sequence[Query],
    rows: Sequence[int],
    tokens: Sequence[int],
    *,
    width: int,
    waiting: bool,
) -> None:
    """Count a round and the rows of it that were computed for a query that is done."""
    record.rounds += 1
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
def run_shaping(model: Any, queries: Sequence[Query], slots: int) -> Record:
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
        note_round(
            record,
            queries,
            [rows[row] for row in others],
            [int(tokens[row]) for row in others],
            width=batch.mask.shape[1],
            waiting=bool(waiting),
        )


def compiled_ragged(model: Any, slots: int, capacity: int) -> RunningBatch:
    """Return a ragged batch whose rounds are compiled, as they can be on a GPU; kept for reuse."""
    key = id(model), slots, capacity
    if key not in _COMPILED:
        batch = RaggedBatch(model, slots, capacity, capture=compiled(lambda round_: round_))
        batch.warm_up()
        _COMPILED[key] = batch
    return _COMPILED[key]


_COMPILED: dict[tuple[int, int, int], RunningBatch] = {}


def embedding(make: Callable[[Any, int, int], RunningBatch], *, ahead: int = 8, planned: bool = False) -> Way:
    """
    Return BATON with decoupling on a tier: prefilled queries wait and are embedded in freed slots.

    ``planned``: the longest answer first, as batchbound plans a job whose lengths it knows.
    """

    def way(model: Any, queries: Sequence[Query], slots: int) -> Record:
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
            rounds = min(queries[i].tokens - len(record.answers[i]) for i in running.values())
            held, padded = batch.kv_tokens, batch.padded_kv_tokens
            tokens = batch.decode(rounds)
            record.decode_seconds += time.process_time() - start
            record.rounds += rounds
            record.rows += rounds * len(running)
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


def run_pd(model: Any, queries: Sequence[Query], slots: int) -> Record:
    """Run the paper's PD: prefill decoupled, static batches."""
    return run_static(model, queries, slots, apart=True)


WAYS: dict[str, Way] = {
    BASELINE: run_generate,
    "static": run_static,
    "PD": run_pd,
    "vector shaping": run_shaping,
    "vector embedding, window": embedding(WindowBatch),
    "vector embedding, slab": embedding(SlabBatch),
    "vector embedding, ragged": embedding(RaggedBatch),
    "vector embedding, planned": embedding(RaggedBatch, planned=True),
    COMPILED: embedding(compiled_ragged, planned=True),
}


def preemption_seconds(model: Any, tier: type[RunningBatch], prompt: int = 200, slots: int = 8) -> float:
    """Return the median CPU seconds to move a running query to the host and embed it again (Section 4.3)."""
    rng = np.random.default_rng(0)
    batch = tier(model, slots, prompt + 200)
    batch.prefill(list(range(slots)), [rng.integers(0, 4096, prompt).tolist() for _ in range(slots)])
    seconds = []
    for turn in range(20):
        batch.decode(1)
        start = time.process_time()
        batch.insert(turn % slots, batch.take(turn % slots))
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def make_model() -> Any:
    """Build a random Llama of about 7 million weights."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    return build_random(config, seed=0).eval()


def measure(
    model: Any, queries: Sequence[Query], slots: int, ways: Sequence[str], repeats: int
) -> dict[str, dict[str, Any]]:
    """Run the ways in turn and return the medians of their figures, with the curves of the last repeat."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    figures: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for name in ways:
            record = WAYS[name](model, queries, slots)
            seconds[name].append(record.now)
            if [len(answer) for answer in record.answers] != [query.tokens for query in queries]:
                raise RuntimeError(f"{name} gave answers of other lengths than asked for")
            figures[name] = {
                "idle": record.idle_rows / max(1, record.rows),
                "idle_outside_the_tail": (record.idle_rows - record.tail_idle_rows) / max(1, record.rows),
                "insertion_ms": 1e3 * statistics.median(record.insertions or [0.0]),
                "step_ms": 1e3 * record.decode_seconds / max(1, record.rounds),
                "kv_used": float(
                    np.mean([held / max(1, kept) for _, held, kept, _ in record.held] or [np.nan])
                ),
                "finished_at": [round(at, 4) for at in record.finished],
                "held": record.held,
                "rounds": record.rounds,
            }
    for name in ways:
        figures[name]["cpu_seconds"] = statistics.median(seconds[name])
    return figures


def show(title: str, figures: dict[str, dict[str, Any]], published: dict[str, float]) -> None:
    """Print a table of one batch size."""
    print(f"\n{title}")
    print(
        f"{'way':40s} {'CPU s':>8s} {'speed-up':>9s} {'paper':>7s} {'rounds':>7s} {'step ms':>8s}"
        f" {'idle':>7s} {'before tail':>12s} {'KV used':>8s} {'insert ms':>10s} {'of a step':>10s}"
    )
    static = figures[BASELINE]["cpu_seconds"]
    for name, row in figures.items():
        paper = published.get(name.split(",")[0])
        of_step = row["insertion_ms"] / row["step_ms"] if row["step_ms"] else 0.0
        print(
            f"{name:40s} {row['cpu_seconds']:8.2f} {static / row['cpu_seconds']:8.2f}x"
            f" {'' if paper is None else f'{paper:.2f}x':>7s} {row['rounds']:7d} {row['step_ms']:8.2f}"
            f" {row['idle']:7.1%} {row['idle_outside_the_tail']:12.1%} {row['kv_used']:8.1%}"
            f" {row['insertion_ms']:10.3f} {of_step:10.1%}"
        )


def ceiling(queries: Sequence[Query], slots: int) -> float:
    """
    Return the most that any schedule can gain where every round costs the same, as it does on a GPU.

    Rounds of static batches in the order of the queries, over those that their answers need at least.
    """
    tokens = [query.tokens for query in queries]
    static = sum(max(tokens[begin : begin + slots]) for begin in range(0, len(tokens), slots))
    return static / max(max(tokens), sum(tokens) / slots)


def draw(written: Sequence[dict[str, Any]], path: str) -> None:
    """Draw completed queries, tokens answered and keys and values kept over time: BATON's Figures 5 to 7."""
    from matplotlib.figure import Figure

    shown = [entry for entry in written if entry["set"] == "short"] or list(written)
    figure = Figure(figsize=(3.4 * len(shown), 8.5), layout="constrained")
    axes = figure.subplots(3, len(shown), squeeze=False)
    ways = (("static", "C1"), ("vector embedding, window", "C2"), ("vector embedding, ragged", "C0"))
    for column, entry in enumerate(shown):
        rows = entry["ways"]
        whole = rows.get("static", rows[BASELINE])["cpu_seconds"]
        for name, color in ways:
            if name not in rows:
                continue
            finished, held = sorted(rows[name]["finished_at"]), np.array(rows[name]["held"], dtype=float)
            axes[0, column].step([0, *finished], range(len(finished) + 1), color, where="post", label=name)
            axes[1, column].plot(held[:, 0], held[:, 3], color, label=name)
            axes[2, column].plot(held[:, 0], held[:, 2], color, label=name)
        published = TABLE_2.get(entry["slots"]) if entry["set"] == "short" else None
        if published:
            end = whole * published[1] / published[0]
            axes[0, column].axvline(end, color="0.5", ls=":", label="the paper's BATON ends")
        axes[0, column].set_title(f"batch size {entry['slots']}")
        axes[2, column].set_xlabel("CPU seconds")
    for row, label in enumerate(
        ("queries done (Figure 5)", "tokens answered (Figure 6)", "KV tokens kept (Figure 7)")
    ):
        axes[row, 0].set_ylabel(label)
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--set", nargs="*", choices=("mixed", "short"), default=("short", "mixed"))
    parser.add_argument("--slots", type=int, nargs="*", default=(2, 4, 6, 8, 10))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--scale-mixed", type=float, default=0.05, help="of the 120 queries' lengths")
    parser.add_argument("--scale-short", type=float, default=0.5, help="of the 30 queries' lengths")
    parser.add_argument("--json", metavar="FILE", help="write all figures with their curves there")
    parser.add_argument("--picture", metavar="FILE", help="draw the curves of Figures 5 to 7 there")
    parser.add_argument("--compile", action="store_true", help="also compile whole rounds (minutes, once)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model = make_model()
    ways = [BASELINE, *(way for way in arguments.ways if way not in (BASELINE, COMPILED))]
    measure(model, short_queries(4096, 0.1), 2, ways, 1)  # warm up
    if arguments.compile:
        ways.append(COMPILED)
    written = []
    for name in arguments.set:
        queries = (
            short_queries(4096, arguments.scale_short)
            if name == "short"
            else mixed_queries(4096, arguments.scale_mixed)
        )
        for slots in arguments.slots:
            figures = measure(model, queries, slots, ways, arguments.repeats)
            if name == "short":
                before, after = TABLE_2.get(slots, (0.0, 1.0))
                published = {BASELINE: 1.0, "vector embedding": before / after} if before else {}
            else:
                table = TABLE_1.get(slots, {})
                published = {way: table[BASELINE] / seconds for way, seconds in table.items()}
            show(f"{len(queries)} {name} queries, batch size {slots}", figures, published)
            print(f"at most {ceiling(queries, slots):.2f}x by any order, if every round took the same time")
            written.append({"set": name, "slots": slots, "ways": figures})
    for tier in (WindowBatch, SlabBatch, RaggedBatch):
        milliseconds = 1e3 * preemption_seconds(model, tier)
        print(f"preemption, {tier.tier}: a query of 200 tokens to the host and back in {milliseconds:.2f} ms")
    if arguments.picture:
        draw(written, arguments.picture)
    if arguments.json:
        with open(arguments.json, "w") as stream:
            json.dump(written, stream)


if __name__ == "__main__":
    main()
