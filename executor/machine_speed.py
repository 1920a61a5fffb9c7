"""How fast a machine is right now: the seconds of a fixed piece of work."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

_TOKENS = 32
_CALLS = 7
"""Of which the median counts: a call alone may be interrupted."""


class MachineSpeed:
    """
    The seconds in which a model reads a short prompt, the same every time.

    Clocks and neighbours change a machine's speed from one second to the next, for all work alike: what is
    measured at different times can be compared by what this took beside it.

    Parameters
    ----------
    model
        A causal language model, loaded.
    clock
        Seconds from any origin.
    """

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        import torch

        self._model, self._clock = model, clock
        self._ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device)

    def __call__(self) -> float:
        """Return the seconds it takes now."""
        return median(self._once() for _ in range(_CALLS))

    def _once(self) -> float:
        import torch

        begun = self._clock()
        with torch.inference_mode():
            # Reading a value back waits for a device to be done.
            self._model(input_ids=self._ids, use_cache=False).logits[0, -1, 0].item()
        return self._clock() - begun
