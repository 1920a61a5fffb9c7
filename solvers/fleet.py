"""Schedules of a fleet of replicas, with a bound for all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import numpy as np

from ..data.arrays import IntArray
from ..data.bound import Bound, gap_above
from ..data.costs.iteration_rates import IterationRates
from ..data.fleet import Fleet, FleetSchedule
from ..data.iterations import EngineLimits
from ..data.prefix_tree import PrefixTree
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..data.workload import numbered_rows
from ..heuristics.dispatch import RULES as DISPATCH_RULES
from ..heuristics.dispatch import dispatch
from ..heuristics.fleet.simulation import simulate_fleet
from ..heuristics.loop import PolicyError, schedule_of
from ..heuristics.policy import Policy, State, Step
from ..heuristics.prefixes.replicas import share_subtrees
from ..heuristics.registry import POLICIES, policy_named
from ..models.bounds.fleet import StepBy, fleet_bound, request_costs, step_shares
from ..models.bounds.fleet_partition import Ends, least_loaded, spread_groups
from .result import Limits, Status, StoppedBy
from .search.baselines import SCARCE, baselines
from .search.constructive import ski_rental_schedule
from .search.incumbent import BETTER
from .search.params import SearchParams
from .search.replicas import anneal_replicas, are_one_search
from .search.schedule_search import search_schedule
from .search.stage_split import split_stages

PATIENCE = (0.5, 0.25, 1.0)
"""Patiences of the ski-rental rule to try on each replica."""

MOST_SIMULATED = 5000
"""Requests up to which rules are simulated on all replicas."""

MOST_DISPATCHED = 500
"""Requests up to which policies are simulated after every dispatch rule."""

FIRST = 4
"""Rules to try where shared prompts or memory may not fit."""

RULES = ("lpt-ski", "lpt", "fcfs", "fcfs-ski", "packing-algorithm1")
"""Policies simulated first after each dispatch rule, as they are usually best."""

RULES_SECONDS, RULES_SHARE = 0.1, 0.2
"""Seconds kept for the rules after the search, and their largest share of the limit."""

SCARCE_SECONDS = 0.3
"""Seconds kept for the rules where memory can run out."""

BOUND_SHARE = 0.1
"""Share of the limit for the bound."""

TOGETHER = 0.9
"""Share of the limit for annealing equal replicas together."""

FIRST_SEARCHES = 0.5
"""Share of the time left for searching every replica once."""

SLICE = 0.1
"""Least seconds of search on a replica at a time."""

SLICE_STEPS = 25
"""Steps of a replica's first search, if steps are limited."""

TRIES = 300
"""Moves between replicas that may fail in a row."""

MOST_LEVELLED = 3000
"""Requests up to which replicas are levelled; more take too long."""

NO_BASELINES = SearchParams(baseline_requests=0, baseline_share=0.0)
"""Parameters of a search that already has a better schedule than the baselines."""

PATIENT = 4
"""Turns without improvement after which a search limited by steps ends."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Result of planning a fleet.

    status, stopped_by: Proof status of the schedule, and reason for the end.
    schedule: Replica, slot and stage of every request.
    makespan: Seconds until the last replica is done.
    bound: Lower bound of the whole fleet.
    seconds: Wall-clock seconds spent.
    message: Built-in rules that there was no time for; empty for none.
    """

    status: Status
    stopped_by: StoppedBy
    schedule: FleetSchedule
    makespan: float
    bound: Bound
    seconds: float
    message: str = ""

    @property
    def gap(self) -> float | None:
        """Gap to the bound, as a fraction; None without one."""
        return gap_above(self.makespan, self.bound.proven)


