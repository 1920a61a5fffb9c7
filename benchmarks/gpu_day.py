"""
Half an hour on a GPU: one command that measures everything the docs lack there, most important first.

Every figure is written to the JSON file as soon as it is known: a run that is cut short loses only what it
was about to measure. A part that fails is written down with its error, and the next one begins; parts
that no longer fit into the minutes left are named as left out.

- ``device``: names, versions, and the rate at which memory is copied, which bounds a decode step.
- ``kernels``: microseconds of each attention kernel for one token a row, and which of them are right.
- ``decode_steps``: captured decode steps against that bound, and the same decode steps run by Python.
- ``job``: Table III's requests profiled, planned and run; the gap of the run to the bound.
- ``peer``: the same requests by transformers' continuous batching.
- ``ends``: completions that end by a token: decode steps run over decode steps planned, by slots.
- ``log_probabilities``: a decode step that records them against one that does not, both captured.
- ``memory``: bytes allocated under a KV capacity against the capacity.
- ``long_prompts``: peak bytes and seconds of a prompt of many chunks.
- ``compiled``: decode steps compiled before the capture.

Without a GPU the same parts run on the CPU with tiny shapes, to show that they work; their figures then say
nothing about a GPU.

Run: ``python benchmarks/gpu_day.py --minutes 25 --output gpu_day.json``
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from gpu_decode import (
    against_peer,
    all_points,
    bandwidth,
    bound_seconds,
    build,
    clock,
    uncaptured,
    ways,
    whole_job,
)

from batchbound.data.files.disk import write_json
from batchbound.executor.attention.kernels import KERNELS, Held, agree, masked
from batchbound.executor.kv.captured import Capture, DecodeStep, cuda_graph
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.models.mixed_sampling import MixedSampler
from batchbound.executor.models.recording import Recorder
from batchbound.executor.models.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Sizes:
    """
    How much is measured.

    Parameters
    ----------
    shape
        Of the model, a key of ``gpu_decode.SHAPES``.
    slots, contexts
        Of the decode steps.
    requests, job_slots, longest
        Of the job, and the most tokens of its prompts and completions.
    long_prompt
        Tokens of the prompt that is prefilled in chunks.
    decode_steps, repeats
        Of a burst, and how often it is measured.
    """

    shape: str
    slots: tuple[int, ...]
    contexts: tuple[int, ...]
    requests: int
    job_slots: int
    longest: int
    long_prompt: int
    decode_steps: int = 16
    repeats: int = 3


ON_GPU = Sizes("llama-3.1-8b", (8, 64, 128), (1024,), 1_319, 200, 1024, 32_768)
ON_CPU = Sizes("tiny", (2, 4), (24,), 12, 4, 16, 96, decode_steps=4, repeats=1)


@dataclass(slots=True)
class Day:
    """
    A run of this script.

    Parameters
    ----------
    output
        Where the figures go.
    device
        What is measured.
    sizes
        How much.
    deadline
        When to begin no further part, as ``time.monotonic`` tells it.
    """

    output: Path
    device: torch.device
    sizes: Sizes
    deadline: float
    model: Any = None
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def capture(self) -> Capture:
        """What captures decode steps; on a CPU a captured decode step is simply run again."""

        def again(step: DecodeStep) -> DecodeStep:
            return step

        return cuda_graph if self.gpu else again

    def note(self, part: str, figures: object) -> None:
        """Write figures down at once."""
        self.report[part] = figures
        write_json(self.output, self.report, indent=1)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Return random prompts."""
        draw = np.random.default_rng(count)
        return [draw.integers(0, self.model.config.vocab_size, tokens).tolist() for _ in range(count)]


def device_part(day: Day) -> None:
    """Name the device and measure its memory's rate."""
    name = (
        torch.cuda.get_device_name(day.device)
        if day.gpu
        else f"CPU ({platform.machine()}): not a GPU's figures"
    )
    day.note(
        "device",
        {
            "name": name,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "bytes_per_s": bandwidth(day.device),
        },
    )


