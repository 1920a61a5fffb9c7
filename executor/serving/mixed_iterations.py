"""Simulating an engine that decodes and encodes in one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...data.costs.cost import FloatArray, IntArray
from ...data.trace import Stage, Trace
from ...data.workload import Workload
from ...heuristics.policy import FREE
from ...heuristics.serving.chunked_prefill import Iteration, MixedPolicy, fresh_state
from ...heuristics.serving.kv_blocks import BlockPool


class IterationCost(Protocol):
    """What an iteration takes."""

    def __call__(self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]], drawn: int) -> float:
        """
        Return seconds.

        Parameters
        ----------
        contexts
            Tokens held by each decoding request, the new one included.
        chunks
            New tokens and tokens already held, of each prompt encoded.
        drawn
            Requests whose next token is drawn at the end.
        """
        ...


class MixedPolicyError(RuntimeError):
    """A policy asked for an iteration that the state does not allow, or for none at all."""


def simulate_iterations(
    workload: Workload,
    policy: MixedPolicy,
    cost: IterationCost,
    pool: BlockPool,
    *,
    ahead: bool = False,
) -> Trace:
    """
    Return the trace of a job whose every iteration a policy puts together.

    Parameters
    ----------
    workload
        The requests, with the true lengths of their answers.
    policy
        Decides each iteration.
    cost
        What an iteration takes.
    pool
        The keys and values, all free.
    ahead
        Whether an iteration is decided while the one before it still runs (vLLM's asynchronous scheduling):
        what finishes in that one is not free yet, and what arrives in it is not seen.

    Raises
    ------
    MixedPolicyError
        If the policy computes tokens a request does not have, for lack of blocks, or does nothing though no
        arrival is outstanding.
    """
    return _Job(workload, policy, cost, pool, ahead).run()


class _Job:
    def __init__(
        self, workload: Workload, policy: MixedPolicy, cost: IterationCost, pool: BlockPool, ahead: bool
    ) -> None:
        self.workload, self.policy, self.cost, self.pool, self.ahead = workload, policy, cost, pool, ahead
        count = len(workload)
        self.state = fresh_state(workload.input_tokens, workload.output_tokens, pool)
        self.order: IntArray = np.argsort(workload.arrival, kind="stable")
        self.arrived = self.done = self.evictions = 0
        self.ending: list[int] = []
        self.times: dict[str, FloatArray] = {
            name: np.full(count, np.nan) for name in ("prefilled", "first_token", "finished")
        }
        self.stage_of = np.full(count, FREE, dtype=np.int64)
        self.stages: list[Stage] = []

    def run(self) -> Trace:
        workload, state = self.workload, self.state
        clock = decided = 0.0
        while self.done < len(workload):
            # Decided ahead, an iteration is put together when the one before it starts.
            state.time = decided if self.ahead else clock
            self._arrive()
            iteration = self.policy(state)
            if not iteration.tokens and not iteration.put_back:
                if self.ending:
                    self._retire()
                    decided = clock
                    continue
                clock = decided = max(clock, self._next_arrival())
                continue
            self._put_back(iteration.put_back)
            decided = clock
            clock += self._run(iteration, clock)
        return Trace(
            ids=tuple(workload.ids.tolist()),
            slots=max((stage.active for stage in self.stages), default=0),
            stages=tuple(self.stages),
            stage_of=self.stage_of,
            slot_of=np.full(len(workload), FREE, dtype=np.int64),
            queued=workload.arrival.copy(),
            prefilled=self.times["prefilled"],
            first_token=self.times["first_token"],
            finished=self.times["finished"],
            tokens=state.generated.copy(),
            evictions=self.evictions,
            engine={"name": "mixed iterations, simulated"},
        )

    def _arrive(self) -> None:
        while self.arrived < len(self.order) and self._next_arrival() <= self.state.time:
            self.state.waiting.append(int(self.order[self.arrived]))
            self.arrived += 1

    def _next_arrival(self) -> float:
        if self.arrived == len(self.order):
            raise MixedPolicyError(
                f"nothing is run while {len(self.order) - self.done} requests are unserved"
            )
        return float(self.workload.arrival[self.order[self.arrived]])

    def _put_back(self, requests: Sequence[int]) -> None:
        state = self.state
        for request in requests:
            state.running.remove(request)
            self.pool.release(request, tokens=int(state.computed[request]))
            state.computed[request] = 0
            state.waiting.insert(0, request)
            self.evictions += 1

    def _run(self, iteration: Iteration, start: float) -> float:
        state = self.state
        contexts: list[int] = []
        chunks: list[tuple[int, int]] = []
        drawing: list[int] = []
        admitted = set(state.waiting)
        for request, new in iteration.tokens:
            if request in admitted:
                state.waiting.remove(request)
                state.running.append(request)
                state.computed[request] = self.pool.resume(request, state.known(request))
                if np.isnan(self.times["prefilled"][request]):
                    self.times["prefilled"][request] = start
                    self.stage_of[request] = len(self.stages)
            held = int(state.computed[request])
            if new < 1 or held + new > state.known(request):
                raise MixedPolicyError(f"{new} tokens of request {request}, which lacks fewer")
            if not self.pool.grow(request, held + new):
                raise MixedPolicyError(f"no blocks for {new} tokens of request {request}")
            if new == 1 and held >= state.prompt[request]:
                contexts.append(held + 1)
            else:
                chunks.append((new, held))
            state.computed[request] = held + new
            if held + new == state.known(request):
                drawing.append(request)
        seconds = self.cost(contexts, chunks, len(drawing))
        self._retire()
        self._draw(drawing, start + seconds)
        if not self.ahead:
            self._retire()
        tokens, kv = len(contexts) + sum(new for new, _ in chunks), sum(contexts)
        kind = "prefill" if chunks else "decode"
        rounds = 0 if chunks else 1
        active = len(iteration.tokens)
        self.stages.append(Stage(kind, start, start + seconds, rounds, active, tokens, kv, kv))
        return seconds

    def _draw(self, requests: Sequence[int], end: float) -> None:
        state = self.state
        for request in requests:
            state.generated[request] += 1
            if state.generated[request] == 1:
                self.times["first_token"][request] = end
            if state.generated[request] == self.workload.output_tokens[request]:
                self.times["finished"][request] = end
                state.running.remove(request)
                self.ending.append(request)
                self.done += 1

    def _retire(self) -> None:
        for request in self.ending:
            self.pool.release(request)
        self.ending.clear()