def plan_fleet(
    fleet: Fleet,
    *,
    limits: Limits | None = None,
    groups: Sequence[IntArray] | None = None,
    keep: Literal["together", "spread"] = "together",
    shares: IntArray | None = None,
) -> FleetResult:
    """Plan all replicas of a fleet, with the fleet's bound.

    Requests go, costliest first, to the replica on which they would end first. Each is priced at its share of
    stages and steps. Requests then move until all replicas would end together by these prices. Every
    replica's schedule is searched, and requests move by the results. The rest of the time goes to the replica
    that ends last.

    fleet: The job, with known or expected lengths, and its replicas.
    limits: Stopping criteria; ``work`` counts steps of the search over all replicas. The default is 10
        seconds.
    groups: Requests that belong together (completions of one prompt), or None.
    keep: True if a group stays on one replica; else it spreads over all.
    shares: Given replica of each request, shape (requests,), or None.
    """
    limits = Limits(seconds=10.0) if limits is None else limits
    search = _FleetSearch(fleet, limits, groups, keep)
    try:
        search.share_out(shares)
        stopped_by = search.improve()
        search.try_rules()
    except KeyboardInterrupt:
        if not search.is_shared_out:
            search.share_out(shares)
        stopped_by = StoppedBy.INTERRUPT
    schedule = search.schedule()
    makespan = schedule.makespan(fleet)
    try:
        bound = fleet_bound(fleet, search.for_bound)
    except KeyboardInterrupt:
        stopped_by, bound = StoppedBy.INTERRUPT, fleet_bound(fleet)
    optimal = bound.proves(makespan)
    return FleetResult(
        Status.OPTIMAL if optimal else Status.FEASIBLE,
        StoppedBy.PROOF if optimal else stopped_by,
        schedule,
        makespan,
        bound,
        time.perf_counter() - search.began,
        search.untried(),
    )


@dataclass(slots=True)
class _Share:
    requests: IntArray
    problem: Problem | None
    schedule: Schedule | None
    finish: float
    searches: int = 0


class _LateError(Exception):
    """Error that ends a rule's simulation at its time limit."""


def _until(end: float, policy: Policy) -> Policy:
    """Return a policy that stops at a time of the clock."""

    def step(state: State) -> Step:
        if time.perf_counter() > end:
            raise _LateError
        return policy(state)

    return step


