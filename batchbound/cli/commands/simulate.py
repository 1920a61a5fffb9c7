"""``batchbound simulate``: simulate a policy on a workload."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

from ...data.arrays import IntArray
from ...data.files.disk import InputError
from ...data.files.outputs import refuse_outputs
from ...data.plan import Plan
from ...data.readers.length_source import longest_planned
from ...data.report import Report
from ...data.trace import Trace
from ...executor.reports.report import fleet_report, report
from ...heuristics.dispatch import RULES, dispatch
from ...heuristics.fleet.policy import FleetPolicy, serve_with_backoff
from ...heuristics.fleet.simulation import simulate_fleet
from ...heuristics.follow import following, plan_policy
from ...heuristics.registry import POLICIES, policy_named
from ...heuristics.simulate import simulate
from ...judging import report as report_of
from ...models.bounds.fleet import fleet_bound
from ...models.bounds.packing.partition import solve_partition
from ...models.bounds.prove import evicting_bound, proven_bound
from ...planning.fleet import fleet_of
from ...run_job.outputs import trace_paths
from ..inputs import add_problem, check_outputs, named_files, read_inputs
from ..parser import Parser, Rule
from ..progress import working
from ..reporting import print_report
from ..rollouts.hidden_lengths import add_hidden_lengths, print_hidden, run_hidden

OF_THE_PLAN = (
    "--slots",
    "--kv-capacity",
    "--prefill-token-cap",
    "--max-position",
    "--cost",
    "--first-token",
    "--policy",
    "--assignment",
)
"""Options that a plan fixes."""

DEFAULT_POLICY = "fcfs"


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    add_problem(parser)
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        metavar="POLICY",
        everyday=True,
        help="; ".join(f"{name}: {entry.summary}" for name, entry in POLICIES.items())
        + f" (default {DEFAULT_POLICY})",
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--plan",
        metavar="PLAN",
        everyday=True,
        help="follow this plan, with its slots, costs and limits, instead of a policy; the lengths are those"
        " of FILE, for instance the true ones for a plan of predicted lengths",
    )
    parser.add_argument(
        "--assignment",
        choices=("own", "optimal"),
        default="own",
        excludes=["--hidden-lengths", "--replicas"],
        help="assignment of requests to slots, for policies that use one: the policy's own, or an optimal bin"
        " packing (default %(default)s)",
    )
    ways.add_argument(
        "--replicas",
        metavar="N|FILE",
        help="number of engines, or a file as in `plan --replicas`; each follows the policy, and an idle one"
        " takes over waiting requests of the others",
    )
    parser.add_argument(
        "--dispatch",
        choices=sorted(RULES),
        needs=["--replicas"],
        help="rule that dispatches requests to replicas (default: lpt)",
    )
    add_hidden_lengths(parser, ways)
    parser.add_argument("--trace", metavar="FILE", everyday=True, help="write the trace to this file")
    parser.add_argument(
        "--overwrite", action="store_true", needs=["--trace"], help="replace the trace if it exists"
    )
    parser.add_argument(
        "--json", action="store_true", everyday=True, help="print one JSON object instead of a table"
    )
    parser.rules.append(Rule(OF_THE_PLAN, conflicts=("--plan",)))


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the makespan and the bound."""
    begun = time.perf_counter()
    if args.hidden_lengths:
        _check_traces(args, 1)
        with working("simulating") as tell:
            traces, found = run_hidden(args, tell)
        _write_traces(args, traces)
        print_hidden({**found, "seconds": time.perf_counter() - begun}, as_json=args.json)
        return 0
    carried_out = _followed if args.plan is not None else _by_policy if args.replicas is None else _by_fleet
    with working("simulating"):
        traces, value = carried_out(args)
    _write_traces(args, traces)
    print_report(replace(value, seconds=time.perf_counter() - begun), as_json=args.json)
    return 0


def _write_traces(args: argparse.Namespace, traces: Sequence[Trace]) -> None:
    if args.trace is not None:
        for path, trace in zip(trace_paths(args.trace, len(traces)), traces, strict=True):
            trace.save(path)


