"""Simulation of a fleet, with queues per replica or shared."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...data.arrays import IntArray
from ...data.fleet import Fleet
from ...data.lengths.remaining import RemainingLengths
from ...data.problem import Problem
from ...data.trace import Trace
from ..loop import Execution
from ..policy import FREE, UNTIL_CHANGE, Policy
from ..queues.admission import Admission
from ..queues.ordered import Ordered, longest_first
from ..queues.prefill_rules import SkiRental, bearable_idle, steps_to_wait
from ..queues.queue_policy import QueuePolicy
from ..simulator import Progress, Simulator


@dataclass(frozen=True, slots=True, eq=False)
class FleetRun:
    """Run of a fleet.

    replica_of: Replica that served each request, shape (requests,).
    traces: One per replica, in the workload's order.
    busy: Seconds each replica was busy before; the traces start after them.
    """

    replica_of: IntArray
    traces: tuple[Trace, ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds until every replica is done."""
        return max(busy + trace.makespan for busy, trace in zip(self.busy, self.traces, strict=True))


def longest_first_policy(problem: Problem) -> Policy:
    """Return longest predicted first, with the ski-rental rule."""
    return QueuePolicy(Ordered(longest_first(problem)), SkiRental(), Admission(problem))


def simulate_fleet(
    fleet: Fleet,
    replica_of: IntArray | None,
    output_tokens: IntArray | None = None,
    *,
    policy: Callable[[Problem], Policy] = longest_first_policy,
    backoff: bool = True,
    patience: float = 0.5,
    remaining: RemainingLengths | None = None,
) -> FleetRun:
    """Simulate a fleet.

    fleet: Job, with known or predicted lengths, and its replicas.
    replica_of: Replica of each request, shape (requests,); None for one shared queue.
    output_tokens: True length of each completion (tokens, shape (requests,)); the fleet's own by default.
    policy: Returns a fresh policy for a replica; it may read only the waiting requests, which change as
        requests move.
    backoff: A replica without waiting requests takes some from the one predicted to end last: as many as it
        has free slots, at most half, longest remaining first. Evicted requests keep their tokens and are
        prefilled again.
    patience: Stage openings' worth of idle slot-steps before a replica that still runs requests takes any.
    remaining: Expected remaining length by decode steps done; by default, prediction minus steps done.

    Raises PolicyError if a policy does nothing while requests wait.
    """
    return _FleetExecution(
        fleet, replica_of, output_tokens, policy, patience if backoff else None, remaining
    ).run()


