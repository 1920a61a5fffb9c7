"""``simulate --hidden-lengths``: policies that see no length."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...data.files.disk import InputError
from ...data.lengths.interval import COVERAGE, Interval
from ...data.lengths.steps import BARRIER, Way
from ...data.problem import Problem
from ...data.readers.tables import is_table, read_steps
from ...data.trace import Trace
from ...heuristics.unknown_lengths.groups import has_groups
from ...heuristics.unknown_lengths.registry import CHOSEN, WITHOUT_LENGTHS, HiddenEntry
from ...planning.history import History, earlier_completions
from ...planning.unknown_lengths import (
    bound_of_runs,
    drawn_makespans,
    samples_of,
    shared_variance,
    simulate_hidden,
    simulate_hidden_steps,
)
from ..inputs import Inputs, at_least_zero, each_once, positive, read_inputs
from ..output import note
from ..parser import Exclusive, Group, Parser, Rule
from ..reporting import print_rows
from ..streams import say

if TYPE_CHECKING:
    from ...executor.reports.tables import Row


def add_hidden_lengths(parser: Parser, ways: Exclusive) -> None:
    """Add the options of jobs with unknown lengths."""
    ways.add_argument(
        "--hidden-lengths",
        action="store_true",
        everyday=True,
        help=f"hide the lengths from the policy ({', '.join(WITHOUT_LENGTHS)}; default {CHOSEN}); the bound"
        " uses them",
    )
    group = parser.add_argument_group("unknown lengths")
    group.add_argument(
        "--history",
        metavar="FILE",
        nargs="+",
        action="extend",
        needs=["--hidden-lengths"],
        help="files of earlier completions: tables, or traces or outputs of runs. Those of other requests"
        " give the distribution of lengths; those of the same ids (an earlier epoch, another model) predict"
        " each length. Adds an expected makespan",
    )
    group.add_argument(
        "--swap",
        type=at_least_zero,
        metavar="SECONDS",
        needs=["--hidden-lengths"],
        excludes=["--steps"],
        help="allow to preempt running requests for waiting ones; seconds to move the KV cache of one token"
        " to the host or back",
    )
    group.add_argument(
        "--steps",
        metavar="COLUMN",
        needs=["--hidden-lengths"],
        help="column of the table with the training step of each request",
    )
    _add_way(group)
    parser.rules += [
        Rule(("--trace",), conflicts=("--steps",)),
        Rule(
            ("--swap",),
            when=lambda args: args.hidden_lengths and not _entry(args).takes_swap,
            where="on the policy {policy}",
            hint=f"Give --policy {CHOSEN}.",
        ),
        Rule(
            ("--history",),
            # For a single step the history gives an expected makespan to any policy.
            when=lambda args: args.steps is not None and not _entry(args).takes_known,
            where="on the policy {policy} with --steps",
            hint=f"Leave it out, or give --policy {CHOSEN}.",
        ),
    ]


def _entry(args: argparse.Namespace) -> HiddenEntry:
    name = args.policy or CHOSEN
    if name not in WITHOUT_LENGTHS:
        hint = f"Choose one of {', '.join(WITHOUT_LENGTHS)}."
        raise InputError(f"--policy {name} needs lengths", hint=hint)
    return WITHOUT_LENGTHS[name]


def _add_way(group: Group) -> None:
    """Add the options that end a step and continue unfinished completions."""
    group.add_argument(
        "--ahead",
        type=at_least_zero,
        metavar="SHARE",
        needs=["--steps"],
        help="share of groups in flight beyond those that a step waits for; unfinished ones continue in the"
        " next step (APRIL; default 0: a barrier)",
    )
    group.add_argument(
        "--keep",
        type=positive,
        metavar="K",
        needs=["--steps"],
        help="keep the first K completions of each group to end, and stop the others",
    )
    group.add_argument(
        "--restart",
        action="store_true",
        needs=["--steps"],
        help="start unfinished groups again, in phases of their own (RollPacker)",
    )
    group.add_argument(
        "--keep-kv",
        action="store_true",
        needs=["--steps"],
        help="keep the KV cache of continued completions although the weights changed",
    )


def run_hidden(
    args: argparse.Namespace, tell: Callable[[str], None]
) -> tuple[Sequence[Trace], dict[str, Any]]:
    """Simulate; return the traces of a single step and the figures."""
    _entry(args)
    inputs = read_inputs(args, keep_arrivals=args.steps is None)
    problem = inputs.problem
    if args.swap is not None and not has_groups(problem):
        message = "--swap has no effect: preemption goes by groups, and no group has two requests"
        raise InputError(message, file=args.workload, hint="Name groups, or leave it out.")
    history = History(tuple(earlier_completions(path) for path in each_once(args.history or ())))
    if args.steps is None:
        trace, found = _one(args, problem, history, _longest(inputs), tell)
        return [trace], found
    return [], _several(args, problem, history, _longest(inputs))


def print_hidden(found: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the figures on stdout, as JSON or as a table."""
    if as_json:
        say(json.dumps(found))
    else:
        print_rows(_rows(found))


