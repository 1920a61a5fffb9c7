"""Layer profile of a model as the engine runs it (ExeGPT's XProfiler)."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...data.costs.cost import CostModel
from ...data.costs.layer_profile import LayerProfile
from ...data.problem import Problem
from ...data.workload import Workload
from ...heuristics.exegpt.dynamic_batch import DynamicBatch
from ...heuristics.exegpt.round_robin import RoundRobinAllocation
from ...heuristics.loop import execute
from ...models.exegpt.run_profile import WARMING_STEPS
from ..engines.device_memory import memory_of
from ..engines.huggingface import NO_EOS, DecodeOptions, HuggingFaceEngine, vocabulary_of
from ..jobs.journal import Journal
from ..jobs.machine_speed import MachineSpeed
from ..models.prompts import Prompts
from ..processes.workload_aware import DecodeEngine
from .layer_composition import REFERENCE, Measurements, Point, at, composed, shape_of
from .profile_grid import BESIDE, WARM_STEPS, Grid, decoding, job_points, spread
from .worker_pair import FEWEST_STEPS, MOST_STEPS, WorkerPair

if TYPE_CHECKING:
    from ..engines.tiers import Tier
    from ..processes.encode_worker import EncodeWorker
    from ..processes.engine_spec import EngineSpec
    from .layer_shares import LayerShares

_NO_COST = CostModel(0.0, 0.0, 0.0, 0.0)
_REQUESTS_PER_SLOT = 6
"""Requests per slot of the job that measures overheads."""
_NEVER = frozenset({-1})
"""End token of no completion, so that all have full length."""
_EARLY = ((1, 0),) * (WARMING_STEPS + WARM_STEPS)
_SINGLE = ((1, 1),) * BESIDE
_AFTER = (*_SINGLE[1:], *((1, BESIDE),) * BESIDE, *_SINGLE)
"""Decode calls after an encoding: steps, and requests done."""

EngineFor = Callable[[Problem], HuggingFaceEngine]
_Task = Callable[[], dict[str, float]]
_Engine = TypeVar("_Engine", bound=HuggingFaceEngine)


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """Model as it runs while it is profiled.

    model: Loaded.
    tier: Layout of its KV cache.
    pinned: True to measure as for runs at pinned lengths, which read tokens back only when a request is done.
    clock: Seconds from any origin.
    """

    model: Any
    tier: Tier
    pinned: bool = False
    clock: Callable[[], float] = time.perf_counter

    def engine(self, problem: Problem) -> HuggingFaceEngine:
        """Return an engine for synthetic prompts."""
        return self._of(HuggingFaceEngine, problem)

    def decode_engine(self, encoding: EncodeWorker, problem: Problem) -> DecodeEngine:
        """Return an engine for synthetic prompts that a worker encodes."""
        return self._of(partial(DecodeEngine, encoding), problem)

    def _of(self, kind: Callable[..., _Engine], problem: Problem) -> _Engine:
        prompts = Prompts.random(problem.workload, vocabulary_of(self.model), seed=0)
        return kind(
            problem,
            self.model,
            prompts.tokens,
            most_tokens=problem.workload.output_tokens,
            decoding=DecodeOptions(NO_EOS if self.pinned else _NEVER),
            tier=self.tier,
            clock=self.clock,
        )


def profile_layers(
    profiled: ProfiledModel,
    grid: Grid,
    measured: Journal,
    *,
    worker: EngineSpec | None = None,
    keep: Callable[[Sequence[int]], None] | None = None,
    on_point: Callable[[int, int], None] | None = None,
) -> LayerProfile:
    """Profile the layers of a model on the engine.

    Every point runs through the engine's own prefill and decode calls, on buffers that were used before, with
    lengths spread as in a running batch. So the engine's additions to the model (padding, masks, storing,
    choice of tokens) are measured with it. The shares of layers and attention are measured separately, with
    hooks; the hooks' own time is removed in proportion.

    The cost of a batch change (packing rows, new masks), and of each request that leaves, is a difference:
    decode steps in which requests are done, minus others. Decode steps after an encoding are slower, as it
    has evicted KV cache from the processor caches, and are measured separately. Jobs of random lengths
    measure the overhead of the loop, of storing a completion, and the slow-down of decode calls between them.

    With a worker, the mutual costs of two workers are measured, too. Decode steps while it encodes are
    compared with those while it rests, and jobs run in which encoded batches join.
    """
    points, joining = _within_positions(profiled.model, grid, paired=worker is not None)
    # Warm-up: the first calls allocate, and choose kernels.
    _point(profiled.engine, *points[-1], 2)
    with ExitStack() as open_:
        pair = None
        if worker is not None and joining:
            several, longest = joining[-1]
            longest_spread = max(spread(longest, several))
            pair = WorkerPair(worker, profiled.decode_engine, several, longest_spread, profiled.clock)
            open_.enter_context(pair)
        passes = [_tasks(profiled, grid, points, keep, number) for number in range(grid.repeats)]
        if pair is not None:
            for number, tasks in enumerate(passes):
                tasks |= _paired_tasks(pair, profiled.engine, grid.decode_steps, points, joining, number)
        _measure(passes, MachineSpeed(profiled.model, profiled.clock), measured, on_point)
    passes_done = {name: measured.finished[name] for tasks in passes for name in tasks}
    profile = composed(shape_of(profiled.model), Measurements(points, joining, grid, passes_done))
    single_request = Problem(Workload.from_lengths([1], [1]), _NO_COST, 1, prefill_emits_first_token=True)
    engine = {name: str(value) for name, value in profiled.engine(single_request).describe().items()}
    memory, kv_tokens = memory_of(profiled.model, profiled.tier)
    return replace(
        profile,
        device=engine["device"],
        device_bytes=memory,
        versions={
            **engine,
            "lengths": "pinned" if profiled.pinned else "free",
            "date": datetime.date.today().isoformat(),
        },
        kv_tokens=kv_tokens,
    )


def _within_positions(model: Any, grid: Grid, *, paired: bool) -> tuple[list[Point], list[Point]]:
    from ..models.source import position_limit

    limit = position_limit(model.config) or 2**31
    points = [point for point in grid.points if grid.within(point, limit)]
    if len({batch for batch, _ in points}) < 2 or len({length for _, length in points}) < 2:
        raise ValueError(f"the model's {limit} positions leave fewer than two batches and lengths to measure")
    joining = [
        (prompts, length)
        for prompts, length in grid.joining
        if paired and grid.within((prompts, length), limit)
        if max(decoding(length, points[-1][0], MOST_STEPS)) + MOST_STEPS < limit
    ]
    return points, joining


def _tasks(
    profiled: ProfiledModel,
    grid: Grid,
    points: Sequence[Point],
    keep: Callable[[Sequence[int]], None] | None,
    number: int,
) -> dict[str, _Task]:
    """Return the measurements of one pass on one engine."""
    from .layer_shares import LayerShares

    shares = LayerShares(profiled.model, profiled.clock)
    tasks: dict[str, _Task] = {}
    for point in points:
        tasks[at(*point, "calls", number)] = partial(_point, profiled.engine, *point, grid.decode_steps)
        tasks[at(*point, "layers", number)] = partial(
            _shares, profiled.engine, *point, grid.decode_steps, shares
        )
    for point in job_points(points):
        tasks[at(*point, "job", number)] = partial(_job, profiled, point, grid, number, keep)
    return tasks


def _paired_tasks(
    pair: WorkerPair,
    engine_for: EngineFor,
    decode_steps: int,
    points: Sequence[Point],
    joining: Sequence[Point],
    number: int,
) -> dict[str, _Task]:
    tasks: dict[str, _Task] = {}
    for point in points:
        crowd = partial(_crowd, engine_for, pair, point, decode_steps)
        tasks[at(*point, "beside encoding", number)] = crowd
    for prompts, length in joining:
        tasks[at(prompts, length, "joining", number)] = partial(pair.join, prompts, length, points[-1][0])
    return tasks


def _measure(
    passes: Sequence[dict[str, _Task]],
    speed: MachineSpeed,
    measured: Journal,
    on_point: Callable[[int, int], None] | None,
) -> None:
    total = sum(len(tasks) for tasks in passes)
    # Each pass has an order of its own. A machine's speed changes within seconds, and measurements in a row
    # would all see the same speed.
    rng = np.random.default_rng(0)
    for tasks in passes:
        for name in rng.permuted(list(tasks)).tolist():
            if name not in measured.finished:
                reading = speed()
                measured.append(name, {**tasks[name](), REFERENCE: reading})
            if on_point is not None:
                on_point(min(total, len(measured.finished)), total)


def _used_engine(
    engine_for: EngineFor, batch: int, length: int, decode_steps: int, leaving: Sequence[int] = ()
) -> HuggingFaceEngine:
    """Return an engine with used buffers.

    A first batch uses the buffers. Then come a batch to encode, done after a decode step, a batch to decode,
    and :data:`BESIDE` further requests. The last two run for more than ``decode_steps`` steps, or as many as
    ``leaving`` says: first for the further requests, then for the batch.
    """
    lengths = spread(length, batch)
    stay = np.full(batch + BESIDE, decode_steps + 1)
    stay[: len(leaving)] = leaving[: len(stay)]
    outputs = 1 + np.roll(stay, -BESIDE)
    workload = Workload.from_lengths(
        lengths * 2 + decoding(length, batch) + [length] * BESIDE, [2] * 2 * batch + outputs.tolist()
    )
    engine = engine_for(Problem(workload, _NO_COST, batch + BESIDE, prefill_emits_first_token=True))
    engine.prefill(range(batch), range(batch))
    engine.decode(1, float("inf"))
    return engine


def _point(engine_for: EngineFor, batch: int, length: int, decode_steps: int) -> dict[str, float]:
    """Return the seconds of an encoding, a decode step and a call.

    After some slower decode steps that follow the encoding, a call of many steps is timed. Calls of one step
    are timed before and after it, with as many more and as many fewer requests. In the last step of each one
    request is done, as in a run.
    """
    calls = (*_EARLY, *_SINGLE, (decode_steps, 1), *_AFTER)
    ends = np.cumsum([call for call, _ in calls])
    leaving = np.repeat(ends, [done for _, done in calls])
    engine = _used_engine(engine_for, batch, length, int(ends[-1]), leaving.tolist())
    encode, _ = engine.prefill(range(batch, 2 * batch), range(batch))
    engine.decode(1, float("inf"))
    engine.prefill(range(2 * batch, 3 * batch), range(batch))
    engine.prefill(range(3 * batch, 3 * batch + BESIDE), range(batch, batch + BESIDE))
    # Small batches are done before all calls are.
    running_after = batch + BESIDE - np.cumsum([0, *(done for _, done in calls[:-1])])
    seconds = [
        engine.decode(rows, float("inf"))[0].seconds
        for (rows, _), running in zip(calls, running_after.tolist(), strict=True)
        if running > 0
    ]
    early, seconds = seconds[: len(_EARLY)], seconds[len(_EARLY) :]
    # No request left before the first of these calls.
    before, many, after = seconds[1:BESIDE], seconds[BESIDE], seconds[BESIDE + 1 :][:3]
    near = min(len(after), batch - 1)
    single = fmean(before[-near:] + after[:near] if near else before[-1:])
    # If noise hides a call's fixed cost, its decode steps get all of it.
    per_step = (many - single) / (decode_steps - 1) if single < many else many / decode_steps
    parts = {"encode": encode.seconds, "decode": per_step, "change": max(0.0, single - per_step)}
    parts |= {"start": early[0], "warming": sum(early[1:WARMING_STEPS]), "warm": sum(early[WARMING_STEPS:])}
    if batch >= leaving.size - BESIDE:
        several, again = seconds[-2 * BESIDE + 1 : -BESIDE], seconds[-BESIDE + 1 :]
        # The batch shrinks throughout: calls before and after are compared with those between.
        alone = (median(after) + median(again)) / 2
        parts["leave"] = (median(several) - alone) / (BESIDE - 1)
    return parts


def _shares(
    engine_for: EngineFor, batch: int, length: int, decode_steps: int, shares: LayerShares
) -> dict[str, float]:
    engine = _used_engine(engine_for, batch, length, decode_steps)
    seconds_of: dict[str, float] = {}
    with shares:
        for kind in ("encode", "decode"):
            if kind == "encode":
                stage, _ = engine.prefill(range(batch, 2 * batch), range(batch))
            else:
                engine.decode(1, float("inf"))
                engine.prefill(range(2 * batch, 3 * batch), range(batch))
                shares.take()
                stage, _ = engine.decode(decode_steps, float("inf"))
            layers, attention = shares.take()
            seconds_of |= {
                f"{kind}_layers": layers / stage.seconds,
                f"{kind}_attention": attention / stage.seconds,
            }
    return seconds_of


def _crowd(engine_for: EngineFor, pair: WorkerPair, point: Point, decode_steps: int) -> dict[str, float]:
    (batch, length), decode_steps = point, max(decode_steps, FEWEST_STEPS)
    engine = _used_engine(engine_for, batch, length, decode_steps + 2 * WARMING_STEPS)
    engine.prefill(range(2 * batch, 3 * batch), range(batch))
    return pair.crowd(engine, length, decode_steps)


def _job(
    profiled: ProfiledModel,
    point: Point,
    grid: Grid,
    seed: int,
    keep: Callable[[Sequence[int]], None] | None,
) -> dict[str, float]:
    """Return the overheads of a job between its stages.

    It also returns the seconds of decode calls in the steady state, with their work: calls, decode steps,
    mean requests and tokens of each, requests done, and encodings among them.
    """
    batch, length = point
    rng = np.random.default_rng(seed)
    count = _REQUESTS_PER_SLOT * batch
    workload = Workload.from_lengths(
        rng.integers(max(1, length // 2), length * 3 // 2 + 1, count),
        rng.integers(2, grid.most_steps + 1, count),
    )
    problem = Problem(workload, _NO_COST, batch, prefill_emits_first_token=True)
    policy = RoundRobinAllocation(grid.decode_steps // 2, DynamicBatch(max(1.0, batch / 2), length, None))
    engine, served, clock = profiled.engine(problem), list[float](), profiled.clock

    def finished(request: int) -> None:
        begun = clock()
        if keep is not None:
            keep(engine.answers[request])
        served.append(clock() - begun)

    trace = execute(problem, policy, engine, on_finish=finished)
    stages = trace.stages
    between = [after.start - before.end for before, after in pairwise(stages)]
    # Means, as a policy does most of its work in few calls. The last completions are stored after the last
    # stage.
    last = served[len(served) - int((trace.finished == trace.makespan).sum()) :]
    encodings = [number for number, stage in enumerate(stages) if stage.kind == "prefill"]
    steady = stages[encodings[2] : encodings[-1]]
    calls = [stage for stage in steady if stage.kind == "decode"]
    decode_steps = sum(call.decode_steps for call in calls)
    done = (trace.finished > steady[0].start) & (trace.finished <= steady[-1].end)
    return {
        "loop": (sum(between) - sum(served) + sum(last)) / len(between),
        "keep": fmean(served),
        "decode": sum(call.seconds for call in calls),
        "calls": len(calls),
        "decode_steps": decode_steps,
        "active": sum(call.tokens for call in calls) / decode_steps,
        "context": sum(call.kv_tokens for call in calls) / sum(call.tokens for call in calls),
        "done": int(done.sum()),
        "encodings": len(steady) - len(calls),
    }
