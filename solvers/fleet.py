"""One optimisation over replicas and slots: who serves what, and when, with a bound for the whole fleet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import numpy as np

from ..data.arrays import FloatArray, IntArray
from ..data.bound import Bound, gap_above
from ..data.fleet import Fleet, FleetSchedule
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..heuristics.dispatch import RULES as DISPATCH_RULES
from ..heuristics.dispatch import dispatch
from ..heuristics.fleet.simulation import simulate_fleet
from ..heuristics.loop import PolicyError, schedule_of
from ..heuristics.policy import Policy, State, Step
from ..heuristics.registry import POLICIES, policy_named
from ..models.bounds.fleet import StepBy, fleet_bound, request_costs, step_shares
from ..models.bounds.fleet_partition import Exchanges, LongestFirst, least_loaded, spread_groups
from .result import Limits, Status, StoppedBy
from .search.baselines import baselines
from .search.constructive import ski_rental_schedule
from .search.incumbent import BETTER
from .search.schedule_search import search_schedule
from .search.slot_sequences import SlotSequences, packing_pays
from .search.stage_split import split_stages
from .search.stages.reuse_times import reuse_times

PATIENCE = (0.5, 0.25, 1.0)
"""Settings of the ski-rental rule tried on each replica."""

FEEDBACKS = 4
"""Times the requests are shared out, each time knowing what the replicas lost to stages and idle slots."""

WORTH = 1 - 1e-6
"""Times of the best end within which another way to share out has to end to be better."""

LONG = 0.5
"""What the longest request takes alone, in times of an even share of all, from which it matters."""

MOST_BESIDE = 100_000
"""Requests up to which they are shared out beside the longest ones: of more, that takes a second."""

MOST_SIMULATED = 5000
"""Requests up to which the rules are simulated on all replicas: of more, one takes a second."""

MOST_DISPATCHED = 500
"""Requests up to which the policies are simulated after every rule that dispatches, and not one alone."""

FIRST = 4
"""Rules tried on each replica where shared prompts cannot all be kept, or memory can run out."""

RULES = ("lpt-ski", "lpt", "fcfs", "fcfs-ski", "packing-algorithm1")
"""Policies simulated before the others, after each rule that dispatches: one is mostly the best."""

RULES_SHARE, RULES_SECONDS = 0.2, 0.2
"""The share of the seconds left that this takes at most, and the seconds it may take in any case."""

MOST_EXCHANGED = 3000
"""Requests up to which they are exchanged between replicas: of more, all pairs take too long to look at."""

EXCHANGE_SHARE = 0.1
"""The share of the seconds left that this takes at most."""

PACKING_SHARE = 0.2
"""The share of the seconds left in which the slots of all replicas are packed full."""

SLICE = 0.2
"""Least wall-clock seconds of search spent on a replica at a time."""

SLICE_STEPS = 25
"""Steps of the first search of a replica, where steps are limited."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """
    What planning a fleet hands back.

    status, stopped_by: What is proven of the schedule, and why the search ended.
    schedule: Replica, slot and stage of every request.
    makespan: Seconds until the last replica is done.
    bound: Proven for the whole fleet.
    seconds: Wall-clock seconds spent.
    """

    status: Status
    stopped_by: StoppedBy
    schedule: FleetSchedule
    makespan: float
    bound: Bound
    seconds: float

    @property
    def gap(self) -> float | None:
        """How far the makespan is above the bound, as a fraction of it; None for a bound of no time."""
        return gap_above(self.makespan, self.bound.proven)


def plan_fleet(
    fleet: Fleet,
    *,
    limits: Limits | None = None,
    groups: Sequence[IntArray] | None = None,
    keep: Literal["together", "spread"] = "together",
    shares: IntArray | None = None,
) -> FleetResult:
    """
    Return a schedule for all replicas and the bound that is proven for the fleet.

    Requests go, dearest first, to the replica on which they would end first, each priced at its share of
    stages and steps; what the replicas' schedules take beyond that is fed back as time they are busy, until
    sharing out anew does not help. Then requests are exchanged between the replica that ends last and the
    others. The time left goes to the schedule search, always on the replica that ends last.

    fleet: The job, lengths known or expected, and its replicas.
    limits: When to stop; ``work`` counts steps of the search, over all replicas. By default after 10 seconds.
    groups: Requests that belong together (completions to one prompt), each request in one of them; None for
        none.
    keep: Whether a group stays on one replica, or goes to as many as there are.
    shares: The replica of each request, shape (requests,), to keep to it; None to share them out here.
    """
    limits = Limits(seconds=10.0) if limits is None else limits
    search = _FleetSearch(fleet, limits, groups, keep)
    try:
        search.share_out(shares)
        if shares is None and groups is None:
            search.offer_rules()
        stopped_by = search.improve()
        search.try_rules(search.left)
    except KeyboardInterrupt:
        if not search.is_shared_out:
            raise
        stopped_by = StoppedBy.INTERRUPT
    schedule = search.schedule()
    makespan, bound = schedule.makespan(fleet), fleet_bound(fleet)
    optimal = bound.proves(makespan)
    return FleetResult(
        Status.OPTIMAL if optimal else Status.FEASIBLE,
        StoppedBy.PROOF if optimal else stopped_by,
        schedule,
        makespan,
        bound,
        time.perf_counter() - search.began,
    )


@dataclass(slots=True)
class _Share:
    """What one replica serves, how, and the seconds it is done at."""

    requests: IntArray
    problem: Problem | None
    schedule: Schedule | None
    finish: float
    searches: int = 0
    tried: Schedule | None = None


class _LateError(Exception):
    """A rule's simulation that has taken all the time it may."""


