"""Pictures of plans, runs and deployments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .data.files.errors import InputError, check_type
from .data.plan import Plan
from .data.problem import Problem
from .planning.plan import make_plan
from .run_job.run import RunResult
from .solvers.result import Limits, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .sizing.result import Sizing


def gantt(result: Plan | RunResult | Result, problem: Problem | None = None) -> Figure:
    """Draw a plan or a run below first come, first served.

    Parameters
    ----------
    result
        Plan, run on one replica, or result of a solver.
    problem
        Problem of the solver's result.
    """
    from .executor.reports.gantt import Panel
    from .executor.reports.gantt import gantt as drawn
    from .executor.reports.report import simulated
    from .heuristics.simulate import simulate
    from .judging import report

    check_type("result", result, Plan, RunResult, Result)
    if isinstance(result, Result):
        if problem is None:
            raise InputError("gantt() needs the problem of a solver's result", hint="Give problem=...")
        result = make_plan(problem, limits=Limits(work=1), start=result.schedule)
    made = result if isinstance(result, Plan) else result.plan
    name, trace = ("plan", simulated(made)[0]) if made is result else ("run", result.traces[0])  # type: ignore[union-attr]
    tokens = dict(zip(trace.ids, trace.tokens.tolist(), strict=True))
    true = [tokens.get(one, 1) for one in made.workload.ids.tolist()]
    first = simulate(made.problem, "fcfs", made.workload.with_output_tokens(true).output_tokens)
    panels = [("first come, first served", first), (name, trace)]
    return drawn(*(Panel.of(title, made.problem.cost, one, report(made, (one,))) for title, one in panels))


def _hours(hours: float) -> str:
    """Return hours as a label: minutes or seconds below one."""
    if hours >= 1:
        return f"{hours:g} h"
    return f"{60 * hours:.3g} min" if hours >= 1 / 60 else f"{3600 * hours:.3g} s"


def deployments(sizing: Sizing) -> Figure:
    """Draw the cost of deployments against their finish, the frontier and the choice."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for device in dict.fromkeys(one.replica.offer.name for one in sizing.tried):
        mine = [one for one in sizing.tried if one.replica.offer.name == device]
        axes.scatter(
            [one.end.expected / 3600 for one in mine], [one.cost for one in mine], s=14, label=device
        )
    ends = sorted((one.end.expected / 3600, one.cost) for one in sizing.frontier)
    axes.plot(*zip(*ends, strict=True), color="#334155", linewidth=1, label="frontier")
    if sizing.choice is not None:
        end, cost = sizing.choice.end, sizing.choice.cost
        spread = [[(end.expected - end.low) / 3600], [(end.high - end.expected) / 3600]]
        name = sizing.choice.name
        axes.errorbar(
            end.expected / 3600, cost, xerr=spread, fmt="*", markersize=14, color="#c2410c", label=name
        )
    for k, window in enumerate(dict.fromkeys(sizing.windows)):
        axes.axvline(window / 3600, color="#94a3b8", linestyle="--", label=None if k else "window")
    priced = all(one.replica.offer.price is not None for one in sizing.tried)
    axes.set(
        xscale="log", yscale="log", xlabel="time until the end, expected; the choice with its 90 % interval"
    )
    axes.set_ylabel("cost of the jobs, in the unit of the prices" if priced else "device-hours")
    for axis, text in (
        (axes.xaxis, lambda hours, _: _hours(hours)),
        (axes.yaxis, lambda cost, _: f"{cost:g}"),
    ):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(text))
    axes.legend(loc="upper center")
    return figure
