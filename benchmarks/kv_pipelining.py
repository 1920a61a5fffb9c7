"""
Lent memory on a real model: EconoServe's policy beside block-allocation and exact allocation.

A tiny Llama in float64 serves Alpaca's lengths with predictions of the paper's accuracy, its keys and values
in a memory of half of slots x longest. Every answer is compared with the model's own, given alone.

Run: ``python benchmarks/kv_pipelining.py`` (see --help).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchbound.data.cost import IntArray
from batchbound.data.generators import generate
from batchbound.data.workload import Workload
from batchbound.executor.model_source import load_model
from batchbound.executor.prompts import Prompts
from batchbound.executor.serving_run import EngineRun, own_answer, serve_on_model
from batchbound.heuristics.econoserve_settings import EconoServeSettings
from batchbound.heuristics.serving_registry import BLOCK_ALLOCATION, ServingOptions, serving_policy

SYSTEMS = ("vllm", "sarathi", "multires", "sync-coupled", "econoserve-sdo", "econoserve")
ERROR, PADDING, RESERVED, BUFFER = 0.126, 0.10, 0.02, 0.15
"""Alpaca's, as benchmarks/econoserve has them."""


def job(requests: int, seed: int) -> tuple[Workload, IntArray]:
    """Return requests that are all there, none longer than the model's positions, and their predictions."""
    drawn = generate("alpaca", seed, requests)
    workload = replace(
        drawn,
        arrival=np.zeros(requests),
        deadline=np.full(requests, np.inf),
        input_tokens=np.minimum(drawn.input_tokens, 128),
    )
    noise = np.random.default_rng((seed, 7)).standard_normal(requests)
    guess = np.rint(workload.output_tokens * np.exp(ERROR * noise))
    return workload, np.maximum(1, guess).astype(np.int64)


def figures(done: EngineRun, own: list[list[int]]) -> dict[str, float]:
    """Return what is printed of a run."""
    run = done.run
    held = run.held / run.capacity
    waiting = run.start < (run.workload.arrival + run.spent[:, 0]).max()
    return {
        "wrong": sum(a != b for a, b in zip(done.answers, own, strict=True)),
        "iterations": len(held),
        "held": float(held.mean()),
        "held_while_waiting": float(held[waiting].mean()),
        "held_by_seconds": float((held * run.seconds).sum() / run.seconds.sum()),
        "promised": float((run.promised / run.capacity)[waiting].mean()),
        "stopped": int(run.preempted.sum()),
        "lent": run.lent_tokens,
        "moved": done.moved_tokens,
        "compactions": done.compactions,
        "seconds": float(run.seconds.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny:llama:0")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.5, help="of slots x longest that the memory holds")
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 256], help="tokens of a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    workload, predicted = job(options.requests, options.seed)
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
    sizes = EconoServeSettings(padding=PADDING, reserved=RESERVED, buffer=BUFFER)
    found: dict[str, dict[str, float]] = {}
    for block in options.blocks:
        print(
            f"\nblocks of {block}\n{'':16}{'wrong':>6}{'iter':>6}{'KV held':>9}{'queued':>8}{'by time':>9}"
            f"{'promised':>9}{'stopped':>8}{'lent':>7}{'moved':>7}{'CPU s':>7}"
        )
        for system in SYSTEMS:
            begun = time.process_time()
            done = serve_on_model(
                model,
                prompts,
                workload,
                serving_policy(system, ServingOptions(longest, 1024, sizes)),
                capacity,
                block_tokens=block,
                paged=system in BLOCK_ALLOCATION,
                predicted=predicted,
            )
            seconds = time.process_time() - begun
            row = figures(done, own)
            found[f"{system} {block}"] = row
            print(
                f"{system:16}{row['wrong']:6.0f}{row['iterations']:6.0f}{row['held']:9.3f}"
                f"{row['held_while_waiting']:8.3f}{row['held_by_seconds']:9.3f}{row['promised']:9.3f}"
                f"{row['stopped']:8.0f}{row['lent']:7.0f}{row['moved']:7.0f}{seconds:7.1f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
