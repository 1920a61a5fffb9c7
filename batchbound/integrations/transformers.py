"""Longest-first scheduler for transformers' continuous batching.

>>> ContinuousBatchingConfig(scheduler_type=register_longest_first(expected))  # doctest: +SKIP

The module imports transformers only when the scheduler is registered. Tested with transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

NAME = "longest_first"


def register_longest_first(expected: Mapping[str, int] | Callable[[Any], int] | None = None) -> str:
    """Register a longest-first scheduler and return its name.

    The name is a value of ``scheduler_type``. Requests of equal length begin in order of arrival. Requests
    whose KV cache was offloaded to the host come first, as in transformers' own schedulers.
    """
    from transformers.generation.continuous_batching import scheduler

    tokens: Callable[[Any], int]
    if expected is None or isinstance(expected, Mapping):
        tokens = partial(_stated, dict(expected or {}))
    else:
        tokens = expected

    class LongestFirst(scheduler.FIFOScheduler):
        def _get_waiting_candidates(self) -> list[Any]:
            waiting: list[Any] = super()._get_waiting_candidates()
            return sorted(waiting, key=lambda state: (not state.is_cpu_offloaded, -tokens(state)))

    scheduler.SCHEDULER_MAPPING[NAME] = LongestFirst
    return NAME


def _stated(expected: Mapping[str, int], state: Any) -> int:
    return int(expected.get(state.request_id, state._new_tokens_limit))
