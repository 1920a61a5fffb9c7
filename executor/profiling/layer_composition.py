"""Layer profile composed from measurements on a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from ...data.arrays import FloatArray
from ...data.costs.layer_profile import LayerProfile, Operation
from ...data.costs.model_shape import ModelShape
from ...data.costs.reference_time import WORK, ReferenceTime
from ...models.exegpt.run_profile import WARMING_STEPS, seconds_after_encoding
from ...models.iterations.layer_cost import LayerCost, Surface
from .profile_grid import BESIDE, STEPS_BEFORE, WARM_STEPS, Grid, decoding, job_points, spread

Found = Mapping[str, Mapping[str, object]]
"""Measurements by name."""
Point = tuple[int, int]
"""Number of requests, and their mean tokens."""

REFERENCE = f"reference: {WORK}"
"""Field of a measurement: seconds of the fixed work before it."""

_LINE = np.array([[0.0], [1e6]])
"""Numbers of requests whose line is exact everywhere."""


def at(batch: int, length: int, what: str, number: int) -> str:
    """Return the name of a measurement at a point."""
    return f"{batch} x {length} tokens, {what}, pass {number}"


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements from which a profile is composed.

    joining: Points of :attr:`~.profile_grid.Grid.joining` measured with an encoding worker, if any.
    """

    points: Sequence[Point]
    joining: Sequence[Point]
    grid: Grid
    found: Found

    def passes(self, point: Point, what: str, kind: str) -> list[float]:
        """Return a measured value at a point, pass by pass."""
        return [_number(self.found[at(*point, what, number)][kind]) for number in range(self.grid.repeats)]

    def calls(self, kind: str) -> FloatArray:
        """Return a measured value of all calls, shape (points, passes)."""
        return np.array([self.passes(point, "calls", kind) for point in self.points])

    @property
    def batches(self) -> FloatArray:
        """Requests of the points, shape (points,)."""
        return np.array([batch for batch, _ in self.points], dtype=np.float64)

    @property
    def begun_with(self) -> FloatArray:
        """Mean prompt tokens of the points, shape (points,)."""
        return np.array([fmean(decoding(length, batch)) for batch, length in self.points])

    @property
    def held(self) -> FloatArray:
        """Mean tokens of a request in the timed steps, shape (points,)."""
        return self.begun_with + STEPS_BEFORE + (self.grid.decode_steps + 1) / 2


def composed(shape: ModelShape, measured: Measurements) -> LayerProfile:
    """Compose a profile with the measured seconds of every point.

    They are the median of its passes, which is robust to a busy moment, scaled to the mean over all points: a
    run has busy moments, too.
    """
    operations = [*_stages(shape, measured, "encode"), *_stages(shape, measured, "decode")]
    operations += _between(measured)
    operations += _after_encoding(_so_far(shape, operations), measured)
    operations.append(_interrupted(_so_far(shape, operations), measured))
    profile = LayerProfile(
        shape=shape,
        device="",
        device_bytes=0.0,
        tensor_parallel=1,
        operations=tuple(operations),
        source="measured on this machine, through the engine's own prefill and decode calls",
        reference=ReferenceTime.of([_number(record[REFERENCE]) for record in measured.found.values()]),
    )
    if not measured.joining:
        return profile
    return replace(profile, operations=(*operations, *_of_two(profile, measured)))


