"""Screen of a plan for an engine that mixes prefill and decode."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict

from ..data.claims.assumptions import least_label
from ..data.figures import percentage
from ..data.iteration_plan import IterationPlan
from ..options.plan import PlanOptions
from ..plan_for_engines import EnginePlan
from ..solvers.result import Status, StoppedBy, ended
from .streams import say
from .terminal import INTERRUPTED, note


def show_engine_plan(made: EnginePlan, options: PlanOptions, seconds: float) -> int:
    """Print the summary of a plan, and what to hand to the engine."""
    plan, handover = made.plan, made.handover
    price = {} if plan.seconds is None else paid(len(plan.shares), plan.seconds, options.price)
    summary = iteration_summary(plan) | {
        "files": [str(path) for path in made.files],
        "command": shlex.join(handover.command) or None,
        "settings": dict(handover.settings),
        "seconds": seconds,
        **price,
    }
    if options.json:
        say(json.dumps(summary))
    else:
        say(f"{options.output}: {_what(plan)}")
        show_iterations(summary)
        _show_handover(summary)
    return interrupted(plan.maker.stopped_by, options.output)


def _what(plan: IterationPlan) -> str:
    slots = sum(share.limits.sequences for share in plan.shares)
    machines = f"{len(plan.shares):,} replicas, " if len(plan.shares) > 1 else ""
    return f"{len(plan.workload):,} completions on {machines}{slots:,} slots of {plan.engine}"


def iteration_summary(plan: IterationPlan) -> dict[str, object]:
    """Return the summary of a plan by JSON key."""
    each, least = [share.predicted for share in plan.shares], plan.least_seconds
    return {
        "for": plan.engine,
        "requests": len(plan.workload),
        "slots": sum(share.limits.sequences for share in plan.shares),
        "iterations": plan.iterations,
        "bound_iterations": plan.bound.iterations,
        "bound_source": plan.bound.source,
        "bound_label": least_label(plan.assumptions, *plan.kinds),
        "gap": plan.gap,
        "makespan_s": plan.seconds,
        "bound_s": None if least is None else least.seconds,
        "seconds_gap": plan.seconds_gap,
        **_aimed(plan),
        "orders": [share.order for share in plan.shares],
        "in_flight": [share.in_flight for share in plan.shares],
        "predicted_iterations": [None if one is None else one.iterations for one in each],
        "preemptions": [None if one is None else one.preemptions for one in each],
        "status": plan.maker.status,
        "stopped_by": plan.maker.stopped_by,
        "lengths": plan.provenance.lengths.get("kind"),
        "assumptions": [asdict(one) for one in plan.relied_on],
    }


def _aimed(plan: IterationPlan) -> dict[str, object]:
    """Return the summary of a plan's aim, in iterations."""
    if plan.aim is None:
        return {}
    bound = plan.aim.bound
    return {
        "objective": str(plan.aim.goal.objective),
        "value": plan.value,
        "bound_value": bound.value,
        "value_source": bound.source,
        "value_gap": plan.aim_gap,
    }


def show_iterations(summary: Mapping[str, object]) -> None:
    """Print the table of :func:`iteration_summary`."""
    taken = summary["iterations"]
    rows = _aim_rows(summary) | {
        "predicted iterations": "unknown: the job is too large to simulate"
        if taken is None
        else f"{taken:,}",
        str(summary["bound_label"]): f"{summary['bound_iterations']:,}, by {summary['bound_source']}",
        "gap to the bound": _share(summary["gap"]),
        "predicted seconds": _decimals(summary["makespan_s"], 3, " s"),
        f"{summary['bound_label']}, in seconds": _decimals(summary["bound_s"], 3, " s"),
        "gap in seconds": _share(summary["seconds_gap"]),
        "device-hours": _decimals(summary.get("device_hours"), 4),
        "cost of the job": _decimals(summary.get("money"), 2),
        "status": _status(summary),
        "completion lengths": summary["lengths"],
    }
    widest = max(22, *(len(name) for name, value in rows.items() if value is not None))
    for name, value in rows.items():
        if value is not None:
            say(f"  {name:{widest}s} {value}")
    columns = [summary[name] for name in ("orders", "in_flight", "predicted_iterations", "preemptions")]
    assert all(isinstance(column, list) for column in columns)
    for k, (order, flying, iterations, put_back) in enumerate(zip(*columns, strict=True)):
        expected = "" if iterations is None else f", {iterations:,} iterations, {put_back:,} preemptions"
        say(f"  replica {k}: {order}; {flying:,} completions in flight{expected}")


def _aim_rows(summary: Mapping[str, object]) -> dict[str, str | None]:
    if "objective" not in summary:
        return {}
    value, source = summary["value"], summary["value_source"]
    return {
        f"predicted {summary['objective']}": "unknown" if value is None else f"{value:,} iterations",
        f"least {summary['objective']}": f"{summary['bound_value']:,}, by {source}",
        f"gap of {summary['objective']}": _share(summary["value_gap"]),
    }


def _status(summary: Mapping[str, object]) -> str:
    holds = summary["status"] != Status.OPTIMAL or summary["bound_label"] == "proven least"
    condition = "" if holds else " if assumptions hold"
    return f"{summary['status']}{condition}, {ended(str(summary['stopped_by']))}"


def _show_handover(summary: Mapping[str, object]) -> None:
    files, settings = summary["files"], summary["settings"]
    assert isinstance(files, list)
    assert isinstance(settings, Mapping)
    say(f"  for {summary['for']}")
    for line in (*files, summary["command"], *(f"{name}={value}" for name, value in settings.items())):
        if line:
            say(f"    {line}")


def _share(value: object) -> str | None:
    return percentage(value) if isinstance(value, float) else None


def _decimals(value: object, digits: int, unit: str = "") -> str | None:
    return f"{value:,.{digits}f}{unit}" if isinstance(value, float) else None


def interrupted(stopped_by: str, output: object) -> int:
    """Note an interrupted search; return the exit status."""
    if stopped_by != StoppedBy.INTERRUPT:
        return 0
    note(f"interrupted: {output} holds the best plan found until then")
    return INTERRUPTED


def paid(replicas: int, makespan: float, price: float | None) -> dict[str, object]:
    """Return device-hours and their cost, by JSON key."""
    hours = replicas * makespan / 3600
    return {"device_hours": hours, "money": None if price is None else price * hours}
