"""ExeGPT's RRA on one device: encode a batch, decode for some rounds, encode the next."""

from __future__ import annotations

import numpy as np

from ...data.configuration import PlannedConfiguration
from ..policy import UNTIL_CHANGE, State, Step
from .dynamic_batch import DynamicBatch


class RoundRobinAllocation:
    """
    Encodes a batch of prompts every so many decode steps (ExeGPT, section 4.1), in order of arrival.

    Requests that complete leave at once, and the rest decodes on; what is encoded is adjusted so that tokens
    and decode batch stay near the plan (section 5.2).

    Parameters
    ----------
    decode_rounds
        Rounds between two encodings, :math:`N_D`.
    batch
        How many prompts to encode.
    """

    def __init__(self, decode_rounds: int, batch: DynamicBatch) -> None:
        self._rounds, self._batch = decode_rounds, batch
        self._next = 0

    def change(self, configuration: PlannedConfiguration, batch: DynamicBatch) -> None:
        """Go on with another configuration after the rounds under way."""
        self._rounds, self._batch = configuration.decode_rounds, batch

    def __call__(self, state: State) -> Step:
        """Return the next encoding with its rounds, or the rest of them."""
        running = state.running
        due = state.rounds_done >= self._next or not len(running)
        # Who they are takes long to list where many wait.
        if not state.waiting.any():
            return Step(rounds=UNTIL_CHANGE)
        if not due:
            return Step(rounds=max(1, self._next - state.rounds_done))
        waiting, problem, free = np.flatnonzero(state.waiting), state.problem, state.free_slots
        count = max(
            self._batch.size(problem.prompt_tokens[waiting[: self._batch.most]], len(running)),
            0 if len(running) else 1,
        )
        count = min(count, len(free))
        if problem.kv_capacity is not None:
            # A request is let in only if its whole completion would fit beside what the others may come to
            # hold.
            needs = problem.prompt_tokens + problem.workload.output_tokens
            room = problem.kv_capacity - int(needs[running].sum())
            count = min(count, int(np.searchsorted(np.cumsum(needs[waiting[:count]]), room, side="right")))
        if problem.prefill_token_cap is not None:
            tokens = np.cumsum(problem.prompt_tokens[waiting[:count]])
            count = int(np.searchsorted(tokens, problem.prefill_token_cap, side="right"))
        self._next = state.rounds_done + self._rounds
        chosen = waiting[:count]
        return Step(prefill=chosen.tolist(), slots=free[:count].tolist(), rounds=self._rounds)
