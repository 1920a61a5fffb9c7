"""Costs of one layer on a device, as a table of operations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..arrays import FloatArray
from ..files.disk import read_json_object, write_json
from ..files.record import plain, record, refuse_unknown
from .cost import LONGEST_TIME
from .model_shape import ModelShape
from .reference_time import ReferenceTime

AXES = ("tokens", "sequences", "length", "past", "decodes", "context")
"""Quantities that determine an operation's time.

They are all new tokens, sequences, new tokens per prompt, tokens already held by it, decoding sequences, and
tokens held by each of those.
"""
FARTHEST = 1e12
"""Largest number of tokens or sequences of a point."""

PHASES = ("both", "encode", "decode", "mixed", "run")
_TOGETHER = {
    "both": set[str](),
    "encode": {"sequences", "length", "past"},
    "decode": {"sequences", "length", "decodes", "context"},
}
"""Axes of a phase's operations, besides tokens or sequences; others allow all."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation of a model with its measured points.

    name: Name of the operation (``qkv_proj``, ``attention``, ...).
    phase: One of :data:`PHASES`. ``mixed`` is the attention of an iteration that both encodes and decodes, in
        place of the two others. ``run`` is the engine's other work, whose frequency depends on the
        configuration (:func:`~batchbound.models.exegpt.run_profile.profile_of_run`).
    axes: Quantities of :data:`AXES` that determine its time. With ``length`` but without ``sequences`` it is
        the time of one sequence.
    points: Measured points, shape (points, axes).
    seconds: Seconds of one execution, shape (points,).
    times: Executions per layer, or per iteration.
    per_layer: True if every layer runs it, False if an iteration runs it once.
    spread: Half of the interquartile range of the repeats in seconds, shape (points,); None if unknown.
    """

    name: str
    phase: str
    axes: tuple[str, ...]
    points: FloatArray
    seconds: FloatArray
    times: int = 1
    per_layer: bool = True
    spread: FloatArray | None = None

    def __post_init__(self) -> None:
        points = np.atleast_2d(np.asarray(self.points, dtype=np.float64))
        seconds = np.asarray(self.seconds, dtype=np.float64)
        if self.phase not in PHASES or not set(self.axes) <= set(AXES):
            raise ValueError(f"operation {self.name!r}: phase {self.phase!r} or axes {self.axes} are unknown")
        alone = self.axes in (("tokens",), ("sequences",))
        if not alone and not set(self.axes) <= _TOGETHER.get(self.phase, set(AXES)):
            raise ValueError(f"operation {self.name!r}: phase {self.phase!r} has no axes {self.axes}")
        if points.shape != (len(seconds), len(self.axes)) or not len(seconds):
            raise ValueError(
                f"operation {self.name!r}: {points.shape} points for {len(seconds)} times of {self.axes}"
            )
        if not (np.isfinite(points).all() and np.isfinite(seconds).all() and (seconds >= 0).all()):
            raise ValueError(f"operation {self.name!r}: a time or point is negative or not finite")
        if seconds.max() > LONGEST_TIME or np.abs(points).max(initial=0.0) > FARTHEST:
            what = f"a time is longer than {LONGEST_TIME:g} s, or a point beyond {FARTHEST:g}"
            raise ValueError(f"operation {self.name!r}: {what}")
        if len(np.unique(points, axis=0)) < len(points):
            raise ValueError(f"operation {self.name!r}: one point has two times")
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "seconds", seconds)


@dataclass(frozen=True, slots=True, eq=False)
class LayerProfile:
    """Operations of a model on a device at one tensor-parallel degree.

    device_bytes: Memory of one device, bytes; 0 if unknown.
    tensor_parallel: Devices that share every layer.
    operations: Operations in any order.
    source: Origin of the times in a sentence.
    measured: False for modelled times.
    versions: Versions of the measured software.
    warnings: Problems in the data that a reader left out.
    kv_tokens: Tokens of KV cache that fit on the device next to the weights; 0 if unknown.
    reference: Speed of the machine during the measurement; None if unknown.
    """

    JSON_HEADER: ClassVar = ("batchbound_layer_profile", 1)
    JSON_HINT: ClassVar = "Profile again, or read it again from its source."

    shape: ModelShape
    device: str
    device_bytes: float
    tensor_parallel: int
    operations: tuple[Operation, ...]
    source: str
    measured: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    kv_tokens: int = 0
    reference: ReferenceTime | None = None

    def operation(self, name: str) -> Operation | None:
        """Return the operation with this name, or None."""
        return next((operation for operation in self.operations if operation.name == name), None)

    @property
    def most_decoding(self) -> float:
        """Most requests of a measured decode iteration; infinite if modelled."""
        if not self.measured:
            return float("inf")
        return min(
            (
                float(operation.points[:, column].max())
                for operation in self.operations
                if operation.phase in ("decode", "both")
                for column, axis in enumerate(operation.axes)
                if axis in ("tokens", "sequences", "decodes")
            ),
            default=float("inf"),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to ``path`` atomically."""
        write_json(path, plain(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerProfile:
        """Return the table that :meth:`save` wrote."""
        value = read_json_object(path)
        refuse_unknown(ModelShape, value.get("shape"), file=path, within="shape", hint=cls.JSON_HINT)
        return record(cls, value, file=path)
