"""A cost model fitted to measurements, with its error and what was measured."""

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
    """
    How far a fitted cost model is from the stages it was fitted to.

    prefill_mape, decode_mape: Mean absolute error of a prefill stage and of a decode step, as a fraction of
        the measured seconds.
    makespan: Predicted over measured seconds of all stages together, minus one: positive if the model is
        slow.
    prefill_stages, decode_steps: Measured stages and decode steps that the error is taken over.
    """

    prefill_mape: float
    decode_mape: float
    makespan: float
    prefill_stages: int
    decode_steps: int


@dataclass(frozen=True, slots=True)
class CalibratedCost:
    """
    A cost model of one model on one machine, measured or stated.

    cost: The fitted coefficients, or those that somebody states: nothing else is needed then.
    error: Of the fit, on the stages it was made from; None of coefficients that are stated.
    engine: What was measured, as the engine describes itself: its name, tier, model, device, dtype and
        versions. Nothing of coefficients that are stated.
    date: When, as an ISO date.
    slots_grid, prompt_grid: Slots and prompt lengths (tokens) that were measured; outside them the model
        extrapolates.
    held_out: Error on a whole job that the fit was not made from; None if none was run.
    kv_token_bytes, kv_tokens: Bytes of a token in KV cache, and the tokens that fitted next to the weights; 0
        if unknown.
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
        """
        Return each place where a plan leaves the measured range, one text each.

        ``longest`` is its longest prompt, ``held`` the mean KV tokens of a request in a decode step.
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
        """
        Return the differences of another engine from the one measured, one text each.

        None differs from coefficients that are stated.
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
