"""Cost model: seconds of prefill stages and decode steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np

from ..arrays import FloatArray, IntArray
from ..files.disk import read_json_object, write_json
from ..files.record import plain, record, refuse_unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LONGEST_TIME = 1e12
"""Longest valid time in seconds; a longer one is damaged data."""


FACTS_OF_RUNS = frozenset({"distinct_tokens", "endings", "plan"})
"""Facts among those of an engine that are of one run, and change no cost."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Affine costs of prefill stages and decode steps, in seconds.

    A prefill stage of ``t`` tokens takes ``prefill_base + prefill_per_token * t`` seconds and
    ``prefill_per_token_beyond * (t - prefill_bend)`` more beyond the bend, at least ``prefill_floor``; a
    decode step over ``a`` active slots that hold ``v`` tokens of KV cache takes
    ``decode_base + decode_per_slot * a + decode_per_kv_token * v``.

    Tokens beyond the bend never cost less than those before, so a stage's seconds are convex in its tokens.

    An engine adds two costs beyond the schedule: padding that attention reads, and ``decode_per_change``
    seconds for each burst of decode steps, to update the running batch. Schedules, bounds and the simulator
    leave both out; predictions and a run's figures include them
    (:meth:`~batchbound.data.trace.Stage.model_seconds`). Neither is negative, so a run's model seconds stay
    above every bound.

    Parameters
    ----------
    prefill_base, prefill_per_token
        Seconds per prefill stage and per prompt token.
    decode_base, decode_per_slot
        Seconds per decode step and per active slot in it.
    prefill_floor
        Least seconds of a prefill stage.
    decode_per_kv_token
        Seconds per token of KV cache read in a decode step.
    prefill_bend, prefill_per_token_beyond
        Tokens of a prefill stage from which each further one costs more, and the additional seconds of each,
        for the attention of long prompts.
    decode_per_change
        Seconds that an engine adds to each burst of decode steps over the same slots.

    Raises
    ------
    ValueError
        If a coefficient is negative or not finite.
    """

    prefill_base: float
    prefill_per_token: float
    decode_base: float
    decode_per_slot: float
    prefill_floor: float = 0.0
    decode_per_kv_token: float = 0.0
    prefill_bend: float = 0.0
    prefill_per_token_beyond: float = 0.0
    decode_per_change: float = 0.0

    def __post_init__(self) -> None:
        refuse_impossible_costs(self)

    @classmethod
    def paper(cls) -> CostModel:
        """Return the costs of the hybrid offline-online paper (LLaMA-65B, section V-A).

        Returns
        -------
        CostModel
            25 ms + 0.13 ms per token a prefill stage, 29 ms + 0.21 ms per active slot a decode step.
        """
        return cls(prefill_base=0.025, prefill_per_token=0.00013, decode_base=0.029, decode_per_slot=0.00021)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Load a cost model, measured or with stated coefficients."""
        return CalibratedCost.load(path).cost

    def with_free_prefill(self) -> CostModel:
        """Return the cost model with free prefill stages."""
        return CostModel(
            0.0, 0.0, self.decode_base, self.decode_per_slot, decode_per_kv_token=self.decode_per_kv_token
        )

    @overload
    def prefill_seconds(self, tokens: int) -> float: ...
    @overload
    def prefill_seconds(self, tokens: IntArray | FloatArray) -> FloatArray: ...
    def prefill_seconds(self, tokens: int | IntArray | FloatArray) -> float | FloatArray:
        """Return the seconds of a prefill stage of ``tokens`` prompt tokens."""
        if isinstance(tokens, np.ndarray):
            stages = np.asarray(self.prefill_base + self.prefill_per_token * tokens, dtype=np.float64)
            stages += self.prefill_per_token_beyond * np.maximum(0.0, tokens - self.prefill_bend)
            return np.maximum(self.prefill_floor, stages)
        beyond = self.prefill_per_token_beyond * max(0.0, tokens - self.prefill_bend)
        return max(self.prefill_floor, self.prefill_base + self.prefill_per_token * tokens + beyond)

    @overload
    def decode_seconds(self, active: int, kv_tokens: int = 0) -> float: ...
    @overload
    def decode_seconds(self, active: IntArray, kv_tokens: IntArray | FloatArray) -> FloatArray: ...
    def decode_seconds(
        self, active: int | IntArray, kv_tokens: int | IntArray | FloatArray = 0
    ) -> float | FloatArray:
        """Return the seconds of one decode step.

        Parameters
        ----------
        active
            Slots that decode a token in the step.
        kv_tokens
            Tokens of KV cache that those slots hold.
        """
        seconds = self.decode_base + self.decode_per_slot * active + self.decode_per_kv_token * kv_tokens
        return np.asarray(seconds, dtype=np.float64) if isinstance(seconds, np.ndarray) else seconds


_NUMBERS = (int, float, np.integer, np.floating)


def refuse_impossible_costs(costs: DataclassInstance) -> None:
    """Refuse impossible coefficients, and convert the others to floats."""
    for coefficient in fields(costs):
        value: Any = getattr(costs, coefficient.name)
        if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not 0 <= value <= LONGEST_TIME:
            name = f"{type(costs).__name__}.{coefficient.name}"
            raise ValueError(
                f"{name} is {value!r}; it must be finite and not negative (at most {LONGEST_TIME:g})"
            )
        object.__setattr__(costs, coefficient.name, float(value))


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
        texts = []
        if self.slots_grid and slots > max(self.slots_grid):
            texts.append(f"{slots} slots, measured up to {max(self.slots_grid)}")
        if self.prompt_grid and longest > max(self.prompt_grid):
            texts.append(f"a prompt of {longest} tokens, measured up to {max(self.prompt_grid)}")
        if self.prompt_grid and held > max(self.prompt_grid):
            texts.append(f"{held:.0f} tokens held by a request, measured up to {max(self.prompt_grid)}")
        return tuple(texts)

    def differences(self, engine: Mapping[str, object]) -> tuple[str, ...]:
        """Return a text for each difference from the measured engine.

        Stated coefficients fit every engine.
        """
        if not self.engine:
            return ()
        names = sorted((self.engine.keys() | engine.keys()) - FACTS_OF_RUNS)
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
