"""Loop that runs a policy's steps on an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from ..data.arrays import IntArray
from ..data.kept_beginnings import HeldBeginnings
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..data.trace import Stage, Trace
from ..data.workload import Turns
from .engine import Engine
from .policy import FREE, UNTIL_CHANGE, Policy, State, Step


class PolicyError(RuntimeError):
    """Error of a policy that returns an impossible or empty step."""


def execute(
    problem: Problem,
    policy: Policy,
    engine: Engine,
    *,
    on_finish: Callable[[int], None] | None = None,
    on_stage: Callable[[Stage, int], None] | None = None,
    turns: Turns | None = None,
) -> Trace:
    """Serve every request as the policy decides; return the trace.

    problem: Requests with the lengths the policy may use, and the limits.
    policy: Fresh policy, as it may keep state.
    engine: Fresh engine.
    on_finish: Function to call with each finished request.
    on_stage: Function to call after each stage, with it and the number of finished requests.
    turns: Requests that arrive after another has finished, or None.

    Raises PolicyError if a step breaks a rule, or is empty while nothing runs.
    """
    serving = Execution(problem, policy, engine, on_stage=on_stage, turns=turns).run()
    while True:
        try:
            request = next(serving)
        except StopIteration as done:
            trace: Trace = done.value
            return trace
        if on_finish is not None:
            on_finish(request)


def schedule_of(trace: Trace) -> Schedule:
    """Return a run's schedule, with a bin for each prefill stage.

    Raises ValueError if a request was evicted, as it has several prefill stages.
    """
    if trace.evictions:
        raise ValueError(f"{trace.evictions} evictions: the run has no schedule of one prefill per request")
    bin_of_stage = np.cumsum([stage.kind == "prefill" for stage in trace.stages]) - 1
    decode_steps = np.bincount(
        np.maximum(bin_of_stage, 0),
        weights=[stage.decode_steps for stage in trace.stages],
        minlength=trace.prefill_stages,
    )
    return Schedule(bin_of_stage[trace.stage_of], trace.slot_of, decode_steps.astype(np.int64))


class Execution:
    """One run: its state, its records, and its steps.

    problem, policy, engine, on_stage, turns: As for :func:`execute`.
    queue: Waiting requests, and decode steps of each, both shape (requests,) and updated. Replicas of a fleet
        may share either. By default, requests wait as they arrive.
    """

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        engine: Engine,
        *,
        on_stage: Callable[[Stage, int], None] | None = None,
        queue: tuple[npt.NDArray[np.bool_], IntArray] | None = None,
        turns: Turns | None = None,
    ) -> None:
        count = len(problem)
        self.problem, self.policy, self.engine = problem, policy, engine
        self.on_stage = on_stage
        self.held_at_start, self.shared = problem.held_at_start, HeldBeginnings(problem)
        self.arrival = problem.workload.arrival if queue is None else np.zeros(count)
        self.arrivals = np.argsort(self.arrival, kind="stable")
        if queue is None:
            queue = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.int64)
            unarrived = count
        else:
            self.arrivals = self.arrivals[:0]
            unarrived = 0
        self.turns = turns
        self.followers: dict[int, list[int]] = {}
        self.coming: list[tuple[float, int]] = []
        if turns is not None:
            self.arrival, self.followers = self.arrival.copy(), turns.followers()
            self.arrivals = self.arrivals[turns.first[self.arrivals]]
        self.arrived = 0
        self.state = State(
            problem=problem,
            time=0.0,
            steps_done=0,
            slot_request=np.full(problem.slots, FREE, dtype=np.int64),
            waiting=queue[0],
            decoded=queue[1],
            unarrived=unarrived,
        )
        self.stages: list[Stage] = []
        self.stage_of = np.full(count, -1, dtype=np.int64)
        self.slot_of = np.full(count, -1, dtype=np.int64)
        self.prefilled, self.first_token, self.finished = (np.full(count, np.nan) for _ in range(3))
        self.done = 0
        self.evictions = 0

    def run(self) -> Generator[int, None, Trace]:
        """Yield each finished request, and return the trace."""
        while self.done < len(self.problem):
            yield from self.step()
        return self.trace(np.arange(len(self.problem)))

    def step(self, most: int = UNTIL_CHANGE) -> Iterator[int]:
        """Run the policy's next step; yield the requests that finish.

        Raises PolicyError as :func:`execute`. ``most`` limits the decode steps.
        """
        self.admit()
        step = self.policy(self.state)
        self.state.finished = []
        self._evict(step.evict)
        if len(step.prefill):
            yield from self._prefill(step)
        if step.decode_steps > 0 and (self.state.slot_request != FREE).any():
            yield from self._decode(min(step.decode_steps, most))
        elif not len(step.prefill) and not len(step.evict):
            self._wait()

    def trace(self, requests: IntArray) -> Trace:
        """Return the trace of some finished requests, in that order."""
        tokens = self.state.decoded[requests] + int(self.problem.prefill_emits_first_token)
        return Trace(
            ids=tuple(self.problem.workload.ids[requests].tolist()),
            slots=self.problem.slots,
            stages=tuple(self.stages),
            stage_of=self.stage_of[requests],
            slot_of=self.slot_of[requests],
            queued=self.arrival[requests],
            prefilled=self.prefilled[requests],
            first_token=self.first_token[requests],
            finished=self.finished[requests],
            tokens=tokens,
            evictions=self.evictions,
            engine=self.engine.describe(),
        )

    @property
    def idle(self) -> bool:
        """True if no request runs, waits or will arrive."""
        state = self.state
        return not (state.unarrived or state.running.size or state.waiting.any())

    def extend(self, problem: Problem) -> None:
        """Add the requests at the end of a longer problem, which arrive now."""
        more = len(problem) - len(self.problem)
        for request in self.state.running:
            self._count(request, -1)
        self.problem = self.state.problem = problem
        self.held_at_start, self.shared = problem.held_at_start, HeldBeginnings(problem)
        for request in self.state.running:
            self._count(request, 1)
        self.arrival = np.append(self.arrival, np.full(more, self.engine.time))
        self.state.waiting = np.append(self.state.waiting, np.ones(more, dtype=np.bool_))
        self.state.decoded = np.append(self.state.decoded, np.zeros(more, dtype=np.int64))
        for name in ("stage_of", "slot_of"):
            setattr(self, name, np.append(getattr(self, name), np.full(more, -1)))
        for name in ("prefilled", "first_token", "finished"):
            setattr(self, name, np.append(getattr(self, name), np.full(more, np.nan)))

    def stop(self, requests: Sequence[int]) -> list[int]:
        """End running and waiting requests, which may continue later; return those that ran."""
        self.admit()
        self.state.waiting[requests] = False
        running = [request for request in requests if request in self.state.running]
        for request in running:
            self.state.slot_request[self.slot_of[request]] = FREE
            self._count(request, -1)
            self.state.apart.add(int(request))
            self.finished[request] = self.engine.time
        self.engine.evict(running)
        return running

    def pause(self, request: int) -> None:
        """Pause a finished request, which may continue later."""
        if request in self.state.finished:
            self.state.finished.remove(request)
        self.finished[request] = np.nan
        self.done -= 1

    def end(self, request: int, time: float) -> None:
        """End a paused request at a time."""
        self.finished[request] = time
        self.done += 1

    def resume(self, request: int, tokens: int) -> None:
        """Let a paused request wait again, with more tokens to prefill."""
        self.prefilled[request] = self.first_token[request] = self.finished[request] = np.nan
        self.state.decoded[request] += tokens
        self.state.waiting[request] = True

    def _next_arrival(self) -> float:
        coming = self.coming[0][0] if self.coming else float("inf")
        if self.arrived == len(self.arrivals):
            return coming
        return min(coming, float(self.arrival[self.arrivals[self.arrived]]))

    def admit(self) -> None:
        """Let the requests that have arrived wait."""
        state = self.state
        state.time = self.engine.time
        while self.coming and self.coming[0][0] <= state.time:
            state.waiting[heappop(self.coming)[1]] = True
            state.unarrived -= 1
        while self.arrived < len(self.arrivals):
            request = self.arrivals[self.arrived]
            if self.arrival[request] > state.time:
                break
            state.waiting[request] = True
            state.unarrived -= 1
            self.arrived += 1

    def _evict(self, requests: Sequence[int]) -> None:
        if not len(requests):
            return
        slots = self.state.slot_request
        for request in requests:
            at = np.flatnonzero(slots == request)
            if not at.size:
                raise PolicyError(f"request {request} is evicted but not running")
            slots[at[0]] = FREE
            self.state.waiting[request] = True
            self._count(request, -1)
            self.state.apart.add(int(request))
        self.evictions += len(requests)
        self.engine.evict(requests)

    def _prefill(self, step: Step) -> list[int]:
        state = self.state
        if len(step.prefill) != len(step.slots):
            raise PolicyError(f"{len(step.prefill)} requests are prefilled into {len(step.slots)} slots")
        for request, slot in zip(step.prefill, step.slots, strict=True):
            if not state.waiting[request]:
                raise PolicyError(f"request {request} is prefilled but not waiting")
            if not 0 <= slot < self.problem.slots:
                raise PolicyError(f"slot {slot} is given to request {request}, of {self.problem.slots} slots")
            if state.slot_request[slot] != FREE:
                raise PolicyError(f"slot {slot} is given to request {request} but not free")
            state.waiting[request] = False
            state.slot_request[slot] = request
            self._count(request, 1)
        stage, finished = self.engine.prefill(step.prefill, step.slots)
        chosen = np.asarray(step.prefill, dtype=np.int64)
        self.stage_of[chosen] = len(self.stages)
        self.slot_of[chosen] = step.slots
        fresh = chosen[np.isnan(self.prefilled[chosen])]
        self.prefilled[fresh] = stage.start
        if self.problem.prefill_emits_first_token:
            self.first_token[fresh] = stage.end
        return self._record(stage, finished)

    def _decode(self, decode_steps: int) -> list[int]:
        running = self.state.running
        stage, finished = self.engine.decode(decode_steps, self._next_arrival())
        self.state.decoded[running] += stage.decode_steps
        self.state.steps_done += stage.decode_steps
        self.state.kv_held += stage.decode_steps * len(running)
        new = running[np.isnan(self.first_token[running])]
        self.first_token[new] = stage.start + stage.seconds / stage.decode_steps
        return self._record(stage, finished)

    def _wait(self) -> None:
        arrival = self._next_arrival()
        if arrival == float("inf"):
            waiting = int(np.count_nonzero(self.state.waiting))
            raise PolicyError(f"the policy does nothing while {waiting} requests wait")
        self.engine.wait(arrival)

    def _record(self, stage: Stage, finished: list[int]) -> list[int]:
        self.stages.append(stage)
        for request in finished:
            slot = self.slot_of[request]
            self.state.slot_request[slot] = FREE
            self._count(request, -1)
            self.finished[request] = stage.end
            self.done += 1
            for follower in self.followers.get(request, ()):
                assert self.turns is not None
                self.arrival[follower] = max(self.arrival[follower], stage.end) + self.turns.pause[follower]
                heappush(self.coming, (float(self.arrival[follower]), follower))
        self.state.finished.extend(finished)
        if self.on_stage is not None:
            self.on_stage(stage, self.done)
        return finished

    def _count(self, request: int, change: int) -> None:
        """Count what a request holds when it begins (1) or ends (-1)."""
        state, before = self.state, self.shared.tokens
        held = int(self.held_at_start[request] + state.decoded[request])
        if request in state.apart:
            held += int(self.problem.kv_at_start[request] - self.held_at_start[request])
        else:
            self.shared.count([request], change)
        state.kv_held += change * held + self.shared.tokens - before
