"""A layer profile composed from what was measured at the points of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from ...data.costs.cost import FloatArray
from ...data.costs.layer_profile import LayerProfile, ModelShape, Operation
from ...data.costs.reference_time import WORK, ReferenceTime
from ...models.exegpt.layer_cost import LayerCost, Surface
from ...models.exegpt.run_profile import WARMING_ROUNDS, seconds_after_encoding
from .profile_grid import BESIDE, ROUNDS_BEFORE, WARM_ROUNDS, Grid, decoding, job_points, spread

Found = Mapping[str, Mapping[str, object]]
"""Measurements by name."""

REFERENCE = f"reference: {WORK}"
"""Of a measurement: the seconds of that work, before and after it on average."""
WAITED = "waited"
"""Of a measurement: the share of its time in which other processes held its cores."""
_MOST_WAITED = 0.02
"""On average, for a profile that says nothing of it."""
_SECONDS = frozenset(
    ("encode", "decode", "change", "start", "warming", "warm", "leave", "loop", "keep", "between")
)
"""What the process that reads the reference takes; one beside it runs at a speed of its own."""

_LINE = np.array([[0.0], [1e6]])
"""Requests: a line through these is exact everywhere."""


def at(batch: int, length: int, what: str, number: int) -> str:
    """Return the name of a measurement at a point, in one of the passes."""
    return f"{batch} x {length} tokens, {what}, pass {number}"


def composed(
    shape: ModelShape,
    points: Sequence[tuple[int, int]],
    joining: Sequence[tuple[int, int]],
    grid: Grid,
    found: Found,
) -> LayerProfile:
    """
    Return the profile whose composition gives what every point takes.

    That is the median of its passes, which a busy moment leaves alone, in proportion to what all points took
    on average: a run pays for its busy moments, too. Each measurement counts as it would have been at the
    mean speed of the machine: its speed changes more from one to the next than most of what is to be told.

    Parameters
    ----------
    shape
        Of the model.
    points
        Of the grid, those that were measured.
    joining
        Of :attr:`~.profile_grid.Grid.joining` those measured with a worker that encodes; none without one.
    grid
        What else was to be measured.
    found
        The measurements, all of them.
    """
    batches = np.array([batch for batch, _ in points], dtype=np.float64)
    tokens = np.array([sum(spread(length, batch)) for batch, length in points], dtype=np.float64)
    held = _begun_with(points) + ROUNDS_BEFORE + (grid.rounds + 1) / 2
    operations: list[Operation] = []
    readings = np.array([_number(each[REFERENCE]) for each in found.values()])
    crowded = [each for each in found.values() if "reference_beside" in each]
    beside = median(
        [_number(each["reference_beside"]) / _number(each["reference_alone"]) for each in crowded] or [1.0]
    )
    found = _at_one_speed(found)
    for kind, axes in (("encode", ("sequences", "length")), ("decode", ("decodes", "context"))):
        repeats = np.array([_passes(found, grid, point, "calls", kind) for point in points])
        seconds = _typical(repeats)
        deviation = np.subtract(*np.quantile(repeats, (0.75, 0.25), axis=1)) / 2 / seconds
        layers, attention = (
            seconds
            * [median(_passes(found, grid, point, "layers", f"{kind}_{part}")) for point in points]
            / shape.layers
            for part in ("layers", "attention")
        )
        size = tokens if kind == "encode" else batches
        sizes = np.unique(size)
        rest = np.array([np.median((layers - attention)[size == each]) for each in sizes])
        # What the whole takes beyond its layers as composed: embedding, output head, choosing tokens, host.
        once = np.maximum(0.0, seconds - shape.layers * (np.interp(size, sizes, rest) + attention))
        corners = np.column_stack((batches, tokens / batches if kind == "encode" else held))
        operations += [
            Operation("layer", kind, ("tokens",), sizes[:, None], rest),
            Operation("attention", kind, axes, corners, attention, spread=deviation * attention),
            Operation("iteration", kind, axes, corners, once, per_layer=False, spread=deviation * once),
        ]
    large = [point for point in points if "leave" in found[at(*point, "calls", 0)]]
    left = [each for point in large for each in _passes(found, grid, point, "calls", "leave")]
    leaving = max(0.0, median(left or [0.0]))
    # One request was done in each call that was timed.
    whole = _typical(np.array([_passes(found, grid, point, "calls", "change") for point in points]))
    changes = np.maximum(0.0, whole - leaving)
    jobs = job_points(points)
    loop, keep = (
        max(0.0, median(each for job in jobs for each in _passes(found, grid, job, "job", what)))
        for what in ("loop", "keep")
    )
    operations += [
        Operation("change", "run", ("decodes", "context"), np.column_stack((batches, held)), changes),
        Operation("leave", "run", ("sequences",), _LINE, leaving * _LINE[:, 0]),
        Operation("loop", "run", ("sequences",), _LINE, np.full(2, loop)),
        Operation("keep", "run", ("sequences",), _LINE, keep * _LINE[:, 0]),
    ]
    operations += _after_encoding(_so_far(shape, operations), points, grid, found)
    operations.append(_interrupted(_so_far(shape, operations), jobs, grid, found))
    profile = LayerProfile(
        shape=shape,
        device="",
        device_bytes=0.0,
        tensor_parallel=1,
        operations=tuple(operations),
        source="measured on this machine, through the engine's own prefill and decode calls",
        reference=ReferenceTime.of(readings, beside),
        warnings=_warnings(found),
    )
    if not joining:
        return profile
    return replace(profile, operations=(*operations, *_of_two(profile, points, joining, grid, found, loop)))


def _warnings(found: Found) -> tuple[str, ...]:
    waited = fmean(_number(each.get(WAITED, 0.0)) for each in found.values())
    if waited <= _MOST_WAITED:
        return ()
    return (
        f"other processes held its cores for {waited:.0%} of the time in which it was measured:"
        " profile again while they rest",
    )


def _at_one_speed(found: Found) -> Found:
    """Return measurements as they would have been at the mean speed of the machine while they were made."""
    references = {name: _number(each[REFERENCE]) for name, each in found.items()}
    mean = fmean(references.values())

    def scaled(name: str, kind: str, value: object) -> object:
        return _number(value) * mean / references[name] if kind in _SECONDS else value

    return {
        name: {kind: scaled(name, kind, value) for kind, value in each.items()}
        for name, each in found.items()
    }


def _after_encoding(
    cost: LayerCost, points: Sequence[tuple[int, int]], grid: Grid, found: Found
) -> list[Operation]:
    """Return what a first call takes beyond a round, and rounds after an encoding beyond later ones."""
    batches = BESIDE + np.array([batch for batch, _ in points], dtype=np.float64)
    lengths = _begun_with(points)
    parts = {"start": 1, "warming": WARMING_ROUNDS - 1, "warm": WARM_ROUNDS}
    beyond, held = {}, 0
    for name, rounds in parts.items():
        beyond[name] = _typical(np.array([_passes(found, grid, point, "calls", name) for point in points]))
        for _ in range(rounds):
            held += 1
            per_layer, once = cost.decode_many(batches, lengths + held)
            beyond[name] -= cost.profile.shape.layers * per_layer + once
    # Each of these rounds is a call of its own: that is not what makes them long.
    beyond["warming"] -= parts["warming"] / parts["warm"] * beyond["warm"]
    corners = np.column_stack((batches, lengths + (WARMING_ROUNDS + 1) / 2))
    return [
        Operation(name, "run", ("decodes", "context"), corners, np.maximum(0.0, beyond[name]))
        for name in ("start", "warming")
    ]


def _so_far(shape: ModelShape, operations: Sequence[Operation]) -> LayerCost:
    return LayerCost(LayerProfile(shape, "", 0.0, 1, tuple(operations), ""))


def _interrupted(cost: LayerCost, jobs: Sequence[tuple[int, int]], grid: Grid, found: Found) -> Operation:
    """Return what a decode call takes longer in a job than in a row of calls, where nothing comes between."""
    profile = cost.profile
    own = {operation.name: operation for operation in profile.operations if operation.phase == "run"}
    change, leaving = Surface(own["change"].points, own["change"].seconds), float(own["leave"].seconds[-1])

    def longer(job: tuple[int, int], number: int) -> float:
        one = {kind: _number(value) for kind, value in found[at(*job, "job", number)].items()}
        active, context, encodings = one["active"], one["context"], one["encodings"]
        per_layer, once = cost.decode(active, context)
        known = one["rounds"] * (profile.shape.layers * per_layer + once)
        known += (one["calls"] - encodings) * change(active, context)
        known += one["done"] * leaving / float(_LINE[-1, 0])
        rounds = round(one["rounds"] / encodings)
        known += encodings * float(seconds_after_encoding(profile, np.array([active]), context, rounds)[0])
        return (one["decode"] - known) / one["calls"]

    active = [fmean(_passes(found, grid, job, "job", "active")) for job in jobs]
    seconds = [max(0.0, median(longer(job, number) for number in range(grid.repeats))) for job in jobs]
    return Operation("interrupted", "run", ("decodes",), np.array(active)[:, None], np.array(seconds))


def _begun_with(points: Sequence[tuple[int, int]]) -> FloatArray:
    """Return the mean tokens of the prompts with which the points begin to decode."""
    return np.array([fmean(decoding(length, batch)) for batch, length in points])


def _typical(repeats: FloatArray) -> FloatArray:
    """Return the medians of points over their passes, scaled so that their sum is that of the means."""
    medians, means = np.median(repeats, axis=1), np.mean(repeats, axis=1)
    return np.asarray(medians * (means.sum() / medians.sum() if medians.any() else 1.0))


def _of_two(
    profile: LayerProfile,
    points: Sequence[tuple[int, int]],
    joining: Sequence[tuple[int, int]],
    grid: Grid,
    found: Found,
    loop: float,
) -> list[Operation]:
    """Return what two workers, one encoding and one decoding, take besides their stages."""
    cost, layers = LayerCost(profile), profile.shape.layers
    own = {operation.name: operation for operation in profile.operations if operation.phase == "run"}
    change, leaving = Surface(own["change"].points, own["change"].seconds), float(own["leave"].seconds[-1])
    slowed: dict[int, list[float]] = {}
    for batch, length in points:
        alone, beside = (
            _passes(found, grid, (batch, length), "beside encoding", kind) for kind in ("alone", "beside")
        )
        slowed.setdefault(batch, []).append(max(0.0, median((1 - np.divide(alone, beside)).tolist())))
    decodes = np.array(sorted(slowed), dtype=np.float64)[:, None]
    crowding = np.array([median(slowed[batch]) for batch in sorted(slowed)])
    joins, sends, joined = [], [], []
    for prompts, length in joining:
        per_layer, once = cost.encode(prompts, sum(spread(length, prompts)) / prompts)
        encode = median(_passes(found, grid, (prompts, length), "joining", "beside"))
        sends.append(max(0.0, encode - layers * per_layer - once))
        between = _passes(found, grid, (prompts, length), "joining", "between")
        stages = _passes(found, grid, (prompts, length), "joining", "stages")
        # Where batches join less often than in every stage, the loop alone is what passes in between.
        joins.append(loop + max(0.0, median(np.subtract(between, np.multiply(stages, loop)).tolist())))
        active, context, decode = (
            median(_passes(found, grid, (prompts, length), "joining", what))
            for what in ("active", "context", "decode")
        )
        per_layer, once = cost.decode(active, context)
        round_ = layers * per_layer + once + change(active, context)
        # As many leave as join, and what the other worker's being at work costs is counted for itself.
        round_ += prompts / median(stages) * leaving / float(_LINE[-1, 0])
        round_ += encode / median(stages) * float(np.interp(active, decodes[:, 0], crowding))
        joined.append((decode - round_) / active)
    corners = np.array(joining, dtype=np.float64)
    # A difference of large numbers: over all lengths it is hardly noise.
    longer = [np.mean(np.array(joined)[corners[:, 0] == prompts]) for prompts, _ in joining]
    return [
        Operation("send", "run", ("sequences", "length"), corners, np.array(sends)),
        Operation("join", "run", ("sequences", "length"), corners, np.array(joins)),
        Operation("joined", "run", ("sequences", "length"), corners, np.maximum(0.0, longer)),
        Operation("crowding", "run", ("decodes",), decodes, crowding),
    ]


def shape_of(model: Any) -> ModelShape:
    """Return the sizes of a loaded model."""
    config = model.config.get_text_config()
    shape = ModelShape.from_config(config.to_dict(), str(model.config.name_or_path or config.model_type))
    return replace(shape, bytes_per_value=model.dtype.itemsize)


def _passes(found: Found, grid: Grid, point: tuple[int, int], what: str, kind: str) -> list[float]:
    return [_number(found[at(*point, what, number)][kind]) for number in range(grid.repeats)]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
