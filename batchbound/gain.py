"""Gain of a run over first come, first served, and its distance to the least possible."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .data.bound import Bound
from .data.costs.cost import CostModel
from .data.fleet import Fleet
from .data.plan import Maker, Plan
from .data.problem import Problem
from .data.trace import Trace
from .executor.profiling.calibrate import fit_cost
from .executor.reports.report import model_seconds, served_part
from .heuristics.simulate import simulate
from .models.bounds.evicting import evicting_bound
from .models.bounds.fleet import work_bound
from .solvers.result import Limits
from .solvers.solve import solve


@dataclass(frozen=True, slots=True)
class GainParams:
    """
    How much work the comparison may do.

    share: Search time as a share of the run's seconds; more finds a better order for known lengths.
    least_seconds, most_seconds: Limits of that time.
    policy: The baseline: what an engine without a plan would do.
    """

    share: float = 0.02
    least_seconds: float = 0.1
    most_seconds: float = 1.2
    policy: str = "fcfs"

    def seconds(self, makespan: float) -> float:
        """Return the search time in seconds for a run of ``makespan`` seconds."""
        return min(self.most_seconds, max(self.least_seconds, self.share * makespan))


@dataclass(frozen=True, slots=True)
class Course:
    """
    One way to serve the requests of a run.

    seconds: On the run's own clock.
    decode_steps, prefill_stages: Counted, not scaled.
    """

    seconds: float
    decode_steps: int
    prefill_stages: int

    @classmethod
    def of(cls, trace: Trace, seconds: float) -> Course:
        """Return the course of a trace that took ``seconds``."""
        return cls(seconds, trace.decode_steps, trace.prefill_stages)


@dataclass(frozen=True, slots=True)
class Gain:
    """
    A run and its alternatives for the same completions on the same slots.

    All seconds are on the run's clock: simulated ones are the cost model's, times measured over modelled
    seconds of this run. Decode steps are exact.

    requests, slots: Completions that the run served, and how many at a time.
    first_come: First come, first served, simulated at the lengths that came out.
    this_run: The run itself.
    known: A plan made with those lengths.
    least: Proven seconds: no schedule of these completions takes less (assuming that the cost model holds).
    clock: Measured seconds for a second of the cost model.
    evicts: Whether the run evicted requests; then the bound allows for it, and no plan of known lengths is
        shown unless it takes less than the run.
    """

    requests: int
    slots: int
    first_come: Course
    this_run: Course
    known: Course | None
    least: float
    clock: float
    evicts: bool = False

    @property
    def saved(self) -> float:
        """The share of first come, first served's seconds that the run saved; below zero if it lost some."""
        return 1 - self.this_run.seconds / self.first_come.seconds if self.first_come.seconds else 0.0

    @property
    def above_least(self) -> float | None:
        """Fraction by which the run is above the least possible; None without a bound above zero."""
        return self.this_run.seconds / self.least - 1 if self.least > 0 else None

    @property
    def steps_to_save(self) -> float:
        """The share of this run's decode steps that known lengths would save; 0 if none."""
        if self.known is None or not self.this_run.decode_steps:
            return 0.0
        return max(0.0, 1 - self.known.decode_steps / self.this_run.decode_steps)


def gain_of(
    fleet: Fleet, trace: Trace, *, cost: CostModel | None = None, params: GainParams | None = None
) -> Gain | None:
    """
    Return what a run on one machine gained, or None if it served nothing or was shared among replicas.

    fleet: The requests and the machine, with the cost model to fall back on.
    trace: The run.
    cost: The cost model; the run's own stages are fitted if left out.
    """
    return gain_and_plan(fleet, trace, cost=cost, params=params)[0]


def gain_and_plan(
    fleet: Fleet, trace: Trace, *, cost: CostModel | None = None, params: GainParams | None = None
) -> tuple[Gain | None, Plan | None]:
    """Return what :func:`gain_of` does, and the plan of the lengths that came out, for a run that repeats."""
    params = params or GainParams()
    served = served_part(fleet, [trace])
    if served is None or len(fleet.replicas) != 1:
        return None, None
    cost = cost or _own_cost(trace, fleet.replicas[0].cost)
    problem = replace(served.problem(), cost=cost)
    modelled = model_seconds(cost, trace, overheads=False)
    clock = trace.makespan / modelled if modelled else 1.0
    limited = _with_capacity(problem, fleet)
    first = simulate(limited, params.policy)
    this_run = Course.of(trace, trace.makespan)
    result = solve(problem, limits=Limits(seconds=params.seconds(trace.makespan)))
    bound = _evicting(problem) if trace.evictions else result.bound
    known, plan, schedule = None, None, result.schedule
    if schedule is not None:
        seconds = clock * schedule.makespan(problem)
        known = Course(seconds, int(schedule.decode_steps.sum()), len(schedule.decode_steps))
        maker = Maker(result.solver, result.version, result.status, result.stopped_by, result.seconds, 0)
        plan = Plan.of(problem, schedule, None, maker)
    gain = Gain(
        requests=len(problem),
        slots=problem.slots,
        first_come=Course.of(first, clock * first.makespan),
        this_run=this_run,
        known=known,
        least=clock * ((bound.proven if bound else None) or 0.0),
        clock=clock,
        evicts=trace.evictions > 0,
    )
    return gain, plan


def _evicting(problem: Problem) -> Bound:
    """Return the stronger bound of schedules that may evict requests."""
    both = (work_bound(Fleet.of(problem, 1)), evicting_bound(problem))
    return max(both, key=lambda bound: bound.seconds)


def _own_cost(trace: Trace, stated: CostModel) -> CostModel:
    """Return the cost model of a run's own stages, or the stated one where they are too few to fit."""
    try:
        return fit_cost(trace.stages)
    except ValueError:
        return stated


def _with_capacity(problem: Problem, fleet: Fleet) -> Problem:
    """Return the problem under the machine's memory, unless a completion outgrew it."""
    capacity = fleet.replicas[0].kv_capacity
    try:
        return replace(problem, kv_capacity=capacity)
    except ValueError:
        return problem
