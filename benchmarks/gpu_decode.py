"""
The engine on a GPU: decode rounds against the bandwidth bound, continuous batching, and a whole job.

- ``rounds``: a decode round has to read every weight once and every key and value that its rows hold; at the
  rate at which the device copies memory, that is the least time it can take.
- ``peer``: the same requests at pinned lengths by the ragged tier and by transformers' continuous batching,
  start-up and captures included for both.
- ``job``: lengths as in the hybrid paper's Table III (GSM8K-like, 1,319 requests, 200 slots), profiled,
  planned and run; the gap is the run's measured seconds over the bound that was proven for the plan.

Weights are seeded random numbers: only shapes matter here. Without a GPU the script runs the same steps on
the CPU with tiny shapes, to show that it works; its figures then say nothing about a GPU.

Run: ``python benchmarks/gpu_decode.py --shape llama-2-7b --slots 8 32 64 128 --context 1024``
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from engine_speed import Job, continuous_batching, refilled
from transformers import AutoConfig, AutoModelForCausalLM

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.executor.engines.huggingface import HuggingFaceEngine
from batchbound.executor.engines.self_check import greedy_shortfall, near_tie
from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.captured import Capture, Round, compiled, cuda_graph
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.profiling.calibrate import fit_cost, fit_error
from batchbound.executor.profiling.grid_run import grid, profile
from batchbound.heuristics.loop import execute
from batchbound.heuristics.replay import Replay
from batchbound.planning.plan import make_plan
from batchbound.solvers import Limits

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
CHECKED = 4
"""Answers whose tokens are compared with the model's own."""

Maker = Callable[[Any, int, int], RunningBatch]
"""Makes a batch of a model, slots and capacity."""


@dataclass(frozen=True, slots=True)
class Point:
    """A way to decode at a number of slots and a context length; seconds of a round."""

    way: str
    slots: int
    context: int
    seconds: float
    bound: float
    tokens_right: bool
    kernel: str

    @property
    def share(self) -> float:
        """Of the bandwidth bound that is reached."""
        return self.bound / self.seconds


def uncaptured(model: Any, slots: int, capacity: int) -> RunningBatch:
    """Return a ragged batch whose rounds Python runs, as on a CPU."""
    batch = RaggedBatch(model, slots, capacity)
    batch._capture = None
    return batch


def captured(capture: Capture) -> Maker:
    """Return what makes ragged batches whose rounds are captured so."""
    return lambda model, slots, capacity: RaggedBatch(model, slots, capacity, capture=capture)


def ways(gpu: bool, compile_rounds: bool) -> dict[str, Maker]:
    """Return the ways to decode; on a CPU a captured round is simply run again."""

    def again(round_: Round) -> Round:
        return round_

    capture: Capture = cuda_graph if gpu else again
    found: dict[str, Maker] = {
        "window": WindowBatch,
        "ragged, not captured": uncaptured,
        "ragged": captured(capture),
    }
    if compile_rounds:
        found["ragged, compiled"] = captured(compiled(capture))
    return found


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


def bound_seconds(model: Any, slots: int, context: float, rate: float) -> float:
    """Return the least seconds of a round: every weight but the embedding, and all keys and values, once."""
    config = model.config
    weights = (
        sum(parameter.numel() for parameter in model.parameters()) - config.vocab_size * config.hidden_size
    )
    head = config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head * slots * context
    return float((weights + cached) * model.dtype.itemsize / rate)


