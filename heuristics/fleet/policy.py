"""Choice of a fleet's policy by sampled lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ...data.arrays import IntArray
from ...data.expectation import Expectation, Follow, Tail
from ...data.fleet import Fleet, Groups
from ...data.lengths.prediction_error import PredictionError
from ...data.lengths.remaining import RemainingLengths
from ...data.problem import Problem
from ..dispatch import dispatch
from ..policy import Policy, State, Step
from ..queues.admission import Admission
from ..queues.ordered import Ordered, arrival_order, longest_first
from ..queues.prefill_rules import Opportunity, SkiRental
from ..queues.queue_policy import QueuePolicy
from ..registry import policy_named
from .simulation import FleetRun, simulate_fleet

ORDERS: tuple[Follow, ...] = ("longest-first", "as-given", "shortest-first")
"""Orders to compare; uncertain short requests should not come last."""

PATIENCE = (1.0, 0.5, 0.0)
"""Ski-rental thresholds to compare; 0 never waits."""

ENDS = ((3.0, 80), (10.0, 40), (40.0, 20))
"""Settings of tail preemption to compare: share of slots, margin in steps."""


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """Built-in policy that each replica follows by itself."""

    name: str

    def select(self, requests: IntArray) -> NamedPolicy:
        """Return the policy for some of the requests."""
        return self

    def __call__(self, problem: Problem) -> Policy:
        """Return a fresh policy for one replica."""
        return policy_named(self.name, problem)


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """Order, prefill rule and end of each replica's queue.

    order: One of :data:`ORDERS`, by predicted length.
    patience: Threshold of the ski-rental rule and of backoff.
    tail: Tail preemption, or None.
    compared: Mean seconds of every candidate, by name.
    """

    order: Follow = "longest-first"
    patience: float = 0.5
    tail: Tail | None = field(default=None, compare=False, repr=False)
    compared: Mapping[str, float] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, expected: Expectation) -> FleetPolicy:
        """Return the policy that a plan's expectation follows."""
        return cls(expected.follow, expected.patience, expected.tail, expected.compared)

    @property
    def name(self) -> str:
        """Name among the candidates."""
        parked = "" if self.tail is None else f", last {self.tail.share:g} a slot by what is left"
        return f"{self.order}, patience {self.patience:g}{parked}"

    @property
    def remaining(self) -> RemainingLengths | None:
        """Expected remaining length by decode steps, if the policy uses it."""
        return None if self.tail is None else self.tail.remaining

    def select(self, requests: IntArray) -> FleetPolicy:
        """Return the policy for some of the requests, in that order."""
        if self.tail is None:
            return self
        return replace(self, tail=replace(self.tail, remaining=self.tail.remaining.select(requests)))

    def queue(self, problem: Problem) -> IntArray:
        """Return the order of the queue, shape (requests,)."""
        if self.order == "as-given":
            return arrival_order(problem)
        longest = longest_first(problem)
        return longest[::-1] if self.order == "shortest-first" else longest

    def __call__(self, problem: Problem) -> Policy:
        """Return a fresh policy for one replica."""
        policy = QueuePolicy(Ordered(self.queue(problem)), SkiRental(self.patience), Admission(problem))
        if self.tail is None:
            return policy
        share, margin = self.tail.share, self.tail.margin
        return TailPreemption(
            policy, problem, self.tail.remaining, share=share, margin=margin, patience=self.patience
        )


def choose_fleet_policy(
    fleet: Fleet,
    error: PredictionError,
    *,
    samples: int = 5,
    seed: int = 0,
    rule: str = "lpt",
    groups: Groups = "any",
    longest: IntArray | None = None,
) -> tuple[FleetPolicy, IntArray]:
    """Choose the policy of least mean makespan over sampled lengths.

    Returns the policy of each replica, with backoff, and the replica of each request, by expected length,
    shape (requests,).

    fleet: Job, with the lengths as predicted, and its replicas.
    samples: Sets of lengths on which each candidate is simulated.
    rule, groups: Dispatch, as for :func:`~batchbound.heuristics.dispatch.dispatch`; replicas take requests
    from each other if groups may be split.
    longest: Most tokens of each completion, shape (requests,); None for no limit.
    """
    predicted = fleet.workload.output_tokens
    planned = fleet.with_output_tokens(error.expected(predicted, longest))
    truths = error.sample(predicted, np.random.default_rng(seed), samples, longest)
    remaining = RemainingLengths.of(error, predicted, longest=longest, seed=seed)
    replica_of = dispatch(planned, rule, groups)
    compared: dict[str, tuple[float, FleetPolicy]] = {}

    def compare(candidate: FleetPolicy) -> None:
        if candidate.name not in compared:
            ends = [
                serve_with_backoff(planned, replica_of, candidate, truth, backoff=groups == "any").makespan
                for truth in truths
            ]
            compared[candidate.name] = float(np.mean(ends)), candidate

    def best() -> FleetPolicy:
        return min(compared.values(), key=lambda found: found[0])[1]

    for order in ORDERS:
        compare(FleetPolicy(order, PATIENCE[0]))
    chosen = best()
    for patience in PATIENCE[1:]:
        compare(FleetPolicy(chosen.order, patience))
    chosen = best()
    for share, margin in ENDS:
        # The longest wait for the end, when most is known about their group.
        compare(FleetPolicy("shortest-first", chosen.patience, Tail(share, margin, remaining)))
    means = {name: mean for name, (mean, _) in compared.items()}
    return replace(best(), compared=means), replica_of


