"""Plans of stages for objectives beside the makespan: a search over orders, without a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..data.arrays import IntArray
from ..data.iterations import EngineLimits
from ..data.objective import Goal, Objective
from ..data.plan import Plan, Provenance
from ..data.problem import Problem
from ..heuristics.loop import schedule_of
from ..heuristics.queues.admission import Admission
from ..heuristics.queues.ordered import Ordered
from ..heuristics.queues.prefill_rules import PacedSkiRental, PrefillFirst, PrefillRule, SkiRental
from ..heuristics.queues.queue_policy import QueuePolicy
from ..heuristics.simulate import simulate
from ..solvers.result import Limits, Status, StoppedBy
from ..solvers.solve import DEFAULT_SECONDS
from .aimed import aimed_orders, near_neighbour, published_orders
from .plan import make_plan
from .release import Releasable

_MAKESPAN_SHARE = 0.2
"""Share of the limits for the plan of least makespan, where the search begins."""

_RULES: tuple[Callable[[], PrefillRule], ...] = (PrefillFirst, SkiRental, PacedSkiRental)


def make_aimed_plan(
    problem: Problem,
    objective: Objective,
    *,
    limits: Limits | None = None,
    provenance: Provenance | None = None,
) -> Plan:
    """Plan one replica for an objective beside the makespan.

    The plan of least makespan, published orders and orders for the goal come first, each under several rules
    of prefill. Requests of the best order are then moved while that takes no more. No bound is known.

    problem: Requests, costs and limits; arrivals are ignored.
    limits: Stopping criteria; ``work`` counts simulated orders.
    provenance: Sources of the numbers, for the plan's record.

    Raises ValueError if the objective is never reached.
    """
    limits, begun = limits or Limits(), time.perf_counter()
    if limits.seconds is None and limits.work is None:
        limits = replace(limits, seconds=DEFAULT_SECONDS)
    problem = problem.without_arrivals()
    goal = Goal.of(objective, np.arange(len(problem)), problem.workload.group)
    part = limits.part(_MAKESPAN_SHARE)
    plan = make_plan(problem, limits=part, provenance=provenance, evicting=False)
    search = _Search(plan, goal, limits, begun)
    try:
        search.run()
    except KeyboardInterrupt:
        search.stopped_by = StoppedBy.INTERRUPT
    seconds = limits.noted(time.perf_counter() - begun)
    maker = replace(plan.maker, status=Status.FEASIBLE, stopped_by=search.stopped_by, seconds=seconds)
    aimed = Plan.of(plan.problem, search.best, plan.bound, maker, provenance=plan.provenance)
    return replace(aimed, goal=goal)


class _Search:
    """Search over orders and rules of prefill, from the plan of least makespan on."""

    def __init__(self, plan: Plan, goal: Goal, limits: Limits, begun: float) -> None:
        self._problem, self._goal = plan.problem, goal
        self.best, self._least = plan.schedule, goal.value(plan.schedule.finishes(plan.problem))
        self._order: IntArray = np.argsort(plan.schedule.bin_of, kind="stable")
        self._rule = _RULES[0]
        self._rng, self._work = np.random.default_rng(limits.seed), limits.work
        self._ends = None if limits.seconds is None else begun + limits.seconds
        self.stopped_by = StoppedBy.FINISHED

    def run(self) -> None:
        """Try the known orders, then neighbours of the best."""
        for order in _known_orders(self._problem, self._goal).values():
            for rule in _RULES:
                if self._over():
                    return
                self._try(order, rule)
        while len(self._order) > 1 and not self._over():
            self._try(near_neighbour(self._order, self._rng), self._rule)

    def _try(self, order: IntArray, rule: Callable[[], PrefillRule]) -> None:
        policy = QueuePolicy(Ordered(order), rule(), Admission(self._problem, "future"))
        schedule = schedule_of(simulate(self._problem, policy)).without_idle_steps(self._problem)
        value = self._goal.value(schedule.finishes(self._problem))
        if value <= self._least:
            self.best, self._least, self._order, self._rule = schedule, value, order, rule
        if self._work is not None:
            self._work -= 1

    def _over(self) -> bool:
        if self._work is not None and self._work <= 0:
            self.stopped_by = StoppedBy.WORK
        elif self._ends is not None and time.perf_counter() >= self._ends:
            self.stopped_by = StoppedBy.TIME
        else:
            return False
        return True


def _known_orders(problem: Problem, goal: Goal) -> dict[str, IntArray]:
    work, ones = problem.workload, np.ones(len(problem), dtype=np.int64)
    releasable = Releasable(work.input_tokens, work.output_tokens, ones, exact=True)
    limits = EngineLimits(problem.slots, kv_tokens=problem.kv_capacity, block_tokens=1)
    return published_orders(releasable, limits) | dict(aimed_orders(releasable, limits, goal))
