"""A fleet in simulated time: a queue per replica, with or without backoff, or one queue for all."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.costs.cost import IntArray
from ...data.fleet import Fleet
from ...data.lengths.remaining import RemainingLengths
from ...data.problem import Problem
from ...data.trace import Stage, Trace
from ..loop import PolicyError
from ..policy import FREE, UNTIL_CHANGE, Policy, State
from ..queues.admission import Admission
from ..queues.ordered import Ordered, longest_first
from ..queues.prefill_rules import SkiRental, bearable_idle, rounds_to_wait
from ..queues.queue_policy import QueuePolicy
from ..simulator import Simulator


@dataclass(frozen=True, slots=True, eq=False)
class FleetRun:
    """
    What a fleet did.

    Parameters
    ----------
    replica_of
        The replica that served each request, shape (requests,).
    traces
        Of each replica's requests, in the workload's order.
    busy
        Seconds each replica was busy before; the traces start after them.
    stolen
        Requests taken over from the replica they were dispatched to.
    """

    replica_of: IntArray
    traces: tuple[Trace, ...]
    busy: tuple[float, ...]
    stolen: int

    @property
    def makespan(self) -> float:
        """Seconds after which every replica is done, what it was busy with included."""
        return max(busy + trace.makespan for busy, trace in zip(self.busy, self.traces, strict=True))


def longest_first_policy(problem: Problem, patience: float = 0.5) -> Policy:
    """Return the policy that serves the longest predicted first, with the ski-rental rule."""
    return QueuePolicy(Ordered(longest_first(problem)), SkiRental(patience), Admission(problem))


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

    Parameters
    ----------
    fleet
        The job, with the lengths that are counted on (known or predicted), and its replicas.
    replica_of
        The replica each request is dispatched to, shape (requests,); None for one queue that all replicas
        take from.
    output_tokens
        The true length of each answer (tokens, shape (requests,)); the fleet's own by default.
    policy
        Returns a fresh policy for a replica; it must look at the waiting requests of the state only, which
        change as requests move. Longest first with the ski-rental rule by default.
    backoff
        Whether a replica that runs dry takes pending requests from the one that would end last, by what is
        predicted: as many as it has free slots, but no more than half, first those with most left. One that
        was put back takes its tokens along; it is prefilled again wherever it goes on.
    patience
        Stage openings' worth of idle slot-rounds for which a replica that still runs something waits before
        it takes any.
    remaining
        What is left of each request by what it has decoded; by default, what its prediction leaves.

    Raises
    ------
    PolicyError
        If a policy does nothing while requests wait.
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
        progress = _Progress.of(fleet, output_tokens)
        self._replicas = [
            _Replica(
                fleet,
                k,
                policy,
                shared if self._dispatched is None else self._dispatched == k,
                progress,
                remaining,
            )
            for k in range(len(fleet.replicas))
        ]

    def run(self) -> FleetRun:
        """Serve everything."""
        ahead = [(replica.time, k) for k, replica in enumerate(self._replicas)]
        heapq.heapify(ahead)
        while ahead:
            _, k = heapq.heappop(ahead)
            replica = self._replicas[k]
            rounds = UNTIL_CHANGE if replica.pending else self._take_over(replica)
            if replica.runs or replica.pending:
                replica.step(rounds)
                heapq.heappush(ahead, (replica.time, k))
        for k, replica in enumerate(self._replicas):
            self._served_by[replica.served] = k
        moved = 0 if self._dispatched is None else int((self._served_by != self._dispatched).sum())
        return FleetRun(
            self._served_by,
            tuple(replica.trace() for replica in self._replicas),
            tuple(replica.busy for replica in self._fleet.replicas),
            moved,
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
        thief.take_from(victim, min(thief.free, -(-victim.pending // 2)))
        return UNTIL_CHANGE


@dataclass(frozen=True, slots=True, eq=False)
class _Progress:
    """What every request has decoded, holds and still has to come, wherever it runs."""

    decoded: IntArray
    held: IntArray
    left: IntArray

    @classmethod
    def of(cls, fleet: Fleet, output_tokens: IntArray | None) -> _Progress:
        lengths = fleet.workload.output_tokens if output_tokens is None else output_tokens
        emitted = int(fleet.prefill_emits_first_token)
        left = (lengths - emitted).astype(np.int64)
        return cls(np.zeros(len(fleet), dtype=np.int64), fleet.workload.input_tokens + emitted, left)


class _FleetSimulator(Simulator):
    """A simulator of one replica, which goes on with requests that others have begun."""

    def __init__(self, problem: Problem, progress: _Progress) -> None:
        super().__init__(problem)
        self._left, self._held = progress.left, progress.held
        # The state counts the rounds; counting them here, too, would count them twice.
        self._decoded = progress.decoded


class _Replica:
    """One replica: engine, policy and state, carried out step by step, and what is recorded of it."""

    def __init__(
        self,
        fleet: Fleet,
        number: int,
        policy: Callable[[Problem], Policy],
        waiting: npt.NDArray[np.bool_],
        progress: _Progress,
        remaining: RemainingLengths | None,
    ) -> None:
        count = len(fleet)
        self._problem = fleet.problem_of(number, np.arange(count))
        self._remaining = remaining
        self._engine = _FleetSimulator(self._problem, progress)
        self._policy = policy(self._problem)
        self._busy = fleet.replicas[number].busy
        self._order = np.argsort(-self._problem.rounds, kind="stable")
        self._state = State(
            problem=self._problem,
            time=0.0,
            rounds_done=0,
            slot_request=np.full(self._problem.slots, FREE, dtype=np.int64),
            waiting=waiting,
            decoded=progress.decoded,
        )
        self._dry_since = 0
        self._stages: list[Stage] = []
        self._evictions = 0
        self._stage_of = np.full(count, -1, dtype=np.int64)
        self._slot_of = np.full(count, -1, dtype=np.int64)
        self._prefilled, self._first, self._finished = (np.full(count, np.nan) for _ in range(3))

    @property
    def time(self) -> float:
        """Seconds after the job's start."""
        return self._busy + self._engine.time

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
        return np.flatnonzero(np.isfinite(self._finished))

    def predicted_end(self) -> float:
        """Return the seconds at which all that runs and waits here would be done, lengths as predicted."""
        problem, state = self._problem, self._state
        running, waiting = state.running, np.flatnonzero(state.waiting)
        left = self._left(running) + self._left(waiting)
        cost = problem.cost
        tokens = int(problem.prompt_tokens[waiting].sum())
        per_round = cost.decode_base / problem.slots + cost.decode_per_slot
        return self.time + left * per_round + tokens * cost.prefill_per_token

    def _left(self, requests: IntArray) -> float:
        if self._remaining is not None:
            return float(self._remaining.tokens(requests, self._state.decoded[requests]).sum())
        return float(np.maximum(1, self._problem.rounds[requests] - self._state.decoded[requests]).sum())

    def idle_wait(self, patience: float) -> int:
        """Return the rounds until the free slots have idled long enough to pay for a prefill stage."""
        if self._problem.cost.decode_base == 0:
            return 0
        idle = self.free * (self._state.rounds_done - self._dry_since)
        return rounds_to_wait(bearable_idle(self._problem, patience), idle, self.free)

    def take_from(self, victim: _Replica, count: int) -> None:
        """Take so many pending requests of another replica, the longest predicted first."""
        if self._remaining is None:
            taken = self._order[victim._state.waiting[self._order]][:count]
        else:
            waiting = np.flatnonzero(victim._state.waiting)
            left = self._remaining.tokens(waiting, self._state.decoded[waiting])
            taken = waiting[np.argsort(-left, kind="stable")][:count]
        victim._state.waiting[taken] = False
        self._state.waiting[taken] = True

    def step(self, most: int) -> None:
        """Carry out the policy's next step, of so many rounds at most."""
        state, engine = self._state, self._engine
        state.time = engine.time
        step = self._policy(state)
        state.finished = []
        for request in step.evict:
            state.slot_request[state.slot_request == request] = FREE
            state.waiting[request] = True
            state.kv_held -= self._held(request)
        if step.evict:
            self._evictions += len(step.evict)
            engine.evict(step.evict)
        if len(step.prefill):
            self._prefill(step.prefill, step.slots)
        running = state.running
        if running.size and step.rounds > 0:
            stage, finished = engine.decode(min(step.rounds, most), float("inf"))
            state.rounds_done += stage.rounds
            state.kv_held += stage.rounds * len(running)
            new = running[np.isnan(self._first[running])]
            self._first[new] = stage.start + stage.seconds / stage.rounds
            self._record(stage, finished)
        elif not len(step.prefill) and not step.evict:
            raise PolicyError(f"the policy does nothing while {self.pending} requests wait")
        if self.pending:
            self._dry_since = state.rounds_done

    def _prefill(self, requests: Sequence[int], slots: Sequence[int]) -> None:
        state = self._state
        chosen = np.asarray(requests, dtype=np.int64)
        state.waiting[chosen] = False
        state.slot_request[np.asarray(slots, dtype=np.int64)] = chosen
        state.kv_held += sum(self._held(request) for request in requests)
        stage, finished = self._engine.prefill(requests, slots)
        self._stage_of[chosen], self._slot_of[chosen] = len(self._stages), slots
        fresh = chosen[np.isnan(self._prefilled[chosen])]
        self._prefilled[fresh] = stage.start
        if self._problem.prefill_emits_first_token:
            self._first[fresh] = stage.end
        self._record(stage, finished)

    def _record(self, stage: Stage, finished: list[int]) -> None:
        self._stages.append(stage)
        for request in finished:
            self._state.slot_request[self._slot_of[request]] = FREE
            self._state.kv_held -= self._held(request)
            self._finished[request] = stage.end
        self._state.finished.extend(finished)

    def _held(self, request: int) -> int:
        return int(self._problem.kv_at_start[request] + self._state.decoded[request])

    def trace(self) -> Trace:
        """Return the trace of what was served here."""
        served = self.served
        tokens = self._state.decoded[served] + int(self._problem.prefill_emits_first_token)
        return Trace(
            ids=tuple(self._problem.workload.ids[served].tolist()),
            slots=self._problem.slots,
            stages=tuple(self._stages),
            stage_of=self._stage_of[served],
            slot_of=self._slot_of[served],
            queued=np.zeros(len(served)),
            prefilled=self._prefilled[served],
            first_token=self._first[served],
            finished=self._finished[served],
            tokens=tokens,
            evictions=self._evictions,
            engine=self._engine.describe(),
        )
