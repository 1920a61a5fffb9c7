"""How fast a machine is right now: the seconds of a fixed piece of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from ..data.cost import FloatArray

_TOKENS = 32
_CALLS = 3
"""Of which the median counts: a call alone may be interrupted."""
_SHARE = 0.005
"""Of a run's seconds that reading its machine's speed may take."""


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
        # A first call finds its weights driven out of the caches by what ran before it.
        self._once()
        return median(self._once() for _ in range(_CALLS))

    def _once(self) -> float:
        import torch

        begun = self._clock()
        with torch.inference_mode():
            # Reading a value back waits for a device to be done.
            self._model(input_ids=self._ids, use_cache=False).logits[0, -1, 0].item()
        return self._clock() - begun


class SpeedLog:
    """
    Readings of a machine's speed in passing, so seldom that they hardly slow down what runs.

    Parameters
    ----------
    speed
        Returns the seconds that a fixed piece of work takes now.
    clock
        Seconds from any origin.
    """

    def __init__(self, speed: Callable[[], float], clock: Callable[[], float]) -> None:
        self._speed, self._clock = speed, clock
        self._next = -float("inf")
        self._taken: list[tuple[float, float, float]] = []

    def in_passing(self) -> None:
        """Take a reading if it is time for one."""
        begun = self._clock()
        if begun < self._next:
            return
        seconds = self._speed()
        ended = self._clock()
        self._taken.append((begun, ended, seconds))
        self._next = ended + (ended - begun) / _SHARE

    def readings(self, beside: Sequence[tuple[float, float]] = ()) -> FloatArray:
        """
        Return when each reading was taken, the seconds it says, and the share of it beside other work.

        Parameters
        ----------
        beside
            When other work began and ended, on the clock.

        Returns
        -------
        FloatArray
            Shape (readings, 3).
        """
        spans = np.array(beside).reshape(-1, 2)
        rows = [
            (begun, seconds, np.diff(spans.clip(begun, ended)).sum() / (ended - begun))
            for begun, ended, seconds in self._taken
        ]
        return np.array(rows).reshape(-1, 3)
