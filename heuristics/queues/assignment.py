"""Offline assignment: each slot serves its own list of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...data.arrays import IntArray
from ...data.problem import Problem
from ..policy import State


def round_robin(problem: Problem) -> IntArray:
    """Deal requests out to the slots in turn, shape (requests,)."""
    return np.arange(len(problem), dtype=np.int64) % problem.slots


class Assigned:
    """One queue per slot, filled once from an assignment.

    This is the hybrid paper's offline part: :math:`x_{ij}` of the bin packing (26)-(30), in any order.

    assignment: Slot of each request, shape (requests,).
    order: All requests in the order each slot serves its own, shape (requests,); by position by default.

    Raises ValueError if a slot does not exist.
    """

    def __init__(
        self, problem: Problem, assignment: npt.ArrayLike, order: npt.ArrayLike | None = None
    ) -> None:
        owner = np.asarray(assignment, dtype=np.int64)
        if owner.shape != (len(problem),):
            raise ValueError(f"the assignment has shape {owner.shape} for {len(problem)} requests")
        wrong = np.flatnonzero((owner < 0) | (owner >= problem.slots))
        if wrong.size:
            i = int(wrong[0])
            raise ValueError(f"request {i} is assigned to slot {owner[i]} of {problem.slots}")
        sequence = np.arange(len(owner)) if order is None else np.asarray(order, dtype=np.int64)
        self._rank = np.empty(len(owner), dtype=np.int64)
        self._rank[sequence] = np.arange(len(owner))
        self.owner: list[int] = owner.tolist()
        self.lists: list[list[int]] = [[] for _ in range(problem.slots)]
        for request in sequence.tolist():
            self.lists[self.owner[request]].append(request)

    def propose(self, state: State, free: IntArray) -> tuple[list[int], list[int]]:
        """Return the first waiting request of each free slot's list."""
        requests: list[int] = []
        slots: list[int] = []
        for slot in free.tolist():
            request = self._first_waiting(slot, state)
            if request is not None:
                requests.append(request)
                slots.append(slot)
        return requests, slots

    def _first_waiting(
        self, slot: int, state: State, but: frozenset[int] | set[int] = frozenset()
    ) -> int | None:
        for request in self.lists[slot]:
            if state.waiting[request] and request not in but:
                return request
        return None

    def take(self, requests: Sequence[int]) -> None:
        """Remove these requests from their lists."""
        for request in requests:
            self.lists[self.owner[request]].remove(request)

    def put_back(self, requests: Sequence[int]) -> None:
        """Return these requests to their old places."""
        for request in requests:
            queue = self.lists[self.owner[request]]
            queue.append(request)
            queue.sort(key=self._rank.__getitem__)
