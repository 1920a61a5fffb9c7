"""Current speed of a machine: seconds for a fixed piece of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...data.costs.reference_time import DECODE_STEPS, PROMPTS, TOKENS
from ..models.families import cache_argument
from ..models.wrapped import unwrapped


class MachineSpeed:
    """Timer of a fixed piece of work: a prefill and decode steps."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        import torch

        self._model, self._clock, self._cache = model, clock, cache_argument(type(unwrapped(model)))
        self._ids = torch.zeros(PROMPTS, TOKENS, dtype=torch.int64, device=model.device)

    def __call__(self) -> float:
        """Return the seconds that the work takes now."""
        import torch

        begun, ids, held = self._clock(), self._ids, None
        with torch.inference_mode():
            for _ in range(1 + DECODE_STEPS):
                out = self._model(input_ids=ids, use_cache=True, **{self._cache: held})
                ids, held = self._ids[:, :1], getattr(out, self._cache)
                # Reading a value back waits for the device.
                out.logits[0, -1, 0].item()
        return self._clock() - begun

    def readings(self) -> list[float]:
        """Return the seconds of three readings in sequence."""
        return [self() for _ in range(3)]
