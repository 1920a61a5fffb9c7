"""``batchbound compare``: solvers and policies side by side on the same instances."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ...comparing.instance_library import suite, suites
from ...comparing.result import Comparison, Measurement
from ...comparing.runner import Instance, compare, known_solvers, limits_heeded_by, write_text
from ...data.files.disk import InputError
from ...models.formulations.linear_files import read_mps
from ...solvers.result import Limits
from ..inputs import (
    add_problem,
    positive,
    random_seed,
    read_inputs,
    refuse_given,
    refuse_losses,
    seconds,
)
from ..output import note

DEFAULT_SECONDS = 10.0
DEFAULT_SOLVERS = ("search", "lpt-ski", "policy:fcfs")

_LIMITS = {"time_limit": "seconds", "work": "work", "seed": "seed", "threads": "threads"}
"""Options of limits, by the fields that they become."""

OUTPUTS = ("csv", "markdown", "profile", "over_time")
"""Options that name a file to write."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_problem(parser, workload_needed=False)
    parser.add_argument(
        "--suite",
        action="append",
        metavar="NAME",
        help="instead of files: the instances of a suite of the library, each with the best schedule and"
        f" certified bound known ({', '.join(suites())}); may be repeated",
    )
    parser.add_argument(
        "more",
        nargs="*",
        metavar="FILE",
        help="further workloads under the same limits, or linear models (.mps) for the backends",
    )
    parser.add_argument(
        "--solvers",
        default=",".join(DEFAULT_SOLVERS),
        metavar="NAME,NAME",
        help="of " + ", ".join(known_solvers()) + " (default %(default)s)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        metavar="SECONDS",
        help=f"of each (default {DEFAULT_SECONDS:g}, none with --work)",
    )
    parser.add_argument("--work", type=positive, metavar="N", help="steps of each solver, as of plan")
    parser.add_argument("--seed", type=random_seed, default=0, help="of random choices (default %(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="of each (default %(default)s)")
    for option, what in (
        ("--csv", "the table as CSV"),
        ("--markdown", "the table in Markdown"),
        ("--profile", "the performance profile as an image"),
        ("--over-time", "the gap over time as an image"),
    ):
        parser.add_argument(option, metavar="FILE", help=f"write {what}")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run every solver on every instance, and print the table."""
    refuse_losses(args, *OUTPUTS)
    for path in (args.profile, args.over_time):
        if path is not None and Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise InputError(
                "is no kind of image we write", file=path, hint="Name a .png, .svg or .pdf file."
            )
    solvers = list(dict.fromkeys(args.solvers.split(",")))
    unknown = next((name for name in solvers if name not in known_solvers()), None)
    if unknown is not None:
        near = get_close_matches(unknown, known_solvers(), n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known_solvers())}."
        raise InputError(f"there is no solver {unknown!r}", where="solvers", hint=hint)
    _refuse_unheeded(args, solvers)
    instances = _instances(args)
    limit = DEFAULT_SECONDS if args.work is None and args.time_limit is None else args.time_limit
    limits = Limits(seconds=limit, work=args.work, threads=args.threads, seed=args.seed)
    comparison = compare(instances, solvers, limits, on_done=_report)
    _write(comparison, args)
    print(json.dumps({"rows": comparison.to_json()}) if args.json else comparison.to_markdown(), end="")
    if args.json:
        print()
    return 0


def _refuse_unheeded(args: argparse.Namespace, solvers: Sequence[str]) -> None:
    """Raise InputError if a limit is given that none of the solvers heeds."""
    heeded = frozenset[str]().union(*map(limits_heeded_by, solvers))
    unheeded = [name for name, field in _LIMITS.items() if field not in heeded]
    where = f"on {', '.join(solvers)}"
    refuse_given(args, unheeded, where, "Leave it out.", usual={"seed": 0, "threads": 1})


def _report(row: Measurement) -> None:
    """Say on stderr that a solver has ended, and what the table has no room for: why it has nothing."""
    note(f"{row.instance}, {row.solver}: {row.status}" + (f", {row.message}" if row.message else ""))


def _instances(args: argparse.Namespace) -> dict[str, Instance]:
    if args.suite is None:
        if args.workload is None:
            hint = f"Name files, or --suite NAME of {', '.join(suites())}."
            raise InputError("missing: FILE", hint=hint)
        names = dict.fromkeys((args.workload, *args.more))
        if all(_is_linear(name) for name in names):
            _refuse_of_problem(args, "on linear models", "Leave it out.", "workload")
        return {name: _instance(args, name) for name in names}
    own = "Leave one of them out: the library's instances have limits and costs of their own."
    _refuse_of_problem(args, "beside --suite", own)
    return {
        f"{name}/{each}": plan for name in dict.fromkeys(args.suite) for each, plan in suite(name).items()
    }


def _refuse_of_problem(args: argparse.Namespace, where: str, hint: str, but: str = "") -> None:
    """Raise InputError if an option of the problem is given, but for one, where instances have their own."""
    problem = argparse.ArgumentParser()
    add_problem(problem, workload_needed=False)
    for name, default in vars(problem.parse_args([])).items():
        if name != but and getattr(args, name) != default:
            said = "a file" if name == "workload" else f"--{name.replace('_', '-')}"
            raise InputError(f"{said} has no effect {where}", hint=hint)


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