def _stages(shape: ModelShape, measured: Measurements, kind: str) -> list[Operation]:
    """Return the operations of encoding or decoding."""
    batches, points = measured.batches, measured.points
    repeats = measured.calls(kind)
    seconds = _typical(repeats)
    deviation = np.subtract(*np.quantile(repeats, (0.75, 0.25), axis=1)) / 2 / seconds
    layers, attention = (
        seconds
        * [median(measured.passes(point, "layers", f"{kind}_{part}")) for point in points]
        / shape.layers
        for part in ("layers", "attention")
    )
    if kind == "encode":
        size = np.array([sum(spread(length, batch)) for batch, length in points], dtype=np.float64)
        axes, corners = ("sequences", "length"), np.column_stack((batches, size / batches))
    else:
        size, axes, corners = batches, ("decodes", "context"), np.column_stack((batches, measured.held))
    sizes = np.unique(size)
    rest = np.array([np.median((layers - attention)[size == sequences]) for sequences in sizes])
    # Seconds beyond the composed layers: embedding, output head, choice of tokens, host.
    once = np.maximum(0.0, seconds - shape.layers * (np.interp(size, sizes, rest) + attention))
    return [
        Operation("layer", kind, ("tokens",), sizes[:, None], rest),
        Operation("attention", kind, axes, corners, attention, spread=deviation * attention),
        Operation("iteration", kind, axes, corners, once, per_layer=False, spread=deviation * once),
    ]


def _between(measured: Measurements) -> list[Operation]:
    points = measured.found
    large = [point for point in measured.points if "leave" in points[at(*point, "calls", 0)]]
    parting = [seconds for point in large for seconds in measured.passes(point, "calls", "leave")]
    leaving = max(0.0, median(parting or [0.0]))
    # One request was done in each timed call.
    changes = np.maximum(0.0, _typical(measured.calls("change")) - leaving)
    jobs = job_points(measured.points)
    loop, keep = (
        max(0.0, median(seconds for job in jobs for seconds in measured.passes(job, "job", what)))
        for what in ("loop", "keep")
    )
    corners = np.column_stack((measured.batches, measured.held))
    return [
        Operation("change", "run", ("decodes", "context"), corners, changes),
        Operation("leave", "run", ("sequences",), _LINE, leaving * _LINE[:, 0]),
        Operation("loop", "run", ("sequences",), _LINE, np.full(2, loop)),
        Operation("keep", "run", ("sequences",), _LINE, keep * _LINE[:, 0]),
    ]


def _after_encoding(cost: LayerCost, measured: Measurements) -> list[Operation]:
    batches, lengths = BESIDE + measured.batches, measured.begun_with
    parts = {"start": 1, "warming": WARMING_STEPS - 1, "warm": WARM_STEPS}
    beyond, encoded = {}, 0
    for name, decode_steps in parts.items():
        beyond[name] = _typical(measured.calls(name))
        for _ in range(decode_steps):
            encoded += 1
            per_layer, once = cost.decode_many(batches, lengths + encoded)
            beyond[name] -= cost.profile.shape.layers * per_layer + once
    # Each of these decode steps is a call of its own, which is not why they are slow.
    beyond["warming"] -= parts["warming"] / parts["warm"] * beyond["warm"]
    corners = np.column_stack((batches, lengths + (WARMING_STEPS + 1) / 2))
    return [
        Operation(name, "run", ("decodes", "context"), corners, np.maximum(0.0, beyond[name]))
        for name in ("start", "warming")
    ]


def _so_far(shape: ModelShape, operations: Sequence[Operation]) -> LayerCost:
    return LayerCost(LayerProfile(shape, "", 0.0, 1, tuple(operations), ""))


def _interrupted(cost: LayerCost, measured: Measurements) -> Operation:
    """Return the slow-down of a decode call in a job."""
    profile, jobs = cost.profile, job_points(measured.points)
    change, leaving = _changing(profile)

    def longer(job: Point, number: int) -> float:
        seconds = {kind: _number(value) for kind, value in measured.found[at(*job, "job", number)].items()}
        active, context, encodings = seconds["active"], seconds["context"], seconds["encodings"]
        per_layer, once = cost.decode(active, context)
        known = seconds["decode_steps"] * (profile.shape.layers * per_layer + once)
        known += (seconds["calls"] - encodings) * change(active, context)
        known += seconds["done"] * leaving
        decode_steps = round(seconds["decode_steps"] / encodings)
        known += encodings * float(
            seconds_after_encoding(profile, np.array([active]), context, decode_steps)[0]
        )
        return (seconds["decode"] - known) / seconds["calls"]

    active = [fmean(measured.passes(job, "job", "active")) for job in jobs]
    passes = range(measured.grid.repeats)
    seconds = [max(0.0, median(longer(job, number) for number in passes)) for job in jobs]
    return Operation("interrupted", "run", ("decodes",), np.array(active)[:, None], np.array(seconds))


