"""Gain of a run over first come, first served."""

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
    """Search time and baseline of the comparison.

    share: Search time as a fraction of the run's seconds.
    least_seconds, most_seconds: Limits of the search time.
    """

    share: float = 0.02
    least_seconds: float = 0.1
    most_seconds: float = 1.2
    policy: str = "fcfs"

    def seconds(self, makespan: float) -> float:
        """Return the search time for a run, in seconds."""
        return min(self.most_seconds, max(self.least_seconds, self.share * makespan))


@dataclass(frozen=True, slots=True)
class Course:
    """One way to serve a run's requests.

    seconds: Makespan on the run's clock.
    decode_steps, prefill_stages: Exact counts.
    """

    seconds: float
    decode_steps: int
    prefill_stages: int

    @classmethod
    def of(cls, trace: Trace, seconds: float) -> Course:
        """Return a trace's course; it took ``seconds``."""
        return cls(seconds, trace.decode_steps, trace.prefill_stages)


@dataclass(frozen=True, slots=True)
class Gain:
    """A run and its alternatives for the same completions.

    Simulated seconds are the cost model's, times ``clock``. Decode steps are exact.

    first_come: First come, first served, simulated with the actual lengths.
    this_run: The run itself.
    known: A plan made with the actual lengths.
    least: Lower bound of all schedules of these completions, in seconds of the run's clock.
    clock: Measured seconds per second of the cost model.
    evicts: True if the run evicted requests; the bound then allows evictions.
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
        """Fraction of first come, first served that the run saved."""
        return 1 - self.this_run.seconds / self.first_come.seconds if self.first_come.seconds else 0.0

    @property
    def above_least(self) -> float | None:
        """Gap to the bound, as a fraction; None without a bound."""
        return self.this_run.seconds / self.least - 1 if self.least > 0 else None

    @property
    def steps_to_save(self) -> float:
        """Fraction of decode steps that known lengths would save."""
        if self.known is None or not self.this_run.decode_steps:
            return 0.0
        return max(0.0, 1 - self.known.decode_steps / self.this_run.decode_steps)


def gain_of(
    fleet: Fleet, trace: Trace, *, cost: CostModel | None = None, params: GainParams | None = None
) -> Gain | None:
    """Return the gain of a run on one replica.

    It is None for an empty run and for several replicas. ``cost`` is fitted to the run's stages by default.
    """
    return gain_and_plan(fleet, trace, cost=cost, params=params)[0]


def gain_and_plan(
    fleet: Fleet, trace: Trace, *, cost: CostModel | None = None, params: GainParams | None = None
) -> tuple[Gain | None, Plan | None]:
    """Return :func:`gain_of`, and a plan of the actual lengths."""
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
    """Return the stronger bound of schedules that may evict."""
    both = (work_bound(Fleet.of(problem, 1)), evicting_bound(problem))
    return max(both, key=lambda bound: bound.seconds)


def _own_cost(trace: Trace, stated: CostModel) -> CostModel:
    """Fit a cost model to the run, or return the stated one."""
    try:
        return fit_cost(trace.stages)
    except ValueError:
        return stated


def _with_capacity(problem: Problem, fleet: Fleet) -> Problem:
    """Return the problem with the replica's KV capacity.

    A capacity that a completion outgrew is left out.
    """
    capacity = fleet.replicas[0].kv_capacity
    try:
        return replace(problem, kv_capacity=capacity)
    except ValueError:
        return problem
