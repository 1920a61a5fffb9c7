"""Times of sending at which each request finds room in the KV cache until it ends."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from ...data.arrays import IntArray
from ...data.iterations import EngineLimits
from .vllm_cache import BlockTree

MOST_HELD = 5_000
"""Most requests to hold back; more take seconds an order."""

_LOOKED_AT = 16
"""Requests at the head of the order of which the first one with room is sent; more keep fewer together."""

_LAG = 1
"""Iterations between the end of a request and the arrival of the next one."""


def hold_back(
    tree: BlockTree, output: IntArray, limits: EngineLimits, order: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """Return the order of sending, and the completions after which each request is sent.

    An engine admits a request as soon as its prompt fits, and preempts one when completions grow. With known
    lengths the client knows the memory of all running requests at any later time. So it sends the next
    request only when all fit until their ends. Beginnings are held while a request below them runs.

    output: Tokens of each completion, shape (requests,).
    order: Requests by preference.

    Returns two arrays of shape (requests,), the second one in the order of the first.
    """
    assert limits.blocks is not None
    size, depth = limits.block_tokens, np.append(tree.depth, 0)
    parent, blocks, leaf = tree.parent.tolist(), tree.blocks.tolist(), tree.leaf.tolist()
    own, lengths = (tree.prompt - depth[tree.leaf] * size).tolist(), output.tolist()
    drawn = np.arange(max(lengths))
    # Blocks held in each later iteration, and the iteration until which each node is held.
    held, until = np.zeros(sum(lengths) + _LAG * len(lengths), dtype=np.int64), [0] * len(parent)
    waiting, ends = list(order), list[int]()
    sent, after, now = list[int](), list[int](), 0
    while waiting:
        place = 0
        while place < min(len(waiting), _LOOKED_AT) and len(ends) < limits.sequences:
            request = waiting[place]
            end, node, path = now + lengths[request], leaf[request], list[int]()
            more = held[now:end] + -(-(own[request] + drawn[: end - now]) // size)
            while node >= 0:
                path.append(node)
                more[max(0, until[node] - now) :] += blocks[node]
                node = parent[node]
            if more.max() > limits.blocks:
                place += 1
                continue
            held[now:end] = more
            for node in path:
                until[node] = max(until[node], end)
            heapq.heappush(ends, end)
            sent.append(waiting.pop(place))
            after.append(len(sent) - len(ends))
            place = 0
        if waiting:
            first = ends[0]
            while ends and ends[0] == first:
                heapq.heappop(ends)
            now = first + _LAG
    return np.array(sent, dtype=np.int64), np.array(after, dtype=np.int64)


class HoldingClient:
    """Client that sends each request after a number of completions.

    order, after: As :func:`hold_back` returns them.
    """

    def __init__(self, order: Sequence[int], after: Sequence[int]) -> None:
        self._order, self._after = order, after
        self._next = self._ended = self._seen = self._iteration = 0
        self._ends: deque[tuple[int, int]] = deque()

    def arrivals(self, finished: Sequence[int]) -> Sequence[int]:
        """Return the requests that arrive next."""
        self._iteration += 1
        if finished:
            self._ended += len(finished)
            self._ends.append((self._iteration, self._ended))
        idle = self._next == self._ended
        while self._ends and (idle or self._ends[0][0] + _LAG <= self._iteration):
            # An idle engine runs nothing until the first of these requests arrives.
            self._seen, idle = self._ends.popleft()[1], False
        first = self._next
        if idle and first < len(self._order):
            # Nothing else is to end: the client waits no longer.
            self._seen = max(self._seen, self._after[first])
        while self._next < len(self._order) and self._after[self._next] <= self._seen:
            self._next += 1
        return self._order[first : self._next]

    def next_arrival(self, iteration: int) -> int:
        """Return the iteration of the next arrival that is due, or -1."""
        if not self._ends or self._next == len(self._order):
            return -1
        return iteration + self._ends[0][0] + _LAG - self._iteration

    def passed(self, iterations: int) -> None:
        """Note that iterations passed without an event."""
        self._iteration += iterations
