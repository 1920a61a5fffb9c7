"""Screen of a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import TextWrapper

from ..data.claims.assumptions import AS_EXPECTED
from ..data.figures import exact_duration, percentage
from ..data.plan import ASSUMED, EXPECTED_LENGTHS, Plan
from ..models.padding import padding_tokens
from ..options.plan import PlanOptions
from ..plan_for_engines import EnginePlan
from ..solvers.result import StoppedBy
from .gain import COLUMNS
from .iterations import interrupted, paid, show_engine_plan
from .streams import say
from .terminal import note

_LABELS = {
    "requests": "requests",
    "replicas": "replicas",
    "slots": "slots",
    "objective": "objective",
    "value_s": "its prediction",
    "value_bound": "its bound",
    "makespan_s": "predicted makespan",
    "run_s": "with batch changes",
    "padded_s": "and padded rows",
    "expected_s": "expected makespan",
    "expected_interval_s": "90 % of makespans in",
    "follows": "follows",
    "bound_s": "proven lower bound",
    "bound_of": "bound of",
    "bound_source": "bound by",
    "repeats": "prompts",
    "gap": "gap to the bound",
    "device_hours": "device-hours",
    "money": "cost of the job",
    "utilization": "utilization",
    "prompt_tokens": "prompt tokens",
    "prefill_stages": "prefill stages",
    "decode_steps": "decode steps",
    "evictions": "evictions",
    "schedule_s": "without evictions",
    "output_tokens_per_s": "output tokens/s",
    "solver": "solver",
    "outcome": "status",
    "stopped_by": "stopped by",
    "cost": "cost model",
    "lengths": "completion lengths",
    "seconds": "took",
}

_OF_LENGTHS = (
    "bound_s",
    "bound_of",
    "bound_source",
    "gap",
    "utilization",
    "prefill_stages",
    "decode_steps",
    "output_tokens_per_s",
    "solver",
    "outcome",
    "stopped_by",
)
"""Keys of a summary that need known lengths."""


_OF_COSTS = (
    *("run_s", "padded_s", "makespan_s", "expected_s", "expected_interval_s", "schedule_s", "bound_s"),
    *("device_hours", "money", "output_tokens_per_s", "value_s"),
)
"""Keys of a summary that need measured costs."""


def show(made: Plan | EnginePlan, options: PlanOptions, seconds: float) -> int:
    """Print the summary of a plan."""
    if isinstance(made, EnginePlan):
        return show_engine_plan(made, options, seconds)
    return _show_plan(made, options, seconds)


def _show_plan(plan: Plan, options: PlanOptions, seconds: float) -> int:
    replicas = len(plan.fleet.replicas)
    summary = plan_summary(plan, seconds) | paid(replicas, plan.seconds, options.price)
    basis = seconds_basis(plan.provenance.cost_source)
    if plan.provenance.assumes_costs:
        basis = "costs not measured: see --cost"
        if options.price is not None:
            note("--price needs measured costs: see --cost")
    title = f"{options.output}: {_what(plan)}, {basis}"
    show_summary(summary, as_json=options.json, title=title)
    return interrupted(plan.maker.stopped_by, options.output)


def _what(plan: Plan) -> str:
    replicas = plan.fleet.replicas
    machines = f"{len(replicas):,} replicas" if len(replicas) > 1 else f"{replicas[0].slots:,} slots"
    return f"{len(plan.workload):,} requests on {machines}"


def plan_summary(plan: Plan, seconds: float) -> dict[str, object]:
    """Return the summary of a plan by JSON key."""
    fleet, expected = plan.fleet, plan.expected
    several = len(fleet.replicas) > 1
    shares = [
        (fleet.problem_of(k, plan.shares.members(k)), schedule)
        for k, schedule in enumerate(plan.shares.schedules)
        if schedule is not None
    ]
    slots = sum(replica.slots for replica in fleet.replicas)
    used = sum(
        schedule.utilization(problem) * schedule.makespan(problem) * problem.slots
        for problem, schedule in shares
    )
    return {
        "requests": len(fleet),
        "replicas": len(fleet.replicas) if several else None,
        "slots": slots,
        "replica_ends_s": list(plan.shares.finishes(fleet)) if several else None,
        "utilization": used / (slots * plan.seconds) if plan.seconds else 0.0,
        "prompt_tokens": int(plan.workload.input_tokens.sum()),
        "prefill_stages": sum(schedule.prefill_stages() for _, schedule in shares),
        "decode_steps": sum(int(schedule.decode_steps.sum()) for _, schedule in shares),
        "output_tokens_per_s": float(plan.workload.output_tokens.sum()) / plan.seconds,
        "expected_s": None if expected is None else expected.mean,
        "expected_interval_s": None if expected is None else [expected.low, expected.high],
        "follows": None if expected is None else expected.what(),
        **({} if plan.goal is None else _aimed(plan)),
        **({} if several or plan.followed else _overheads(plan)),
        **_followed(plan),
        "makespan_s": plan.seconds,
        "bound_s": None if plan.claim is None else plan.claim.seconds,
        "bound_of": None if plan.claim is None else plan.bound_of,
        "bound_if": plan.provenance.condition or None,
        "bound_source": None if plan.claim is None else plan.claim.source,
        "repeats": plan.repeats or None,
        "gap": plan.gap,
        "solver": plan.maker.solver,
        "status": plan.maker.status,
        "outcome": plan.maker.outcome,
        "stopped_by": plan.maker.stopped_by,
        "cost": plan.provenance.cost_source.get("name"),
        "lengths": plan.provenance.lengths.get("kind"),
        "lengths_sampled": plan.provenance.lengths.get("sampled"),
        "seconds": seconds,
    }


def _aimed(plan: Plan) -> dict[str, object]:
    assert plan.goal is not None
    unknown = "no bound: the seconds of a step depend on its batch"
    return {"objective": str(plan.goal.objective), "value_s": plan.value, "value_bound": unknown}


def _followed(plan: Plan) -> dict[str, object]:
    followed = plan.followed
    if followed is None:
        return {}
    return {
        "follows": f"the policy {followed.policy}, which evicts requests",
        "prefill_stages": followed.prefill_stages,
        "decode_steps": followed.decode_steps,
        "evictions": followed.evictions,
        "schedule_s": plan.makespan,
    }


def _overheads(plan: Plan) -> dict[str, float | None]:
    """Return the makespan with overheads of batch changes and padding."""
    cost, problem, schedule = plan.problem.cost, plan.problem, plan.schedule
    seconds = plan.makespan + cost.decode_per_change * schedule.changes(problem)
    measured = plan.provenance.cost_source.get("engine")
    # The ragged tier reads each row to about its own length.
    pads = not (isinstance(measured, Mapping) and measured.get("tier", "ragged") == "ragged")
    counted = pads and cost.decode_per_kv_token > 0
    padded = cost.decode_per_kv_token * padding_tokens(problem, schedule) if counted else 0.0
    return {
        "run_s": seconds if cost.decode_per_change else None,
        "padded_s": seconds + padded if padded else None,
    }


def show_summary(summary: Mapping[str, object], *, as_json: bool, title: str = "") -> None:
    """Print a summary on stdout, as JSON or as a table."""
    if as_json:
        say(json.dumps(summary))
        return
    if title:
        _say_within("", title)
    # Caps are not lengths: figures that need lengths are left out.
    left_out = {*(_OF_LENGTHS if summary.get("lengths") == "cap" else ())}
    if summary.get("cost") == ASSUMED:
        left_out |= {*_OF_COSTS}
    if "objective" in summary:
        # The bound is one of the makespan.
        left_out |= {"bound_s", "bound_of", "bound_source", "gap", "outcome"}
    if summary.get("stopped_by") == StoppedBy.FINISHED:
        left_out |= {"stopped_by"}
    labels = {**_LABELS, "makespan_s": "at most"} if summary.get("lengths") == "cap" else _LABELS
    if summary.get("bound_if") == AS_EXPECTED:
        labels = {**_LABELS, "bound_s": "bound, if they hold"}
    for name, label in labels.items():
        value = summary.get(name)
        if name == "lengths" and summary.get("lengths_sampled"):
            value = "expected: those of earlier completions, which are sampled"
        if value is not None and name not in left_out:
            _say_within(f"  {label:20s} ", _shown(name, value))


def _say_within(label: str, text: str) -> None:
    """Print a labelled text within the columns of a screen."""
    wrapper = TextWrapper(COLUMNS, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = label, " " * (len(label) or 2)
    say(wrapper.fill(text))


def _shown(name: str, value: object) -> str:
    if isinstance(value, list):
        return " to ".join(exact_duration(entry) for entry in value)
    if name in ("gap", "utilization") and isinstance(value, float):
        return str(percentage(value))
    if (name.endswith("_s") or name == "seconds") and isinstance(value, float):
        return f"{value:,.1f}" if name.endswith("per_s") else exact_duration(value)
    if name in ("device_hours", "money"):
        return f"{value:,.4f}" if name == "device_hours" else f"{value:,.2f}"
    if name == "lengths" and value == "cap":
        return "unknown: at most as long as each request allows"
    if name == "lengths" and value in EXPECTED_LENGTHS:
        return f"expected, by {value}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def seconds_basis(cost_source: Mapping[str, object]) -> str:
    """Return the model and device that a plan's seconds are for."""
    engine = cost_source.get("engine")
    if isinstance(engine, Mapping) and engine:
        return f"in the seconds of {engine.get('model')} on {engine.get('device')}"
    if cost_source.get("name") in ("paper", ASSUMED):
        return "in the seconds of a LLaMA-65B: see --cost"
    return f"in the seconds of {cost_source.get('name')}"
