"""``batchbound simulate``: any policy on any workload, in the simulator."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from ...data.files.disk import InputError
from ...data.plan import Plan
from ...data.readers.length_source import longest_planned
from ...data.report import Report
from ...data.trace import Trace
from ...executor.reports.report import report
from ...heuristics.follow import following
from ...heuristics.registry import POLICIES, policy_named
from ...heuristics.simulate import simulate
from ...solvers.bounds.proven_bound import proven_bound
from ...solvers.packing.partition import solve_partition
from ..inputs import add_problem, named_files, read_inputs, refuse_outputs
from ..reporting import print_report, report_of

OF_THE_PLAN = ("slots", "kv_capacity", "prefill_token_cap", "max_position", "cost", "first_token", "policy")
"""Options that a plan has settled."""

DEFAULT_POLICY = "fcfs"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_problem(parser)
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        metavar="POLICY",
        help="; ".join(f"{name}: {entry.summary}" for name, entry in POLICIES.items())
        + f" (default {DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="carry out this plan instead, on the answer lengths of FILE as they come out: a plan of"
        " predicted lengths on true ones, say; slots, costs and limits are the plan's",
    )
    parser.set_defaults(settled={name: parser.get_default(name) for name in OF_THE_PLAN})
    parser.add_argument(
        "--assignment",
        choices=("own", "optimal"),
        default="own",
        help="of requests to slots, for policies that start from one: the policy's own, or a bin packing"
        " proven optimal (default %(default)s)",
    )
    parser.add_argument("--trace", metavar="FILE", help="write the trace")
    parser.add_argument("--overwrite", action="store_true", help="replace the trace if it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Simulate, and say what the policy reaches beside the bound."""
    begun = time.perf_counter()
    if args.trace is not None:
        refuse_outputs([args.trace], args.overwrite, named_files(args, "trace"))
    trace, value = _followed(args) if args.plan is not None else _by_policy(args)
    if args.trace is not None:
        trace.save(args.trace)
    print_report(replace(value, seconds=time.perf_counter() - begun), as_json=args.json)
    return 0


def _by_policy(args: argparse.Namespace) -> tuple[Trace, Report]:
    problem = read_inputs(args, keep_arrivals=True).problem
    policy, assignment = args.policy or DEFAULT_POLICY, None
    if args.assignment == "optimal":
        if POLICIES[policy].assignment is None:
            message = f"the policy {policy!r} starts from no assignment"
            raise InputError(message, hint="Leave --assignment out.")
        assignment = solve_partition(problem.rounds, problem.slots).assignment
    trace = simulate(problem, policy_named(policy, problem, assignment))
    return trace, report(problem, trace, proven_bound(problem), None)


def _followed(args: argparse.Namespace) -> tuple[Trace, Report]:
    """Return the trace and report of a plan carried out on the lengths that the workload says."""
    given = next((name for name in OF_THE_PLAN if getattr(args, name) != args.settled[name]), None)
    if given is not None or args.assignment != "own":
        option = (given or "assignment").replace("_", "-")
        raise InputError(f"--{option} says nothing beside --plan", hint="Leave one of them out.")
    plan = Plan.load(args.plan)
    args.slots, args.max_position = plan.problem.slots, None
    if args.longest_answer is None:
        # A run of the plan stops there.
        args.longest_answer = longest_planned(plan.provenance.lengths, file=args.plan)
    answered = read_inputs(args, keep_arrivals=False).problem.workload
    ids = plan.problem.workload.ids.tolist()
    row_of = {name: row for row, name in enumerate(answered.ids.tolist())}
    missing = next((name for name in ids if name not in row_of), None)
    if missing is not None or len(ids) != len(answered):
        what = f"{len(answered)} requests for the plan's {len(ids)}" if missing is None else f"no {missing!r}"
        raise InputError(f"has {what}", file=args.workload, hint="Give the requests that were planned.")
    truth = answered.output_tokens[[row_of[name] for name in ids]]
    trace = simulate(plan.problem, following(plan.expected, plan.schedule, plan.problem), truth)
    return trace, report_of(plan, [trace])
