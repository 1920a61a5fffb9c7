"""Arriving requests served iteration by iteration."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.costs.iteration_cost import MixedCost
from ...data.workload import Workload
from .device import DeviceBatch, ServingDevice, SimulatedDevice
from .kv_ledger import KvLedger
from .policy import ServingPolicy, ServingState, ServingStep

WAITING, EXECUTING, QUEUED, PAUSED = range(4)
"""States of a request: before its prompt, computing, queued, preempted."""


class ServingError(RuntimeError):
    """Error of a policy with an invalid or missing step."""


@dataclass(frozen=True, slots=True, eq=False)
class ServingRun:
    """Run of a device.

    workload: The requests, with their true lengths.
    first_token, finished: Seconds after the start, shape (requests,); NaN if the run was stopped before.
    spent: Seconds each request was waiting, executing, queued and paused, shape (requests, 4).
    tokens: Generated tokens, shape (requests,).
    preempted: Preemptions of each request, shape (requests,).
    start, seconds: Begin and duration of each iteration, shape (iterations,).
    decodes, prompt_tokens, held, promised, completed: Per iteration: requests that generated, prompt tokens
    computed, KV tokens held and promised at its end, requests completed.
    decided: CPU seconds of the policy before each iteration, measured.
    capacity: KV tokens in all.
    failures: Promises of KV memory that were refused.
    lent_tokens: Tokens lent, over all loans.
    until: When the run was stopped, seconds; infinite if every request was served.
    """

    workload: Workload
    first_token: FloatArray
    finished: FloatArray
    spent: FloatArray
    tokens: IntArray
    preempted: IntArray
    start: FloatArray
    seconds: FloatArray
    decodes: IntArray
    prompt_tokens: IntArray
    held: IntArray
    promised: IntArray
    completed: IntArray
    decided: FloatArray
    capacity: int
    failures: int
    lent_tokens: int
    until: float = math.inf


def simulate_serving(
    workload: Workload,
    policy: ServingPolicy,
    cost: MixedCost,
    kv_capacity: int,
    *,
    block_tokens: int = 32,
    predicted: IntArray | None = None,
    prefilled: bool = False,
    until: float = math.inf,
) -> ServingRun:
    """Simulate a device under a policy, with a referee.

    workload: Requests, with their true lengths, arrivals and deadlines.
    kv_capacity: KV tokens of the device.
    predicted: Completion lengths the policy sees, shape (requests,); the true ones by default.
    prefilled: True if prompts are computed elsewhere: the KV cache is only received, with the first token.
    until: Seconds after which nothing new begins.

    Raises ServingError if a request exceeds the device or is left unserved, or a step is invalid. Raises
    KvLedgerError if a request holds KV cache that it was not given.
    """
    ledger = KvLedger(kv_capacity, len(workload), block_tokens)
    device = SimulatedDevice(cost)
    job = ServingJob(workload, policy, ledger, predicted, prefilled=prefilled, until=until)
    return _carried_out(job, device)


def serve_on_device(
    workload: Workload,
    policy: ServingPolicy,
    device: ServingDevice,
    ledger: KvLedger,
    *,
    predicted: IntArray | None = None,
    ahead: bool = False,
) -> ServingRun:
    """Serve requests on a device under a policy, with a referee.

    Seconds are the device's. An idle device's clock jumps to the next arrival. Errors are as in
    :func:`simulate_serving`.

    ledger: Empty.
    ahead: True to decide an iteration while the last one still runs (vLLM's asynchronous scheduling): its
        freed blocks and arrivals are not seen yet.
    """
    return _carried_out(ServingJob(workload, policy, ledger, predicted, ahead=ahead), device)


def _carried_out(job: ServingJob, device: ServingDevice) -> ServingRun:
    steps = job.iterations()
    ask = next(steps, None)
    while ask is not None:
        try:
            ask = steps.send(device.run(ask[1]))
        except StopIteration:
            ask = None
    return job.result()


class ServingJob:
    """Job that yields iterations and records their results.

    Its arguments are those of :func:`simulate_serving` and :func:`serve_on_device`. Raises ServingError if a
    request alone exceeds the device.
    """

    def __init__(
        self,
        workload: Workload,
        policy: ServingPolicy,
        ledger: KvLedger,
        predicted: IntArray | None = None,
        *,
        prefilled: bool = False,
        until: float = math.inf,
        ahead: bool = False,
    ) -> None:
        count = len(workload)
        self.workload, self.policy, self.ledger = workload, policy, ledger
        self.output, self.until, self.ahead = workload.output_tokens, until, ahead
        needed = workload.input_tokens + workload.output_tokens - 1
        room = ledger.blocks * ledger.block_tokens
        if (needed > room).any():
            request = int(np.argmax(needed))
            name = str(workload.ids[request])
            raise ServingError(
                f"request {name!r} ends with {needed[request]} tokens of KV cache on a device"
                f" of {room}. Leave it out or raise the capacity."
            )
        expected = self.output if predicted is None else predicted
        zeros = np.zeros(count, dtype=np.int64)
        self.state = ServingState(
            prompt=workload.input_tokens,
            predicted=expected,
            arrival=workload.arrival,
            deadline=workload.deadline,
            ledger=ledger,
            generated=zeros.copy(),
            held=zeros.copy(),
        )
        self.order = np.argsort(workload.arrival, kind="stable").tolist()
        self.arrivals = workload.arrival[self.order].tolist()
        self.arrived = self.done = 0
        # Finished in the iteration that still runs when the next one is decided.
        self.ending: list[int] = []
        self.running: dict[int, None] = {}
        self.stale = False
        # Tokens on the host of each request that was swapped out.
        self.away: dict[int, int] = {}
        self.status = np.full(count, WAITING, dtype=np.int64)
        self.since = workload.arrival.copy()
        self.spent = np.zeros((count, 4))
        self.first_token = np.full(count, np.nan)
        self.finished = np.full(count, np.nan)
        self.preempted = zeros.copy()
        self.records: list[tuple[float, float, int, int, int, int, int, float]] = []
        if prefilled:
            self._receive(workload)

    def _receive(self, workload: Workload) -> None:
        self.state.generated[:] = 1
        self.away = dict(enumerate(workload.input_tokens.tolist()))
        self.first_token[:] = workload.arrival

    def iterations(self) -> Generator[tuple[float, DeviceBatch], float, None]:
        """Yield each iteration's start and batch; expect its seconds.

        Raises the errors of :func:`simulate_serving`.
        """
        count, state = len(self.workload), self.state
        clock = started = 0.0
        while self.done < count and clock < self.until:
            # With ``ahead``, an iteration is decided when the one before it starts.
            state.time = started if self.ahead else clock
            while self.arrived < count and self.arrivals[self.arrived] <= state.time:
                state.arrived.append(self.order[self.arrived])
                self.arrived += 1
            self._refresh()
            begun = time.process_time()
            step = self.policy(state)
            decided = time.process_time() - begun
            state.arrived, state.prefilled, state.finished = [], [], []
            swapped = self._apply(step, clock)
            waited = self._retire()
            if not self.running and not step.prefill and not swapped:
                if self.arrived == count and not waited:
                    raise ServingError(f"nothing runs while {count - self.done} requests are unserved")
                started = clock = clock if waited else max(clock, self.arrivals[self.arrived])
                continue
            started = clock
            running, drawing = self._begin(step, clock)
            seconds = yield clock, self._batch(step, running, drawing, swapped)
            clock = self._end(step, (running, drawing), (clock, seconds), decided)

    def _apply(self, step: ServingStep, now: float) -> int:
        """Apply preemptions and swaps; return the tokens swapped."""
        state, ledger, swapped = self.state, self.ledger, 0
        for request in (*step.stop, *step.swap_out, *step.drop):
            if request in self.running:
                del self.running[request]
                self.stale = True
            if self.status[request] != PAUSED:
                self.preempted[request] += 1
                self._turn(request, PAUSED, now)
        for request in step.swap_out:
            self._gone(request)
            self.away[request] = int(state.held[request])
            swapped += self.away[request]
            state.held[request] = 0
        for request in step.drop:
            self._gone(request)
            state.held[request] = 0
        for request, tokens in step.resume:
            if tokens > ledger.room[request]:
                raise ServingError(f"request {request} takes up {tokens} tokens that it has no room for")
            state.held[request] = tokens
        for request in step.swap_in:
            back = self.away.pop(request, None)
            if back is None or back > ledger.room[request]:
                raise ServingError(f"request {request} cannot come back from the host")
            state.held[request] = back
            swapped += back
        for request in step.start:
            if state.lacks(request) != 1 or request in self.running or state.generated[request] == 0:
                raise ServingError(f"request {request} cannot generate yet")
            self.running[request] = None
            self.stale = True
            self._turn(request, EXECUTING, now)
        self._refresh()
        return swapped

    def _refresh(self) -> None:
        if self.stale:
            self.state.running = np.fromiter(self.running, dtype=np.int64, count=len(self.running))
            self.stale = False

    def _gone(self, request: int) -> None:
        if self.ledger.room[request] != 0:
            raise ServingError(f"request {request} leaves the device but keeps its blocks")

    def _turn(self, request: int, status: int, now: float) -> None:
        self.spent[request, self.status[request]] += now - self.since[request]
        self.since[request] = now
        self.status[request] = status

    def _begin(self, step: ServingStep, now: float) -> tuple[IntArray, list[int]]:
        """Check an iteration; return decoding and completing requests."""
        state = self.state
        running = state.running if step.decode else state.running[:0]
        drawing = []
        for request, new in step.prefill:
            lacks = state.lacks(request)
            if not 1 <= new <= lacks or request in self.running:
                raise ServingError(f"{new} prompt tokens of request {request}, which lacks {lacks}")
            if self.status[request] != EXECUTING:
                self._turn(request, EXECUTING, now)
            state.held[request] += new
            if new == lacks:
                drawing.append(request)
        state.held[running] += 1
        prefilling = np.array([request for request, _ in step.prefill], dtype=np.int64)
        self.ledger.check(np.concatenate((state.running, prefilling)), state.held)
        return running, drawing

    def _batch(self, step: ServingStep, running: IntArray, drawing: list[int], swapped: int) -> DeviceBatch:
        return DeviceBatch(
            decodes=running,
            prefill=step.prefill,
            held=self.state.held,
            swap_out=step.swap_out,
            swap_in=step.swap_in,
            swapped=swapped,
            drawn=len(running) + len(drawing),
        )

    def _end(
        self,
        step: ServingStep,
        requests: tuple[IntArray, list[int]],
        took: tuple[float, float],
        decided: float,
    ) -> float:
        """Record an iteration's results; return its end."""
        state, (running, drawing), (now, seconds) = self.state, requests, took
        end = now + seconds
        prompt_tokens = sum(new for _, new in step.prefill)
        kv_tokens = self._held()
        promised = (self.ledger.blocks - self.ledger.free) * self.ledger.block_tokens
        state.generated[running] += 1
        over = running[state.generated[running] >= self.output[running]].tolist()
        for request in drawing:
            state.generated[request] += 1
            if np.isnan(self.first_token[request]):
                self.first_token[request] = end
            if state.generated[request] >= self.output[request]:
                over.append(request)
            else:
                self._turn(request, QUEUED if state.generated[request] == 1 else PAUSED, end)
                state.prefilled.append(request)
        for request in over:
            self._finish(request, end)
        self.records.append(
            (now, seconds, len(running), prompt_tokens, kv_tokens, promised, len(over), decided)
        )
        return end

    def _held(self) -> int:
        # A whole guest has no blocks of its own; a request that is guest and host is counted once.
        there = self.ledger.own.keys() | self.ledger.loans.keys()
        return int(self.state.held[np.fromiter(there, dtype=np.int64, count=len(there))].sum())

    def _finish(self, request: int, end: float) -> None:
        if request in self.running:
            del self.running[request]
            self.stale = True
        self._turn(request, EXECUTING, end)
        self.finished[request] = end
        self.ending.append(request)
        if not self.ahead:
            self._retire()
        self.state.held[request] = 0
        self.state.finished.append(request)
        self.done += 1

    def _retire(self) -> bool:
        """Free the blocks of finished requests, if any."""
        for request in self.ending:
            self.ledger.release(request)
        some = bool(self.ending)
        self.ending.clear()
        return some

    def result(self) -> ServingRun:
        """Return the finished run."""
        self._retire()
        ledger = self.ledger
        columns = list(zip(*self.records, strict=True))
        start, seconds, decided = (np.array(columns[at]) for at in (0, 1, 7))
        decodes, prompts, kv_tokens, promised, completed = (
            np.array(columns[at], dtype=np.int64) for at in (2, 3, 4, 5, 6)
        )
        stopped = self.done < len(self.workload)
        for request in np.flatnonzero(
            np.isnan(self.finished) & (self.workload.arrival < self.until)
        ).tolist():
            # The last iteration may end after that.
            self._turn(request, int(self.status[request]), max(self.until, float(self.since[request])))
        whole = np.array_equal(self.state.generated, self.output) and ledger.free == ledger.blocks
        if not (whole or stopped):
            raise ServingError("requests lack tokens, or blocks were not given back")
        return ServingRun(
            workload=self.workload,
            first_token=self.first_token,
            finished=self.finished,
            spent=self.spent,
            tokens=self.state.generated,
            preempted=self.preempted,
            start=start,
            seconds=seconds,
            decodes=decodes,
            prompt_tokens=prompts,
            held=kv_tokens,
            promised=promised,
            completed=completed,
            decided=decided,
            capacity=ledger.blocks * ledger.block_tokens,
            failures=ledger.failures,
            lent_tokens=ledger.lent_tokens,
            until=self.until if stopped else math.inf,
        )
