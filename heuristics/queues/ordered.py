"""One queue for all slots, in a given order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.arrays import IntArray
from ...data.prefix_tree import PrefixTree
from ...data.problem import Problem
from ..policy import State


def arrival_order(problem: Problem) -> IntArray:
    """Order requests by arrival, then position, shape (requests,)."""
    return np.argsort(problem.workload.arrival, kind="stable")


def longest_first(problem: Problem) -> IntArray:
    """Order requests by decreasing decode steps, as LPT does, shape (requests,)."""
    return np.argsort(-problem.decode_steps, kind="stable")


def group_by_group(problem: Problem, classes: int = 0) -> IntArray:
    """Order requests by group, that of the longest first, shape (requests,).

    The groups are the subtrees of the roots, and requests that share nothing. Within one, requests go depth
    first, then by decreasing decode steps.

    classes: Length classes per halving of the decode steps. Longer classes go first, each group by group; 0
        makes one class.
    """
    decode_steps = np.maximum(problem.decode_steps, 1)
    of = np.floor(classes * np.log2(decode_steps.max() / decode_steps)).astype(np.int64)
    if problem.tree is not None:
        longest = _longest_below(problem.tree, problem.decode_steps)
        place = problem.tree.depth_first_key(-longest)
        root = problem.tree.root
        first = np.where(root < 0, problem.decode_steps, np.append(longest, 0)[root])
        return np.lexsort((-problem.decode_steps, place, root, -first, of))
    return np.lexsort((-problem.decode_steps, of))


def _longest_below(tree: PrefixTree, decode_steps: IntArray) -> IntArray:
    """Return the most decode steps of a request below each node, shape (nodes,)."""
    most = np.zeros(len(tree.parent) + 1, dtype=np.int64)
    np.maximum.at(most, tree.leaf, decode_steps)
    for node in range(len(tree.parent) - 1, -1, -1):
        most[tree.parent[node]] = max(most[tree.parent[node]], most[node])
    return most[:-1]


class Ordered:
    """One queue for all slots, in a given order of all requests."""

    def __init__(self, order: IntArray) -> None:
        self.order = np.asarray(order, dtype=np.int64)
        self._rank = np.empty_like(self.order)
        self._rank[self.order] = np.arange(len(self.order))
        self._taken = np.zeros(len(self.order), dtype=np.bool_)
        self._head = 0

    def propose(self, state: State, free: IntArray) -> tuple[list[int], list[int]]:
        """Return the first waiting requests, one per free slot."""
        wanted = len(free)
        window = self.order[self._head : self._head + 2 * wanted + 32]
        chosen = self._waiting(state, window)[:wanted]
        if len(chosen) < wanted and self._head + len(window) < len(self.order):
            chosen = self._waiting(state, self.order[self._head :])[:wanted]
        requests: list[int] = chosen.tolist()
        slots: list[int] = free[: len(requests)].tolist()
        return requests, slots

    def _waiting(self, state: State, window: IntArray) -> IntArray:
        waiting: IntArray = window[state.waiting[window] & ~self._taken[window]]
        return waiting

    def take(self, requests: Sequence[int]) -> None:
        """Record that these requests are prefilled."""
        self._taken[requests] = True
        while self._head < len(self.order) and self._taken[self.order[self._head]]:
            self._head += 1

    def put_back(self, requests: Sequence[int]) -> None:
        """Return these requests to their old places."""
        self._taken[requests] = False
        self._head = min(self._head, int(self._rank[requests].min()))
