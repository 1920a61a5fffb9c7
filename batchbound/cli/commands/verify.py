"""``batchbound verify``: check a plan's schedule and bound without the solver."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ...data.claims.assumptions import assumed_line
from ...data.files.disk import InputError
from ...data.iteration_plan import IterationPlan, load_plan
from ...data.trace import Trace
from ...judging import verify
from ..output import fail
from ..parser import Parser
from ..streams import say

BIT_FACTS = {
    "run": "plan, model or sampling",
    "dtype": "number format",
    "threads": "threads",
    "torch": "torch",
    "product_rows": "rows of a product",
    "processor": "processor",
}
"""Facts of a trace that determine a run's bits, with users' names."""


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "plan", nargs="?", default="plan.json", metavar="PLAN", help="plan (default %(default)s)"
    )
    parser.add_argument(
        "--same-as",
        metavar="TRACE",
        help="compare the digests of two traces of runs with --repeatable: PLAN and this one",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Load the plan, check it and derive its bound again."""
    if args.same_as is not None:
        return _compare_runs(args)
    plan = load_plan(args.plan)
    if isinstance(plan, IterationPlan):
        return _verify_iterations(plan, args)
    bound, condition = plan.claim, plan.provenance.condition
    if bound is None:
        return fail(f"{args.plan}: the schedule breaks no rule; there is no bound to verify")
    violation = verify(plan)
    if violation is not None:
        what = "bound" if plan.followed is None else "plan"
        return fail(f"{args.plan}: the {what} does not hold: {violation}")
    if args.json:
        verified: dict[str, object] = {"makespan_s": plan.seconds, "bound_s": bound.seconds, "gap": plan.gap}
        verified |= {} if plan.bound_of is None else {"bound_of": plan.bound_of}
        verified |= {"bound_if": condition} if condition else {}
        say(json.dumps({"verified": True, "bound_source": bound.source, **verified}))
    else:
        if plan.repeats:
            say(plan.repeats)
        say(f"the schedule breaks no rule and takes {plan.makespan:.6f} s")
        followed = plan.followed
        if followed is not None:
            counts = f"{followed.decode_steps:,} decode steps and {followed.evictions:,} evictions"
            say(f"the policy {followed.policy}, simulated again, takes {followed.seconds:.6f} s, {counts}")
        which = (plan.bound_of or "every schedule").removeprefix("every ").removesuffix(", evicting or not")
        held = f", if {condition}" if condition else ""
        say(f"no {which} takes less than {bound.seconds:.6f} s{held}: {bound.source}")
        say("no gap: the bound is zero" if plan.gap is None else f"gap {plan.gap:.4%}")
    return 0


def _compare_runs(args: argparse.Namespace) -> int:
    runs = [Trace.load(path).engine for path in (args.plan, args.same_as)]
    for path, engine in zip((args.plan, args.same_as), runs, strict=True):
        if "digest" not in engine:
            raise InputError("names no digest", file=path, hint="Run again with --repeatable.")
    one, other = runs
    differing = [name for name in BIT_FACTS if one.get(name) != other.get(name)]
    # The fact "run" covers all others.
    differing = [name for name in differing if name != "run"] or differing
    same = one["digest"] == other["digest"]
    if args.json:
        found = {"same": same, "digests": [one["digest"], other["digest"]], "differing": differing}
        say(json.dumps(found))
    elif same:
        say(f"the same tokens and log-probabilities, bit by bit: digest {one['digest']}")
    if same:
        return 0
    facts = "; ".join(f"{BIT_FACTS[name]}: {one.get(name)} and {other.get(name)}" for name in differing)
    return fail(f"tokens or log-probabilities differ ({facts or 'the traces agree in every other fact'})")


def _verify_iterations(plan: IterationPlan, args: argparse.Namespace) -> int:
    violation = verify(plan)
    if violation is not None:
        return fail(f"{args.plan}: the plan does not hold: {violation}")
    least = plan.least_seconds
    if args.json:
        verified: dict[str, object] = {"iterations": plan.iterations, "gap": plan.gap}
        verified |= {"bound_iterations": plan.bound.iterations, "bound_source": plan.bound.source}
        verified |= {"assumptions": [asdict(one) for one in plan.relied_on]}
        if least is not None:
            verified |= {
                "makespan_s": plan.seconds,
                "bound_s": least.seconds,
                "seconds_gap": plan.seconds_gap,
            }
        say(json.dumps({"verified": True, **verified}))
        return 0
    taken = "is too large to simulate" if plan.iterations is None else f"takes {plan.iterations:,} iterations"
    say(f"the order holds each completion once and, simulated again, {taken}")
    assuming = assumed_line(plan.relied_on)
    if assuming is not None:
        say(assuming)
    say(f"no order takes less than {plan.bound.iterations:,} iterations: {plan.bound.source}")
    if plan.gap is not None:
        say(f"gap {plan.gap:.4%}")
    if least is not None:
        say(f"no order takes less than {least.seconds:.6f} s at the plan's prices of an iteration")
    if plan.seconds_gap is not None:
        say(f"gap {plan.seconds_gap:.4%}")
    if plan.profile is not None:
        say("only a sample of iterations checks that those prices are at most the profile's")
    return 0
