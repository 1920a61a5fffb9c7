"""Current speed of a machine: the seconds of a fixed piece of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...data.costs.reference_time import DECODE_STEPS, PROMPTS, TOKENS


class MachineSpeed:
    """The seconds in which a model reads a few prompts and decodes a few tokens of each, always the same."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        import torch

        self._model, self._clock = model, clock
        self._ids = torch.zeros(PROMPTS, TOKENS, dtype=torch.int64, device=model.device)

    def __call__(self) -> float:
        """Return the seconds it takes now."""
        import torch

        begun, ids, held = self._clock(), self._ids, None
        with torch.inference_mode():
            for _ in range(1 + DECODE_STEPS):
                out = self._model(input_ids=ids, past_key_values=held, use_cache=True)
                ids, held = self._ids[:, :1], out.past_key_values
                # Reading a value back waits for a device to be done.
                out.logits[0, -1, 0].item()
        return self._clock() - begun

    def readings(self) -> list[float]:
        """Return the seconds of three readings, one after the other."""
        return [self() for _ in range(3)]
