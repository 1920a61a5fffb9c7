"""Screens of ``verify``, ``replay``, ``bound``, ``export`` and ``validate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from ..checking import BIT_FACTS, Compared, Validated, Verified
from ..data.bound import Bound
from ..data.claims.assumptions import assumed_line
from ..data.files.record import plain
from ..data.iteration_plan import IterationPlan
from ..data.plan import Plan
from ..data.readers.replayed import Replayed
from ..executor.profiling.validate import Validation
from ..models.formulations.linear_model import LinearModel
from ..options.bound import BoundOptions, ExportOptions
from ..options.judging import ValidateOptions, VerifyOptions
from ..options.replay import ReplayOptions
from .streams import say
from .terminal import WRONG_BOUND, fail, note


def show_verified(verified: Verified | Compared, options: VerifyOptions) -> int:
    """Print what holds of a plan, or of two runs."""
    if isinstance(verified, Compared):
        return _show_compared(verified, as_json=options.json)
    plan, violation = verified.plan, verified.violation
    if violation is not None:
        what = "bound" if isinstance(plan, Plan) and plan.followed is None else "plan"
        return fail(f"{options.plan}: the {what} does not hold: {violation}")
    if isinstance(plan, Plan) and plan.claim is None and verified.run is None:
        if not plan.lengths_unknown:
            return fail(f"{options.plan}: the schedule breaks no rule; there is no bound to verify")
        _say(options, "the schedule breaks no rule; lengths were unknown, so the plan claims no bound")
        return 0
    if verified.run is not None:
        run = verified.run
        own, kept = "the costs of its end screen", "the plan's costs, as its stages fit none"
        costs = own if run.fitted else kept
        _say(
            options,
            f"the schedule breaks no rule, and lengths were unknown; of the completions of {run.trace}:\n"
            f"by {costs}, no schedule takes less than {run.bound.seconds:.6f} s: {run.bound.source}\n"
            f"by them the run's steps and stages take {run.seconds:.6f} s:"
            f" gap {run.bound.gap(run.seconds):.4%}",
            bound_s=run.bound.seconds,
            bound_source=run.bound.source,
            makespan_s=run.seconds,
            gap=run.bound.gap(run.seconds),
        )
    elif verified.replayed is not None:
        _show_replay(verified.replayed, as_json=options.json)
    elif options.json:
        tree = {"tree_from_prompts": True} if verified.from_prompts else {}
        say(json.dumps({"verified": True, **_claims(plan), **tree}))
    elif isinstance(plan, IterationPlan):
        _show_iterations(plan, from_prompts=verified.from_prompts)
    else:
        _show_plan(plan, from_prompts=verified.from_prompts)
    return 0


def _say(options: VerifyOptions, text: str, **figures: object) -> None:
    say(json.dumps({"verified": True, **figures}) if options.json else text)


def _claims(plan: Plan | IterationPlan) -> dict[str, object]:
    if isinstance(plan, Plan):
        assert plan.claim is not None
        claims: dict[str, object] = {"bound_source": plan.claim.source, "makespan_s": plan.seconds}
        claims |= {"bound_s": plan.claim.seconds, "gap": plan.gap}
        if plan.goal is not None:
            claims |= {"objective": str(plan.goal.objective), "value_s": plan.value}
        claims |= {} if plan.bound_of is None else {"bound_of": plan.bound_of}
        condition = plan.provenance.condition
        return claims | ({"bound_if": condition} if condition else {})
    claims = {"iterations": plan.iterations, "gap": plan.gap, "bound_iterations": plan.bound.iterations}
    claims["bound_source"] = plan.bound.source
    if plan.aim is not None:
        claims |= {"objective": str(plan.aim.goal.objective), "value": plan.value}
        claims |= {"bound_value": plan.aim.bound.value, "value_gap": plan.aim_gap}
    claims["assumptions"] = [asdict(assumption) for assumption in plan.relied_on]
    if plan.least_seconds is not None:
        claims |= {"makespan_s": plan.seconds, "bound_s": plan.least_seconds.seconds}
        claims["seconds_gap"] = plan.seconds_gap
    return claims


def _show_plan(plan: Plan, *, from_prompts: bool) -> None:
    bound, condition, followed = plan.claim, plan.provenance.condition, plan.followed
    if plan.goal is not None:
        say(f"{plan.goal.objective.title}: {plan.value:.6f} s, and no bound of it is known")
    assert bound is not None
    if plan.repeats:
        say(plan.repeats)
    assumed = ", at assumed costs" if plan.provenance.assumes_costs else ""
    say(f"the schedule breaks no rule and takes {plan.makespan:.6f} s{assumed}")
    if followed is not None:
        counts = f"{followed.decode_steps:,} decode steps and {followed.evictions:,} evictions"
        say(f"the policy {followed.policy}, simulated again, takes {followed.seconds:.6f} s, {counts}")
    which = (plan.bound_of or "every schedule").removeprefix("every ").removesuffix(", evicting or not")
    held = f", if {condition}" if condition else ""
    say(f"no {which} takes less than {bound.seconds:.6f} s{held}: {bound.source}")
    if from_prompts:
        say(_FROM_PROMPTS)
    elif plan.workload.tree is not None:
        say("that is of the tree of shared beginnings in this plan: --prompts FILE derives it again")
    say("no gap: the bound is zero" if plan.gap is None else f"gap {plan.gap:.4%}")


_FROM_PROMPTS = "the tree of shared beginnings was derived from the prompts again"


def _show_iterations(plan: IterationPlan, *, from_prompts: bool) -> None:
    taken = "is too large to simulate" if plan.iterations is None else f"takes {plan.iterations:,} iterations"
    say(f"the order holds each completion once and, simulated again, {taken}")
    assuming = assumed_line(plan.relied_on)
    if assuming is not None:
        say(assuming)
    stated = [assumption.name for assumption in plan.relied_on if assumption.basis == "stated"]
    if stated:
        say(f"stated: {', '.join(stated)}")
    of_tree = ""
    if from_prompts:
        say(_FROM_PROMPTS)
    elif plan.tree is not None and len(plan.tree.parent):
        of_tree = ", for the tree of shared beginnings in this plan"
    say(f"no order takes less than {plan.bound.iterations:,} iterations: {plan.bound.source}{of_tree}")
    if plan.gap is not None:
        say(f"gap {plan.gap:.4%}")
    if plan.aim is not None:
        value = "unknown" if plan.value is None else f"{plan.value:,} iterations"
        title, bound = plan.aim.goal.objective.title, plan.aim.bound
        say(f"{title}: {value}; no order takes less than {bound.value:,}: {bound.source}")
    if plan.aim_gap is not None:
        say(f"gap {plan.aim_gap:.4%}")
    if plan.least_seconds is not None:
        least = f"{plan.least_seconds.seconds:.6f} s"
        say(f"no order takes less than {least} at the plan's prices of an iteration")
    if plan.seconds_gap is not None:
        say(f"gap {plan.seconds_gap:.4%}")
    if plan.profile is not None:
        say("only a sample of iterations checks that those prices are at most the profile's")


def _show_replay(replayed: Replayed, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps({"verified": True, **_replay_summary(replayed)}))
        return
    _show_iterations(replayed.plan, from_prompts=False)
    say("the server drew each completion's planned tokens, and no count is below its bound:")
    _show_figures(replayed)


def _replay_summary(replayed: Replayed) -> dict[str, object]:
    """Return the figures of a replay by JSON key."""
    plan, server = replayed.plan, replayed.server
    predicted = plan.shares[0].predicted
    return {
        "order": plan.shares[0].order,
        "requests": len(plan.workload),
        "slots": plan.shares[0].limits.sequences,
        "objective": "makespan" if plan.aim is None else str(plan.aim.goal.objective),
        "value": replayed.value,
        "simulated": replayed.simulated,
        "least": replayed.least,
        "error": replayed.error,
        "iterations": replayed.iterations,
        "simulated_iterations": plan.iterations,
        "least_iterations": plan.bound.iterations,
        "preemptions": server.preemptions,
        "simulated_preemptions": None if predicted is None else predicted.preemptions,
        "prompt_tokens": int(replayed.prompt_tokens.sum()),
        "completion_tokens": int(replayed.completion_tokens.sum()),
        "seconds": float(replayed.finished.max()),
    }


def show_replayed(replayed: Replayed, options: ReplayOptions) -> int:
    """Print the server's counts next to simulation and bound."""
    violation = replayed.check()
    if options.json:
        say(json.dumps(_replay_summary(replayed) | {"replay": str(options.output)}))
    else:
        say(f"{options.output}: {_replay_of(replayed)}")
        _show_figures(replayed)
        if (assuming := assumed_line(replayed.plan.relied_on)) is not None:
            note(assuming)
    if violation is not None:
        fail(f"{options.output}: {violation}")
        return WRONG_BOUND if violation.rule == "the bound holds" else 1
    return 0


