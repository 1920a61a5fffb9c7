"""Cost model: seconds of prefill stages and decode steps."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..arrays import FloatArray, IntArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LONGEST_TIME = 1e12
"""Longest valid time in seconds; a longer one is damaged data."""


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
        from .calibration import CalibratedCost

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
    for field in fields(costs):
        value: Any = getattr(costs, field.name)
        if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not 0 <= value <= LONGEST_TIME:
            name = f"{type(costs).__name__}.{field.name}"
            raise ValueError(
                f"{name} is {value!r}; it must be finite and not negative (at most {LONGEST_TIME:g})"
            )
        object.__setattr__(costs, field.name, float(value))
