"""A fleet in simulated time: a queue per replica, with or without backoff, or one queue for all."""

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
    """
    What a fleet did.

    replica_of: The replica that served each request, shape (requests,).
    traces: Of each replica's requests, in the workload's order.
    busy: Seconds each replica was busy before; the traces start after them.
    """

    replica_of: IntArray
    traces: tuple[Trace, ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds after which every replica is done, what it was busy with included."""
        return max(busy + trace.makespan for busy, trace in zip(self.busy, self.traces, strict=True))


def longest_first_policy(problem: Problem) -> Policy:
    """Return the policy that serves the longest predicted first, with the ski-rental rule."""
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
    """
    Return what a fleet does in simulated time.

    fleet: The job, with the lengths that are counted on (known or predicted), and its replicas.
    replica_of: The replica each request is dispatched to, shape (requests,); None for one queue that all
        replicas take from.
    output_tokens: The true length of each completion (tokens, shape (requests,)); the fleet's own by default.
    policy: Returns a fresh policy for a replica; it must look at the waiting requests of the state only,
        which change as requests move. Longest first with the ski-rental rule by default.
    backoff: Whether a replica that runs dry takes pending requests from the one that would end last, by what
        is predicted: as many as it has free slots, but no more than half, first those with most left. One
        that was put back takes its tokens along; it is prefilled again wherever it goes on.
    patience: Stage openings' worth of idle slot-steps for which a replica that still runs something waits
        before it takes any.
    remaining: What is left of each request by what it has decoded; by default, what its prediction leaves.
    Raises PolicyError if a policy does nothing while requests wait.
    """
    return _FleetExecution(
        fleet, replica_of, output_tokens, policy, patience if backoff else None, remaining
    ).run()


class _FleetExecution:
    """All replicas, each with a clock of its own; the one that is furthest behind goes on."""

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
        """Serve everything."""
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
        """Take pending requests from the replica that would end last; return the rounds to go on without."""
        others = [replica for replica in self._replicas if replica.pending]
        if self._patience is None or self._dispatched is None or not thief.free or not others:
            return UNTIL_CHANGE
        wait = thief.idle_wait(self._patience)
        if thief.runs and wait > 0:
            return wait
        victim = max(others, key=_Replica.predicted_end)
        thief.take(victim.give_up(min(thief.free, -(-victim.pending // 2))))
        return UNTIL_CHANGE


class _Replica:
    """
    One replica: an execution that goes on step by step, and takes requests over from others.

    busy: Seconds it is busy before.
    remaining: What is left of each request by what it has decoded; None for what its prediction leaves.
    """

    def __init__(self, execution: Execution, busy: float, remaining: RemainingLengths | None) -> None:
        self._execution, self._busy, self._remaining = execution, busy, remaining
        self._problem, self._state = execution.problem, execution.state
        self._order = np.argsort(-self._problem.decode_steps, kind="stable")
        self._dry_since = 0

    @property
    def time(self) -> float:
        """Seconds after the job's start."""
        return self._busy + self._execution.engine.time

    @property
    def pending(self) -> int:
        """Requests that wait here."""
        return int(np.count_nonzero(self._state.waiting))

    @property
    def runs(self) -> bool:
        """Whether any slot is occupied."""
        return bool((self._state.slot_request != FREE).any())

    @property
    def free(self) -> int:
        """Free slots."""
        return int((self._state.slot_request == FREE).sum())

    @property
    def served(self) -> IntArray:
        """The requests that finished here."""
        return np.flatnonzero(np.isfinite(self._execution.finished))

    def predicted_end(self) -> float:
        """Return the seconds at which all that runs and waits here would be done, lengths as predicted."""
        problem, state = self._problem, self._state
        running, waiting = state.running, np.flatnonzero(state.waiting)
        left = self._left(running) + self._left(waiting)
        cost = problem.cost
        tokens = int(problem.prompt_tokens[waiting].sum())
        per_step = cost.decode_base / problem.slots + cost.decode_per_slot
        return self.time + left * per_step + tokens * cost.prefill_per_token

    def _left(self, requests: IntArray) -> float:
        if self._remaining is not None:
            return float(self._remaining.tokens(requests, self._state.decoded[requests]).sum())
        return float(
            np.maximum(1, self._problem.decode_steps[requests] - self._state.decoded[requests]).sum()
        )

    def idle_wait(self, patience: float) -> int:
        """Return the decode steps until the free slots have idled long enough to pay for a prefill stage."""
        if self._problem.cost.decode_base == 0:
            return 0
        idle = self.free * (self._state.steps_done - self._dry_since)
        return steps_to_wait(bearable_idle(self._problem, patience), idle, self.free)

    def give_up(self, count: int) -> IntArray:
        """Return so many of the requests that wait here, the longest predicted first; they wait no more."""
        waiting = self._state.waiting
        if self._remaining is None:
            given = self._order[waiting[self._order]][:count]
        else:
            ids = np.flatnonzero(waiting)
            left = self._remaining.tokens(ids, self._state.decoded[ids])
            given = ids[np.argsort(-left, kind="stable")][:count]
        waiting[given] = False
        return given

    def take(self, requests: IntArray) -> None:
        """Let requests wait here that another replica gave up."""
        self._state.waiting[requests] = True

    def step(self, most: int) -> None:
        """Carry out the policy's next step, of so many decode steps at most."""
        for _ in self._execution.step(most):
            pass
        if self.pending:
            self._dry_since = self._state.steps_done

    def trace(self) -> Trace:
        """Return the trace of what was served here."""
        return self._execution.trace(self.served)
