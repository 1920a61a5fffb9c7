"""Longest-first scheduler for vLLM.

Start it with ``vllm serve MODEL --scheduler-cls batchbound.integrations.vllm.LongestFirst``. Clients then
need not order their requests or send priorities. The expected tokens are ``vllm_xargs: {"expected_tokens":
N}`` of the body (``SamplingParams.extra_args`` in Python), else ``max_tokens``. The module imports vLLM only
when the class is used. vLLM's scheduler interface is not public; tested with vLLM 0.32.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

EXPECTED = "expected_tokens"
"""Extra argument with a completion's expected tokens."""


def expected_tokens(request: Any) -> int:
    """Return the expected tokens of a vLLM request's completion."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    stated = extra.get(EXPECTED)
    most = int(request.max_tokens)
    return int(min(stated, most)) if isinstance(stated, int | float) and stated >= 1 else most


class LongestFirstQueue:
    """Waiting requests: evicted ones, then longest first.

    It has the methods of vLLM's ``RequestQueue``. Ties go by arrival.
    """

    def __init__(self) -> None:
        self._front: deque[Any] = deque()
        self._heap: list[tuple[int, int, Any]] = []
        self._came = 0

    def add_request(self, request: Any) -> None:
        """Add a request."""
        heapq.heappush(self._heap, (-expected_tokens(request), self._came, request))
        self._came += 1

    def pop_request(self) -> Any:
        """Remove and return the next request."""
        return self._front.popleft() if self._front else heapq.heappop(self._heap)[2]

    def peek_request(self) -> Any:
        """Return the next request."""
        return self._front[0] if self._front else self._heap[0][2]

    def prepend_request(self, request: Any) -> None:
        """Insert an evicted request before all others."""
        self._front.appendleft(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Insert evicted requests in reverse order, as vLLM does."""
        self._front.extendleft(requests)

    def remove_request(self, request: Any) -> None:
        """Remove a request."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove requests."""
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
    """Return a vLLM scheduler that begins the longest request first."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue

    RequestQueue.register(LongestFirstQueue)

    class LongestFirst(AsyncScheduler):  # type: ignore[misc]  # mypy runs without vLLM
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.policy.value != "fcfs":
                raise ValueError("LongestFirst has an order of its own: leave out --scheduling-policy")
            self.waiting = LongestFirstQueue()

    return LongestFirst


def __getattr__(name: str) -> Any:
    if name == "LongestFirst":
        return longest_first()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