def _check_traces(args: argparse.Namespace, replicas: int) -> None:
    if args.trace is not None and replicas > 1:
        paths = trace_paths(args.trace, replicas)
        refuse_outputs(paths, args.overwrite, named_files(args, "trace"))
    else:
        check_outputs(args, "trace")


def _by_policy(args: argparse.Namespace) -> tuple[Sequence[Trace], Report]:
    _check_traces(args, 1)
    problem = read_inputs(args, keep_arrivals=True).problem
    policy, assignment = args.policy or DEFAULT_POLICY, None
    if args.assignment == "optimal":
        if POLICIES[policy].assignment is None:
            message = f"the policy {policy!r} starts from no assignment"
            raise InputError(message, hint="Leave --assignment out.")
        assignment = solve_partition(problem.decode_steps, problem.slots).assignment
    trace = simulate(problem, policy_named(policy, problem, assignment))
    found = report(problem, trace, proven_bound(problem), None)
    if trace.evictions:
        # The simulator obeys the KV capacity, so the stronger bound holds.
        seconds = max(found.run_bound or 0.0, evicting_bound(problem).seconds)
        found = replace(found, run_bound=seconds)
    return [trace], found


def _by_fleet(args: argparse.Namespace) -> tuple[Sequence[Trace], Report]:
    inputs = read_inputs(args, keep_arrivals=False)
    fleet = fleet_of(inputs.problem, args.replicas, inputs.prompts)
    _check_traces(args, len(fleet.replicas))
    policy = args.policy or DEFAULT_POLICY
    try:
        replica_of = dispatch(fleet, args.dispatch or "lpt")
    except ValueError as error:
        raise InputError(str(error), where="--dispatch", hint="Choose another rule.") from None
    ran = simulate_fleet(fleet, replica_of, policy=lambda problem: policy_named(policy, problem))
    return ran.traces, fleet_report(fleet, ran.traces, fleet_bound(fleet), served_by=replica_of)


def _followed(args: argparse.Namespace) -> tuple[Sequence[Trace], Report]:
    plan = Plan.load(args.plan)
    _check_traces(args, len(plan.fleet.replicas))
    args.slots, args.max_position = max(one.slots for one in plan.fleet.replicas), None
    if args.longest_completion is None:
        # A run of the plan stops there.
        args.longest_completion = longest_planned(plan.provenance.lengths, file=args.plan)
    answered = read_inputs(args, keep_arrivals=False).problem.workload
    ids = plan.workload.ids.tolist()
    row_of = {name: row for row, name in enumerate(answered.ids.tolist())}
    missing = next((name for name in ids if name not in row_of), None)
    if missing is not None or len(ids) != len(answered):
        what = f"{len(answered)} requests for the plan's {len(ids)}" if missing is None else f"no {missing!r}"
        raise InputError(f"has {what}", file=args.workload, hint="Give the requests that were planned.")
    truth = answered.output_tokens[[row_of[name] for name in ids]]
    traces = _carried_out(plan, truth)
    return traces, report_of(plan, traces)


def _carried_out(plan: Plan, truth: IntArray) -> Sequence[Trace]:
    """Return each replica's trace, by its queue or schedule."""
    if len(plan.fleet.replicas) == 1:
        return [simulate(plan.problem, plan_policy(plan, plan.schedule, plan.problem), truth)]
    shares, fleet = plan.shares, plan.fleet
    if plan.expected is not None:
        policy, backoff = FleetPolicy.of(plan.expected), plan.groups == "any"
        return serve_with_backoff(fleet, shares.replica_of, policy, truth, backoff=backoff).traces
    traces = []
    for k, schedule in enumerate(shares.schedules):
        mine = shares.members(k)
        if schedule is None:
            traces.append(Trace.empty(fleet.replicas[k].slots))
        else:
            problem = fleet.problem_of(k, mine)
            traces.append(simulate(problem, following(None, schedule, problem), truth[mine]))
    return traces
