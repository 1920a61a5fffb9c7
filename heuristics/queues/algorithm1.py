"""Algorithm 1 of the hybrid paper: help the busiest slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...data.arrays import IntArray
from ...data.problem import Problem
from ..policy import State
from .assignment import Assigned


class SortingPreemptive(Assigned):
    """Slots that serve their own lists, and then help another.

    This is the paper's sorting and online preemptive method (Algorithm 1). Requests are sorted by
    :math:`N^p_i + N^d_i`, and ``remain_token`` of a slot is that sum over the requests that wait in its list.

    assignment: Slot of each request, shape (requests,): the paper's :math:`x_{ij}`.
    """

    def __init__(self, problem: Problem, assignment: npt.ArrayLike) -> None:
        tokens = problem.prompt_tokens + problem.workload.output_tokens
        super().__init__(problem, assignment, np.argsort(-tokens, kind="stable"))
        self.tokens: list[int] = tokens.tolist()
        self.remaining = np.zeros(problem.slots, dtype=np.int64)
        np.add.at(self.remaining, np.asarray(assignment, dtype=np.int64), tokens)

    def propose(self, state: State, free: IntArray) -> tuple[list[int], list[int]]:
        """Return each free slot's next request.

        It comes from its own list, else it is the longest of the busiest slot.
        """
        requests: list[int] = []
        slots: list[int] = []
        taken: set[int] = set()
        remaining = self.remaining.copy()
        for slot in free.tolist():
            request = self._first_waiting(slot, state, taken)
            while request is None:
                busiest = int(remaining.argmax())
                if remaining[busiest] <= 0:
                    return requests, slots
                request = self._first_waiting(busiest, state, taken)
                if request is None:
                    remaining[busiest] = 0
            remaining[self.owner[request]] -= self.tokens[request]
            taken.add(request)
            requests.append(request)
            slots.append(slot)
        return requests, slots

    def take(self, requests: Sequence[int]) -> None:
        """Remove these requests from their lists."""
        super().take(requests)
        for request in requests:
            self.remaining[self.owner[request]] -= self.tokens[request]

    def put_back(self, requests: Sequence[int]) -> None:
        """Return these requests to their lists."""
        super().put_back(requests)
        for request in requests:
            self.remaining[self.owner[request]] += self.tokens[request]
