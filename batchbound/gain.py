"""Gain of a run over first come, first served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .data.bound import Bound
from .data.costs.cost import CostModel
from .data.figures import gap_text, short_duration
from .data.fleet import Fleet
from .data.plan import LEAST_REPEATED, Maker, Plan
from .data.problem import Problem, ProblemError
from .data.trace import Trace
from .executor.profiling.calibrate import fit_cost
from .executor.reports.report import model_seconds, pace_of, run_bound_of, served_part, simulated
from .heuristics.fleet.simulation import simulate_fleet
from .heuristics.registry import policy_named
from .heuristics.simulate import simulate
from .heuristics.simulator import KEEPS_KV
from .models.bounds.fleet import fleet_bound, work_bound
from .models.bounds.prove import evicting_bound
from .planning.fleet import make_fleet_plan
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
    decode_steps, prefill_stages, prompt_tokens: Exact counts; the tokens are those that stages compute.
    """

    seconds: float
    decode_steps: int
    prefill_stages: int
    prompt_tokens: int

    @classmethod
    def of(cls, trace: Trace, seconds: float) -> Course:
        """Return a trace's course; it took ``seconds``."""
        tokens = sum(stage.tokens for stage in trace.stages if stage.kind == "prefill")
        return cls(seconds, trace.decode_steps, trace.prefill_stages, tokens)


EQUAL = 0.005
"""Largest relative difference of seconds that counts as equal."""

KEPT = "gain"
"""Key of a run's gain among its trace's engine facts."""

_WELL, _AS_WELL = 0.04, 1.25
"""Misfit of costs that fit a run well, and the ratio to the own one up to which others fit as well."""

_PARTS = 5
"""Parts of a run that are left out in turn, to see how far its costs are known."""


@dataclass(frozen=True, slots=True)
class GainLine:
    """Line of a gain: one way to serve the requests, or the bound.

    course: Exact counts; None for the bound.
    seconds: 0 if nothing is proven.
    """

    name: str
    course: Course | None
    seconds: float
    note: str

    @property
    def duration(self) -> str:
        """The seconds as a text; empty if nothing is proven."""
        return short_duration(self.seconds) if self.seconds else ""


@dataclass(frozen=True, slots=True)
class Gain:
    """A run and its alternatives for the same completions, under its own limits.

    Simulated seconds are the cost model's, times ``clock``. Decode steps and stages are exact.

    first_come: First come, first served, simulated with the actual lengths.
    this_run: The run itself.
    known: The best of these two and of a plan made with the actual lengths; None if not planned.
    least: Lower bound of all schedules of these completions, in seconds of the run's clock.
    clock: Measured seconds per second of the cost model.
    evicts: True if the bound allows evictions, as the run or first come, first served evicted requests.
    capacity: KV capacity in tokens; None for no limit.
    at_once: True if all requests are in progress at once, so that no order can help.
    needed: Prompt tokens that every order computes at least, if prompts share beginnings; else None.
    prompt_tokens: Tokens of all prompts.
    missed: Measured seconds of all stages over those of the cost model at the pace of the median stage,
        minus one; None if unknown.
    within: Least and largest fraction saved by costs that are fitted without a fifth of the run; None if
        they are not fitted to it.
    replicas: Number of engines. Steps and stages of several are those of the one that ends last.
    cost: Costs of the other lines and of the bound; None for several engines.
    """

    requests: int
    slots: int
    """Slots of all replicas."""
    first_come: Course
    this_run: Course
    known: Course | None
    least: float
    clock: float
    evicts: bool = False
    capacity: int | None = None
    at_once: bool = False
    needed: int | None = None
    prompt_tokens: int = 0
    missed: float | None = None
    within: tuple[float, float] | None = None
    replicas: int = 1
    cost: CostModel | None = None

    @property
    def saved(self) -> float:
        """Fraction of first come, first served that the run saved."""
        return 1 - self.this_run.seconds / self.first_come.seconds if self.first_come.seconds else 0.0

    @property
    def above_least(self) -> float | None:
        """Gap to the bound, as a fraction; None without a bound."""
        return self.this_run.seconds / self.least - 1 if self.least > 0 else None

    @property
    def worth(self) -> float:
        """Fraction of this run's seconds that known lengths would save."""
        if self.known is None or not self.this_run.seconds:
            return 0.0
        return 1 - self.known.seconds / self.this_run.seconds

    def _saved_note(self) -> str:
        if self.within is None and self.missed is not None and abs(self.missed) > abs(self.saved) >= EQUAL:
            return "no clear difference"
        return _less_time(self.saved, *(self.within or ()))

    def lines(self, *, repeats: bool) -> list[GainLine]:
        """Return the lines of the end screen: first come, this run, known lengths, least possible.

        repeats: True if the lengths of the run are those of the next run.
        """
        first, ours, known = self.first_come, self.this_run, self.known
        lines = [
            GainLine("first come, first served", first, first.seconds, "simulated"),
            GainLine("this run", ours, ours.seconds, self._saved_note()),
        ]
        if known is not None and not self.at_once:
            note = _known_note(self, repeats=repeats)
            lines.append(GainLine("lengths known beforehand", known, known.seconds, note))
        above = self.above_least
        note = "nothing is proven" if above is None else f"proven; run {gap_text(above)} above"
        return [*lines, GainLine("least possible", None, self.least, note)]


