"""``batchbound simulate``: any policy on any workload, in the simulator."""

from __future__ import annotations

import argparse
import time

from ..data.files import InputError
from ..executor.report import report
from ..executor.simulate import simulate
from ..heuristics.registry import POLICIES, policy_named
from ..models.bounds import best_bound
from ..solvers.partition import solve_partition
from .inputs import add_problem, read_inputs, refuse_existing
from .reporting import print_report


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_problem(parser)
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        default="fcfs",
        metavar="POLICY",
        help="; ".join(f"{name}: {entry.summary}" for name, entry in POLICIES.items())
        + " (default %(default)s)",
    )
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
        refuse_existing(args.trace, args.overwrite)
    problem = read_inputs(args, keep_arrivals=True).problem
    assignment = None
    if args.assignment == "optimal":
        if POLICIES[args.policy].assignment is None:
            message = f"the policy {args.policy!r} starts from no assignment"
            raise InputError(message, mend="Leave --assignment out.")
        assignment = solve_partition(problem.rounds, problem.slots).assignment
    trace = simulate(problem, policy_named(args.policy, problem, assignment))
    if args.trace is not None:
        trace.save(args.trace)
    value = report(problem, trace, best_bound(problem), None, seconds=time.perf_counter() - begun)
    print_report(value, as_json=args.json)
    return 0
