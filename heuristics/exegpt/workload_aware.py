"""ExeGPT's WAA with an encoding and a decoding worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...data.configuration import PlannedConfiguration
from ..policy import UNTIL_CHANGE, State, Step
from .dynamic_batch import DynamicBatch


class Encoding(Protocol):
    """Encoding worker as the policy sees it."""

    def encode(self, requests: Sequence[int]) -> None:
        """Queue requests for encoding, in order."""
        ...

    def encoded(self, *, wait: bool) -> list[list[int]]:
        """Return newly encoded batches; with ``wait``, at least one."""
        ...


class WorkloadAwareAllocation:
    """Policy that decodes without pause and adds encoded batches.

    Prompts come in order of arrival (ExeGPT, section 4.1). A few batches are encoded ahead, and the oldest
    finished one joins before each decode iteration. Batches are adjusted to keep tokens and decode batch near
    the plan (section 5.2).

    lead: Batches encoded or being encoded that have not joined yet.
    """

    def __init__(self, encoding: Encoding, batch: DynamicBatch, lead: int) -> None:
        self._encoding, self._batch, self._lead = encoding, batch, max(1, lead)
        self._ahead = 0
        self._ready: deque[list[int]] = deque()
        self._sent = np.zeros(0, dtype=np.bool_)
        self._joined: list[int] = []

    def change(self, configuration: PlannedConfiguration, batch: DynamicBatch) -> None:
        """Change the configuration after the batches in progress."""
        self._lead, self._batch = max(1, configuration.lead), batch

    def __call__(self, state: State) -> Step:
        """Return the next iteration, with the batch that joins."""
        # They run by now: one that waits again was evicted.
        self._sent[self._joined] = False
        self._encode_ahead(state, 0)
        idle = not len(state.running) and not self._ready
        self._ready.extend(self._encoding.encoded(wait=idle))
        self._joined = chosen = self._joining(state)
        # One iteration later, the other worker would be idle until the request for the next batch.
        self._encode_ahead(state, len(chosen))
        return Step(
            prefill=chosen,
            slots=state.free_slots[: len(chosen)].tolist(),
            decode_steps=1 if state.waiting.any() else UNTIL_CHANGE,
        )

    def _encode_ahead(self, state: State, joining: int) -> None:
        if self._ahead >= self._lead:
            return
        if not len(self._sent):
            self._sent = np.zeros(len(state.waiting), dtype=np.bool_)
        fresh = np.flatnonzero(state.waiting & ~self._sent)
        while len(fresh) and self._ahead < self._lead:
            prompts = state.problem.prompt_tokens[fresh[: self._batch.most]]
            count = max(1, self._batch.size(prompts, len(state.running) + joining))
            chosen: list[int] = fresh[:count].tolist()
            self._encoding.encode(chosen)
            self._ahead += 1
            self._sent[chosen] = True
            fresh = fresh[count:]

    def _joining(self, state: State) -> list[int]:
        """Return the part of the oldest encoded batch that fits."""
        if not self._ready:
            return []
        problem, oldest = state.problem, self._ready[0]
        count = min(len(oldest), len(state.free_slots))
        if problem.kv_capacity is not None:
            # A request joins only if its whole completion fits with the planned growth of the others.
            needs = problem.prompt_tokens + problem.workload.output_tokens
            room = problem.kv_capacity - int(needs[state.running].sum())
            count = min(count, int(np.searchsorted(np.cumsum(needs[oldest[:count]]), room, side="right")))
        chosen, self._ready[0] = oldest[:count], oldest[count:]
        if not self._ready[0]:
            self._ready.popleft()
            self._ahead -= 1
        return chosen