def _until(end: float, policy: Policy) -> Policy:
    """Return a policy that gives up after a time of the clock."""

    def step(state: State) -> Step:
        if time.perf_counter() > end:
            raise _LateError
        return policy(state)

    return step


class _FleetSearch:
    """The best shares found so far, and what improves them."""

    def __init__(self, fleet: Fleet, limits: Limits, groups: Sequence[IntArray] | None, keep: str) -> None:
        self.began = time.perf_counter()
        self._fleet, self._limits, self._groups, self._keep = fleet, limits, groups, keep
        kinds = list(dict.fromkeys(fleet.replicas))
        self._kind_of = np.array([kinds.index(replica) for replica in fleet.replicas], dtype=np.int64)
        self._busy = np.array([replica.busy for replica in fleet.replicas])
        by_memory = [_memory_binds(fleet, k) for k in range(len(kinds))]
        arguments: list[StepBy] = ["keys and values" if tight else "slots" for tight in by_memory]
        by_kind = list(zip(kinds, arguments, strict=True))
        self._costs = np.array([request_costs(fleet, kind, "slots", by) for kind, by in by_kind])
        self._beside = self._costs - np.array([step_shares(fleet, kind, by) for kind, by in by_kind])
        self._alone = np.array([kind.cost.decode_base * fleet.decode_steps for kind in kinds])
        self._shares: list[_Share] = []
        self._untried: Iterator[tuple[str, IntArray]] = iter(())

    @property
    def left(self) -> float:
        """Seconds left, less than none where it is late; infinite where they are not limited."""
        seconds = self._limits.seconds
        return float("inf") if seconds is None else seconds - (time.perf_counter() - self.began)

    def _late(self) -> bool:
        """Return whether no seconds are left."""
        return self.left <= 0

    @property
    def is_shared_out(self) -> bool:
        """Whether there is a schedule."""
        return bool(self._shares)

    def schedule(self) -> FleetSchedule:
        """Return the best schedule found."""
        schedules = tuple(share.schedule for share in self._shares)
        return FleetSchedule(self._replica_of(self._shares), schedules)

    def _replica_of(self, shares: list[_Share]) -> IntArray:
        """Return the replica of each request, shape (requests,)."""
        replica_of = np.empty(len(self._fleet), dtype=np.int64)
        for k, share in enumerate(shares):
            replica_of[share.requests] = k
        return replica_of

    def share_out(self, fixed: IntArray | None = None) -> None:
        """Share the requests out, each time with what the replicas lost before taken into account."""
        if fixed is not None:
            self._shares = [self._scheduled(k, np.flatnonzero(fixed == k)) for k in range(len(self._busy))]
            return
        assignments: list[Callable[[FloatArray], IntArray]] = [self._assign]
        if self._longest_matters:
            beside = LongestFirst(self._costs, self._beside, self._alone, self._kind_of)
            assignments += [beside.least_loaded, beside.first_fit]
        if self._groups is None and self._fleet.workload.shared_tokens.any():
            # Each replica computes a shared prompt for itself.
            assignments.append(partial(self._together, self._fleet.workload.group_numbers()))
        for assign in assignments:
            if not (self._shares and self._late()):
                self._share_by(assign)
        if not self._late() and any([self._pack(share) for share in self._shares]):
            self._shares = self._exchanged(self._shares, packed=True)

    def offer_rules(self) -> None:
        """Take what rules come to if that is better, replicas that run dry taking over from the others."""
        if 1 < len(self._shares) <= len(self._fleet) <= MOST_SIMULATED:
            self._untried = self._rules()
            self.try_rules(max(RULES_SECONDS, RULES_SHARE * self.left))

    def try_rules(self, seconds: float) -> None:
        """Offer the rules that have not been tried for some seconds; one that takes longer is cut off."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and (rule := next(self._untried, None)) is not None:
            shares = self._simulated(*rule, end)
            if shares is not None and _latest(shares) < _latest(self._shares) - BETTER:
                self._shares = shares

    def _rules(self) -> Iterator[tuple[str, IntArray]]:
        """Yield policies and the replica of each request to begin with, the mostly best policies first."""
        dispatched = list(self._dispatched())
        yield from product(dict.fromkeys((*RULES, *POLICIES)), dispatched)

    def _dispatched(self) -> Iterator[IntArray]:
        """Yield the replica of each request by different rules, shape (requests,), the best rule first."""
        met = set[bytes]()
        for rule in (
            dict.fromkeys(("lpt", *DISPATCH_RULES)) if len(self._fleet) <= MOST_DISPATCHED else ("lpt",)
        ):
            try:
                replica_of = dispatch(self._fleet, rule)
            except ValueError:
                continue  # It takes no replicas that differ.
            if replica_of.tobytes() not in met:
                met.add(replica_of.tobytes())
                yield replica_of

    def _simulated(self, policy: str, dispatched: IntArray, end: float) -> list[_Share] | None:
        """Return what a policy on each replica comes to; None if it fails, is late, or puts requests back."""
        try:
            ran = simulate_fleet(
                self._fleet, dispatched, policy=lambda each: _until(end, policy_named(policy, each))
            )
        except (PolicyError, _LateError):
            return None
        shares = []
        for k, trace in enumerate(ran.traces):
            requests = np.flatnonzero(ran.replica_of == k)
            if trace.evictions:
                return None
            if not requests.size:
                shares.append(self._scheduled(k, requests))
                continue
            problem = self._fleet.problem_of(k, requests)
            schedule = _kept(problem, schedule_of(trace))
            if schedule is None:
                return None
            finish = self._fleet.replicas[k].busy + schedule.makespan(problem)
            shares.append(_Share(requests, problem, schedule, finish))
        return shares

    def _share_by(self, assign: Callable[[FloatArray], IntArray]) -> None:
        """Share the requests out in one way, again while what the replicas lost shows a better one."""
        lost, best, first = np.zeros(len(self._busy)), np.inf, not self._shares
        shares: list[_Share] = []
        for _ in range(FEEDBACKS):
            begun = time.perf_counter()
            replica_of = assign(self._busy + lost)
            tried = [self._scheduled(k, np.flatnonzero(replica_of == k)) for k in range(len(lost))]
            latest = _latest(tried)
            if latest >= best * WORTH:
                break
            best, shares = latest, tried
            if first:
                # An interrupt finds it here.
                self._shares = shares
            lost = self._lost(shares)
            if self.left < 2 * (time.perf_counter() - begun):
                break
        shares = self._exchanged(shares)
        if first or _latest(shares) < _latest(self._shares):
            self._shares = shares

    def _exchanged(self, shares: list[_Share], packed: bool = False) -> list[_Share]:
        """Exchange requests between replicas while their schedules, packed or not, end sooner for it."""
        if self._groups is not None or not 1 < len(shares) <= len(self._fleet) <= MOST_EXCHANGED:
            return shares
        exchanges = Exchanges(self._costs, self._beside, self._alone, self._kind_of)
        end = self.left * (1 - EXCHANGE_SHARE)
        took = 0.0
        for _ in range(FEEDBACKS):
            if self.left < 2 * took:
                break
            begun, before = time.perf_counter(), self._replica_of(shares)
            busy = self._busy + self._lost(shares)
            after = exchanges.improved(before, busy, lambda: self.left < end)
            changed = np.zeros(len(shares), dtype=np.bool_)
            changed[before[before != after]] = changed[after[before != after]] = True
            tried = [
                self._scheduled(k, np.flatnonzero(after == k)) if changed[k] else share
                for k, share in enumerate(shares)
            ]
            for k in np.flatnonzero(changed).tolist() if packed else ():
                self._pack(tried[k])
            took = time.perf_counter() - begun
            if _latest(tried) >= _latest(shares) * WORTH:
                break
            shares = tried
        return shares

    def _lost(self, shares: list[_Share]) -> FloatArray:
        """Return the seconds each replica's schedule takes beyond what its requests are priced at."""
        beyond = [share.finish - self._priced(k, share) for k, share in enumerate(shares)]
        lost: FloatArray = np.array(beyond) - self._busy
        return lost

    def _pack(self, share: _Share) -> bool:
        """Pack a replica's slots full where its stages are cheap, and return whether that is better."""
        if share.problem is None or share.schedule is None or not packing_pays(share.problem):
            return False
        if share.problem.memory_can_run_out or share.problem.prefill_token_cap is not None:
            return False
        rng = np.random.default_rng(self._limits.seed)
        walk = SlotSequences(share.problem, rng, PACKING_SHARE * self.left / len(self._shares))
        packed = walk.schedule()
        saved = share.schedule.makespan(share.problem) - packed.makespan(share.problem)
        if saved > 0:
            share.schedule, share.finish = packed, share.finish - saved
        return saved > 0

    def _priced(self, replica: int, share: _Share) -> float:
        """Return the seconds of a replica as its requests are priced."""
        kind, requests = self._kind_of[replica], share.requests
        longest = self._alone[kind, requests].max(initial=0.0) + self._beside[kind, requests].sum()
        return float(max(self._costs[kind, requests].sum(), longest))

    @property
    def _longest_matters(self) -> bool:
        """Whether a replica may be done late for its longest request, others costing little beside it."""
        even = float(self._costs.mean(axis=0).sum()) / len(self._busy)
        few = len(self._fleet) <= MOST_BESIDE
        return few and self._groups is None and float(self._alone.max(initial=0.0)) > LONG * even

    def improve(self) -> StoppedBy:
        """Search the schedule of the replica that ends last, again and again, and return why it ended."""
        patience, steps = 0, 0
        while True:
            if self._limits.work is not None and steps >= self._limits.work:
                return StoppedBy.WORK
            last = max(range(len(self._shares)), key=lambda k: self._shares[k].finish)
            if self._taken_over(last):
                steps += 1
                continue
            if self.left < 0.5 * SLICE:
                return StoppedBy.TIME
            share = self._shares[last]
            if share.problem is None or share.schedule is None or patience > 3:
                return StoppedBy.GAVE_UP
            finish = share.finish
            steps += self._search(share, self._fleet.replicas[last].busy, steps)
            patience = 0 if share.finish < finish - 1e-12 else patience + 1

    def _taken_over(self, last: int) -> bool:
        """Serve the last replica's requests at the stages of the first one of its kind, if that is better."""
        share, alike = self._shares[last], np.flatnonzero(self._kind_of == self._kind_of[last]).tolist()
        first = self._shares[min(alike, key=lambda k: self._shares[k].finish)]
        if first is share or first.schedule is None or first.schedule is share.tried:
            return False
        share.tried = first.schedule
        if share.problem is None:
            return False
        found = reuse_times(share.problem, first.schedule, min(self.left / 4, SLICE / 2))
        if found is None or found.check(share.problem) is not None:
            return False
        finish = self._busy[last] + found.makespan(share.problem)
        if finish >= share.finish * WORTH:
            return False
        share.schedule, share.finish = found, finish
        return True

    def _search(self, share: _Share, busy: float, steps: int) -> int:
        """Search one replica's schedule after so many steps in all, and return the steps that took."""
        assert share.problem is not None
        seconds, most = None, None
        if self._limits.work is not None:
            most = min(self._limits.work - steps, SLICE_STEPS * 2**share.searches)
        if self._limits.seconds is not None or most is None:
            # A turn for each that had none, and one to spare for the last one then.
            turns = 1 + sum(not share.searches for share in self._shares)
            even = SLICE if self._limits.seconds is None else self.left / turns
            seconds = min(self.left, max(SLICE, even) * 2**share.searches)
        seed = self._limits.seed + share.searches
        found = search_schedule(
            share.problem, seconds=seconds, iterations=most, seed=seed, start=share.schedule
        )
        share.searches += 1
        share.schedule, share.finish = found.schedule, busy + found.makespan
        return found.iterations

    def _assign(self, busy: FloatArray) -> IntArray:
        dearest = np.argsort(-self._costs.mean(axis=0), kind="stable")
        if self._groups is None:
            return least_loaded(self._costs, self._kind_of, busy, dearest)
        if self._keep == "spread":
            return spread_groups(self._costs, self._kind_of, busy, self._groups)
        unit_of = np.empty(len(self._fleet), dtype=np.int64)
        for unit, members in enumerate(self._groups):
            unit_of[members] = unit
        return self._together(unit_of, busy)

    def _together(self, unit_of: IntArray, busy: FloatArray) -> IntArray:
        """Share whole units of requests out, the dearest first."""
        costs = np.array([np.bincount(unit_of, weights=row) for row in self._costs])
        dearest = np.argsort(-costs.mean(axis=0), kind="stable")
        replica_of: IntArray = least_loaded(costs, self._kind_of, busy, dearest)[unit_of]
        return replica_of

    def _scheduled(self, replica: int, requests: IntArray) -> _Share:
        busy = self._fleet.replicas[replica].busy
        if not requests.size:
            return _Share(requests, None, None, busy)
        problem = self._fleet.problem_of(replica, requests)
        best = min(_quick(problem, self._late), key=lambda schedule: schedule.makespan(problem))
        return _Share(requests, problem, best, busy + best.makespan(problem))


