"""Deciding iteration by iteration: which requests decode, and which chunks of prompts run beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...data.costs.cost import IntArray
from .kv_blocks import BlockPool


@dataclass(slots=True, eq=False)
class MixedState:
    """
    The job as it stands before an iteration, kept by the simulator; a policy reads it and changes nothing.

    Parameters
    ----------
    time
        Seconds after the job's start.
    prompt
        Prompt tokens of each request, shape (requests,).
    output
        Answer tokens of each request, as far as the policy may know them, shape (requests,).
    computed
        Tokens of each request whose keys and values are held, shape (requests,).
    generated
        Answer tokens each request has, shape (requests,); one ahead of ``computed``, whose next it is.
    running
        Requests under way, in the order they were admitted.
    waiting
        Requests that have arrived and are not under way, in the order they are queued (a request put back
        stands first).
    pool
        The keys and values.
    """

    time: float
    prompt: IntArray
    output: IntArray
    computed: IntArray
    generated: IntArray
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    pool: BlockPool = field(default_factory=lambda: BlockPool(None))

    def known(self, request: int) -> int:
        """Return the tokens a request has, prompt and answer: what its keys and values are computed from."""
        return int(self.prompt[request] + self.generated[request])


@dataclass(frozen=True, slots=True)
class Iteration:
    """
    What to run next.

    Parameters
    ----------
    tokens
        Requests, each with how many of its tokens to compute: 1 decodes a request whose prompt is done, more
        is a chunk of a prompt (of prompt and answer, if it was put back). One of ``waiting`` is admitted.
    put_back
        Running requests that give up their blocks first; they stand first in ``waiting`` afterwards.
    """

    tokens: Sequence[tuple[int, int]] = ()
    put_back: Sequence[int] = ()


class MixedPolicy(Protocol):
    """Decides the next iteration from the state."""

    def __call__(self, state: MixedState) -> Iteration:
        """Return what to run next; an empty iteration waits for the next arrival."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    """
    vLLM's own rule: every running request first, then new ones as far as the token budget goes.

    Running requests are served in order of admission, each with all the tokens it lacks, up to the budget;
    where blocks run out, the request admitted last is put back. Only when nobody was put back, waiting
    requests are admitted in order while there are sequences, budget and blocks left.

    Parameters
    ----------
    batched_tokens
        Most tokens of an iteration.
    sequences
        Most requests under way.
    whole_input
        Admit a request only if all its tokens would fit at once (vLLM's ``scheduler_reserve_full_isl``).
    """

    batched_tokens: int = 2048
    sequences: int = 256
    whole_input: bool = True

    def __call__(self, state: MixedState) -> Iteration:
        """Return vLLM's next iteration."""
        pool, budget = state.pool, self.batched_tokens
        free = pool.free
        tokens: dict[int, int] = {}
        put_back: list[int] = []
        running = list(state.running)
        at = 0
        while at < len(running) and budget > 0:
            request = running[at]
            # The token drawn last is already the request's, and computed next.
            new = min(state.known(request) - int(state.computed[request]), budget)
            if new <= 0:
                at += 1
                continue
            lacking = pool.lacking(request, int(state.computed[request]) + new)
            while lacking > free:
                victim = running.pop()
                put_back.append(victim)
                if victim in tokens:
                    computed = int(state.computed[victim]) + tokens[victim]
                    free += pool.lacking(victim, computed)
                    budget += tokens.pop(victim)
                free += pool.held(victim)
                if victim == request:
                    break
            if request in put_back:
                break
            tokens[request] = new
            free -= lacking
            budget -= new
            at += 1
        if not put_back:
            self._admit(state, tokens, budget, free)
        return Iteration(tuple(tokens.items()), tuple(put_back))

    def _admit(self, state: MixedState, tokens: dict[int, int], budget: int, free: int) -> None:
        pool, running = state.pool, len(state.running)
        for request in state.waiting:
            if budget <= 0 or running >= self.sequences:
                return
            known = state.known(request)
            cached = pool.cached_tokens(request, known)
            new = min(known - cached, budget)
            if pool.blocks_for(known if self.whole_input else cached + new) > free:
                return
            tokens[request] = new
            free -= pool.blocks_for(cached + new)
            budget -= new
            running += 1


def fresh_state(prompt: IntArray, output: IntArray, pool: BlockPool) -> MixedState:
    """Return the state before anything has arrived, for lengths in tokens of shape (requests,)."""
    zeros = np.zeros(len(prompt), dtype=np.int64)
    return MixedState(0.0, prompt, output, zeros, zeros.copy(), pool=pool)
