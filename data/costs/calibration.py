"""A cost model fitted to measurements, with its error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..files.disk import read_json_object, write_json
from ..files.record import plain, record, refuse_unknown
from .cost import CostModel


@dataclass(frozen=True, slots=True)
class FitError:
    """Error of a fitted cost model on its own measurements.

    prefill_mape, decode_mape: Mean absolute error of a stage or step, as a fraction of the measured seconds.
    makespan: Predicted over measured seconds of all stages, minus one; positive if the model is too slow.
    prefill_stages, decode_steps: Numbers of measured stages and decode steps.
    """

    prefill_mape: float
    decode_mape: float
    makespan: float
    prefill_stages: int
    decode_steps: int


@dataclass(frozen=True, slots=True)
class CalibratedCost:
    """Measured or stated cost model of a model on a machine.

    cost: Fitted coefficients, or stated ones, which need no other field.
    error: Error of the fit on its own stages; None for stated coefficients.
    engine: Measured engine: name, tier, model, device, dtype and versions.
    date: ISO date of the measurement.
    slots_grid, prompt_grid: Measured slots and prompt lengths (tokens); beyond them the model extrapolates.
    held_out: Error on a whole job outside the fit; None if none was run.
    kv_token_bytes, kv_tokens: Bytes of a KV token, and tokens next to the weights; 0 if unknown.
    """

    JSON_HEADER: ClassVar = ("batchbound_cost", 2)
    JSON_OLDER: ClassVar = (1,)
    JSON_HINT: ClassVar = (
        "Measure again with `batchbound profile`, or state your own seconds:"
        ' {"batchbound_cost": 2, "cost": {"prefill_base": ...}}.'
    )

    cost: CostModel
    error: FitError | None = None
    engine: Mapping[str, object] = field(default_factory=dict)
    date: str = ""
    slots_grid: tuple[int, ...] = ()
    prompt_grid: tuple[int, ...] = ()
    held_out: FitError | None = None
    kv_token_bytes: float = 0.0
    kv_tokens: int = 0

    def beyond(self, slots: int, longest: int, held: float) -> tuple[str, ...]:
        """Return a text for each quantity outside the measured range.

        held: Mean KV tokens of a request in a decode step.
        """
        found = []
        if self.slots_grid and slots > max(self.slots_grid):
            found.append(f"{slots} slots, measured up to {max(self.slots_grid)}")
        if self.prompt_grid and longest > max(self.prompt_grid):
            found.append(f"a prompt of {longest} tokens, measured up to {max(self.prompt_grid)}")
        if self.prompt_grid and held > max(self.prompt_grid):
            found.append(f"{held:.0f} tokens held by a request, measured up to {max(self.prompt_grid)}")
        return tuple(found)

    def differences(self, engine: Mapping[str, object]) -> tuple[str, ...]:
        """Return a text for each difference from the measured engine.

        Stated coefficients fit every engine.
        """
        if not self.engine:
            return ()
        names = sorted(self.engine.keys() | engine.keys())
        return tuple(
            f"{name} {engine.get(name, 'unknown')} instead of {self.engine.get(name, 'unknown')}"
            for name in names
            if self.engine.get(name) != engine.get(name)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to ``path`` atomically."""
        write_json(path, plain(self), indent=2)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CalibratedCost:
        """Return the calibration that :meth:`save` wrote."""
        value = read_json_object(path)
        refuse_unknown(CostModel, value.get("cost"), file=path, within="cost", hint=cls.JSON_HINT)
        return record(cls, value, file=path)