def kernels_part(day: Day) -> None:
    """Time each attention kernel at every number of slots and context."""
    config, dtype = day.model.config, day.model.dtype
    size = config.hidden_size // config.num_attention_heads
    found = []
    for context in day.sizes.contexts:
        for slots in day.sizes.slots:
            keys, values = torch.randn(
                2, slots, config.num_key_value_heads, context, size, dtype=dtype, device=day.device
            )
            query = torch.randn(slots, config.num_attention_heads, size, dtype=dtype, device=day.device)
            held = Held(keys, values, torch.linspace(1, context, slots, device=day.device).long(), None, None)
            expected = masked(query, held)
            for name, kernel in KERNELS.items():
                entry: dict[str, Any] = {"kernel": name, "slots": slots, "context": context}
                try:
                    entry["right"] = agree(kernel(query, held), expected)
                    call = partial(kernel, query, held)
                    entry["microseconds"] = 1e6 * min(clock(call, day.device) for _ in range(5))
                except Exception as error:  # a kernel for another device
                    entry["error"] = _first_line(error)
                found.append(entry)
                day.note("kernels", found)


def steps_part(day: Day, *, compiled: bool = False) -> None:
    """Measure decode steps of the ragged tier, captured and not."""
    makers = ways(day.gpu, compiled)
    kept = ("ragged, compiled",) if compiled else ("ragged", "ragged, limited", "ragged, not captured")
    rate = day.report["device"]["bytes_per_s"]
    points = all_points(
        day.model, {way: makers[way] for way in kept}, day.sizes.slots, day.sizes.contexts,
        day.sizes.decode_steps, rate, day.sizes.repeats,
    )  # fmt: skip
    found = []
    for point in points:
        found.append({**asdict(point), "share": point.share})
        day.note("compiled" if compiled else "decode_steps", found)


def job_part(day: Day) -> None:
    """Profile, plan and run a job."""
    sizes = day.sizes
    day.note("job", whole_job(day.model, sizes.requests, sizes.job_slots, sizes.longest, 5.0))


