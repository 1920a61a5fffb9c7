"""
Longest first inside vLLM: ``vllm serve MODEL --scheduler-cls batchbound.integrations.vllm.LongestFirst``.

The server then needs no client that knows the order, and no priorities. A request's expected tokens are
taken from ``vllm_xargs: {"expected_tokens": N}`` in its body (``SamplingParams.extra_args`` in Python), else
from its ``max_tokens``. vLLM is imported when the class is asked for. It calls its scheduler interface not
public; this is tested with vLLM 0.32.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

EXPECTED = "expected_tokens"
"""Name of the extra argument that states how many tokens a completion is expected to have."""


def expected_tokens(request: Any) -> int:
    """Return how many tokens the completion of a vLLM request is expected to have."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    stated = extra.get(EXPECTED)
    most = int(request.max_tokens)
    return int(min(stated, most)) if isinstance(stated, int | float) and stated >= 1 else most


class LongestFirstQueue:
    """
    Waiting requests: evicted ones first, then the longest first, ties in order of arrival.

    It has the methods of vLLM's ``RequestQueue``.
    """

    def __init__(self) -> None:
        self._front: deque[Any] = deque()
        self._heap: list[tuple[int, int, Any]] = []
        self._came = 0

    def add_request(self, request: Any) -> None:
        """Add a request that came."""
        heapq.heappush(self._heap, (-expected_tokens(request), self._came, request))
        self._came += 1

    def pop_request(self) -> Any:
        """Return the next request and take it out; IndexError if there is none."""
        return self._front.popleft() if self._front else heapq.heappop(self._heap)[2]

    def peek_request(self) -> Any:
        """Return the next request; IndexError if there is none."""
        return self._front[0] if self._front else self._heap[0][2]

    def prepend_request(self, request: Any) -> None:
        """Insert an evicted request before all others."""
        self._front.appendleft(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Insert evicted requests, the last one first, as vLLM's own queue does."""
        self._front.extendleft(requests)

    def remove_request(self, request: Any) -> None:
        """Take out a request."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take out requests."""
        gone = {id(request) for request in requests}
        self._front = deque(one for one in self._front if id(one) not in gone)
        self._heap = [entry for entry in self._heap if id(entry[2]) not in gone]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._front or self._heap)

    def __len__(self) -> int:
        return len(self._front) + len(self._heap)

    def __iter__(self) -> Iterator[Any]:
        yield from self._front
        for _, _, request in sorted(self._heap, key=lambda entry: entry[:2]):
            yield request


@cache
def longest_first() -> type:
    """Return a vLLM scheduler that begins waiting requests longest first."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue

    RequestQueue.register(LongestFirstQueue)

    class LongestFirst(AsyncScheduler):  # type: ignore[misc]  # vLLM is not there to be checked
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.policy.value != "fcfs":
                raise ValueError("LongestFirst has an order of its own: leave --scheduling-policy out")
            self.waiting = LongestFirstQueue()

    return LongestFirst


def __getattr__(name: str) -> Any:
    if name == "LongestFirst":
        return longest_first()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
