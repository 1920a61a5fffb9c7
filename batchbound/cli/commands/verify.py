"""``batchbound verify``: a plan's schedule and bound checked again, without the solver that made them."""

from __future__ import annotations

import argparse
import json

from ...data.plan import Plan
from ...models.certificates.fleet import verify_fleet_bound
from ..output import fail


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("plan", nargs="?", default="plan.json", metavar="PLAN", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Load the plan, which has the referee check its schedule, and re-derive its bound."""
    plan = Plan.load(args.plan)
    bound = plan.bound
    if bound is None:
        return fail(f"{args.plan}: the schedule breaks no rule; there is no bound to verify")
    violation = verify_fleet_bound(plan.fleet, bound)
    if violation is not None:
        return fail(f"{args.plan}: the bound does not hold: {violation}")
    if args.json:
        verified = {"makespan_s": plan.makespan, "bound_s": bound.seconds, "gap": plan.gap}
        print(json.dumps({"verified": True, "bound_source": bound.source, **verified}))
    else:
        print(f"the schedule breaks no rule and takes {plan.makespan:.6f} s")
        print(f"no schedule takes less than {bound.seconds:.6f} s: {bound.source}")
        print("no gap to a bound of no time" if plan.gap is None else f"gap {plan.gap:.4%}")
    return 0
