"""Forecast of KV memory, if completions end as predicted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...data.arrays import IntArray


class KvForecast:
    """Test of whether one more request fits until its end.

    Each request grows by a token an iteration and frees all at its end, so memory is scarcest just before an
    end. Memory promised for later is lent to requests that will have ended by then. This is EconoServe's KVC
    pipelining (section 3.2) without fixed places for guests, nested to any depth. If no request may stay
    longer than predicted, the peak is that of R. Gong et al.'s Past-Future scheduler (2025).

    capacity: Tokens that may be held.
    held: Tokens each holds, shape (requests,).
    rest: Tokens each will still generate, shape (requests,).
    stay: Iterations each may still be there, at least ``rest``, shape (requests,).
    """

    def __init__(self, capacity: int, held: IntArray, rest: IntArray, stay: IntArray) -> None:
        self._capacity = capacity
        self.promised = int(held.sum() + rest.sum())
        """Sum of the tokens all hold at their ends."""
        self._held, self._rest, self._stay = held.tolist(), rest.tolist(), stay.tolist()
        # Free tokens by iterations from now, filled on demand; and a lower bound of it at any time.
        self._free: IntArray | None = None
        self._least = capacity - self.promised

    def add(self, held: int, rest: int, stay: int) -> None:
        """Add a request."""
        self.promised += held + rest
        self._least -= held + rest
        if self._free is None:
            self._held.append(held)
            self._rest.append(rest)
            self._stay.append(stay)
            return
        free = self._until(stay)
        free[:rest] -= np.arange(held, held + rest)
        free[rest : stay + 1] -= held + rest

    def fits(self, held: int, rest: int, stay: int) -> bool:
        """Return whether one more request fits until its end."""
        most = held + rest
        if most <= self._least:
            return True
        free = self._until(stay)
        self._least = int(free[free.argmin()])
        if most <= self._least:
            return True
        # For such short arrays, numpy counts in a third of the time that a minimum takes.
        if np.count_nonzero(free[rest : stay + 1] < most):
            return False
        return not np.count_nonzero(free[:rest] < np.arange(held, most))

    def may_fit(self, held: IntArray, rest: IntArray, stay: IntArray) -> NDArray[np.bool_]:
        """Return False for requests that clearly do not fit, each tested alone.

        held, rest: KV tokens of each request now, and tokens left to generate, shape (requests,).
        stay: Iterations until each request must be gone, shape (requests,).
        """
        if not len(rest):
            return np.zeros(0, dtype=np.bool_)
        free = self._until(int(stay.max()))
        growing = np.minimum.accumulate(free[: rest.max()] - np.arange(rest.max()))
        may: NDArray[np.bool_] = held <= np.minimum(
            growing[rest - 1], np.minimum(free[rest], free[stay]) - rest
        )
        return may

    def _until(self, end: int) -> IntArray:
        """Return the free tokens of the next ``end`` iterations."""
        free = self._count() if self._free is None else self._free
        if len(free) <= end:
            free = np.append(free, np.full(2 * end - len(free) + 1, self._capacity))
        self._free = free
        return free

    def _count(self) -> IntArray:
        columns = (self._held, self._rest, self._stay)
        held, rest, stay = (np.array(column, dtype=np.int64) for column in columns)
        after = stay + 1
        last = int(after.max(initial=0))
        taken = np.bincount(after, held + rest, last + 1).astype(np.int64)
        # Each request that still generates takes one more token an iteration.
        taken[1:] -= (len(rest) - np.cumsum(np.bincount(rest, minlength=last + 1)))[:-1]
        taken[0] -= held.sum()
        free: IntArray = self._capacity + np.cumsum(taken)
        return free
