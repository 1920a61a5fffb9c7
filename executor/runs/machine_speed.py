"""How fast a machine is right now: the seconds of a fixed piece of work, and what other processes take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...data.costs.cost import FloatArray
from ...data.costs.reference_time import PROMPTS, ROUNDS, TOKENS

_SHARE = 0.01
"""Of a run's seconds that reading its machine's speed may take."""
_UNDISTURBED = 0.03
"""Share of its time that a process may wait for a core and be taken as alone on it."""
_TRIES = 3


class MachineSpeed:
    """
    The seconds in which a model reads a few prompts and decodes a few tokens of each, the same every time.

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
        self._ids = torch.zeros(PROMPTS, TOKENS, dtype=torch.int64, device=model.device)

    def __call__(self) -> float:
        """Return the seconds it takes now."""
        import torch

        begun, ids, held = self._clock(), self._ids, None
        with torch.inference_mode():
            for _ in range(1 + ROUNDS):
                out = self._model(input_ids=ids, past_key_values=held, use_cache=True)
                ids, held = self._ids[:, :1], out.past_key_values
                # Reading a value back waits for a device to be done.
                out.logits[0, -1, 0].item()
        return self._clock() - begun


def waited_for_core(process_id: int | None = None) -> float:
    """
    Return the seconds for which a process was ready to run and others held its core; 0 where none says it.

    Parameters
    ----------
    process_id
        None for this process.
    """
    try:
        # Linux's scheduler: nanoseconds run, nanoseconds waited, and how often.
        text = Path(f"/proc/{process_id or 'self'}/schedstat").read_text()
    except OSError:
        return 0.0
    return int(text.split()[1]) / 1e9


def undisturbed(
    measure: Callable[[], dict[str, float]], waited: Callable[[], float], clock: Callable[[], float]
) -> tuple[dict[str, float], float]:
    """
    Return what was measured while others hardly held the cores, or least of some tries, and their share.

    Parameters
    ----------
    measure
        Returns what it measured.
    waited
        Returns the seconds for which what is measured has waited for a core so far.
    clock
        Seconds from any origin.
    """
    tries: list[tuple[dict[str, float], float]] = []
    while len(tries) < _TRIES and (not tries or tries[-1][1] > _UNDISTURBED):
        begun, before = clock(), waited()
        found = measure()
        tries.append((found, (waited() - before) / (clock() - begun)))
    return min(tries, key=lambda each: each[1])


class SpeedLog:
    """
    Readings of a machine's speed in passing, so seldom that they hardly slow down what runs.

    Parameters
    ----------
    speed
        Returns the seconds that a fixed piece of work takes now.
    clock
        Seconds from any origin.
    waited
        Returns the seconds for which the process has waited for a core so far.
    """

    def __init__(
        self,
        speed: Callable[[], float],
        clock: Callable[[], float],
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._speed, self._clock, self._waited = speed, clock, waited
        self._next = -float("inf")
        self._taken: list[tuple[float, float, float, float]] = []

    def in_passing(self) -> None:
        """Take a reading if it is time for one."""
        begun = self._clock()
        if begun < self._next:
            return
        seconds = self._speed()
        ended = self._clock()
        self._taken.append((begun, ended, seconds, self._waited()))
        self._next = ended + (ended - begun) / _SHARE

    def readings(self, beside: Sequence[tuple[float, float]] = ()) -> FloatArray:
        """
        Return when each reading was taken, and what it says.

        That is the seconds of the fixed piece of work, the share of them beside other work, and the seconds
        for which the process had waited for a core until then.

        Parameters
        ----------
        beside
            When other work began and ended, on the clock.

        Returns
        -------
        FloatArray
            Shape (readings, 4).
        """
        spans = np.array(beside).reshape(-1, 2)
        rows = [
            (begun, seconds, np.diff(spans.clip(begun, ended)).sum() / (ended - begun), waited)
            for begun, ended, seconds, waited in self._taken
        ]
        return np.array(rows).reshape(-1, 4)
