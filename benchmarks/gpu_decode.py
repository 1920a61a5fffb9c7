"""
What is measured of the engine on a GPU: decode steps against the bandwidth bound, a peer, and a whole job.

A decode step has to read every weight once and every key and value that its rows hold; at the rate at which
the device copies memory, that is the least time it can take.

Weights are seeded random numbers: only shapes matter here.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from engine_speed import Job, continuous_batching, refilled
from transformers import AutoConfig, AutoModelForCausalLM

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.executor.engines.huggingface import HuggingFaceEngine
from batchbound.executor.engines.self_check import greedy_shortfall, near_tie
from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.captured import Capture, DecodeStep, cuda_graph
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.profiling.calibrate import fit_cost, fit_error
from batchbound.executor.profiling.grid_run import grid, profile
from batchbound.heuristics.loop import execute
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.planning.plan import make_plan
from batchbound.solvers import Limits

SHAPES: dict[str, dict[str, Any]] = {
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
MOST_CASES = 64
"""Captures of a process whose steps are compiled."""

CHECKED = 4
"""Answers whose tokens are compared with the model's own."""

Maker = Callable[[Any, int, int], RunningBatch]
"""Makes a batch of a model, slots and capacity."""


def compiled(capture: Capture = cuda_graph, *, backend: str | Callable[..., Any] = "inductor") -> Capture:
    """Return a capture that compiles the decode step first."""

    def compile_and_capture(step: DecodeStep) -> DecodeStep:
        compiled_step = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)

        def run() -> None:
            # Every number of rows and every buffer is a case of its own, of the same code.
            with torch._dynamo.config.patch(recompile_limit=MOST_CASES):
                compiled_step()

        return capture(run)

    return compile_and_capture


@dataclass(frozen=True, slots=True)
class Point:
    """A way to decode at a number of slots and a context length; seconds of a decode step."""

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
    """Return a ragged batch whose decode steps Python runs, as on a CPU."""
    batch = RaggedBatch(model, slots, capacity)
    batch._capture = None
    return batch


def captured(capture: Capture) -> Maker:
    """Return what makes ragged batches whose decode steps are captured so."""
    return lambda model, slots, capacity: RaggedBatch(model, slots, capacity, capture=capture)


def ways(gpu: bool, compile_steps: bool) -> dict[str, Maker]:
    """Return the ways to decode; on a CPU a captured decode step is simply run again."""

    def again(step: DecodeStep) -> DecodeStep:
        return step

    capture: Capture = cuda_graph if gpu else again
    found: dict[str, Maker] = {
        "ragged, not captured": uncaptured,
        "ragged": captured(capture),
        "ragged, limited": lambda model, slots, capacity: RaggedBatch(
            model, slots, capacity, capture=capture, kv_tokens=slots * capacity
        ),
    }
    if compile_steps:
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
    """Return the least seconds of a step: every weight but the embedding, and all keys and values, once."""
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
    model: Any, way: str, maker: Maker, slots: int, context: int, decode_steps: int, rate: float, repeats: int
) -> Point:
    """Return the median round of a way, with rows whose lengths lie between half and all of the context."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(1, context // 2), context + 1, slots)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    batch = maker(model, slots, context + (repeats + 1) * decode_steps + 1)
    first = batch.prefill(list(range(slots)), prompts)
    start = batch.decode(decode_steps)
    answers = [[first[slot], *start[:, slot].tolist()] for slot in range(slots)]
    right = tokens_right(model, prompts, answers)
    seconds, held = [], []
    for _ in range(repeats):
        held.append(batch.kv_tokens / slots + decode_steps / 2)
        seconds.append(clock(lambda: batch.decode(decode_steps), model.device) / decode_steps)
    middle = int(np.argsort(seconds)[len(seconds) // 2])
    bound = bound_seconds(model, slots, held[middle], rate)
    kernel = (isinstance(batch, RaggedBatch) and batch._kernel) or "sdpa"
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
