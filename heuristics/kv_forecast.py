"""How much memory requests will hold, iteration by iteration, if their answers end as predicted."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..data.cost import IntArray


class KvForecast:
    """
    Whether one more request would ever need memory that others need at the time.

    Each holds a token more every iteration and gives all back at its end, so memory is scarcest just before
    an end. What is promised to one for later is lent until then to those who will be gone: EconoServe's KVC
    pipelining (section 3.2) without a fixed place for the guest, nested as deep as it goes. Without a buffer
    the peak is that of R. Gong et al.'s Past-Future scheduler (2025).

    Parameters
    ----------
    capacity
        Tokens that may be held.
    buffer
        Share of what is left of its answer by which a request may overstay.
    held
        Tokens each holds, shape (requests,).
    rest
        Tokens each will still generate, shape (requests,).
    """

    def __init__(self, capacity: int, buffer: float, held: IntArray, rest: IntArray) -> None:
        self._capacity, self._stay = capacity, 1 + buffer
        self.promised = int(held.sum() + rest.sum())
        """Tokens all will hold at their ends together."""
        self._held, self._rest = held.tolist(), rest.tolist()
        # What all leave free so many iterations from now, once that is asked for; at least this at any time.
        self._free: IntArray | None = None
        self._least = capacity - self.promised

    def add(self, held: int, rest: int) -> None:
        """Add a request."""
        self.promised += held + rest
        self._least -= held + rest
        if self._free is None:
            self._held.append(held)
            self._rest.append(rest)
            return
        end = math.ceil(rest * self._stay)
        free = self._until(end)
        free[:rest] -= np.arange(held, held + rest)
        free[rest : end + 1] -= held + rest

    def fits(self, held: int, rest: int) -> bool:
        """Return whether there is memory for one more request until its end."""
        most = held + rest
        if most <= self._least:
            return True
        end = math.ceil(rest * self._stay)
        free = self._until(end)
        self._least = int(free[free.argmin()])
        if most <= self._least:
            return True
        # numpy counts in a third of the time in which it looks for the least of so few.
        if np.count_nonzero(free[rest : end + 1] < most):
            return False
        return not np.count_nonzero(free[:rest] < np.arange(held, most))

    def may_fit(self, held: IntArray, rest: IntArray) -> NDArray[np.bool_]:
        """
        Return of which of many requests it is not plain that they do not fit, each alone, shape (requests,).

        What they hold is compared with what is free while they grow, at their end and when the buffer is
        over, but not in between.
        """
        if not len(rest):
            return np.zeros(0, dtype=np.bool_)
        end = np.ceil(rest * self._stay).astype(np.int64)
        free = self._until(int(end.max()))
        growing = np.minimum.accumulate(free[: rest.max()] - np.arange(rest.max()))
        may: NDArray[np.bool_] = held <= np.minimum(
            growing[rest - 1], np.minimum(free[rest], free[end]) - rest
        )
        return may

    def _until(self, end: int) -> IntArray:
        """Return what all leave free, at least until so many iterations from now."""
        free = self._count() if self._free is None else self._free
        if len(free) <= end:
            free = np.append(free, np.full(2 * end - len(free) + 1, self._capacity))
        self._free = free
        return free

    def _count(self) -> IntArray:
        """Work out what all leave free, if nothing more begins."""
        held, rest = (np.array(column, dtype=np.int64) for column in (self._held, self._rest))
        after = np.ceil(rest * self._stay).astype(np.int64) + 1
        last = int(after.max(initial=0))
        taken = np.bincount(after, held + rest, last + 1).astype(np.int64)
        # Whoever still generates takes one more at a time.
        taken[1:] -= (len(rest) - np.cumsum(np.bincount(rest, minlength=last + 1)))[:-1]
        taken[0] -= held.sum()
        free: IntArray = self._capacity + np.cumsum(taken)
        return free
