"""``plan --steps``: several steps of rollouts whose lengths nobody knows, planned and updated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.costs.cost import IntArray
from ...data.files.disk import InputError
from ...data.files.jsonl import file_digest
from ...data.lengths.steps_plan import COVERAGE, Interval, StepsExpectation, StepsPlan, Way
from ...data.readers.completions import lengths_by_name
from ...data.readers.tables import read_steps
from ...data.workload import numbered
from ...heuristics.unknown_lengths.registry import WITHOUT_LENGTHS
from ...planning.history import read_history
from ...planning.steps import POLICIES, history_of, make_steps_plan, steps_of, text_of, update_steps_plan
from ...solvers.result import Limits
from ..inputs import Inputs, each_once, provenance_of, read_inputs, refuse_given
from ..reporting import print_rows
from .hidden_lengths import add_way, longest_stated

if TYPE_CHECKING:
    from ...executor.reports.tables import Row
    from ...running.steps import StepResult, StepsFiles

_OF_STEPS = ("history", "policy", "ahead", "keep", "restart", "keep_kv")
_OF_SCHEDULES = (
    "solver",
    "work",
    "threads",
    "replicas",
    "dispatch",
    "groups",
    "sweep",
    "price",
    "engine",
    "token_budget",
    "block_tokens",
    "no_prefix_caching",
    "length_error",
    "lengths",
    "drop_unanswered",
)
_OF_AN_UPDATE = (
    "time_limit",
    "command",
    "run",
    "workload",
    "ended",
    "output",
    "overwrite",
    "json",
    "quiet",
    "verbose",
)


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan over several steps."""
    group = parser.add_argument_group("several steps of rollouts whose lengths nobody knows")
    group.add_argument(
        "--steps",
        metavar="COLUMN|N",
        help="the column, or field beside body, that says which step a request is of, or into how many steps"
        " the groups are shared out; lengths in FILE are not read and need not be there."
        " The plan says what to expect, per step and in all",
    )
    group.add_argument(
        "--history",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="earlier completions, of a step each: tables, which may have the same column of steps, or a"
        " run's trace or output",
    )
    group.add_argument(
        "--policy",
        choices=sorted(WITHOUT_LENGTHS),
        help=f"default: the best of {', '.join(POLICIES)}",
    )
    add_way(group, at_most="at most; the plan takes all of it, half or nothing")
    group.add_argument(
        "--ended",
        metavar="FILE",
        help="all completions that have ended (a table with id and output_tokens, or a run's trace or"
        " output); FILE is the plan that is under way, and what to expect of it is stated anew",
    )
    parser.set_defaults(usual=vars(parser.parse_args(["FILE"])))


def concerned(args: argparse.Namespace) -> bool:
    """Return whether several steps are planned; refuse options that have no effect beside the others."""
    usual = args.usual
    if args.ended is not None:
        others = [name for name in usual if name not in (*_OF_AN_UPDATE, "usual")]
        _refuse_unusual(args, others, "beside --ended: the plan has settled it")
        return True
    if args.steps is None:
        refuse_given(args, _OF_STEPS, "without --steps")
        return False
    _refuse_unusual(args, _OF_SCHEDULES, "beside --steps: there is no schedule to search")
    if not args.slots:
        raise InputError("--slots auto has no effect beside --steps", hint="Give a number.")
    if args.history is None:
        raise InputError(
            "--steps needs --history: nothing else says how long completions are", hint="Give it."
        )
    return True


def _refuse_unusual(args: argparse.Namespace, names: Sequence[str], where: str) -> None:
    given = next((name for name in names if getattr(args, name) != args.usual[name]), None)
    if given is not None:
        option = {"engine": "for"}.get(given, given).replace("_", "-")
        raise InputError(f"--{option} has no effect {where}", hint="Leave one of them out.")


