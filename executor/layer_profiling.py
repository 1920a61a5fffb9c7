"""Profiling a model layer by layer as the engine runs it (ExeGPT's XProfiler, section 3)."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import NormalDist, fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.cost import CostModel
from ..data.layer_profile import LayerProfile, ModelShape, Operation
from ..data.problem import Problem
from ..data.workload import Workload
from ..heuristics.dynamic_batch import DynamicBatch
from ..heuristics.round_robin_allocation import RoundRobinAllocation
from .device_memory import memory_of
from .huggingface import NO_EOS, HuggingFaceEngine, vocabulary_of
from .journal import Journal
from .loop import execute
from .prompts import Prompts

if TYPE_CHECKING:
    from .layer_shares import LayerShares
    from .tiers import Tier

_NO_COST = CostModel(0.0, 0.0, 0.0, 0.0)
_REQUESTS_PER_SLOT = 6
"""Of the job that measures what passes between stages."""
_NEVER = frozenset({-1})
"""An end that no answer has: the engine looks for it, and decodes to the full length."""
_DEVIATION = 0.45
"""Of lengths in a batch, as a share of their mean: about that of ExeGPT's tasks."""
_AT_A_TIME = 4
_DONE = (1,) * _AT_A_TIME + (_AT_A_TIME,) * _AT_A_TIME + (1,) * _AT_A_TIME
"""Requests done in each of some rounds in a row, to time what such a change of the batch costs."""
_LINE = np.array([[0.0], [1e6]])
"""Requests: a line through these is exact everywhere."""

EngineFor = Callable[[Problem], HuggingFaceEngine]


