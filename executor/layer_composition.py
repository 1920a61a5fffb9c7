"""A layer profile composed from what was measured at the points of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from ..data.layer_profile import LayerProfile, ModelShape, Operation
from ..models.layer_cost import LayerCost
from .profile_grid import Grid, spread

Found = Mapping[str, Mapping[str, object]]
"""Measurements by name."""

_LINE = np.array([[0.0], [1e6]])
"""Requests: a line through these is exact everywhere."""


def at(batch: int, length: int, what: str) -> str:
    """Return the name of a measurement at a point."""
    return f"{batch} x {length} tokens, {what}"


def composed(
    shape: ModelShape,
    points: Sequence[tuple[int, int]],
    joining: Sequence[tuple[int, int]],
    grid: Grid,
    found: Found,
) -> LayerProfile:
    """
    Return the profile whose composition gives every point's median.

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
    held = np.array([length + (grid.rounds + 1) / 2 for _, length in points])
    operations: list[Operation] = []
    for kind, axes in (("encode", ("sequences", "length")), ("decode", ("decodes", "context"))):
        repeats = np.array([_repeats(found, grid, point, kind) for point in points])
        seconds = np.median(repeats, axis=1)
        deviation = np.subtract(*np.quantile(repeats, (0.75, 0.25), axis=1)) / 2 / seconds
        parts = [found[at(*point, "layers")] for point in points]
        layers = seconds * [_number(part, f"{kind}_layers") for part in parts] / shape.layers
        attention = seconds * [_number(part, f"{kind}_attention") for part in parts] / shape.layers
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
    changes = np.array([median(_repeats(found, grid, point, "change")) for point in points])
    left = [_number(entry, "leave") for entry in found.values() if "leave" in entry]
    loop = max(0.0, median(_number(entry, "loop") for entry in found.values() if "loop" in entry))
    operations += [
        Operation("change", "run", ("decodes", "context"), np.column_stack((batches, held)), changes),
        Operation("leave", "run", ("sequences",), _LINE, max(0.0, median(left or [0.0])) * _LINE[:, 0]),
        Operation("loop", "run", ("sequences",), _LINE, np.full(2, loop)),
    ]
    profile = LayerProfile(
        shape=shape,
        device="",
        device_bytes=0.0,
        tensor_parallel=1,
        operations=tuple(operations),
        source="measured on this machine, through the engine's own prefill and decode calls",
    )
    if not joining:
        return profile
    return replace(profile, operations=(*operations, *_of_two(profile, points, joining, grid, found, loop)))


def _of_two(
    profile: LayerProfile,
    points: Sequence[tuple[int, int]],
    joining: Sequence[tuple[int, int]],
    grid: Grid,
    found: Found,
    loop: float,
) -> list[Operation]:
    """Return what two workers, one encoding and one decoding, take besides their stages."""
    alone, layers = LayerCost(profile), profile.shape.layers
    joins, sends = [], []
    for prompts, length in joining:
        per_layer, once = alone.encode(prompts, sum(spread(length, prompts)) / prompts)
        encode = median(_repeats(found, grid, (prompts, length), "beside"))
        sends.append(max(0.0, encode - layers * per_layer - once))
        between = _repeats(found, grid, (prompts, length), "between")
        stages = _repeats(found, grid, (prompts, length), "stages")
        # Where batches join less often than in every stage, the loop alone is what passes in between.
        joins.append(loop + max(0.0, median(np.subtract(between, np.multiply(stages, loop)).tolist())))
    corners = np.array(joining, dtype=np.float64)
    slowed: dict[int, list[float]] = {}
    for batch, length in points:
        pair = found[at(batch, length, "beside encoding")]
        lost = 1 - _number(pair, "alone") / _number(pair, "beside")
        slowed.setdefault(batch, []).append(max(0.0, lost))
    decodes = np.array(sorted(slowed), dtype=np.float64)[:, None]
    crowding = np.array([median(slowed[batch]) for batch in sorted(slowed)])
    return [
        Operation("send", "run", ("sequences", "length"), corners, np.array(sends)),
        Operation("join", "run", ("sequences", "length"), corners, np.array(joins)),
        Operation("crowding", "run", ("decodes",), decodes, crowding),
    ]


def shape_of(model: Any) -> ModelShape:
    """Return the sizes of a loaded model."""
    config = model.config.get_text_config()
    shape = ModelShape.from_config(config.to_dict(), str(model.config.name_or_path or config.model_type))
    return replace(shape, bytes_per_value=model.dtype.itemsize)


def _repeats(found: Found, grid: Grid, point: tuple[int, int], kind: str) -> list[float]:
    name = "joining" if kind in ("between", "stages", "beside") else "repeat"
    return [_number(found[at(*point, f"{name} {repeat}")], kind) for repeat in range(grid.repeats)]


def _number(values: Mapping[str, object], name: str) -> float:
    value = values[name]
    assert isinstance(value, int | float)
    return float(value)
