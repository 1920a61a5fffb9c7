"""``batchbound compare``: run solvers and policies on the same instances."""

from __future__ import annotations

import argparse
import json
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from ...comparing.instance_library import suite, suites
from ...comparing.result import Comparison, Measurement
from ...comparing.runner import Instance, compare, known_solvers, limits_heeded_by, write_text
from ...data.files.disk import InputError
from ...models.formulations.linear_files import read_mps
from ...solvers.result import Limits
from ..inputs import (
    add_problem,
    check_outputs,
    positive,
    random_seed,
    read_inputs,
    seconds,
)
from ..output import note
from ..parser import Parser, Rule
from ..streams import say

DEFAULT_SECONDS = 10.0
DEFAULT_SOLVERS = ("search", "lpt-ski", "policy:fcfs")

_LIMITS = {"--time-limit": "seconds", "--work": "work", "--seed": "seed", "--threads": "threads"}
"""Options of limits, with their fields of :class:`Limits`."""

OUTPUTS = ("csv", "markdown", "profile", "over_time")
"""Options that name a file to write."""


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    first = len(parser._actions)
    add_problem(parser, workload_needed=False)
    problem = parser.names_since(first)
    parser.add_argument(
        "--suite",
        action="append",
        metavar="NAME",
        everyday=True,
        help="instances of a suite of the library instead of files, each with its best known schedule and"
        f" certified bound ({', '.join(suites())}); may be repeated",
    )
    parser.add_argument(
        "more",
        nargs="*",
        metavar="FILE",
        help="further workloads under the same limits, or linear models (.mps) for the backends",
    )
    parser.add_argument(
        "--solvers",
        type=_solver_names,
        default=",".join(DEFAULT_SOLVERS),
        metavar="NAME,NAME",
        everyday=True,
        help="solvers to compare: " + ", ".join(known_solvers()) + " (default %(default)s)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        metavar="SECONDS",
        everyday=True,
        help=f"time limit of each solver in seconds (default {DEFAULT_SECONDS:g}, none with --work)",
    )
    parser.add_argument(
        "--work", type=positive, metavar="N", help="limit of each solver in steps, as in `plan`"
    )
    parser.add_argument(
        "--seed", type=random_seed, default=0, help="seed of random choices (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=positive, default=1, help="threads of each solver (default %(default)s)"
    )
    for option, what in (
        ("--csv", "the table as CSV"),
        ("--markdown", "the table in Markdown"),
        ("--profile", "the performance profile as an image"),
        ("--over-time", "the gap over time as an image"),
    ):
        parser.add_argument(option, metavar="FILE", help=f"write {what}")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        needs=["--csv", "--markdown", "--profile", "--over-time"],
        help="replace files that exist",
    )
    parser.add_argument(
        "--json", action="store_true", everyday=True, help="print one JSON object instead of the table"
    )
    own = "The library's instances have limits and costs of their own."
    parser.rules += [
        Rule(problem, conflicts=("--suite",), hint=own),
        Rule(problem, when=_are_linear, where="on linear models"),
        *(
            Rule((option,), when=partial(_ignored, field), where="on {solvers}")
            for option, field in _LIMITS.items()
        ),
    ]


def run(args: argparse.Namespace) -> int:
    """Run every solver on every instance, and print the table."""
    check_outputs(args, *OUTPUTS)
    for path in (args.profile, args.over_time):
        if path is not None and Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise InputError(
                "is not an image file that can be written", file=path, hint="Name a .png, .svg or .pdf file."
            )
    solvers = args.solvers.split(",")
    instances = _instances(args)
    limit = DEFAULT_SECONDS if args.work is None and args.time_limit is None else args.time_limit
    limits = Limits(seconds=limit, work=args.work, threads=args.threads, seed=args.seed)
    comparison = compare(instances, solvers, limits, on_done=_report)
    _write(comparison, args)
    say(json.dumps({"rows": comparison.to_json()}) if args.json else comparison.to_markdown().rstrip("\n"))
    return 0


def _solver_names(text: str) -> str:
    names = list(dict.fromkeys(text.split(",")))
    unknown = next((name for name in names if name not in known_solvers()), None)
    if unknown is not None:
        near = get_close_matches(unknown, known_solvers(), n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known_solvers())}"
        raise argparse.ArgumentTypeError(f"there is no solver {unknown!r}; {meant}")
    return ",".join(names)


def _ignored(limit: str, args: argparse.Namespace) -> bool:
    return not any(limit in limits_heeded_by(name) for name in args.solvers.split(","))


def _are_linear(args: argparse.Namespace) -> bool:
    return args.workload is not None and all(_is_linear(name) for name in (args.workload, *args.more))


def _report(row: Measurement) -> None:
    note(f"{row.instance}, {row.solver}: {row.status}" + (f", {row.message}" if row.message else ""))


def _instances(args: argparse.Namespace) -> dict[str, Instance]:
    if args.suite is None:
        if args.workload is None:
            hint = f"Name files, or --suite NAME of {', '.join(suites())}."
            raise InputError("missing: FILE", hint=hint)
        return {name: _instance(args, name) for name in dict.fromkeys((args.workload, *args.more))}
    if args.workload is not None:
        raise InputError("a file has no effect with --suite", hint="Leave one of them out.")
    return {
        f"{name}/{each}": plan for name in dict.fromkeys(args.suite) for each, plan in suite(name).items()
    }


def _is_linear(name: str) -> bool:
    return name.lower().endswith(".mps")


def _instance(args: argparse.Namespace, name: str) -> Instance:
    if _is_linear(name):
        return read_mps(name)
    chosen = argparse.Namespace(**{**vars(args), "workload": name})
    return read_inputs(chosen, keep_arrivals=False).problem


def _write(comparison: Comparison, args: argparse.Namespace) -> None:
    if args.csv is not None:
        write_text(args.csv, comparison.to_csv())
    if args.markdown is not None:
        write_text(args.markdown, comparison.to_markdown())
    if args.profile is not None:
        comparison.plot_profile(args.profile)
    if args.over_time is not None:
        comparison.plot_over_time(args.over_time)