@dataclass(frozen=True, slots=True)
class Grid:
    """
    What to measure.

    Parameters
    ----------
    batches
        Prompts encoded, and requests decoding, at a time.
    lengths
        Mean tokens of a prompt, and tokens held where decoding begins.
    rounds
        Decode rounds timed at a point.
    repeats
        Measurements of a point, of which the median counts.
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    rounds: int = 16
    repeats: int = 3

    def __post_init__(self) -> None:
        if min(len(set(self.batches)), len(set(self.lengths))) < 2:
            raise ValueError("a grid needs two batches and two lengths at least")
        if min(*self.batches, *self.lengths, self.rounds, self.repeats) < 1:
            raise ValueError("a grid's numbers must be at least 1")

    @property
    def measurements(self) -> int:
        """How many there are."""
        return len(self.points) * (self.repeats + 1) + len(set(self.lengths)) + self.repeats

    @property
    def points(self) -> list[tuple[int, int]]:
        """Batch and length of each point, the largest last."""
        return [
            (batch, length) for batch in sorted(set(self.batches)) for length in sorted(set(self.lengths))
        ]


def profile_layers(
    model: Any,
    tier: Tier,
    grid: Grid,
    measured: Journal,
    *,
    pinned: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    on_point: Callable[[int, int], None] | None = None,
) -> LayerProfile:
    """
    Return what the layers of a model take on the engine, measured point by point.

    Every point goes through the engine's own prefill and decode calls, on a batch that was in use before,
    with lengths spread as in a running batch. So what the engine adds to the model (padding, masks, storing,
    choosing tokens) is measured with it. How much of it layers and attention take is measured apart, with
    hooks, whose own time is taken out again in proportion. What a change of the decode batch costs (packing
    rows, new masks), and each request that leaves, is the difference between rounds in which one or several
    are done and others. What the loop around the stages costs is measured last, on a job of random lengths.

    Parameters
    ----------
    model
        Loaded.
    tier
        Its layout of keys and values.
    grid
        What to measure; points beyond the model's positions are left out.
    measured
        Keeps each measurement: those it has already are not made again.
    pinned
        Measure as for runs at pinned lengths, which read tokens back only when a request is done.
    clock
        Seconds from any origin.
    on_point
        Called after each measurement with the number done and the number in all.

    Raises
    ------
    ValueError
        If the model's layers cannot be told from its modules.
    """
    from .handover import OtherWorker
    from .layer_shares import LayerShares
    from .model_source import position_limit

    limit = position_limit(model.config) or 2**31
    points = [
        (batch, length)
        for batch, length in grid.points
        if max(_spread(length, batch)) + grid.rounds + 2 <= limit
    ]
    if len({batch for batch, _ in points}) < 2 or len({length for _, length in points}) < 2:
        raise ValueError(f"the model's {limit} positions leave fewer than two batches and lengths to measure")
    described: dict[str, object] = {}

    def engine_for(problem: Problem) -> HuggingFaceEngine:
        prompts = Prompts.random(problem.workload, vocabulary_of(model), seed=0)
        engine = HuggingFaceEngine(
            problem,
            model,
            prompts.tokens,
            problem.workload.output_tokens,
            eos_ids=NO_EOS if pinned else _NEVER,
            tier=tier,
            clock=clock,
        )
        described.update(engine.describe())
        return engine

    tasks: dict[str, Callable[[], dict[str, float]]] = {}
    for repeat in range(grid.repeats):
        for point in points:
            tasks[_name(*point, f"repeat {repeat}")] = partial(_point, engine_for, *point, grid.rounds)
    shares = LayerShares(model, clock)
    for point in points:
        tasks[_name(*point, "layers")] = partial(_shares, engine_for, *point, grid.rounds, shares)
    lengths = sorted({length for _, length in points})
    other = OtherWorker()
    for length in lengths:
        tasks[_handed(length)] = partial(other.time_handover, model, tier, length, grid.repeats, clock)
    # Warm-up, which also describes the engine: the first calls allocate, and choose kernels.
    _point(engine_for, *points[-1], 2)
    middle = points[len(points) // 2]
    jobs = [_name(*middle, f"job {repeat}") for repeat in range(grid.repeats)]
    total = len(tasks) + len(jobs)
    with other:
        for name, measure in tasks.items():
            _keep(measured, name, measure, total, on_point)
    found = measured.finished
    composed = _composed(shape_of(model), points, grid, found)
    for seed, name in enumerate(jobs):
        job = partial(_job, engine_for, middle, grid.rounds, seed)
        _keep(measured, name, job, total, on_point)
    engine = {name: str(value) for name, value in described.items()}
    memory, kv_tokens = memory_of(model, tier)
    return replace(
        composed,
        device=engine["device"],
        device_bytes=memory,
        operations=(*composed.operations, *_run_operations(found, jobs, lengths)),
        versions={
            **engine,
            "lengths": "pinned" if pinned else "free",
            "date": datetime.date.today().isoformat(),
        },
        kv_tokens=kv_tokens,
    )


def _keep(
    measured: Journal,
    name: str,
    measure: Callable[[], dict[str, float]],
    total: int,
    on_point: Callable[[int, int], None] | None,
) -> None:
    if name not in measured.finished:
        measured.append(name, measure())
    if on_point is not None:
        on_point(min(total, len(measured.finished)), total)


def _run_operations(
    found: Mapping[str, Mapping[str, object]], jobs: Sequence[str], lengths: Sequence[int]
) -> list[Operation]:
    """Return what an engine does besides the stages themselves."""
    left = [_number(entry, "leave") for entry in found.values() if "leave" in entry]
    loop = max(0.0, median(_number(found[name], "loop") for name in jobs))
    tokens = np.array(lengths, dtype=np.float64)[:, None]
    return [
        Operation("leave", "run", ("sequences",), _LINE, max(0.0, median(left or [0.0])) * _LINE[:, 0]),
        Operation("loop", "run", ("sequences",), _LINE, np.full(2, loop)),
    ] + [
        Operation(
            name,
            "run",
            ("length",),
            tokens,
            np.array([_number(found[_handed(each)], name) for each in lengths]),
        )
        for name in ("send", "receive")
    ]


def _handed(length: int) -> str:
    return f"handover of {length} tokens"


def _name(batch: int, length: int, what: str) -> str:
    return f"{batch} x {length} tokens, {what}"


def _spread(length: int, batch: int) -> list[int]:
    """Return prompt lengths as of a running batch: a normal distribution's quantiles, in random order."""
    if batch == 1:
        return [length]
    # In order, rows of like lengths would be neighbours, and an engine that groups rows pads less.
    order = np.random.default_rng(batch).permutation(batch)
    at = [_DEVIATION * NormalDist().inv_cdf((k + 0.5) / batch) for k in order.tolist()]
    return [max(1, round(length * max(0.1, 1 + each))) for each in at]


def _used_engine(engine_for: EngineFor, batch: int, length: int, rounds: int) -> HuggingFaceEngine:
    """
    Return an engine whose buffers a first batch has used and left.

    The requests to measure come after those of that batch. None of them is done within ``rounds`` rounds;
    after that, :data:`_DONE` are in each round.
    """
    lengths = _spread(length, batch)
    done_in = np.repeat(np.arange(len(_DONE)), _DONE)[:batch]
    extra = np.append(done_in, np.full(batch - len(done_in), len(_DONE))) + 1
    workload = Workload.from_lengths(lengths * 2, [2] * batch + (1 + rounds + extra).tolist())
    engine = engine_for(Problem(workload, _NO_COST, batch, prefill_emits_first_token=True))
    engine.prefill(range(batch), range(batch))
    engine.decode(1, float("inf"))
    return engine


def _point(engine_for: EngineFor, batch: int, length: int, rounds: int) -> dict[str, float]:
    engine = _used_engine(engine_for, batch, length, rounds)
    encode, _ = engine.prefill(range(batch, 2 * batch), range(batch))
    decode, _ = engine.decode(rounds, float("inf"))
    each = decode.seconds / decode.rounds
    rounds_left = int(np.searchsorted(np.cumsum(_DONE), batch)) + 1
    calls = [engine.decode(1, float("inf"))[0].seconds for _ in range(min(rounds_left, len(_DONE)))]
    # The first round of a kind still packs, or does not, for the one before it.
    alone = median(calls[1:_AT_A_TIME] or calls)
    found = {"encode": encode.seconds, "decode": each, "change": max(0.0, alone - each)}
    if batch >= sum(_DONE):
        many, again = median(calls[_AT_A_TIME + 1 : 2 * _AT_A_TIME]), median(calls[2 * _AT_A_TIME + 1 :])
        # The batch shrinks all the while: rounds before and after are compared with those between.
        found["leave"] = (many - (alone + again) / 2) / (_AT_A_TIME - 1)
    return found