def _replay_of(replayed: Replayed) -> str:
    share = replayed.plan.shares[0]
    machine = f"{share.limits.sequences:,} slots of {replayed.server.engine}"
    return f"{len(replayed.plan.workload):,} completions on {machine}, {share.order}"


def _show_figures(replayed: Replayed) -> None:
    """Print a replay as a table."""
    figures = _replay_summary(replayed)
    say(f"  {'':22s} {'least':>12s} {'simulated':>12s} {'server':>12s}")
    rows = [("iterations", "least_iterations", "simulated_iterations", "iterations")]
    if replayed.plan.aim is not None:
        rows.append((str(figures["objective"]), "least", "simulated", "value"))
    rows.append(("preemptions", "", "simulated_preemptions", "preemptions"))
    for label, *names in rows:
        cells = "".join(f" {_cell(figures.get(name)):>12s}" for name in names)
        say(f"  {label:22s}{cells}")
    if replayed.error is not None:
        say(f"  the server is {replayed.error:+.2%} off the simulation, and took {figures['seconds']:,.1f} s")


def _cell(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else ""


def _show_compared(compared: Compared, *, as_json: bool) -> int:
    if as_json:
        digests, differing = list(compared.digests), list(compared.differing)
        say(json.dumps({"same": compared.same, "digests": digests, "differing": differing}))
    elif compared.same:
        say(f"the same tokens and log-probabilities, bit by bit: digest {compared.digests[0]}")
    if compared.same:
        return 0
    facts = "; ".join(
        f"{BIT_FACTS[name]}: {one} and {other}" for name, (one, other) in compared.differing.items()
    )
    return fail(f"tokens or log-probabilities differ ({facts or 'the traces agree in every other fact'})")


def show_bounds(bounds: Sequence[Bound], options: BoundOptions) -> int:
    """Print bounds with their terms."""
    if options.json:
        say(json.dumps([plain(bound) for bound in bounds]))
        return 0
    for bound in bounds:
        doubt = "" if bound.valid else " (NOT a valid bound in general: for comparison only)"
        say(f"{bound.seconds:14.6f} s  {bound.source}{doubt}")
        for name, seconds in bound.terms.items():
            say(f"{seconds:14.6f} s    {name}")
    return 0


def show_model(model: LinearModel, options: ExportOptions) -> int:
    """Print the size of a written model."""
    rows, columns = model.matrix.shape
    whole, unit = int(model.integer.sum()), "decode steps" if options.formulation == "packing" else "seconds"
    say(f"{options.output}: {rows:,} rows, {columns:,} columns, {whole:,} of them whole; minimise, in {unit}")
    return 0


def show_validated(validated: Validated, options: ValidateOptions) -> int:
    """Print the simulator's errors against a run."""
    validation, free = validated.validation, validated.free
    if validated.link is not None and free is not None:
        note(validated.link.text())
        took, without = (each.metrics["makespan_s"].simulated for each in (validation, free))
        note(f"{1 - without / took:.1%} of the simulated time depends on the link ({took - without:,.3f} s)")
    if options.json:
        say(json.dumps({"warnings": list(validated.warnings)} | validation.to_json()))
    else:
        warnings = (f"WARNING: {warning}" for warning in validated.warnings)
        say("\n".join([*warnings, _table(validation)]))
    return 0


def _table(validation: Validation) -> str:
    lines = [f"  {'':14s} {'measured':>10s} {'simulated':>10s} {'error':>8s}"]
    for name, metric in validation.metrics.items():
        figures = f"{metric.measured:10.4g} {metric.simulated:10.4g} {metric.error:+8.1%}"
        lines.append(f"  {name:14s} {figures}")
    lines.append(f"  {'order of completion':25s} {validation.order_correlation:10.4f} (Spearman)")
    return "\n".join(lines)