def _quick(problem: Problem, late: Callable[[], bool]) -> Iterator[Schedule]:
    """
    Yield schedules of a replica made in one pass each, in more orders where not only slots are scarce.

    One at least, no further one when it is late.
    """
    for patience in PATIENCE:
        yield ski_rental_schedule(problem, patience=patience).without_idle_steps(problem)
        if late():
            return
    if len(problem) > MOST_SIMULATED or (problem.keeps_every_prefix and not problem.memory_can_run_out):
        return
    rules, others = baselines(problem, late)
    for baseline in [*rules, *others][:FIRST]:
        schedule = None if late() else baseline(math.inf)
        schedule = None if schedule is None else _kept(problem, schedule)
        if schedule is not None:
            yield schedule


def _kept(problem: Problem, schedule: Schedule) -> Schedule | None:
    """Return a schedule without idle steps, its stages split if that is better; None if it breaks a rule."""
    schedule = split_stages(problem, schedule.without_idle_steps(problem))
    return schedule if schedule.check(problem) is None else None


def _latest(shares: list[_Share]) -> float:
    """Return when the last replica is done."""
    return max(share.finish for share in shares)


def _memory_binds(fleet: Fleet, kind: int) -> bool:
    """Return whether a kind of replica runs out of KV capacity before it runs out of slots."""
    replica = list(dict.fromkeys(fleet.replicas))[kind]
    if replica.kv_capacity is None:
        return False
    mean_held = fleet.kv_token_steps.sum() / max(1, fleet.decode_steps.sum())
    return bool(mean_held * replica.slots > replica.kv_capacity)
