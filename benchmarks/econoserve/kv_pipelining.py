"""
Lent memory on a real model: EconoServe and the pipelined scheduler beside block- and exact allocation.

A tiny Llama in float64 serves Alpaca's lengths with predictions as wrong as the paper reports its own (or
log-normal about the truth, as often too short), its keys and values in a memory of half of slots x longest.
Every answer is compared with the model's own, given alone. "Held" is the share of the memory that tokens are
in, "useful" without those that are thrown away later to be computed anew; over all iterations, and over those
in which requests are queued. Without a model (``--seeds``) also what each part that is kept free
costs.

Run: ``python benchmarks/econoserve/kv_pipelining.py`` (see --help).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from prediction import PredictorErrors

from batchbound.data.arrays import IntArray
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.models.source import load_model
from batchbound.executor.serving.engine import ServingEngine, own_answer
from batchbound.executor.serving.regions import PlacedLedger
from batchbound.heuristics.serving.device import DeviceBatch, ServingDevice
from batchbound.heuristics.serving.econoserve.sizes import EconoServeSizes
from batchbound.heuristics.serving.registry import BLOCK_ALLOCATION, ServingOptions, serving_policy
from batchbound.heuristics.serving.simulation import WAITING, ServingRun, serve_on_device

ERRORS = PredictorErrors(padding=0.10, accuracy=0.775, over=0.0262, under=0.0930)
PAPER = EconoServeSizes(padding=0.10, reserved=0.02, buffer=0.15)
"""Alpaca's, as benchmarks/econoserve has them."""
PARTS = {
    "no reserve": replace(PAPER, reserved=0.0),
    "no padding": replace(PAPER, padding=0.0),
    "no buffer": replace(PAPER, buffer=0.0),
    "none of them": replace(PAPER, reserved=0.0, padding=0.0, buffer=0.0),
}
"""What the pipelined scheduler keeps free, a part at a time."""
SYSTEMS = {
    "vllm": ("vllm", PAPER),
    "sarathi": ("sarathi", PAPER),
    "multires": ("multires", PAPER),
    "sync-coupled": ("sync-coupled", PAPER),
    "econoserve-sdo": ("econoserve-sdo", PAPER),
    "econoserve": ("econoserve", PAPER),
    "pipelined": ("pipelined", PAPER),
    "half the sizes": ("pipelined", replace(PAPER, padding=0.05, buffer=0.075)),
    "no pad, no buffer": ("pipelined", replace(PAPER, padding=0.0, buffer=0.0)),
}


GRID = {
    "held": ("held", 8), "useful": ("useful", 8), "held_while_waiting": ("queued:", 9),
    "useful_while_waiting": ("useful", 8), "promised": ("promised", 9), "iterations": ("iter", 7),
    "waiting": ("queued", 7), "stopped": ("stopped", 8),
}  # fmt: skip
"""Figures printed without a model, each with its head and width."""


@dataclass(slots=True)
class Recorder:
    """A device that keeps what every request held, and who came back from the host."""

    device: ServingDevice
    held: list[IntArray] = field(default_factory=list)
    back: list[Sequence[int]] = field(default_factory=list)

    def run(self, work: DeviceBatch) -> float:
        """Return the seconds the device took."""
        self.held.append(work.held.copy())
        self.back.append(tuple(work.swap_in))
        return self.device.run(work)

    def useful(self) -> IntArray:
        """Return the tokens held each iteration that were not computed anew later, shape (iterations,)."""
        held = np.array(self.held)
        begins = (held > 0) & (np.vstack((np.zeros_like(held[:1]), held[:-1])) == 0)
        for iteration, requests in enumerate(self.back):
            begins[iteration, list(requests)] = False
        # Whatever a request held before it last began with nothing was thrown away.
        last = np.where(begins, np.arange(len(held))[:, None], -1).max(0)
        return np.asarray((held * (np.arange(len(held))[:, None] >= last)).sum(1))


def job(requests: int, seed: int, errors: str) -> tuple[Workload, IntArray]:
    """Return requests that are all there, none longer than the model's positions, and their predictions."""
    drawn = generate("alpaca", seed, requests)
    workload = replace(
        drawn,
        arrival=np.zeros(requests),
        deadline=np.full(requests, np.inf),
        input_tokens=np.minimum(drawn.input_tokens, 128),
    )
    draw = ERRORS.ratios if errors == "reported" else ERRORS.log_normal
    guess = np.rint(workload.output_tokens / draw(np.random.default_rng((seed, 7)), requests))
    return workload, np.maximum(1, guess).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Clock:
    """A device whose every iteration takes a second."""

    def run(self, work: DeviceBatch) -> float:
        """Return the second."""
        return 1.0


