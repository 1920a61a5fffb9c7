"""
Compare the tiers with other ways to run a batch on a transformers model, at pinned answer lengths.

Every way runs the same requests, in turns in one process on one thread, and gives every request exactly the
same number of tokens. CPU seconds, so that other load on the machine matters less than on the clock.

Run: ``python benchmarks/engine_speed.py --repeats 3``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from transformers import AutoConfig, ContinuousBatchingConfig, DynamicCache, GenerationConfig

from batchbound.executor.engines.device_memory import keep_freed_memory
from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.models.families import cache_argument
from batchbound.executor.models.source import build_random

NO_TOKEN = -1
"""As an end token: never matched, so answers have their pinned lengths."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and the number of tokens to answer it with."""

    prompt: list[int]
    tokens: int


Way = Callable[[Any, Sequence[Job], int], list[list[int]]]


def left_padded(prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts end-aligned, and 1 where they are, each of shape (prompts, longest)."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def static_generate(model: Any, jobs: Sequence[Job], slots: int) -> list[list[int]]:
    """Run ``generate`` on one full batch after the other: each lasts as long as its longest answer."""
    answers = []
    for begin in range(0, len(jobs), slots):
        batch = jobs[begin : begin + slots]
        ids, mask = left_padded([job.prompt for job in batch])
        width = ids.shape[1]
        longest = max(job.tokens for job in batch)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
        answers += [out[row, width : width + job.tokens].tolist() for row, job in enumerate(batch)]
    return answers


class ConcatenatingBatch:
    """BATON's vector embedding as published: keys and values of a DynamicCache, padded and concatenated."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache_argument = cache_argument(type(model))
        self.cache: Any = DynamicCache()
        self.mask = torch.zeros(0, 0, dtype=torch.long)
        self.tokens = torch.zeros(0, dtype=torch.long)
        self.positions = torch.zeros(0, dtype=torch.long)

    def join(self, prompts: Sequence[list[int]]) -> list[int]:
        """Prefill prompts, left-padded together, and concatenate them to the running batch."""
        ids, mask = left_padded(prompts)
        width = ids.shape[1]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        new: Any = DynamicCache()
        logits = self.model(
            ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **{self.cache_argument: new}
        ).logits
        first = logits[:, -1].argmax(-1)
        wide = max(width, self.mask.shape[1])
        if self.mask.shape[0]:
            for old, fresh in zip(self.cache.layers, new.layers, strict=True):
                old.keys = torch.cat([_pad(old.keys, wide), _pad(fresh.keys, wide)])
                old.values = torch.cat([_pad(old.values, wide), _pad(fresh.values, wide)])
        else:
            self.cache = new
        pad = torch.nn.functional.pad
        self.mask = torch.cat([pad(self.mask, (wide - self.mask.shape[1], 0)), pad(mask, (wide - width, 0))])
        self.tokens = torch.cat([self.tokens, first])
        self.positions = torch.cat([self.positions, mask.sum(1)])
        answer: list[int] = first.tolist()
        return answer

    def step(self) -> torch.Tensor:
        """Give every row a token."""
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        logits = self.model(
            self.tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.positions[:, None],
            **{self.cache_argument: self.cache},
        ).logits
        self.tokens = logits[:, -1].argmax(-1)
        self.positions = self.positions + 1
        return self.tokens

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows and the front padding that the rest has in common."""
        kept = torch.tensor(rows, dtype=torch.long)
        self.mask = self.mask[kept]
        front = int(self.mask.argmax(1).min()) if rows else 0
        self.mask = self.mask[:, front:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[kept, :, front:]
            layer.values = layer.values[kept, :, front:]
        self.tokens, self.positions = self.tokens[kept], self.positions[kept]


def _pad(states: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))


@torch.inference_mode()
def concatenate(model: Any, jobs: Sequence[Job], slots: int) -> list[list[int]]:
    """Refill freed rows as BATON was published."""
    batch = ConcatenatingBatch(model)
    answers: list[list[int]] = [[] for _ in jobs]
    waiting, running = list(range(len(jobs))), list[int]()
    while waiting or running:
        joining = [waiting.pop(0) for _ in range(min(slots - len(running), len(waiting)))]
        if joining:
            for job, token in zip(joining, batch.join([jobs[job].prompt for job in joining]), strict=True):
                answers[job].append(token)
            running += joining
        decode_steps = min(jobs[job].tokens - len(answers[job]) for job in running)
        history = [batch.step() for _ in range(decode_steps)]
        if history:
            for job, tokens in zip(running, torch.stack(history, 1).tolist(), strict=True):
                answers[job] += tokens
        rows = [row for row, job in enumerate(running) if len(answers[job]) < jobs[job].tokens]
        batch.keep(rows)
        running = [running[row] for row in rows]
    return answers


def refilled(tier: type[RunningBatch]) -> Way:
    """Return the way that refills freed slots of a running batch as soon as they are free."""

    def way(model: Any, jobs: Sequence[Job], slots: int) -> list[list[int]]:
        # As the engine does around a batch.
        keep_freed_memory()
        batch = tier(model, slots, max(len(job.prompt) + job.tokens for job in jobs))
        answers: list[list[int]] = [[] for _ in jobs]
        waiting, free, running = list(range(len(jobs))), list(range(slots)), dict[int, int]()
        while waiting or running:
            joining = [waiting.pop(0) for _ in range(min(len(free), len(waiting)))]
            if joining:
                places = [free.pop() for _ in joining]
                first = batch.prefill(places, [jobs[job].prompt for job in joining])
                for slot, job, token in zip(places, joining, first, strict=True):
                    running[slot] = job
                    answers[job].append(token)
            decode_steps = min(jobs[job].tokens - len(answers[job]) for job in running.values())
            tokens = batch.decode(decode_steps).T.tolist()
            for slot, job in list(running.items()):
                answers[job] += tokens[slot]
                if len(answers[job]) == jobs[job].tokens:
                    batch.release(slot)
                    free.append(slot)
                    del running[slot]
        return answers

    return way


def continuous_batching(
    model: Any,
    jobs: Sequence[Job],
    slots: int,
    *,
    most_tokens: int = 512,
    end: int | list[int] = NO_TOKEN,
    on_path: Callable[[str], None] | None = None,
) -> list[list[int]]:
    """
    Run transformers' continuous batching manager: paged attention, chunked prefill.

    ``most_tokens`` is the most tokens of a forward call, ``end`` what ends an answer before its tokens are
    through; ``on_path`` is told how it attended.
    """
    implementation = model.config._attn_implementation
    tokens = sum(len(job.prompt) + job.tokens for job in jobs)
    page = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    fields: dict[str, Any] = {page: 32}
    settings = ContinuousBatchingConfig(
        **fields,
        num_blocks=max(64, tokens // 32 + 2 * len(jobs)),
        max_batch_tokens=most_tokens,
        max_requests_per_batch=slots,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=end, pad_token_id=0, max_new_tokens=2048
    )
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=settings
    )
    manager.start()
    answers: list[list[int]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        manager.add_request(job.prompt, request_id=str(index), max_new_tokens=job.tokens, eos_token_id=end)
    left = len(jobs)
    while left:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before all requests were done")
            continue
        if result.is_finished():
            answers[int(result.request_id)] = list(result.generated_tokens)
            left -= 1
    if on_path is not None:
        on_path(str(model.config._attn_implementation))
    manager.stop(block=True)
    model.set_attn_implementation(implementation)
    return answers


WAYS: dict[str, Way] = {
    "static generate": static_generate,
    "concatenate (BATON as published)": concatenate,
    "window": refilled(WindowBatch),
    "ragged": refilled(RaggedBatch),
    "transformers continuous batching": continuous_batching,
}
WORKLOADS = ((64, 128), (48, 384), (128, 64))
"""Requests, and the most tokens of a prompt and of an answer."""
HOST_STEPS = (20, 120)
"""Answers of so many tokens are timed: the difference is what decode steps alone take."""

ORDERS: dict[str, Callable[[list[Job]], list[Job]]] = {
    "arrival": list,
    "longest": lambda jobs: sorted(jobs, key=lambda job: -job.tokens),
}


def make_jobs(count: int, longest: int, vocabulary: int, seed: int) -> list[Job]:
    """Draw prompts and answer lengths uniformly from 4 to ``longest`` tokens."""
    rng = np.random.default_rng(seed)
    return [
        Job(
            rng.integers(0, vocabulary, rng.integers(4, longest + 1)).tolist(),
            int(rng.integers(4, longest + 1)),
        )
        for _ in range(count)
    ]


def make_model(small: bool = False, positions: int = 1024) -> Any:
    """Build a random Llama of about 7 million weights, or of 0.2 million."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=512 if small else 4096,
        hidden_size=64 if small else 256,
        intermediate_size=208 if small else 704,
        num_hidden_layers=2 if small else 7,
        num_attention_heads=4 if small else 8,
        num_key_value_heads=2 if small else 4,
        max_position_embeddings=positions,
        eos_token_id=None,
    )
    return build_random(config, seed=0).eval()


def measure(
    model: Any, jobs: Sequence[Job], slots: int, ways: dict[str, Way], repeats: int
) -> dict[str, list[float]]:
    """Run every way in turn, ``repeats`` times, and return CPU seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.process_time()
            answers = way(model, jobs, slots)
            seconds[name].append(time.process_time() - start)
            if [len(answer) for answer in answers] != [job.tokens for job in jobs]:
                raise RuntimeError(f"{name} gave answers of other lengths than asked for")
    return seconds


def host_overhead(model: Any, slots: int, repeats: int, ways: dict[str, Way]) -> None:
    """Print the CPU milliseconds of a decode step with a model so small that the host's work remains."""
    few, many = ([Job([slot, 1, 2, 3], tokens) for slot in range(slots)] for tokens in HOST_STEPS)
    decode_steps = HOST_STEPS[1] - HOST_STEPS[0]
    print(f"\nCPU ms of a decode step at {slots} slots")
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            taken = [measure(model, jobs, slots, {name: way}, 1)[name][0] for jobs in (few, many)]
            milliseconds[name].append(1e3 * (taken[1] - taken[0]) / decode_steps)
    ours = statistics.median(milliseconds["ragged"]) if "ragged" in ways else float("nan")
    for name, values in milliseconds.items():
        middle = statistics.median(values)
        print(f"{name:36s} {middle:8.2f}   ragged takes {ours / middle:.2f} of it")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", type=int, nargs="*", choices=(0, 1), default=(0, 1))
    parser.add_argument(
        "--host-overhead",
        action="store_true",
        help="a model of 0.2 million weights and 64 slots: what remains is the host's work",
    )
    parser.add_argument("--small", action="store_true", help="a model of 0.2 million weights")
    parser.add_argument("--requests", type=int, help="instead of a workload's own number")
    parser.add_argument("--orders", nargs="*", choices=sorted(ORDERS), default=sorted(ORDERS))
    parser.add_argument("--only", nargs="*", choices=sorted(WAYS), default=sorted(WAYS))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model = make_model(arguments.host_overhead or arguments.small)
    if arguments.host_overhead:
        arguments.slots, arguments.workload = 64, (2,)
    vocabulary = model.config.vocab_size
    ways = {name: way for name, way in WAYS.items() if name in arguments.only}
    measure(model, make_jobs(4, 16, vocabulary, 1), 2, ways, 1)  # warm up
    results = []
    for count, longest in [WORKLOADS[number] for number in arguments.workload]:
        arrival = make_jobs(arguments.requests or count, longest, vocabulary, arguments.seed)
        for order in arguments.orders:
            jobs = ORDERS[order](arrival)
            seconds = measure(model, jobs, arguments.slots, ways, arguments.repeats)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            results.append(
                {"requests": len(jobs), "longest": longest, "order": order, "cpu_seconds": medians}
            )
            if not arguments.json:
                print(f"\n{len(jobs)} requests, prompts and answers of 4 to {longest} tokens, {order} order")
                print(f"{'way':36s} {'CPU s':>8s} {'ragged is':>10s}")
                for name, value in medians.items():
                    ratio = value / medians["ragged"] if "ragged" in medians else float("nan")
                    print(f"{name:36s} {value:8.2f} {ratio:9.2f}x")
    if arguments.host_overhead and not arguments.json:
        host_overhead(model, arguments.slots, arguments.repeats, ways)
    weights = sum(parameter.numel() for parameter in model.parameters())
    if arguments.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps({"weights": weights, "slots": arguments.slots, **versions, "results": results}))
    else:
        print(
            f"\n{weights / 1e6:.1f} million weights, {arguments.slots} slots, median of {arguments.repeats}"
        )


if __name__ == "__main__":
    main()