class _FleetExecution:
    """All replicas, each with its clock; the earliest runs next."""

    def __init__(
        self,
        fleet: Fleet,
        replica_of: IntArray | None,
        output_tokens: IntArray | None,
        policy: Callable[[Problem], Policy],
        patience: float | None,
        remaining: RemainingLengths | None,
    ) -> None:
        count = len(fleet)
        self._fleet, self._patience = fleet, patience
        self._dispatched = None if replica_of is None else np.asarray(replica_of, dtype=np.int64)
        self._served_by = np.full(count, -1, dtype=np.int64)
        shared = np.ones(count, dtype=np.bool_)
        decoded = np.zeros(count, dtype=np.int64)
        progress = Progress.none(fleet.problem_of(0, np.arange(count)), output_tokens)
        self._replicas = []
        for k in range(len(fleet.replicas)):
            problem = fleet.problem_of(k, np.arange(count))
            waiting = shared if self._dispatched is None else self._dispatched == k
            engine = Simulator(problem, progress=progress)
            execution = Execution(problem, policy(problem), engine, queue=(waiting, decoded))
            self._replicas.append(_Replica(execution, fleet.replicas[k].busy, remaining))

    def run(self) -> FleetRun:
        ahead = [(replica.time, k) for k, replica in enumerate(self._replicas)]
        heapq.heapify(ahead)
        while ahead:
            _, k = heapq.heappop(ahead)
            replica = self._replicas[k]
            decode_steps = UNTIL_CHANGE if replica.pending else self._take_over(replica)
            if replica.runs or replica.pending:
                replica.step(decode_steps)
                heapq.heappush(ahead, (replica.time, k))
        for k, replica in enumerate(self._replicas):
            self._served_by[replica.served] = k
        return FleetRun(
            self._served_by,
            tuple(replica.trace() for replica in self._replicas),
            tuple(replica.busy for replica in self._fleet.replicas),
        )

    def _take_over(self, thief: _Replica) -> int:
        """Take requests from the last replica; return the first decode steps."""
        busy = [replica for replica in self._replicas if replica.pending]
        if self._patience is None or self._dispatched is None or not thief.free or not busy:
            return UNTIL_CHANGE
        wait = thief.idle_wait(self._patience)
        if thief.runs and wait > 0:
            return wait
        victim = max(busy, key=_Replica.predicted_end)
        thief.take(victim.give_up(min(thief.free, -(-victim.pending // 2))))
        return UNTIL_CHANGE


class _Replica:
    """One replica, which can exchange requests with others.

    busy: Seconds it is busy before.
    remaining: Expected remaining length by decode steps done; None for prediction minus steps done.
    """

    def __init__(self, execution: Execution, busy: float, remaining: RemainingLengths | None) -> None:
        self._execution, self._busy, self._remaining = execution, busy, remaining
        self._problem, self._state = execution.problem, execution.state
        self._order = np.argsort(-self._problem.decode_steps, kind="stable")
        self._dry_since = 0

    @property
    def time(self) -> float:
        return self._busy + self._execution.engine.time

    @property
    def pending(self) -> int:
        return int(np.count_nonzero(self._state.waiting))

    @property
    def runs(self) -> bool:
        return bool((self._state.slot_request != FREE).any())

    @property
    def free(self) -> int:
        return int((self._state.slot_request == FREE).sum())

    @property
    def served(self) -> IntArray:
        return np.flatnonzero(np.isfinite(self._execution.finished))

    def predicted_end(self) -> float:
        problem, state = self._problem, self._state
        running, waiting = state.running, np.flatnonzero(state.waiting)
        steps_left = self._left(running) + self._left(waiting)
        cost = problem.cost
        tokens = int(problem.prompt_tokens[waiting].sum())
        per_step = cost.decode_base / problem.slots + cost.decode_per_slot
        return self.time + steps_left * per_step + tokens * cost.prefill_per_token

    def _left(self, requests: IntArray) -> float:
        if self._remaining is not None:
            return float(self._remaining.tokens(requests, self._state.decoded[requests]).sum())
        return float(
            np.maximum(1, self._problem.decode_steps[requests] - self._state.decoded[requests]).sum()
        )

    def idle_wait(self, patience: float) -> int:
        """Return the steps until idle slots cost as much as a stage."""
        if self._problem.cost.decode_base == 0:
            return 0
        idle = self.free * (self._state.steps_done - self._dry_since)
        return steps_to_wait(bearable_idle(self._problem, patience), idle, self.free)

    def give_up(self, count: int) -> IntArray:
        """Remove and return some waiting requests, the longest predicted first."""
        waiting = self._state.waiting
        if self._remaining is None:
            surrendered = self._order[waiting[self._order]][:count]
        else:
            ids = np.flatnonzero(waiting)
            steps_left = self._remaining.tokens(ids, self._state.decoded[ids])
            surrendered = ids[np.argsort(-steps_left, kind="stable")][:count]
        waiting[surrendered] = False
        return surrendered

    def take(self, requests: IntArray) -> None:
        self._state.waiting[requests] = True

    def step(self, most: int) -> None:
        """Run the policy's next step, within ``most`` decode steps."""
        for _ in self._execution.step(most):
            pass
        if self.pending:
            self._dry_since = self._state.steps_done

    def trace(self) -> Trace:
        return self._execution.trace(self.served)