def steps_planned(args: argparse.Namespace) -> StepsPlan:
    """Return the plan of several steps that the options ask for, new or updated."""
    if args.ended is not None:
        return _updated(args)
    args.lengths = "constant:1"
    inputs = read_inputs(args, keep_arrivals=False)
    step, problem = _steps(args, inputs), inputs.problem
    if inputs.job.records:
        # A prompt that comes again in another step begins a group of its own.
        work = problem.workload
        group = np.where(work.group < 0, -1, work.group * (int(step.max()) + 1) + step)
        problem = replace(problem, workload=replace(work, group=group).with_shared_prompts())
    paths = each_once(args.history)
    column = None if args.steps.isdecimal() else args.steps
    history = read_history({path: file_digest(path) for path in paths}, column)
    try:
        plan = make_steps_plan(
            problem,
            step,
            history,
            Way(args.ahead or 0.0, args.keep, args.restart, args.keep_kv),
            policy=args.policy,
            longest=longest_stated(inputs),
            limits=Limits(seconds=args.time_limit, seed=args.seed),
            provenance=provenance_of(inputs, args.output),
        )
    except ValueError as error:
        raise InputError(str(error), file=args.workload, hint="Correct the table or the option.") from None
    return replace(plan, column=column)


def _updated(args: argparse.Namespace) -> StepsPlan:
    plan = StepsPlan.load(args.workload)
    history = history_of(plan)
    ended = lengths_by_name(args.ended, apart=True)
    try:
        later = update_steps_plan(plan, history, ended, seconds=args.time_limit)
    except ValueError as error:
        raise InputError(str(error), file=args.ended, hint="Correct the row.") from None
    return later.seen_from(args.output, args.workload)


def _steps(args: argparse.Namespace, inputs: Inputs) -> IntArray:
    if args.steps.isdecimal():
        try:
            return steps_of(inputs.problem, int(args.steps))
        except (ValueError, ZeroDivisionError) as error:
            hint = "Give fewer, or the column or field that says the step of each."
            raise InputError(str(error), file=args.workload, where="--steps", hint=hint) from None
    if inputs.job.digest is None or Path(args.workload).is_dir():
        message = "--steps COLUMN is for a file, whose rows or lines say of which step they are"
        raise InputError(message, file=args.workload, hint="Give a number of steps.")
    step = read_steps(args.workload, args.steps)
    if not inputs.job.records:
        return step
    # A line may ask for several completions, all of its step.
    return step[numbered(one.line for one in inputs.job.records)]


def show_steps(plan: StepsPlan, path: str, *, as_json: bool) -> None:
    """Print what is to be expected of a plan of several steps on stdout: as one JSON object, or a table."""
    if as_json:
        print(json.dumps(_summary(plan)))
        return
    print(f"{path}: {len(plan.fleet):,} requests in {int(plan.step.max()) + 1} steps")
    print_rows(_rows(plan))


def show_step(result: StepResult, *, as_json: bool) -> None:
    """Print what a step of a run came to on stdout: as one JSON object, or as lines for people."""
    from ...executor.reports.tables import duration, percent

    plan, files = result.plan, result.files
    steps = int(plan.step.max()) + 1
    output = str(files.completions(result.step))
    if as_json:
        found = {
            "step": result.step + 1,
            "steps": steps,
            "output": output,
            "completions": len(result.completions),
            "resumed": result.resumed,
            "seconds": result.seconds,
            "model_seconds": result.model_seconds,
            "unfinished": result.unfinished,
            "stale_share": result.stale_share,
            "staleness_steps": result.staleness,
            **_expected(plan),
        }
        print(json.dumps(found))
        return
    # Not all of those are of a group that is complete now.
    before = f" ({result.resumed:,} had ended before)" if result.resumed else ""
    took = f"{duration(result.seconds)}, {duration(result.model_seconds)} by the model"
    stale = f"{percent(result.stale_share)} of their tokens are of earlier steps"
    age = f"{result.staleness:.3f} steps old on average"
    count = f"{len(result.completions):,} completions{before}"
    print(f"{output}: step {result.step + 1} of {steps}, {count} in {took}")
    print(f"{stale}, {age}; {result.unfinished:,} unfinished completions go on in the next")
    total = plan.expected.total
    between = f"{percent(COVERAGE, 0)} within {duration(total.low)} to {duration(total.high)}"
    print(f"{files.plan}: all steps take {duration(total.mean)} by the model, {between}")