def _less_time(*shares: float) -> str:
    """Return shares of time saved as a range; they are negative where time was lost."""
    low, high = (round(100 * share(shares)) for share in (min, max))
    if max(map(abs, shares)) < EQUAL or low == high == 0:
        return "no gain"
    if low == high:
        return f"{abs(low)}% {'less' if low > 0 else 'more'} time"
    if low < 0 < high:
        return f"{-low}% more to {high}% less"
    return f"{-high} to {-low}% more time" if high <= 0 else f"{low} to {high}% less time"


def _known_note(gain: Gain, *, repeats: bool) -> str:
    if gain.worth < EQUAL:
        above = gain.above_least
        return "no more to gain" if above is not None and above < EQUAL else "no better order found"
    return f"{gain.worth:.0%} less" + (" than this run" if repeats else ", if they repeat")


def gain_of(
    fleet: Fleet, trace: Trace, *, cost: CostModel | None = None, params: GainParams | None = None
) -> Gain | None:
    """Return the gain of a run on one replica, which is None for an empty run.

    It is None, too, if the engine shared beginnings that the plan does not know. ``cost`` is fitted to the
    run's stages by default.
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
    served = _as_shared(served, fleet, trace)
    if served is None:
        return None, None
    own = cost or _own_cost(trace, fleet.replicas[0].cost)
    served = _with(served, cost=[own])
    first = _first_come(served, fleet, params)
    cost = _careful_cost(trace, first, own, fleet.replicas[0].cost)
    if cost != own:
        served = _with(served, cost=[cost])
        first = _first_come(served, fleet, params)
    free = served.problem()
    modelled = model_seconds(cost, trace, overheads=False)
    clock = trace.makespan / modelled if modelled else 1.0
    planned, problem = _limited(free, fleet)
    evicts = trace.evictions + first.evictions > 0
    courses = [Course.of(trace, trace.makespan), Course.of(first, clock * first.makespan)]
    known, plan, bound = None, None, work_bound(Fleet.of(free, 1))
    if problem is not None:
        result = solve(problem, limits=Limits(seconds=params.seconds(trace.makespan)))
        bound = _evicting(problem) if evicts else result.bound or bound
        if result.schedule is not None:
            schedule = result.schedule
            tokens = int(schedule.stage_tokens(problem).sum())
            seconds = clock * schedule.makespan(problem)
            steps, stages = int(schedule.decode_steps.sum()), len(schedule.decode_steps)
            known = min(Course(seconds, steps, stages, tokens), *courses, key=lambda course: course.seconds)
            maker = Maker(result.solver, result.version, result.status, result.stopped_by, result.seconds, 0)
            plan = Plan.of(problem, schedule, None, maker)
    least = run_bound_of(served, [trace], lambda _: bound, evictions=evicts)
    gain = Gain(
        requests=len(free),
        slots=free.slots,
        first_come=courses[1],
        this_run=courses[0],
        known=known,
        least=clock * ((least.proven if least else None) or 0.0),
        clock=clock,
        evicts=evicts,
        capacity=planned.kv_capacity,
        at_once=first.prefill_stages == 1 and len(free) <= free.slots,
        needed=None if free.tree is None else free.tree.distinct_tokens,
        prompt_tokens=int(free.prompt_tokens.sum()),
        missed=pace_of([(cost, trace)])[1],
        within=_saved_within(trace, first),
        cost=cost,
    )
    return gain, plan


def _first_come(served: Fleet, fleet: Fleet, params: GainParams) -> Trace:
    """Simulate first come, first served on the completions of a run on one replica."""
    free = served.problem()
    planned, _ = _limited(free, fleet)
    # The policy of a run knows the room for beginnings that was planned, not what short completions leave.
    expected = replace(planned, prefix_cache=fleet.replicas[0].prefix_cache)
    policy = policy_named(params.policy, expected)
    return simulate(planned, policy, free.workload.output_tokens, swap=KEEPS_KV)


def _careful_cost(trace: Trace, first: Trace, own: CostModel, stated: CostModel) -> CostModel:
    """Return the costs by which the run saved less: its own, or the plan's if they fit the run as well.

    A run of few large stages shows little of the many small ones of first come, first served; the plan's
    costs may come from a run that had some.
    """
    if _misfit(stated, trace) > _AS_WELL * max(_misfit(own, trace), _WELL):
        return own
    return min((own, stated), key=lambda cost: _saved(cost, trace, first))


def _misfit(cost: CostModel, trace: Trace) -> float:
    """Return the share of a run's seconds by which its stages differ from the costs' in proportion."""
    model = np.array([stage.model_seconds(cost) for stage in trace.stages])
    measured = np.array([stage.seconds for stage in trace.stages])
    if not model.sum() or not measured.sum():
        return math.inf
    return float(np.abs(model / model.sum() - measured / measured.sum()).sum())


def _saved(cost: CostModel, trace: Trace, first: Trace) -> float:
    """Return the fraction of first come, first served that a run saved."""
    theirs = model_seconds(cost, first, overheads=False)
    return 1 - model_seconds(cost, trace, overheads=False) / theirs if theirs else 0.0


def _saved_within(trace: Trace, first: Trace) -> tuple[float, float] | None:
    """Return the least and the largest fraction saved by costs fitted without a fifth of the run's stages."""
    stages, saved = trace.stages, list[float]()
    if len(stages) < 2 * _PARTS:
        return None
    for part in np.array_split(np.arange(len(stages)), _PARTS):
        rest = (*stages[: part[0]], *stages[part[-1] + 1 :])
        try:
            cost = fit_cost(rest)
        except ValueError:
            continue
        saved.append(_saved(cost, trace, first))
    return (min(saved), max(saved)) if saved else None