def _changing(profile: LayerProfile) -> tuple[Surface, float]:
    of_run = {operation.name: operation for operation in profile.operations if operation.phase == "run"}
    leaving = float(of_run["leave"].seconds[-1]) / float(_LINE[-1, 0])
    return Surface(of_run["change"].points, of_run["change"].seconds), leaving


def _typical(repeats: FloatArray) -> FloatArray:
    """Return each point's median, scaled to the sum of means."""
    medians, means = np.median(repeats, axis=1), np.mean(repeats, axis=1)
    return np.asarray(medians * (means.sum() / medians.sum() if medians.any() else 1.0))


def _of_two(profile: LayerProfile, measured: Measurements) -> list[Operation]:
    """Return the extra operations of two workers."""
    cost, layers = LayerCost(profile), profile.shape.layers
    change, leaving = _changing(profile)
    alone = profile.operation("loop")
    assert alone is not None
    loop = float(alone.seconds[0])
    decodes, crowding = _crowding(measured)
    joins, sends, joined = [], [], []
    for prompts, length in measured.joining:
        per_layer, once = cost.encode(prompts, sum(spread(length, prompts)) / prompts)
        encode, active, context, decode = (
            median(measured.passes((prompts, length), "joining", what))
            for what in ("beside", "active", "context", "decode")
        )
        sends.append(max(0.0, encode - layers * per_layer - once))
        between = measured.passes((prompts, length), "joining", "between")
        stages = measured.passes((prompts, length), "joining", "stages")
        # If batches join less often than in every stage, only the loop is between the others.
        joins.append(loop + max(0.0, median(np.subtract(between, np.multiply(stages, loop)).tolist())))
        per_layer, once = cost.decode(active, context)
        step = layers * per_layer + once + change(active, context)
        # As many requests leave as join, and the other worker's load has its own operation.
        step += prompts / median(stages) * leaving
        step += encode / median(stages) * float(np.interp(active, decodes, crowding))
        joined.append((decode - step) / active)
    corners = np.array(measured.joining, dtype=np.float64)
    # As a difference of large numbers it is noisy, but hardly so over all lengths.
    longer = [np.mean(np.array(joined)[corners[:, 0] == prompts]) for prompts, _ in measured.joining]
    return [
        Operation("send", "run", ("sequences", "length"), corners, np.array(sends)),
        Operation("join", "run", ("sequences", "length"), corners, np.array(joins)),
        Operation("joined", "run", ("sequences", "length"), corners, np.maximum(0.0, longer)),
        Operation("crowding", "run", ("decodes",), decodes[:, None], crowding),
    ]


def _crowding(measured: Measurements) -> tuple[FloatArray, FloatArray]:
    """Return batches, and their slow-down by another worker."""
    slowed: dict[int, list[float]] = {}
    for point in measured.points:
        alone, beside = (measured.passes(point, "beside encoding", kind) for kind in ("alone", "beside"))
        slowed.setdefault(point[0], []).append(max(0.0, median((1 - np.divide(alone, beside)).tolist())))
    batches = sorted(slowed)
    return np.array(batches, dtype=np.float64), np.array([median(slowed[batch]) for batch in batches])


def shape_of(model: Any) -> ModelShape:
    """Return the sizes of a loaded model."""
    config = model.config.get_text_config()
    shape = ModelShape.from_config(config.to_dict(), str(model.config.name_or_path or config.model_type))
    return replace(shape, bytes_per_value=model.dtype.itemsize)


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