def show_served(files: StepsFiles) -> None:
    """Print on stdout, as one JSON object, what there is to say of a plan of which all steps are served."""
    plan = StepsPlan.load(files.plan)
    print(json.dumps({"step": None, "steps": int(plan.step.max()) + 1, "completions": 0, **_expected(plan)}))


def _expected(plan: StepsPlan) -> dict[str, Any]:
    return {"ended": int((plan.ended > 0).sum()), "expected": plan.to_json()["expected"]}


def _summary(plan: StepsPlan) -> dict[str, Any]:
    value = plan.to_json()
    return {
        **{name: value[name] for name in ("policy", "way", "permitted", "expected")},
        "coverage": COVERAGE,
        "steps": int(plan.step.max()) + 1,
        "requests": len(plan.fleet),
        "slots": plan.problem.slots,
        "ended": int((plan.ended > 0).sum()),
    }


def _recovered(expected: StepsExpectation) -> list[Row]:
    """Return the lines of what is recovered of first come, first served's loss, and could be."""
    from ...executor.reports.tables import Row, percent

    ours, tendencies = expected.recovered(expected.total), expected.told_tendencies
    if ours is None:
        return [Row("shares", "FCFS's loss", "none lost", "")]
    rows = [Row("shares", "FCFS's loss recovered", percent(ours), "")]
    if tendencies is None or expected.told_lengths is None:
        return rows
    known, more = (expected.recovered(each) or 0.0 for each in (tendencies, expected.told_lengths))
    rows += [
        Row("shares", "by one told the groups' tendencies", percent(known), ""),
        Row("shares", "by one told their lengths, not whose", percent(more), ""),
    ]
    left = Row(
        "shares", "left to foresight", percent(max(0.0, 1 - max(ours, known))), "an estimate, no bound"
    )
    return [*rows, left]


def _rows(plan: StepsPlan) -> list[Row]:
    from ...executor.reports.tables import Row, duration, percent

    expected = plan.expected

    def seconds(name: str, value: Interval) -> Row:
        between = f"{percent(COVERAGE, 0)} within {duration(value.low)} to {duration(value.high)}"
        return Row("seconds", name, duration(value.mean), between)

    rows = [seconds("expected", expected.total)]
    rows += [seconds(f"step {k + 1}", each) for k, each in enumerate(expected.seconds)]
    rows += [
        seconds("bound with lengths known", expected.bound),
        seconds("first come, first served, barrier", expected.first_come),
    ]
    told = {
        "told how long each group tends to be": expected.told_tendencies,
        "told each group's lengths, not whose": expected.told_lengths,
    }
    rows += [seconds(name, each) for name, each in told.items() if each is not None]
    saved = 1 - expected.total.mean / expected.first_come.mean
    shares = {
        "less time than FCFS with a barrier": saved,
        "above the bound": expected.total.mean / expected.bound.mean - 1,
        "completions begun in an earlier step": expected.stale_share,
        "kept completions longer by": expected.kept_bias,
        "those before the last step longer by": expected.early_bias,
    }
    rows += [Row("shares", name, percent(value), "") for name, value in shares.items()]
    rows += _recovered(expected)
    rows += [Row("compared", name, duration(value), "") for name, value in expected.compared.items()]
    return [
        *rows,
        Row("counts", "policy", plan.policy, text_of(plan.way)),
        Row("counts", "age of a completion in steps", f"{expected.staleness:.3f}", ""),
        Row("counts", "sets of lengths drawn", str(expected.samples), ""),
        Row("counts", "ended", str(int((plan.ended > 0).sum())), f"of {len(plan.fleet)}"),
    ]
