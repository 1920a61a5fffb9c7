"""
BATON's experiments at the scale of this machine, beside the figures it published.

The paper (Section 5) runs Llama-2-7B on an A6000 and a 4090 over two made-up data sets: 120 queries (long
input and short output, short input and long output, short and short, 1:1:2) and 30 short queries. Here the
queries have the same shape with lengths scaled down, a random Llama takes the place of the 7B model, answers
have pinned lengths, and CPU seconds are counted. Absolute seconds say nothing about the paper's machine;
ratios between ways on one machine do.

The 30 queries come in three sets, for the paper does not give their lengths. ``short``: uniform in the range
it states, our choice. ``stated`` and ``free``: inferred from its ten completion times, within that range or
without one (``baton_lengths.py`` prints how well they explain them). Inputs are uniform in all three.

Run: ``python benchmarks/baton.py --repeats 1`` (a few minutes on one CPU thread)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from baton_lengths import QUERIES, RANGES, TABLE_2, TRIES, any_order, reconstruct
from baton_ways import BASELINE, COMPILED, WAYS
from engine_speed import Job, make_model

from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch

SHORT = ("short", *RANGES)
"""The sets of 30 short queries."""

TABLE_1 = {
    4: {"static generate": 21_901, "PD": 21_781, "vector shaping": 20_549, "vector embedding": 11_771},
    8: {"static generate": 6_619, "PD": 6_577, "vector shaping": 3_424, "vector embedding": 2_654},
}
"""BATON, Table 1: seconds by batch size, on the 120 queries (twice as long at batch size 4)."""


def mixed_queries(vocabulary: int, scale: float, seed: int = 0) -> list[Job]:
    """Return the 120 queries: long is about 4,000 words, short a few dozen to 400, all times ``scale``."""
    rng = np.random.default_rng(seed)
    kinds = rng.permutation([0] * 30 + [1] * 30 + [2] * 60)

    def length(long: bool) -> int:
        words = rng.integers(3_600, 4_401) if long else rng.integers(24, 401)
        return max(2, round(float(words) * scale))

    return [Job(rng.integers(0, vocabulary, length(kind == 0)).tolist(), length(kind == 1)) for kind in kinds]


def short_queries(vocabulary: int, scale: float, seed: int = 0) -> list[Job]:
    """Return the 30 queries: input and answer of a few dozen to 200 words, times ``scale``."""
    rng = np.random.default_rng(seed)

    def length() -> int:
        return max(2, round(float(rng.integers(24, 201)) * scale))

    return [Job(rng.integers(0, vocabulary, length()).tolist(), length()) for _ in range(QUERIES)]


def reconstructed_queries(vocabulary: int, scale: float, name: str, tries: int = TRIES) -> list[Job]:
    """Return the 30 queries with answers as the published times tell them, times ``scale``."""
    lengths = reconstruct(*RANGES[name], tries=tries).lengths
    return [
        Job(query.prompt, max(2, round(tokens * scale)))
        for query, tokens in zip(short_queries(vocabulary, scale), lengths, strict=True)
    ]


def preemption_seconds(model: Any, tier: type[RunningBatch], prompt: int = 200, slots: int = 8) -> float:
    """Return the median CPU seconds to move a running query to the host and embed it again (Section 4.3)."""
    rng = np.random.default_rng(0)
    batch = tier(model, slots, prompt + 200)
    vocabulary = model.config.vocab_size
    batch.prefill(list(range(slots)), [rng.integers(0, vocabulary, prompt).tolist() for _ in range(slots)])
    seconds = []
    for turn in range(20):
        batch.decode(1)
        start = time.process_time()
        batch.insert(turn % slots, batch.take(turn % slots))
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def measure(
    model: Any, queries: Sequence[Job], slots: int, ways: Sequence[str], repeats: int
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
                "step_ms": 1e3 * record.decode_seconds / max(1, record.decode_steps),
                "kv_used": float(
                    np.mean([held / max(1, kept) for _, held, kept, _ in record.held] or [np.nan])
                ),
                "finished_at": [round(at, 4) for at in record.finished],
                "held": record.held,
                "decode_steps": record.decode_steps,
            }
    for name in ways:
        figures[name]["cpu_seconds"] = statistics.median(seconds[name])
    return figures


def show(title: str, figures: dict[str, dict[str, Any]], published: dict[str, float]) -> None:
    """Print a table of one batch size."""
    print(f"\n{title}")
    print(
        f"{'way':40s} {'CPU s':>8s} {'speed-up':>9s} {'paper':>7s} {'decode_steps':>7s} {'step ms':>8s}"
        f" {'idle':>7s} {'before tail':>12s} {'KV used':>8s} {'insert ms':>10s} {'of a step':>10s}"
    )
    static = figures[BASELINE]["cpu_seconds"]
    for name, row in figures.items():
        paper = published.get(name.split(",")[0])
        of_step = row["insertion_ms"] / row["step_ms"] if row["step_ms"] else 0.0
        print(
            f"{name:40s} {row['cpu_seconds']:8.2f} {static / row['cpu_seconds']:8.2f}x"
            f" {'' if paper is None else f'{paper:.2f}x':>7s} {row['decode_steps']:7d} {row['step_ms']:8.2f}"
            f" {row['idle']:7.1%} {row['idle_outside_the_tail']:12.1%} {row['kv_used']:8.1%}"
            f" {row['insertion_ms']:10.3f} {of_step:10.1%}"
        )


def draw(written: Sequence[dict[str, Any]], path: str) -> None:
    """Draw completed queries, tokens answered and keys and values kept over time: BATON's Figures 5 to 7."""
    from matplotlib.figure import Figure

    shown = [entry for entry in written if entry["set"] in SHORT] or list(written)
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
        published = TABLE_2.get(entry["slots"]) if entry["set"] in SHORT else None
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
    parser.add_argument("--set", nargs="*", choices=(*SHORT, "mixed"), default=(*SHORT, "mixed"))
    parser.add_argument("--slots", type=int, nargs="*", default=(2, 4, 6, 8, 10))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--scale-mixed", type=float, default=0.05, help="of the 120 queries' lengths")
    parser.add_argument("--scale-short", type=float, default=0.5, help="of the 30 queries' lengths")
    parser.add_argument("--json", metavar="FILE", help="write all figures with their curves there")
    parser.add_argument("--picture", metavar="FILE", help="draw the curves of Figures 5 to 7 there")
    parser.add_argument("--small", action="store_true", help="a model of 0.2 million weights")
    parser.add_argument("--tries", type=int, default=TRIES, help="lists of lengths, where they are inferred")
    parser.add_argument(
        "--compile", action="store_true", help="also compile whole decode steps (minutes, once)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model = make_model(arguments.small, positions=8192)
    words = model.config.vocab_size
    ways = [BASELINE, *(way for way in arguments.ways if way not in (BASELINE, COMPILED))]
    measure(model, short_queries(words, 0.1), 2, ways, 1)  # warm up
    if arguments.compile:
        ways.append(COMPILED)
    written = []
    for name in arguments.set:
        if name == "mixed":
            queries = mixed_queries(words, arguments.scale_mixed)
        elif name == "short":
            queries = short_queries(words, arguments.scale_short)
        else:
            queries = reconstructed_queries(words, arguments.scale_short, name, arguments.tries)
        for slots in arguments.slots:
            figures = measure(model, queries, slots, ways, arguments.repeats)
            if name in SHORT:
                before, after = TABLE_2.get(slots, (0.0, 1.0))
                published = {BASELINE: 1.0, "vector embedding": before / after} if before else {}
            else:
                table = TABLE_1.get(slots, {})
                published = {way: table[BASELINE] / seconds for way, seconds in table.items()}
            show(f"{len(queries)} {name} queries, batch size {slots}", figures, published)
            most = any_order([query.tokens for query in queries], slots)
            print(f"at most {most:.2f}x by any order, if every decode step took the same time")
            written.append({"set": name, "slots": slots, "ways": figures})
    for tier in (WindowBatch, RaggedBatch):
        milliseconds = 1e3 * preemption_seconds(model, tier)
        print(f"preemption, {tier.tier}: a query of 200 tokens to the host and back in {milliseconds:.2f} ms")
    if arguments.picture:
        draw(written, arguments.picture)
    if arguments.json:
        with open(arguments.json, "w") as stream:
            json.dump(written, stream)


if __name__ == "__main__":
    main()