def grid(options: argparse.Namespace) -> None:
    """Print shares of the memory without a model, means over the seeds: all depends on lengths alone."""
    parts = {label: ("pipelined", sizes) for label, sizes in PARTS.items()}
    for block in options.blocks:
        print(f"\n{options.slots} slots, blocks of {block}")
        print("".join(f"{name:>{width}}" for name, width in (("", 26), *GRID.values())))
        for label, (system, sizes) in (
            SYSTEMS | parts | {"none, lengths known": parts["none of them"]}
        ).items():
            rows = []
            for seed in range(options.seeds):
                workload, predicted = job(options.requests, seed, options.errors)
                if label.endswith("known"):
                    predicted = workload.output_tokens
                longest = int((workload.input_tokens + workload.output_tokens).max())
                capacity = int(options.share * options.slots * longest)
                ledger = PlacedLedger(capacity, len(workload), block, paged=system in BLOCK_ALLOCATION)
                recorder = Recorder(Clock())
                policy = serving_policy(system, ServingOptions(longest, 1024, sizes))
                run = serve_on_device(workload, policy, recorder, ledger, predicted=predicted)
                rows.append(figures(run, recorder.useful(), 0, 0))
            means = {name: np.mean([row[name] for row in rows]) for name in GRID}
            cells = (f"{mean:{GRID[name][1]}{'.0f' if mean >= 2 else '.3f'}}" for name, mean in means.items())
            print(f"{label:26}{''.join(cells)}", flush=True)


def figures(run: ServingRun, useful: IntArray, wrong: int, moved: int) -> dict[str, float]:
    """Return what is printed of a run."""
    held = run.held / run.capacity
    waiting = run.start <= (run.workload.arrival + run.spent[:, WAITING]).max()
    return {
        "wrong": wrong,
        "iterations": len(held),
        "waiting": int(waiting.sum()),
        "held": float(held.mean()),
        "useful": float((useful / run.capacity).mean()),
        "held_while_waiting": float(held[waiting].mean()),
        "useful_while_waiting": float((useful / run.capacity)[waiting].mean()),
        "promised": float((run.promised / run.capacity)[waiting].mean()),
        "stopped": int(run.preempted.sum()),
        "lent": run.lent_tokens,
        "moved": moved,
        "seconds": float(run.seconds.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny:llama:0")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.5, help="of slots x longest that the memory holds")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32, 64, 256], help="tokens of a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--errors", choices=("reported", "log-normal"), default="reported", help="of predicted lengths"
    )
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--seeds", type=int, default=0, help="without a model, means over so many seeds")
    options = parser.parse_args()
    if options.seeds:
        grid(options)
        return
    workload, predicted = job(options.requests, options.seed, options.errors)
    longest = int((workload.input_tokens + workload.output_tokens).max())
    capacity = int(options.share * options.slots * longest)
    model = load_model(options.model, dtype=options.dtype)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = Prompts.random(workload, vocabulary, options.seed).tokens
    begun = time.process_time()
    lengths = workload.output_tokens.tolist()
    own = [own_answer(model, prompt, tokens) for prompt, tokens in zip(prompts, lengths, strict=True)]
    print(
        f"{options.requests} requests, longest {longest}; memory {capacity} tokens, {options.share:.0%} of"
        f" {options.slots} x {longest}; each alone: {time.process_time() - begun:.1f} CPU s"
    )
    found: dict[str, dict[str, float]] = {}
    for block in options.blocks:
        print(
            f"\nblocks of {block}\n{'':18}{'wrong':>6}{'iter':>6}{'KV held':>9}{'useful':>8}{'queued:':>9}"
            f"{'useful':>8}{'promised':>9}{'stopped':>8}{'lent':>7}{'moved':>7}{'CPU s':>7}"
        )
        for label, (system, sizes) in SYSTEMS.items():
            begun = time.process_time()
            ledger = PlacedLedger(capacity, len(workload), block, paged=system in BLOCK_ALLOCATION)
            engine = ServingEngine(model, prompts, ledger)
            recorder = Recorder(engine)
            policy = serving_policy(system, ServingOptions(longest, 1024, sizes))
            run = serve_on_device(workload, policy, recorder, ledger, predicted=predicted)
            wrong = sum(a != b for a, b in zip(engine.answers, own, strict=True))
            row = figures(run, recorder.useful(), wrong, engine.moved_tokens)
            found[f"{label} {block}"] = row
            print(
                f"{label:18}{row['wrong']:6.0f}{row['iterations']:6.0f}{row['held']:9.3f}"
                f"{row['useful']:8.3f}{row['held_while_waiting']:9.3f}{row['useful_while_waiting']:8.3f}"
                f"{row['promised']:9.3f}{row['stopped']:8.0f}{row['lent']:7.0f}{row['moved']:7.0f}"
                f"{time.process_time() - begun:7.1f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