class _FleetSearch:
    """Best shares found, and the steps that improve them."""

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
        beside = self._costs - np.array([step_shares(fleet, kind, by) for kind, by in by_kind])
        alone = np.array([kind.cost.decode_base * fleet.decode_steps for kind in kinds])
        self._ends = Ends(self._costs, beside, alone, self._kind_of)
        self._rng = np.random.default_rng(limits.seed)
        self._shares: list[_Share] = []
        self._fixed = False
        self._levels = True
        self._tried = set[str]()

    @property
    def left(self) -> float:
        """Seconds left, negative if late; infinite without a limit."""
        seconds = self._limits.seconds
        if seconds is None:
            return math.inf
        return seconds - self.for_bound - self._for_rules(seconds) - (time.perf_counter() - self.began)

    @property
    def for_bound(self) -> float:
        """Seconds kept for the bound; none for many requests: counts prove as much.

        Without a limit of seconds there are none, so that the bound is the same each time.
        """
        return BOUND_SHARE * (self._limits.seconds or 0.0) if len(self._fleet) <= MOST_SIMULATED else 0.0

    def _for_rules(self, seconds: float) -> float:
        longest = SCARCE_SECONDS if self._is_scarce else RULES_SECONDS
        return min(longest, RULES_SHARE * seconds) if self._tries_rules else 0.0

    @cached_property
    def _is_scarce(self) -> bool:
        """True if the memory of a replica can run out: rules are then often best."""
        return any(self._fleet.problem(k).memory_can_run_out for k in range(len(self._kind_of)))

    @property
    def _tries_rules(self) -> bool:
        """True if rules may find a better schedule of few requests."""
        several = 1 < len(self._busy) <= len(self._fleet) <= MOST_SIMULATED
        return several and self._groups is None and not self._fixed

    def _late(self) -> bool:
        return self.left <= 0

    @property
    def is_shared_out(self) -> bool:
        return bool(self._shares)

    def schedule(self) -> FleetSchedule:
        schedules = tuple(share.schedule for share in self._shares)
        return FleetSchedule(self._replica_of(self._shares), schedules)

    def _replica_of(self, shares: list[_Share]) -> IntArray:
        replica_of = np.empty(len(self._fleet), dtype=np.int64)
        for k, share in enumerate(shares):
            replica_of[share.requests] = k
        return replica_of

    def share_out(self, fixed: IntArray | None = None) -> None:
        if fixed is not None:
            self._fixed, self._shares = True, self._scheduled_by(fixed)
            return
        replica_of = self._assign()
        if self._may_level:
            even = [np.flatnonzero(replica_of == k) for k in range(len(self._busy))]
            for k, requests in enumerate(self._ends.levelled(even, self._busy, self._rng, TRIES)):
                replica_of[requests] = k
        self._shares = self._scheduled_by(replica_of)
        tree = self._fleet.workload.tree
        if self._groups is None and tree is not None and not self._late():
            # Each replica computes a shared beginning for itself.
            self._take(self._by_subtrees(tree))

    @property
    def _may_level(self) -> bool:
        """True if requests may move between replicas, and are few enough."""
        several = 1 < len(self._busy) <= len(self._fleet) <= MOST_LEVELLED
        return several and self._groups is None and not self._fixed

    def _take(self, replica_of: IntArray) -> None:
        """Share the requests out in another way, if all end sooner."""
        shares = self._scheduled_by(replica_of)
        if _latest(shares) < _latest(self._shares):
            self._shares = shares

    def _scheduled_by(self, replica_of: IntArray) -> list[_Share]:
        return [self._scheduled(k, np.flatnonzero(replica_of == k)) for k in range(len(self._busy))]

    def try_rules(self) -> None:
        """Take schedules of rules that are better; level their idle replicas."""
        end = time.perf_counter() + max(0.0, self.left) + self._for_rules(self._limits.seconds or math.inf)
        for rule in self._rules() if self._tries_rules else ():
            if time.perf_counter() >= end:
                return
            shares = self._simulated(*rule, end)
            if time.perf_counter() < end:
                self._tried.add(rule[0])
            if shares is not None and _latest(shares) < _latest(self._shares) - BETTER:
                self._shares = shares

    def untried(self) -> str:
        """Return a remark on the built-in rules that were not simulated; empty if all were."""
        names = dict.fromkeys((*RULES, *POLICIES))
        untried_rules = len(names) - len(self._tried)
        if (
            not untried_rules
            or self._groups is not None
            or self._fixed
            or not 1 < len(self._busy) <= len(self._fleet)
        ):
            return ""
        return f"the search ended before {untried_rules} of {len(names)} simple rules were tried"

    def _rules(self) -> Iterator[tuple[str, IntArray]]:
        dispatched = list(self._dispatched())
        names = dict.fromkeys((*RULES, *POLICIES))
        if self._is_scarce:
            # All rules as a user would simulate them come first.
            names = dict.fromkeys((*SCARCE, *names))
            yield from product(names, dispatched[:1])
            dispatched = dispatched[1:]
        yield from product(names, dispatched)

    def _dispatched(self) -> Iterator[IntArray]:
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
        """Simulate a policy on each replica; None if it cannot be used.

        It cannot if it fails, is late, or evicts requests.
        """
        try:
            run = simulate_fleet(
                self._fleet, dispatched, policy=lambda each: _until(end, policy_named(policy, each))
            )
        except (PolicyError, _LateError):
            return None
        shares = []
        for k, trace in enumerate(run.traces):
            requests = np.flatnonzero(run.replica_of == k)
            if trace.evictions:
                return None
            if not requests.size:
                shares.append(self._scheduled(k, requests))
                continue
            share = self._kept(k, requests, schedule_of(trace))
            if share is None:
                return None
            shares.append(share)
        return shares

    def _anneal(self) -> int:
        """Anneal equal replicas together, where that applies; return the steps."""
        core, may = NO_BASELINES.core, self._groups is None and not self._fixed
        parts = [(each.requests, each.schedule) for each in self._shares if each.schedule is not None]
        work = None if self._limits.work is None else math.floor(TOGETHER * self._limits.work)
        may = may and work != 0 and self.left > 0.0
        if not may or not are_one_search(self._fleet, [schedule for _, schedule in parts]):
            return 0
        self._levels = False
        seconds, seed = TOGETHER * self.left, self._limits.seed
        schedules, interrupted = anneal_replicas(self._fleet, parts, core, seconds, work, seed)
        shares = [self._kept(k, *part) for k, part in enumerate(schedules)]
        better = [share for share in shares if share is not None]
        if better and len(better) == len(shares) and _latest(better) < _latest(self._shares):
            self._shares = better
        if interrupted:
            raise KeyboardInterrupt
        return work or 0

    def _kept(self, replica: int, requests: IntArray, schedule: Schedule) -> _Share | None:
        problem = self._fleet.problem_of(replica, requests)
        valid_schedule = _kept(problem, schedule)
        if valid_schedule is None:
            return None
        return _Share(
            requests,
            problem,
            valid_schedule,
            self._fleet.replicas[replica].busy + valid_schedule.makespan(problem),
        )

    def improve(self) -> StoppedBy:
        """Search replicas together, then each; level them, and search the last one repeatedly."""
        # Prices know neither when memory runs out nor what a joint search has fitted.
        scarce = (each.problem is not None and each.problem.memory_can_run_out for each in self._shares)
        self._levels = not any(scarce)
        steps = self._anneal()
        first = self.left * FIRST_SEARCHES / len(self._shares)
        steps += self._search_all(self._shares, first, steps)
        turns = 0
        while turns < PATIENT or math.isfinite(self.left):
            if self._worked(steps):
                return StoppedBy.WORK
            if self.left < 0.5 * SLICE:
                return StoppedBy.TIME
            latest = _latest(self._shares)
            if self._levels and self._may_level and turns % 2 == 0:
                steps += self._level(steps)
            share = max(self._shares, key=lambda share: share.finish)
            if share.problem is None:
                return StoppedBy.FINISHED
            if self._worked(steps) or self.left < 0.5 * SLICE:
                continue
            steps += self._search(share, first, steps)
            turns = 0 if _latest(self._shares) < latest - BETTER else turns + 1
        return StoppedBy.FINISHED

    def _search_all(self, shares: list[_Share], seconds: float, steps: int) -> int:
        """Search some replicas once, the last first; return the steps."""
        begun = steps
        for number, share in enumerate(sorted(shares, key=lambda share: -share.finish)):
            if share.problem is not None and self.left > 0.5 * SLICE and not self._worked(steps):
                steps += self._search(share, seconds, steps, len(shares) - number)
        return steps - begun

    def _level(self, steps: int) -> int:
        """Move requests so that replicas end together, and search these."""
        shares = [share.requests for share in self._shares]
        ends = np.array([share.finish for share in self._shares])
        beyond = ends - [self._ends.of(k, requests) for k, requests in enumerate(shares)]
        levelled = self._ends.levelled(shares, beyond, self._rng, TRIES)
        changed = [k for k in range(len(shares)) if not np.array_equal(shares[k], levelled[k])]
        if not changed:
            return 0
        seconds = self.left / (1 + len(changed))
        if seconds < 0.5 * SLICE:
            return 0
        tried = {k: self._scheduled(k, levelled[k]) for k in changed}
        elapsed = self._search_all(list(tried.values()), seconds, steps)
        better = [tried.get(k, share) for k, share in enumerate(self._shares)]
        if _latest(better) < _latest(self._shares) - BETTER:
            self._shares = better
        return elapsed

    def _worked(self, steps: int) -> bool:
        return self._limits.work is not None and steps >= self._limits.work

    def _search(self, share: _Share, seconds: float, steps: int, turns: int = 1) -> int:
        """Search one replica's schedule for some turns; return the steps."""
        assert share.problem is not None
        assert share.schedule is not None
        limit = None
        if self._limits.work is not None:
            limit = min(-(-(self._limits.work - steps) // turns), SLICE_STEPS * 2**share.searches)
        outcome = search_schedule(
            share.problem,
            seconds=None if math.isinf(seconds) else min(self.left, seconds),
            iterations=limit,
            seed=self._limits.seed + share.searches,
            start=share.schedule,
            params=NO_BASELINES,
        )
        share.searches += 1
        share.finish += outcome.makespan - share.schedule.makespan(share.problem)
        share.schedule = outcome.schedule
        return outcome.iterations

    def _assign(self) -> IntArray:
        """Send each request to the replica on which it ends first."""
        if self._groups is None:
            dearest = np.argsort(-self._costs.mean(axis=0), kind="stable")
            return least_loaded(self._costs, self._kind_of, self._busy, dearest)
        if self._keep == "spread":
            return spread_groups(self._costs, self._kind_of, self._busy, self._groups)
        unit_of = np.empty(len(self._fleet), dtype=np.int64)
        for unit, members in enumerate(self._groups):
            unit_of[members] = unit
        return self._together(unit_of)

    def _together(self, unit_of: IntArray) -> IntArray:
        """Share out whole units of requests, the costliest first."""
        costs = np.array([np.bincount(unit_of, weights=row) for row in self._costs])
        dearest = np.argsort(-costs.mean(axis=0), kind="stable")
        replica_of: IntArray = least_loaded(costs, self._kind_of, self._busy, dearest)[unit_of]
        return replica_of

    def _by_subtrees(self, tree: PrefixTree) -> IntArray:
        """Share out whole subtrees, and between equal replicas parts of them where balance pays."""
        one = self._fleet.replicas[0]
        if len(set(self._fleet.replicas)) > 1:
            lone = len(tree.parent) + np.arange(len(tree))
            return self._together(numbered_rows(np.where(tree.root < 0, lone, tree.root)))
        cost = one.cost
        rates = IterationRates(
            cost.decode_base, decodes=cost.decode_per_slot, prompt_tokens=cost.prefill_per_token
        )
        steps, replicas = self._fleet.decode_steps, len(self._busy)
        return share_subtrees(tree, steps, replicas, EngineLimits(one.slots), rates)

    def _scheduled(self, replica: int, requests: IntArray) -> _Share:
        busy = self._fleet.replicas[replica].busy
        if not requests.size:
            return _Share(requests, None, None, busy)
        problem = self._fleet.problem_of(replica, requests)
        best = min(_quick(problem, self._late), key=lambda schedule: schedule.makespan(problem))
        return _Share(requests, problem, best, busy + best.makespan(problem))


def _quick(problem: Problem, late: Callable[[], bool]) -> Iterator[Schedule]:
    """Yield schedules of a replica, each made in one pass.

    There is at least one, and no further one when it is late.
    """
    for patience in PATIENCE:
        yield ski_rental_schedule(problem, patience=patience).without_idle_steps(problem)
        if late():
            return
    if len(problem) > MOST_SIMULATED or (problem.keeps_every_prefix and not problem.memory_can_run_out):
        return
    rules, constructions = baselines(problem, late)
    for baseline in [*rules, *constructions][:FIRST]:
        schedule = None if late() else baseline(math.inf)
        schedule = None if schedule is None else _kept(problem, schedule)
        if schedule is not None:
            yield schedule


def _kept(problem: Problem, schedule: Schedule) -> Schedule | None:
    """Return a schedule without idle steps and with its best stages.

    It is None if it breaks a rule.
    """
    schedule = split_stages(problem, schedule.without_idle_steps(problem))
    return schedule if schedule.check(problem) is None else None


def _latest(shares: list[_Share]) -> float:
    return max(share.finish for share in shares)


def _memory_binds(fleet: Fleet, kind: int) -> bool:
    replica = list(dict.fromkeys(fleet.replicas))[kind]
    if replica.kv_capacity is None:
        return False
    mean_held = fleet.kv_token_steps.sum() / max(1, fleet.decode_steps.sum())
    return bool(mean_held * replica.slots > replica.kv_capacity)