def gain_of_fleet(
    fleet: Fleet,
    traces: Sequence[Trace],
    *,
    shared: bool = False,
    costs: Sequence[CostModel] | None = None,
    params: GainParams | None = None,
) -> Gain | None:
    """Return the gain of a run on several replicas; None for an empty run.

    Each replica's costs are fitted to its own stages by default. First come, first served has one queue.
    ``shared``: True if replicas may have shared beginnings; nothing is proven of such a run.
    """
    params = params or GainParams()
    served = served_part(fleet, traces)
    if served is None:
        return None
    if costs is None:
        costs = [_own_cost(trace, one.cost) for trace, one in zip(traces, fleet.replicas, strict=True)]
    free = _with(served, cost=costs, busy=[0.0] * len(costs))
    modelled = [
        model_seconds(cost, trace, overheads=False) for cost, trace in zip(costs, traces, strict=True)
    ]
    measured = max(trace.makespan for trace in traces)
    clock = measured / max(modelled) if max(modelled) else 1.0
    limits = {
        name: [getattr(one, name) for one in fleet.replicas] for name in ("kv_capacity", "prefill_token_cap")
    }
    try:
        limited: Fleet | None = _with(free, **limits)
        assert limited is not None
        limited.problem_of(0, np.arange(len(limited)))
    except ProblemError:
        limited = None  # a completion outgrew the KV capacity
    first = simulate_fleet(
        limited or free, None, policy=lambda problem: policy_named(params.policy, problem), backoff=False
    )
    evicts = any(trace.evictions for trace in (*traces, *first.traces))
    courses = [_last(traces, measured), _last(first.traces, clock * first.makespan)]
    known = courses[0] if limited is not None else None
    if limited is not None:
        plan = make_fleet_plan(limited, limits=Limits(seconds=params.seconds(measured)))
        known = min(_last(simulated(plan), clock * plan.seconds), *courses, key=lambda course: course.seconds)
    prove = work_bound if evicts else fleet_bound
    least = None if shared else run_bound_of(free, traces, prove, evictions=evicts)
    slots = sum(trace.slots for trace in traces)
    return Gain(
        requests=len(free),
        slots=slots,
        first_come=courses[1],
        this_run=courses[0],
        known=known,
        least=clock * ((least.proven if least else None) or 0.0),
        clock=clock,
        evicts=evicts,
        at_once=len(free) <= slots and all(trace.prefill_stages <= 1 for trace in first.traces),
        missed=pace_of(list(zip(costs, traces, strict=True)))[1],
        replicas=len(traces),
    )


