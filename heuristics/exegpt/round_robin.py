"""ExeGPT's RRA on one device: encode, decode some steps, repeat."""

from __future__ import annotations

from typing import Self

import numpy as np

from ...data.configuration import PlannedConfiguration
from ..policy import UNTIL_CHANGE, State, Step
from .dynamic_batch import DynamicBatch


class RoundRobinAllocation:
    """Policy that encodes a batch every N_D steps (ExeGPT, section 4.1).

    Prompts come in order of arrival, and completed requests leave at once. Batches are adjusted to keep
    tokens and decode batch near the plan (section 5.2).

    decode_steps: Decode steps between two encodings, :math:`N_D`.
    """

    def __init__(self, decode_steps: int, batch: DynamicBatch) -> None:
        self._decode_steps, self._batch = decode_steps, batch
        self._next = 0

    @classmethod
    def of(cls, configuration: PlannedConfiguration) -> Self:
        """Return a fresh policy for a configuration on one device."""
        return cls(configuration.decode_steps, DynamicBatch.of(configuration))

    def change(self, configuration: PlannedConfiguration, batch: DynamicBatch) -> None:
        """Change the configuration after the present decode steps."""
        self._decode_steps, self._batch = configuration.decode_steps, batch

    def __call__(self, state: State) -> Step:
        """Return the next encoding with its decode steps, or their rest."""
        running = state.running
        due = state.steps_done >= self._next or not len(running)
        # A list of the waiting requests is slow to build if many wait.
        if not state.waiting.any():
            return Step(decode_steps=UNTIL_CHANGE)
        if not due:
            return Step(decode_steps=max(1, self._next - state.steps_done))
        waiting, problem, free = np.flatnonzero(state.waiting), state.problem, state.free_slots
        count = max(
            self._batch.size(problem.prompt_tokens[waiting[: self._batch.most]], len(running)),
            0 if len(running) else 1,
        )
        count = min(count, len(free))
        if problem.kv_capacity is not None:
            # A request joins only if its whole completion fits with the planned growth of the others.
            needs = problem.prompt_tokens + problem.workload.output_tokens
            room = problem.kv_capacity - int(needs[running].sum())
            count = min(count, int(np.searchsorted(np.cumsum(needs[waiting[:count]]), room, side="right")))
        if problem.prefill_token_cap is not None:
            tokens = np.cumsum(problem.prompt_tokens[waiting[:count]])
            count = int(np.searchsorted(tokens, problem.prefill_token_cap, side="right"))
        self._next = state.steps_done + self._decode_steps
        chosen = waiting[:count]
        return Step(prefill=chosen.tolist(), slots=free[:count].tolist(), decode_steps=self._decode_steps)
