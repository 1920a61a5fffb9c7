"""How much memory requests will hold, iteration by iteration, if their answers end as predicted."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

import numpy as np

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
        # In the order of the ends, once measured: these, what is held just before each, the greatest so far
        # of what a newcomer would come on top of; what those from each on hold now, and what those before
        # each will have written.
        self._measured = False
        self._ends = self._loads = self._peaks = self._kept = self._written = np.zeros(0, dtype=np.int64)

    def add(self, held: int, rest: int) -> None:
        """Add a request."""
        self.promised += held + rest
        if not self._measured:
            self._held.append(held)
            self._rest.append(rest)
            return
        end = math.ceil(rest * self._stay)
        load = self._load(end) + held + rest
        at = bisect_right(self._ends, end)
        self._loads[:at] += held + np.minimum(self._ends[:at], rest)
        self._loads = _insert(self._loads, at, load)
        self._ends = _insert(self._ends, at, end)
        self._written = _insert(self._written, at, self._written[at])
        self._written[at + 1 :] += rest
        self._kept = _insert(self._kept, at, self._kept[at])
        self._kept[: at + 1] += held
        self._rest.insert(at, rest)
        self._peaks = np.maximum.accumulate(self._loads + self._ends)

    def fits(self, held: int, rest: int) -> bool:
        """Return whether there is memory for one more request until its end."""
        if self.promised + held + rest <= self._capacity:
            return True
        if not self._measured:
            self._measure()
        end = math.ceil(rest * self._stay)
        writing = bisect_right(self._ends, rest)
        if writing and self._peaks[writing - 1] + held > self._capacity:
            return False
        spare = self._capacity - held - rest
        staying = bisect_right(self._ends, end, writing)
        return self._load(end) <= spare and bool((self._loads[writing:staying] <= spare).all())

    def _measure(self) -> None:
        """Work out what is held just before each end, if nothing more begins."""
        rest = np.array(self._rest, dtype=np.int64)
        order = np.argsort(rest, kind="stable")
        rest = rest[order]
        self._rest = rest.tolist()
        self._ends = np.ceil(rest * self._stay).astype(np.int64)
        self._kept = np.append(0, np.array(self._held, dtype=np.int64)[order[::-1]].cumsum())[::-1].copy()
        self._written = np.append(0, rest.cumsum())
        done = np.searchsorted(rest, self._ends)
        there = np.arange(len(rest))
        done = np.maximum(done, there)
        self._loads = (
            self._kept[:-1] + self._written[done] - self._written[:-1] + (len(rest) - done) * self._ends
        )
        self._peaks = np.maximum.accumulate(self._loads + self._ends)
        self._measured = True

    def _load(self, time: int) -> int:
        """Return what those hold that are there so many iterations from now."""
        there = bisect_left(self._ends, time)
        done = max(bisect_left(self._rest, time), there)
        written = self._written[done] - self._written[there] + (len(self._rest) - done) * time
        return int(self._kept[there] + written)


def _insert(values: IntArray, at: int, value: int) -> IntArray:
    """Return the values with one more (numpy's own takes ten times as long on so few)."""
    longer = np.empty(len(values) + 1, dtype=values.dtype)
    longer[:at], longer[at], longer[at + 1 :] = values[:at], value, values[at:]
    return longer
