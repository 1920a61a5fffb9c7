"""What requests were promised and have not used, by when they will need it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..data.cost import IntArray
from .kv_allocation import KvLedger

_NEVER = 1 << 40
"""Iterations."""
_PIECES = 16
"""Most parts that a guest lies in after one loan: it takes none that is a smaller share of what it needs."""


class UnusedParts:
    """
    The parts of regions that nobody will write to for a while, and who may borrow them meanwhile.

    A request that generates writes a token an iteration, so it needs the place ``n`` tokens beyond the last
    it holds after ``n`` iterations. Whoever is gone by then may have it (EconoServe, section 3.2, where a
    guest is half as long as its host and lies in the second half of its region; here it may be of any
    length, and lie in the regions of several).

    Parameters
    ----------
    ledger
        Where parts are lent.
    """

    def __init__(self, ledger: KvLedger) -> None:
        self._ledger = ledger
        # Of each part: who has it, its token that stands at iteration 0, its first and last iteration.
        self._parts: list[tuple[int, int, int, int]] = []
        self._times: IntArray | None = None

    def add(self, host: int, held: int) -> None:
        """
        Add what a request has not used.

        Parameters
        ----------
        host
            Generates from the next iteration on, or from the one after its prompt.
        held
            Tokens it holds then.
        """
        self._times = None
        for begin, end in self._ledger.gaps(host):
            if end > held:
                self._parts.append((host, held, max(begin - held, 0), end - held))

    def add_left_behind(self, host: int) -> None:
        """Add what a request that is gone has left, which nobody will need."""
        self._times = None
        self._parts += (
            (host, -_NEVER, begin + _NEVER, end + _NEVER) for begin, end in self._ledger.gaps(host)
        )

    def room(self, tokens: int, iterations: int) -> int:
        """Return how many of the tokens a guest needs it may have for so many iterations."""
        if self._times is None:
            self._times = np.array([part[2:] for part in self._parts], dtype=np.int64).reshape(-1, 2)
        begin, end = self._times.T
        there = end - np.maximum(begin, iterations)
        return min(tokens, int(there[there * _PIECES >= tokens].sum()))

    def largest(self) -> int:
        """Return the tokens of the largest part that begins where its owner is."""
        return max((end for _, held, begin, end in self._parts if not begin), default=0)

    def longest(self, most: int, needs: Callable[[int], tuple[int, int]]) -> int:
        """
        Return the greatest length there is room for, or 0.

        Parameters
        ----------
        most
            Greatest length looked for.
        needs
            Returns the tokens and the iterations that a length needs; neither falls as it grows.
        """
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            tokens, iterations = needs(middle)
            low, high = (middle, high) if self.room(tokens, iterations) == tokens else (low, middle)
        return low

    def take(self, guest: int, tokens: int, iterations: int) -> None:
        """
        Lend a guest places for so many iterations.

        Parameters
        ----------
        guest
            Lends nothing.
        tokens
            No more than there is room for.
        iterations
            It may stay.
        """
        # Those needed soonest first: what is needed later is left to guests that stay longer.
        self._parts.sort(key=lambda part: part[3])
        left: list[tuple[int, int, int, int]] = []
        least = -(-tokens // _PIECES)
        for host, held, begin, end in self._parts:
            first = max(begin, iterations)
            if not tokens or end - first < least:
                left.append((host, held, begin, end))
                continue
            lent = min(tokens, end - first)
            self._ledger.lend(host, guest, held + first, lent)
            tokens -= lent
            if first > begin:
                left.append((host, held, begin, first))
            if first + lent < end:
                left.append((host, held, first + lent, end))
        self._parts, self._times = left, None