def _one(
    args: argparse.Namespace,
    problem: Problem,
    history: History,
    longest: int | None,
    tell: Callable[[str], None],
) -> tuple[Trace, dict[str, Any]]:
    name = args.policy or CHOSEN
    known = history.known(problem, longest)
    trace = simulate_hidden(problem, name, known, args.swap)
    first = simulate_hidden(problem, "fcfs")
    bound = bound_of_runs(problem, (trace, first))
    lost = first.makespan - bound.seconds
    found: dict[str, Any] = {
        "policy": name,
        "makespan_s": trace.makespan,
        "fcfs_s": first.makespan,
        "bound_s": bound.seconds,
        "bound_source": bound.source,
        "gap": trace.makespan / bound.seconds - 1,
        "recovered": None if lost <= 0 else (first.makespan - trace.makespan) / lost,
        "intraclass_correlation": shared_variance(problem, trace),
        "evictions": trace.evictions,
        "prefill_stages": trace.prefill_stages,
        "requests": len(problem),
        "slots": problem.slots,
    }
    if history.workloads:
        samples, seconds = samples_of(problem), []
        for each in drawn_makespans(problem, history, name, longest, args.swap):
            seconds.append(each)
            tell(f"simulating sampled lengths, {len(seconds)} of {samples}")
        expected = Interval.of(seconds)
        found |= {f"expected_{key}_s": value for key, value in asdict(expected).items()}
        found["coverage"] = COVERAGE
    return trace, found


def _several(
    args: argparse.Namespace, problem: Problem, history: History, longest: int | None
) -> dict[str, Any]:
    if not is_table(args.workload):
        message = "--steps needs a table of lengths with a column of steps"
        raise InputError(message, file=args.workload, hint="Give a table, or leave --steps out.")
    step = read_steps(args.workload, args.steps)
    if len(step) != len(problem):
        raise InputError(
            "rows were left out, so steps do not match the rows", file=args.workload, hint="Give whole rows."
        )
    name = args.policy or CHOSEN
    known, truth = history.known(problem, longest), problem.workload.output_tokens
    try:
        way = Way(args.ahead or 0.0, args.keep, args.restart, args.keep_kv)
        ran = simulate_hidden_steps(problem, step, way, name, known)
    except ValueError as error:
        raise InputError(str(error), file=args.workload, hint="Correct the table or the option.") from None
    barrier = simulate_hidden_steps(problem, step, BARRIER, "fcfs").makespan
    return {
        "policy": name,
        "steps": len(ran.seconds),
        "makespan_s": ran.makespan,
        "fcfs_barrier_s": barrier,
        "saved": 1 - ran.makespan / barrier,
        "step_s": ran.seconds.tolist(),
        "kept": int(ran.kept.sum()),
        "stale_share": ran.stale_share,
        "staleness_steps": ran.staleness,
        "kept_length_bias": ran.kept_bias(truth),
        "early_length_bias": ran.early_bias(truth),
        "lost_tokens": ran.lost,
        "requests": len(problem),
        "slots": problem.slots,
    }


def _longest_stated(inputs: Inputs) -> int | None:
    """Return the largest completion that is stated, in tokens."""
    caps = inputs.job.lengths.capped([record.max_tokens for record in inputs.job.records])
    stated = [cap for cap in caps if cap is not None]
    most = max(stated) if stated and len(stated) == len(caps) else inputs.job.lengths.longest
    if any(cap != most for cap in caps):
        assumed = "no limit" if most is None else f"a limit of {most:,} tokens"
        note(f"requests state different limits: the expected makespan assumes {assumed} for each")
    return most


def _longest(inputs: Inputs) -> int | None:
    most = _longest_stated(inputs)
    return None if most is None else max(1, most - int(inputs.problem.prefill_emits_first_token))


def _rows(found: Mapping[str, Any]) -> list[Row]:
    from ...executor.reports.tables import Row, duration, percent

    shares = {
        "gap": "above the bound",
        "recovered": "of FCFS's loss recovered",
        "intraclass_correlation": "correlation within a group (ICC)",
        "saved": "less time than FCFS with a barrier",
        "stale_share": "completions begun in an earlier step",
        "kept_length_bias": "kept completions longer by",
        "early_length_bias": "completions before the last step longer by",
    }
    seconds = {
        "makespan_s": "makespan",
        "fcfs_s": "first come, first served",
        "fcfs_barrier_s": "FCFS with a barrier",
        "bound_s": "bound with lengths known",
    }
    rows = []
    for key, value in found.items():
        if key in seconds:
            note = str(found.get("bound_source", "")) if key == "bound_s" else ""
            rows.append(Row("seconds", seconds[key], duration(value), note))
        elif key in shares:
            rows.append(Row("shares", shares[key], "none lost" if value is None else percent(value), ""))
        elif key == "expected_mean_s":
            between = f"{duration(found['expected_low_s'])} to {duration(found['expected_high_s'])}"
            rows.append(
                Row("seconds", "expected", duration(value), f"{percent(COVERAGE, 0)} within {between}")
            )
        elif key == "staleness_steps":
            rows.append(Row("counts", "age of a completion in steps", f"{value:.3f}", ""))
        elif isinstance(value, int | str) and key != "bound_source":
            rows.append(Row("counts", key.replace("_", " "), str(value), ""))
    return sorted(rows, key=lambda row: ("seconds", "shares", "counts").index(row.group))