def peer_part(day: Day) -> None:
    """Run requests by transformers' continuous batching, too."""
    sizes = day.sizes
    count = max(4, sizes.requests // 4)
    day.note("peer", against_peer(day.model, count, min(sizes.job_slots, 64), sizes.longest // 2))


def ends_part(day: Day) -> None:
    """Count the decode steps that completions of random length need, and those that were launched."""
    found = []
    for slots in day.sizes.slots:
        batch = RaggedBatch(day.model, slots, 2 * day.sizes.longest, capture=day.capture)
        most = day.sizes.longest // 2
        batch.prefill(list(range(slots)), day.prompts(slots, 8))
        # Tokens that some row gives every few decode steps, whatever the model: one in 32 of the vocabulary.
        ends = (
            frozenset(range(0, day.model.config.vocab_size, 32 * slots)) if day.gpu else frozenset({1, 2, 3})
        )
        bursts: list[int] = []
        seconds = clock(partial(_to_the_end, batch, most, frozenset(sorted(ends)[:64]), bursts), day.device)
        found.append(
            {
                "slots": slots,
                "decode_steps": sum(bursts),
                "calls": len(bursts),
                "seconds_a_step": seconds / sum(bursts),
            }
        )
        day.note("ends", found)


def _to_the_end(batch: RaggedBatch, most: int, ends: frozenset[int], bursts: list[int]) -> None:
    """Decode, a call after each end, and note the decode steps of each."""
    while sum(bursts) < most:
        bursts.append(len(batch.decode(most - sum(bursts), until=ends)))


def log_probabilities_part(day: Day) -> None:
    """Time captured decode steps that record log-probabilities, and those that do not."""
    found = []
    for slots in day.sizes.slots:
        entry: dict[str, Any] = {"slots": slots}
        for name in ("without", "with"):
            asked = {str(slot): Sampler(temperature=1.0) for slot in range(slots)}
            streams = {sampler.stream(request): "raw" for request, sampler in asked.items()}
            recorder = Recorder(streams) if name == "with" else None  # type: ignore[arg-type]
            batch = RaggedBatch(
                day.model,
                slots,
                day.sizes.longest,
                capture=day.capture,
                sampler=MixedSampler(asked, None, recorder),
            )
            batch.prefill(list(range(slots)), day.prompts(slots, 8), request_ids=list(asked))
            batch.decode(day.sizes.decode_steps)
            seconds = clock(lambda batch=batch: batch.decode(day.sizes.decode_steps), day.device)  # type: ignore[misc]
            entry[f"{name}_seconds"] = seconds / day.sizes.decode_steps
            entry[f"{name}_captured"] = batch._capture is not None
        found.append(entry)
        day.note("log_probabilities", found)


def memory_part(day: Day) -> None:
    """Compare the bytes allocated under a KV capacity with the capacity's."""
    slots, longest = max(day.sizes.slots), 2 * day.sizes.longest
    capacity = slots * longest // 4
    batch = RaggedBatch(day.model, slots, longest, kv_tokens=capacity)
    batch.prefill([0], day.prompts(1, 4))
    buffers = [buffer for layer in batch._store._paged_layers for buffer in layer.buffers]
    of_a_token = sum(buffer.nbytes // buffer.shape[0] for buffer in buffers)
    figures: dict[str, Any] = {
        "capacity_tokens": capacity,
        "allocated_tokens": sum(buffer.nbytes for buffer in buffers) / of_a_token,
        "slots": slots,
    }
    if day.gpu:
        figures["allocated_bytes"] = torch.cuda.max_memory_allocated(day.device)
    day.note("memory", figures)


def long_prompts_part(day: Day) -> None:
    """Prefill a prompt of many chunks."""
    tokens = day.sizes.long_prompt
    if day.gpu:
        torch.cuda.reset_peak_memory_stats(day.device)
    batch = RaggedBatch(day.model, 1, tokens + 1, capture=day.capture, prefill_tokens=4096 if day.gpu else 16)
    prompt = day.prompts(1, tokens)
    seconds = clock(lambda: batch.prefill([0], prompt), day.device)
    figures: dict[str, Any] = {"tokens": tokens, "seconds": seconds}
    if day.gpu:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(day.device)
    day.note("long_prompts", figures)


def host_part(day: Day) -> None:
    """Time decode steps that Python runs on a batch of one row: what a launch costs the host."""
    batch = uncaptured(day.model, 1, day.sizes.longest)
    batch.prefill([0], day.prompts(1, 8))
    batch.decode(2)
    seconds = clock(lambda: batch.decode(day.sizes.decode_steps), day.device) / day.sizes.decode_steps
    bound = bound_seconds(day.model, 1, 8, day.report["device"]["bytes_per_s"])
    day.note("host", {"seconds_a_step": seconds, "bound_seconds": bound})


PARTS: dict[str, tuple[Callable[[Day], None], float]] = {
    "kernels": (kernels_part, 0.5),
    "decode_steps": (steps_part, 4.0),
    "job": (job_part, 5.0),
    "memory": (memory_part, 0.5),
    "ends": (ends_part, 1.5),
    "log_probabilities": (log_probabilities_part, 1.5),
    "peer": (peer_part, 4.0),
    "long_prompts": (long_prompts_part, 1.0),
    "host": (host_part, 0.5),
    "compiled": (lambda day: steps_part(day, compiled=True), 4.0),
}
"""What measures each part, and the minutes on a GPU that it is begun with at least."""


def run(day: Day, parts: Sequence[str]) -> None:
    """Run parts one after the other, as far as the time goes."""
    device_part(day)
    start = time.monotonic()
    sizes = day.sizes
    positions = max(sizes.long_prompt + 1, 2 * sizes.longest, max(sizes.contexts) + 200)
    dtype = torch.bfloat16 if day.gpu else torch.float32
    day.model = build(sizes.shape, day.device, dtype, positions)
    day.note("seconds", {"load": time.monotonic() - start})
    for part in parts:
        measure, minutes = PARTS[part]
        left = day.deadline - time.monotonic()
        if left < (60 * minutes if day.gpu else 0.0):
            day.note(part, {"left_out": f"{left / 60:.1f} minutes were left, it takes about {minutes:g}"})
            continue
        start = time.monotonic()
        try:
            measure(day)
        except Exception as error:  # the parts after it are worth having all the same
            day.note(
                part,
                {"error": f"{type(error).__name__}: {_first_line(error)}", "before": day.report.get(part)},
            )
        day.note("seconds", {**day.report["seconds"], part: time.monotonic() - start})
        gc.collect()
        if day.gpu:
            torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--output", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.is_available()
    deadline = time.monotonic() + 60 * options.minutes
    day = Day(options.output, torch.device("cuda" if gpu else "cpu"), ON_GPU if gpu else ON_CPU, deadline)
    run(day, options.parts)
    for part, figures in day.report.items():
        print(f"{part}: {json.dumps(figures)}")


if __name__ == "__main__":
    main()