def tokens_right(model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> bool:
    """Tell whether the first few answers are the model's own, up to near-ties of its number format."""
    pairs = list(zip(prompts, answers, strict=True))[:CHECKED]
    return all(bool(greedy_shortfall(model, *pair).max() <= near_tie(model)) for pair in pairs)


def measure(
    model: Any, way: str, maker: Maker, slots: int, context: int, rounds: int, rate: float, repeats: int
) -> Point:
    """Return the median round of a way, with rows whose lengths lie between half and all of the context."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(1, context // 2), context + 1, slots)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    batch = maker(model, slots, context + (repeats + 1) * rounds + 1)
    first = batch.prefill(list(range(slots)), prompts)
    start = batch.decode(rounds)
    answers = [[first[slot], *start[:, slot].tolist()] for slot in range(slots)]
    right = tokens_right(model, prompts, answers)
    seconds, held = [], []
    for _ in range(repeats):
        held.append(batch.kv_tokens / slots + rounds / 2)
        seconds.append(clock(lambda: batch.decode(rounds), model.device) / rounds)
    middle = int(np.argsort(seconds)[len(seconds) // 2])
    bound = bound_seconds(model, slots, held[middle], rate)
    kernel = (isinstance(batch, RaggedBatch) and batch.kernel) or "sdpa"
    return Point(way, slots, context, seconds[middle], bound, right, kernel)


def all_points(
    model: Any, makers: dict[str, Maker], slots: Sequence[int], contexts: Sequence[int], *rest: Any
) -> Iterator[Point]:
    """Yield the points of a grid; what does not fit into memory is told and left out."""
    for context in contexts:
        for count in slots:
            for way, maker in makers.items():
                try:
                    yield measure(model, way, maker, count, context, *rest)
                except (torch.OutOfMemoryError, RuntimeError) as error:
                    print(f"{way}, {count} slots x {context}: left out: {str(error).splitlines()[0]}")
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()


def against_peer(model: Any, count: int, slots: int, longest: int) -> dict[str, Any]:
    """Run requests by the ragged tier and by transformers' continuous batching; return what came out."""
    rng = np.random.default_rng(1)
    jobs = [
        Job(
            rng.integers(0, model.config.vocab_size, rng.integers(4, longest + 1)).tolist(),
            int(rng.integers(4, longest + 1)),
        )
        for _ in range(count)
    ]
    on_gpu = model.device.type == "cuda"
    seconds: dict[str, float] = {}
    answers: dict[str, list[list[int]]] = {}
    paths: list[str] = []

    def by_peer() -> None:
        most_tokens = 8192 if on_gpu else 512
        answers["peer"] = continuous_batching(
            model, jobs, slots, most_tokens=most_tokens, on_path=paths.append
        )

    def by_us() -> None:
        answers["ragged"] = refilled(RaggedBatch)(model, jobs, slots)

    for name, call in (("ragged", by_us), ("peer", by_peer)):
        clock(lambda call=call: call(), model.device)  # type: ignore[misc]
        seconds[name] = clock(call, model.device)
    same = sum(ours == theirs for ours, theirs in zip(answers["ragged"], answers["peer"], strict=True))
    return {
        "requests": count,
        "slots": slots,
        "longest": longest,
        "output_tokens": sum(job.tokens for job in jobs),
        "ragged_seconds": seconds["ragged"],
        "peer_seconds": seconds["peer"],
        "speed_up": seconds["peer"] / seconds["ragged"],
        "peer_attention": paths[-1],
        "same_answers": same,
        "tokens_right": tokens_right(model, [job.prompt for job in jobs], answers["ragged"]),
    }


def whole_job(model: Any, count: int, slots: int, longest: int, seconds: float) -> dict[str, Any]:
    """Profile the model, plan GSM8K-like requests and run the plan; return its gap to the bound."""
    drawn = generate("table3", 0, count)
    workload = Workload.from_lengths(
        np.minimum(drawn.input_tokens, longest), np.minimum(drawn.output_tokens, longest)
    )
    rng = np.random.default_rng(0)

    def engine_for(problem: Problem) -> HuggingFaceEngine:
        prompts = [
            rng.integers(0, model.config.vocab_size, int(tokens)).tolist() for tokens in problem.prompt_tokens
        ]
        return HuggingFaceEngine(problem, model, prompts, np.asarray(problem.workload.output_tokens))

    most = int(workload.input_tokens.max())
    stages = profile(engine_for, grid(slots, points=5), grid(most, least=min(8, most), points=4))
    cost: CostModel = fit_cost(stages)
    problem = Problem(workload, cost, slots, prefill_emits_first_token=True)
    plan = make_plan(problem, limits=Limits(seconds=seconds))
    assert plan.bound is not None
    engine = engine_for(problem)
    trace = execute(problem, Replay(plan.schedule, problem), engine)
    return {
        "requests": count,
        "slots": slots,
        "planned_seconds": plan.makespan,
        "bound_seconds": plan.bound.seconds,
        "run_seconds": trace.makespan,
        "gap_of_the_plan": plan.bound.gap(plan.makespan),
        "gap_of_the_run": trace.makespan / plan.bound.seconds - 1,
        "fit_error": asdict(fit_error(cost, stages)),
    }


def show_points(points: Sequence[Point]) -> None:
    """Print a table of decode rounds."""
    print(
        f"{'way':22s} {'slots':>6s} {'context':>8s} {'round ms':>9s} {'bound ms':>9s} {'reached':>8s}  tokens"
        "  attention"
    )
    for point in points:
        tokens = "right " if point.tokens_right else "WRONG "
        print(
            f"{point.way:22s} {point.slots:6d} {point.context:8d} {point.seconds * 1e3:9.3f}"
            f" {point.bound * 1e3:9.3f} {point.share:8.1%}  {tokens}  {point.kernel}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="*", choices=("rounds", "peer", "job"), default=("rounds", "peer", "job")
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: llama-3.1-8b on a GPU, else tiny")
    parser.add_argument("--slots", type=int, nargs="*")
    parser.add_argument("--context", type=int, nargs="*")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="also compile whole rounds before the capture")
    parser.add_argument("--bandwidth", type=float, help="bytes/s to bound by; measured by a copy if left out")
    parser.add_argument("--requests", type=int, help="of the job and, a quarter of them, of the peer")
    parser.add_argument("--plan-seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    shape = arguments.shape or ("llama-3.1-8b" if gpu else "tiny")
    slots = arguments.slots or ([8, 32, 64, 128, 200] if gpu else [4, 16])
    contexts = arguments.context or ([512, 1024] if gpu else [64])
    requests = arguments.requests or (1_319 if gpu else 24)
    job_slots, longest = (200, 1024) if gpu else (8, 24)
    if not gpu:
        torch.set_num_threads(1)
    rounds, repeats = arguments.rounds, arguments.repeats
    positions = max(2 * longest, max(contexts) + (repeats + 2) * rounds)
    model = build(shape, device, torch.bfloat16 if gpu else torch.float32, positions)
    rate = arguments.bandwidth or bandwidth(device)
    name = torch.cuda.get_device_name(device) if gpu else "CPU (these figures say nothing about a GPU)"
    source = "given" if arguments.bandwidth else "copied"
    report: dict[str, Any] = {"device": name, "shape": shape, "bytes_per_s": rate}
    if not arguments.json:
        print(f"{name}, {shape}, {rate / 1e9:,.1f} GB/s {source}, median of {repeats}")
    if "rounds" in arguments.parts:
        makers = ways(gpu, arguments.compile)
        points = list(all_points(model, makers, slots, contexts, rounds, rate, repeats))
        report["rounds"] = [{**asdict(point), "share": point.share} for point in points]
        if not arguments.json:
            show_points(points)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "peer": lambda: against_peer(model, max(8, requests // 4), min(job_slots, 64), longest // 2),
        "job": lambda: whole_job(model, requests, job_slots, longest, arguments.plan_seconds),
    }
    for part, run in parts.items():
        if part in arguments.parts:
            report[part] = run()
            if not arguments.json:
                print(
                    f"\n{part}: " + "\n      ".join(f"{key}: {value}" for key, value in report[part].items())
                )
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