def _with(fleet: Fleet, **fields: Sequence[Any]) -> Fleet:
    """Return a fleet whose replicas have other fields, a value each."""
    changed = [
        replace(replica, **{name: values[k] for name, values in fields.items()})
        for k, replica in enumerate(fleet.replicas)
    ]
    return replace(fleet, replicas=tuple(changed))


def _last(traces: Sequence[Trace], seconds: float) -> Course:
    """Return the course of the replica that ends last; the job took ``seconds``."""
    return Course.of(max(traces, key=lambda trace: trace.makespan), seconds)


def _as_shared(served: Fleet, fleet: Fleet, trace: Trace) -> Fleet | None:
    """Return the served requests with the beginnings that the engine shared; None if unknown."""
    work, replica = served.workload, served.replicas[0]
    if trace.distinct_tokens is None or trace.engine.get("tier") == "window":
        # Without sharing, or with equal prompts alone.
        alone = replace(work, tree=None)
        return replace(served, workload=alone.with_shared_prompts() if trace.distinct_tokens else alone)
    if work.tree is None:
        whole = work.computed_tokens
        return served if trace.distinct_tokens >= (1 - LEAST_REPEATED) * whole else None
    # The engine took its memory by the planned lengths.
    lacking = fleet.problem().pages - _limited(served.problem(), fleet)[0].pages
    return replace(served, replicas=(replace(replica, prefix_cache=max(0, replica.prefix_cache + lacking)),))


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


def _limited(problem: Problem, fleet: Fleet) -> tuple[Problem, Problem | None]:
    """Return the problem under the replica's limits, as it was planned and as it came out.

    The second is None if a completion outgrew the KV capacity, so that no schedule holds it.
    """
    capacity, cap = fleet.replicas[0].kv_capacity, fleet.replicas[0].prefill_token_cap
    try:
        limited = replace(problem, kv_capacity=capacity, prefill_token_cap=cap)
    except ProblemError:
        position = {name: k for k, name in enumerate(fleet.workload.ids.tolist())}
        rows = [position[name] for name in problem.workload.ids.tolist()]
        lengths = np.minimum(problem.workload.output_tokens, fleet.workload.output_tokens[rows])
        workload = problem.workload.with_output_tokens(lengths)
        return replace(problem, workload=workload, kv_capacity=capacity, prefill_token_cap=cap), None
    return limited, limited
