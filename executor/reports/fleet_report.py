"""The report of a fleet's run: what it took, what was planned and is proven, and what each replica did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...data.bound import Bound
from ...data.costs.cost import IntArray
from ...data.fleet import Fleet
from ...data.fleet_plan import FleetPlan
from ...data.report import Report
from ...data.trace import Trace
from ...heuristics.loop import execute
from ...heuristics.replay import Replay
from ...heuristics.simulator import Simulator
from ...models.bounds.fleet import fleet_bound
from ...models.bounds.makespan import best_bound
from .report import report


@dataclass(frozen=True, slots=True)
class FleetReport:
    """
    A fleet's run against its plan and its bound.

    Parameters
    ----------
    requests, resumed
        Requests served by this run, and requests of the plan that it did not serve.
    makespan
        Seconds until the last replica was done, on the run's clock.
    model_makespan
        The same in the seconds that the replicas' cost models give their stages, what each was busy with
        before included: what the run's gap is taken of.
    planned_makespan
        Seconds the plan predicted.
    bound, bound_source
        Proven model seconds of the planned job on the fleet, and by what argument.
    run_bound
        Proven model seconds of the requests served, at the lengths that came out; None if there were none.
    moved
        Requests that another replica served than was planned.
    lost
        The replicas that died, and why.
    planned_ends
        Seconds at which each replica was planned to be done, by replica.
    replicas
        Each replica's report on the requests it served, None if it served none; gaps are to the bound of
        those alone.
    """

    requests: int
    resumed: int
    makespan: float
    model_makespan: float
    planned_makespan: float
    bound: float
    bound_source: str
    run_bound: float | None
    moved: int
    lost: Mapping[int, str]
    planned_ends: tuple[float, ...]
    replicas: tuple[Report | None, ...]

    @property
    def plan_gap(self) -> float | None:
        """How far the plan is above the bound, as a fraction of it; None for a bound of no time."""
        return _above(self.planned_makespan, self.bound)

    @property
    def run_gap(self) -> float | None:
        """How far the run is above its bound, as a fraction of it, in model seconds; None without a bound."""
        return _above(self.model_makespan, self.run_bound)

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens of answers per second of makespan."""
        tokens = sum(each.output_tokens for each in self.replicas if each is not None)
        return tokens / self.makespan if self.makespan else 0.0

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values, derived ones included."""
        return {
            "requests": self.requests,
            "resumed": self.resumed,
            "makespan_s": self.makespan,
            "model_s": self.model_makespan,
            "bound_s": self.run_bound,
            "gap": self.run_gap,
            "planned_s": self.planned_makespan,
            "planned_bound_s": self.bound,
            "planned_gap": self.plan_gap,
            "bound_source": self.bound_source,
            "output_tokens_per_s": self.output_tokens_per_second,
            "moved": self.moved,
            "lost": {str(k): why for k, why in self.lost.items()},
            "replicas": [
                _replica_to_json(each, end)
                for each, end in zip(self.replicas, self.planned_ends, strict=True)
            ],
        }


def fleet_report(plan: FleetPlan, traces: Sequence[Trace]) -> FleetReport:
    """
    Return the report of a fleet's run.

    Parameters
    ----------
    plan
        What was run.
    traces
        What each replica did, in the plan's order.

    Raises
    ------
    ValueError
        If there are not as many traces as replicas, or one serves a request that the plan has not, or that
        another serves.
    """
    fleet = plan.fleet
    if len(traces) != len(fleet.replicas):
        raise ValueError(f"{len(traces)} traces for {len(fleet.replicas)} replicas")
    rows = _rows(fleet, traces)
    served = np.concatenate(rows)
    tokens = fleet.workload.output_tokens.copy()
    for mine, trace in zip(rows, traces, strict=True):
        tokens[mine] = trace.tokens
    came_out = _unlimited(fleet).with_output_tokens(tokens)
    reports = [
        None
        if not mine.size
        else report(
            fleet.problem_of(k, mine), trace, None, None, run_bound=best_bound(came_out.problem_of(k, mine))
        )
        for k, (mine, trace) in enumerate(zip(rows, traces, strict=True))
    ]
    as_planned = served.size == len(fleet) and np.array_equal(tokens, fleet.workload.output_tokens)
    part = replace(came_out, workload=came_out.workload.select(np.sort(served))) if served.size else None
    dispatched = plan.schedule.replica_of
    return FleetReport(
        requests=int(served.size),
        resumed=len(fleet) - int(served.size),
        makespan=max(trace.makespan for trace in traces),
        model_makespan=max(
            one.busy + (0.0 if each is None else each.model_makespan)
            for one, each in zip(fleet.replicas, reports, strict=True)
        ),
        planned_makespan=plan.makespan,
        bound=plan.bound.seconds,
        bound_source=plan.bound.source,
        run_bound=None if part is None else _run_bound(part, plan.bound if as_planned else None),
        moved=sum(int(np.count_nonzero(dispatched[mine] != k)) for k, mine in enumerate(rows)),
        lost={k: str(trace.engine["lost"]) for k, trace in enumerate(traces) if "lost" in trace.engine},
        planned_ends=plan.schedule.finishes(fleet),
        replicas=tuple(reports),
    )


def simulated_fleet(plan: FleetPlan) -> tuple[Trace, ...]:
    """Return the trace of each replica as planned, at its cost model's pace; an empty one if it is idle."""
    traces = []
    for k, schedule in enumerate(plan.schedule.schedules):
        if schedule is None:
            traces.append(Trace.empty(plan.fleet.replicas[k].slots))
            continue
        problem = plan.fleet.problem_of(k, plan.schedule.members(k))
        traces.append(execute(problem, Replay(schedule, problem), Simulator(problem)))
    return tuple(traces)


def _rows(fleet: Fleet, traces: Sequence[Trace]) -> list[IntArray]:
    """Return the plan's requests that each trace serves, in the trace's order."""
    row_of = {name: row for row, name in enumerate(fleet.workload.ids.tolist())}
    seen: set[str] = set()
    for trace in traces:
        for name in trace.ids:
            if name not in row_of:
                raise ValueError(f"a trace serves {name!r}, which is not a request of the plan")
            if name in seen:
                raise ValueError(f"two traces serve {name!r}")
            seen.add(name)
    return [np.array([row_of[name] for name in trace.ids], dtype=np.int64) for trace in traces]


def _unlimited(fleet: Fleet) -> Fleet:
    """Return the fleet without capacities, which actual lengths may outgrow: its bounds hold all the more."""
    free = [
        replace(one, kv_capacity=None, prefill_token_cap=None, max_position=None) for one in fleet.replicas
    ]
    return replace(fleet, replicas=tuple(free))


def _run_bound(served: Fleet, planned: Bound | None) -> float:
    """Return the larger bound of what was served and of the plan, where that is the same job."""
    found = fleet_bound(served).seconds
    return max(found, planned.seconds) if planned is not None and planned.valid else found


def _above(seconds: float, bound: float | None) -> float | None:
    return (seconds - bound) / bound if bound else None


def _replica_to_json(value: Report | None, planned_end: float) -> dict[str, object]:
    return {
        "requests": 0 if value is None else value.requests,
        "planned_s": planned_end,
        "seconds": 0.0 if value is None else value.makespan,
        "model_s": 0.0 if value is None else value.model_makespan,
        "gap": None if value is None else value.run_gap,
        "utilization": 0.0 if value is None else value.utilization,
        "prefill_stages": 0 if value is None else value.prefill_stages,
        "decode_rounds": 0 if value is None else value.decode_rounds,
    }