def serve_with_backoff(
    fleet: Fleet,
    replica_of: IntArray,
    policy: FleetPolicy,
    output_tokens: IntArray | None = None,
    *,
    backoff: bool = True,
) -> FleetRun:
    """Simulate a fleet that follows a policy, with backoff."""
    return simulate_fleet(
        fleet,
        replica_of,
        output_tokens,
        policy=policy,
        backoff=backoff,
        patience=policy.patience,
        remaining=policy.remaining,
    )


class TailPreemption:
    """Policy that ends a job with the longest remaining first.

    The request that starts last may turn out the longest, and predictions cannot prevent it. But a request
    that has decoded long has little left, as no completion exceeds the longest. So at the end, running
    requests with little left are evicted in favour of those that may have much left.

    policy: Policy before the end.
    problem: Problem with the lengths as predicted.
    remaining: Expected remaining length by decode steps done.
    share: The end begins when at most ``share`` times the slots wait.
    margin: Decode steps by which a waiting request must have more left than a running one to take its slot.
    patience: Threshold of the ski-rental rule for free slots.
    """

    def __init__(
        self,
        policy: Policy,
        problem: Problem,
        remaining: RemainingLengths,
        *,
        share: float,
        margin: int,
        patience: float,
    ) -> None:
        self._policy = policy
        self._remaining = remaining
        self._few = share * problem.slots
        self._margin = margin
        self._rule = SkiRental(patience)
        self._admission = Admission(problem)
        self._ending = False
        self._idle = self._idling = self._asked = 0

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        self._ending = self._ending or int(np.count_nonzero(state.waiting)) <= self._few
        return self._end(state) if self._ending else self._policy(state)

    def _end(self, state: State) -> Step:
        evicted = self._admission.overflowing(state)
        if evicted:
            return Step(decode_steps=0, evict=evicted)
        self._idle += self._idling * (state.steps_done - self._asked)
        self._asked, self._idling = state.steps_done, 0
        decode_steps = min(self._admission.steps_that_fit(state), max(1, self._margin // 2))
        waiting, running, free = np.flatnonzero(state.waiting), state.running, state.free_slots
        if not waiting.size:
            return Step(decode_steps=self._admission.steps_that_fit(state))
        waiting_left = self._remaining.tokens(waiting, state.decoded[waiting])
        longest_first_order = np.argsort(-waiting_left, kind="stable")
        waiting, waiting_left = waiting[longest_first_order], waiting_left[longest_first_order]
        running_left = self._remaining.tokens(running, state.decoded[running])
        shortest_first = np.argsort(running_left, kind="stable")
        rivals = waiting_left[len(free) : len(free) + len(shortest_first)]
        swapped = int(np.count_nonzero(rivals > running_left[shortest_first[: len(rivals)]] + self._margin))
        parked = running[shortest_first[:swapped]]
        if swapped:
            # Room for the waiting requests is only known once the slots are free.
            return Step(decode_steps=0, evict=parked.tolist())
        requests: list[int] = waiting[: len(free)].tolist()
        count, full = self._admission.fitting(state, requests)
        if not count:
            return Step(decode_steps=decode_steps)
        requests = requests[:count]
        if running.size:
            wait = self._rule(state.problem, Opportunity.of(state, requests, self._idle, full))
            if wait > 0:
                self._idling = count
                return Step(decode_steps=min(wait, decode_steps))
        self._idle = 0
        self._admission.enter(requests)
        return Step(prefill=requests, slots=free[:count].tolist(), decode_steps=0)