def _shares(
    engine_for: EngineFor, batch: int, length: int, rounds: int, shares: LayerShares
) -> dict[str, float]:
    """Return which part of an encoding, and of a decode round, layers take, and attention in them."""
    engine = _used_engine(engine_for, batch, length, rounds)
    found: dict[str, float] = {}
    with shares:
        for kind in ("encode", "decode"):
            if kind == "encode":
                stage, _ = engine.prefill(range(batch, 2 * batch), range(batch))
            else:
                stage, _ = engine.decode(rounds, float("inf"))
            layers, attention = shares.take()
            found |= {
                f"{kind}_layers": layers / stage.seconds,
                f"{kind}_attention": attention / stage.seconds,
            }
    return found


def _composed(
    shape: ModelShape,
    points: Sequence[tuple[int, int]],
    grid: Grid,
    found: Mapping[str, Mapping[str, object]],
) -> LayerProfile:
    """Return the profile whose composition gives every point's median."""
    batches = np.array([batch for batch, _ in points], dtype=np.float64)
    tokens = np.array([sum(_spread(length, batch)) for batch, length in points], dtype=np.float64)
    held = np.array([length + (grid.rounds + 1) / 2 for _, length in points])
    operations: list[Operation] = []
    for kind, axes in (("encode", ("sequences", "length")), ("decode", ("decodes", "context"))):
        repeats = np.array(
            [
                [_number(found[_name(*point, f"repeat {repeat}")], kind) for repeat in range(grid.repeats)]
                for point in points
            ]
        )
        seconds = np.median(repeats, axis=1)
        spread = np.subtract(*np.quantile(repeats, (0.75, 0.25), axis=1)) / 2 / seconds
        parts = [found[_name(*point, "layers")] for point in points]
        layers = seconds * [_number(part, f"{kind}_layers") for part in parts] / shape.layers
        attention = seconds * [_number(part, f"{kind}_attention") for part in parts] / shape.layers
        size = tokens if kind == "encode" else batches
        at = np.unique(size)
        rest = np.array([np.median((layers - attention)[size == each]) for each in at])
        # What the whole takes beyond its layers as composed: embedding, output head, choosing tokens, host.
        once = np.maximum(0.0, seconds - shape.layers * (np.interp(size, at, rest) + attention))
        corners = np.column_stack((batches, tokens / batches if kind == "encode" else held))
        operations += [
            Operation("layer", kind, ("tokens",), at[:, None], rest),
            Operation("attention", kind, axes, corners, attention, spread=spread * attention),
            Operation("iteration", kind, axes, corners, once, per_layer=False, spread=spread * once),
        ]
    changes = [
        median(_number(found[_name(*point, f"repeat {repeat}")], "change") for repeat in range(grid.repeats))
        for point in points
    ]
    corners = np.column_stack((batches, held))
    operations.append(Operation("change", "run", ("decodes", "context"), corners, np.array(changes)))
    return LayerProfile(
        shape=shape,
        device="",
        device_bytes=0.0,
        tensor_parallel=1,
        operations=tuple(operations),
        source="measured on this machine, through the engine's own prefill and decode calls",
    )


def _job(engine_for: EngineFor, point: tuple[int, int], rounds: int, seed: int) -> dict[str, float]:
    """Return what passes between two stages of a job, in the loop and its policy."""
    batch, length = point
    rng = np.random.default_rng(seed)
    count = _REQUESTS_PER_SLOT * batch
    workload = Workload.from_lengths(
        rng.integers(max(1, length // 2), length * 3 // 2 + 1, count), rng.integers(2, 2 * rounds, count)
    )
    problem = Problem(workload, _NO_COST, batch, prefill_emits_first_token=True)
    policy = RoundRobinAllocation(rounds // 2, DynamicBatch(max(1.0, batch / 2), length, None))
    stages = execute(problem, policy, engine_for(problem)).stages
    # The mean: a policy does much in few of its calls.
    return {"loop": fmean(after.start - before.end for before, after in pairwise(stages))}


def shape_of(model: Any) -> ModelShape:
    """Return the sizes of a loaded model."""
    config = model.config.get_text_config()
    shape = ModelShape.from_config(config.to_dict(), str(model.config.name_or_path or config.model_type))
    return replace(shape, bytes_per_value=model.dtype.itemsize)


def _number(values: Mapping[str, object], name: str) -> float:
    value = values[name]
    assert isinstance(value, int | float)
    return float(value)
