"""
Measure decode rounds against the memory-bandwidth bound of the device.

A decode round has to read every weight once and every key and value that its rows hold; at the rate at which
the device copies memory, that is the least time it can take. Weights are seeded random numbers: only shapes
matter here. Without a GPU the script runs the same steps on the CPU with tiny shapes, to show that it works;
its figures then say nothing about a GPU.

Run: ``python benchmarks/gpu_decode.py --shape llama-3.1-8b --slots 8 32 64 128 --context 1024``
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from batchbound.executor.batch import WindowBatch
from batchbound.executor.ragged import RaggedBatch
from batchbound.executor.running import RunningBatch
from batchbound.executor.self_check import greedy_shortfall, near_tie
from batchbound.executor.slab import SlabBatch

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
TIERS: tuple[type[RunningBatch], ...] = (WindowBatch, SlabBatch, RaggedBatch)


@dataclass(frozen=True, slots=True)
class Point:
    """A tier at a number of slots and a context length; seconds of a round, measured and at the bound."""

    tier: str
    slots: int
    context: int
    seconds: float
    bound: float
    near_ties_only: bool

    @property
    def share(self) -> float:
        """Of the bandwidth bound that is reached."""
        return self.bound / self.seconds


def build(shape: str, device: torch.device, dtype: torch.dtype, positions: int) -> Any:
    """Return a random Llama of a shape, built on the device."""
    config = AutoConfig.for_model(
        "llama", **SHAPES[shape], max_position_embeddings=positions, eos_token_id=None, dtype=dtype
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
    return model.eval()


def bandwidth(device: torch.device) -> float:
    """Return bytes read and written per second by a large copy, the best of some."""
    count = 2**28 if device.type == "cuda" else 2**24
    source, target = torch.ones(2, count, dtype=torch.float32, device=device).unbind()
    seconds = min(clock(lambda: target.copy_(source), device) for _ in range(5))
    return 2 * 4 * count / seconds


def clock(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds a call takes: of the wall clock on a GPU, of the CPU on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start
    start = time.process_time()
    call()
    return time.process_time() - start


def bound_seconds(model: Any, slots: int, context: int, rate: float) -> float:
    """Return the least seconds of a round: every weight but the embedding, and all keys and values, once."""
    config = model.config
    weights = (
        sum(parameter.numel() for parameter in model.parameters()) - config.vocab_size * config.hidden_size
    )
    head = config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head * slots * context
    return float((weights + cached) * model.dtype.itemsize / rate)


def measure(
    model: Any, tier: type[RunningBatch], slots: int, context: int, rounds: int, rate: float, repeats: int
) -> Point:
    """Return the median round of a tier, with rows whose lengths lie between half and all of the context."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(1, context // 2), context + 1, slots)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    batch = tier(model, slots, context + (repeats + 1) * rounds + 1)
    first = batch.prefill(list(range(slots)), prompts)
    start = batch.decode(rounds)
    answer = [first[0], *start[:, 0].tolist()]
    shortfall = greedy_shortfall(model, prompts[0], answer).max()
    seconds, held = [], []
    for _ in range(repeats):
        held.append(batch.kv_tokens / slots + rounds / 2)
        seconds.append(clock(lambda: batch.decode(rounds), model.device) / rounds)
    middle = int(np.argsort(seconds)[len(seconds) // 2])
    bound = bound_seconds(model, slots, round(held[middle]), rate)
    return Point(tier.tier, slots, context, seconds[middle], bound, bool(shortfall <= near_tie(model)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: llama-3.1-8b on a GPU, else tiny")
    parser.add_argument("--slots", type=int, nargs="*")
    parser.add_argument("--context", type=int, nargs="*")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    shape = arguments.shape or ("llama-3.1-8b" if gpu else "tiny")
    all_slots = arguments.slots or ([8, 32, 64, 128, 200] if gpu else [4, 16])
    contexts = arguments.context or ([512, 1024] if gpu else [64])
    if not gpu:
        torch.set_num_threads(1)
    rounds, repeats = arguments.rounds, arguments.repeats
    positions = max(contexts) + (repeats + 2) * rounds
    model = build(shape, device, torch.bfloat16 if gpu else torch.float32, positions)
    rate = bandwidth(device)
    points = [
        measure(model, tier, slots, context, rounds, rate, repeats)
        for context in contexts
        for slots in all_slots
        for tier in TIERS
    ]
    name = torch.cuda.get_device_name(device) if gpu else "CPU (these figures say nothing about a GPU)"
    if arguments.json:
        fields = [
            {"tier": p.tier, "slots": p.slots, "context": p.context, "ms": p.seconds * 1e3, "share": p.share}
            for p in points
        ]
        print(json.dumps({"device": name, "shape": shape, "bytes_per_s": rate, "points": fields}))
        return
    print(f"{name}, {shape}, {rate / 1e9:,.0f} GB/s copied, median of {repeats}")
    print(
        f"{'tier':8s} {'slots':>6s} {'context':>8s} {'round ms':>9s} {'bound ms':>9s} {'reached':>8s}  tokens"
    )
    for point in points:
        tokens = "right" if point.near_ties_only else "WRONG"
        print(
            f"{point.tier:8s} {point.slots:6d} {point.context:8d} {point.seconds * 1e3:9.3f}"
            f" {point.bound * 1e3:9.3f} {point.share:8.1%}  {tokens}"
        )


if __name__ == "__main__":
    main()
