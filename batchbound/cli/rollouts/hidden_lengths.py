"""``simulate --hidden-lengths``: jobs, and steps of rollouts, whose policy sees no length."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...data.files.disk import InputError
from ...data.lengths.interval import COVERAGE, Interval
from ...data.lengths.steps import BARRIER, Way
from ...data.problem import Problem
from ...data.readers.tables import is_table, read_steps
from ...data.trace import Trace
from ...heuristics.unknown_lengths.queues import has_groups
from ...heuristics.unknown_lengths.registry import CHOSEN, WITHOUT_LENGTHS
from ...planning.history import History, earlier_completions
from ...planning.unknown_lengths import (
    bound_of_runs,
    drawn_makespans,
    shared_variance,
    simulate_hidden,
    simulate_hidden_steps,
    simulate_told,
)
from ..inputs import Inputs, at_least_zero, each_once, positive, read_inputs, refuse_given
from ..output import note
from ..reporting import print_rows

if TYPE_CHECKING:
    from ...executor.reports.tables import Row

_ONLY_HIDDEN = ("history", "swap", "steps")
_ONLY_STEPS = ("ahead", "keep", "restart", "keep_kv")


def add_hidden_lengths(parser: argparse.ArgumentParser) -> None:
    """Add the options of jobs whose lengths nobody knows."""
    group = parser.add_argument_group("lengths nobody knows")
    group.add_argument(
        "--hidden-lengths",
        action="store_true",
        help=f"the policy sees no length ({', '.join(WITHOUT_LENGTHS)}; default {CHOSEN}); the bound beside"
        " it knows all",
    )
    group.add_argument(
        "--history",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="earlier completions (tables, or a run's trace or output): of other requests, for how lengths"
        " are distributed; of the same ids (an earlier epoch, another model), for how long each is. Gives an"
        " expected makespan, too",
    )
    group.add_argument(
        "--swap",
        type=at_least_zero,
        metavar="SECONDS",
        help="that a token of KV cache takes to the host or back: what runs may give way to what waits",
    )
    group.add_argument(
        "--steps", metavar="COLUMN", help="of the table, that says which step of training a request is of"
    )
    _add_way(group)


def _add_way(group: argparse._ArgumentGroup) -> None:
    """Add the options that say when a step ends, and what becomes of what is not complete then."""
    group.add_argument(
        "--ahead",
        type=at_least_zero,
        metavar="SHARE",
        help="groups in play beyond those that a step waits for; what is not complete goes on in the next"
        " (APRIL; default 0: a barrier)",
    )
    group.add_argument(
        "--keep", type=positive, metavar="K", help="completions of each group that are kept, the first to end"
    )
    group.add_argument(
        "--restart",
        action="store_true",
        help="groups that are not complete start again, in rounds of their own (RollPacker)",
    )
    group.add_argument(
        "--keep-kv", action="store_true", help="what goes on keeps the KV cache of the weights before"
    )


def refuse_without_effect(args: argparse.Namespace) -> None:
    """Refuse options that have no effect beside the others."""
    if not args.hidden_lengths:
        refuse_given(args, (*_ONLY_HIDDEN, *_ONLY_STEPS), "without --hidden-lengths")
        return
    refuse_given(args, ("plan", "replicas", "dispatch"), "beside --hidden-lengths")
    if args.assignment != "own":
        raise InputError("--assignment has no effect beside --hidden-lengths", hint="Leave it out.")
    name = args.policy or CHOSEN
    entry = WITHOUT_LENGTHS.get(name)
    if entry is None:
        raise InputError(
            f"--policy {name} goes by lengths", hint=f"Without them there are {', '.join(WITHOUT_LENGTHS)}."
        )
    if args.steps is None:
        refuse_given(args, _ONLY_STEPS, "without --steps")
    else:
        refuse_given(args, ("swap", "trace"), "beside --steps")
        if not entry.takes_known:
            # Of one step the history also says what to expect.
            hint = f"Leave it out, or say --policy {CHOSEN}."
            refuse_given(args, ("history",), f"on the policy {name} beside --steps", hint)
    if args.swap is not None and not entry.takes_swap:
        raise InputError(f"--swap has no effect on the policy {name}", hint=f"Say --policy {CHOSEN}.")


def run_hidden(args: argparse.Namespace) -> tuple[Sequence[Trace], dict[str, Any]]:
    """Simulate, and return the trace of a single step and what the policy reaches."""
    inputs = read_inputs(args, keep_arrivals=args.steps is None)
    problem = inputs.problem
    if args.swap is not None and not has_groups(problem):
        message = "--swap has no effect: what runs gives way by its group, and no group has two requests"
        raise InputError(message, file=args.workload, hint="Name groups, or leave it out.")
    history = History(tuple(earlier_completions(path) for path in each_once(args.history or ())))
    if args.steps is None:
        trace, found = _one(args, problem, history, _longest(inputs))
        return [trace], found
    return [], _several(args, problem, history, _longest(inputs))


def print_hidden(found: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what a policy reaches on stdout: as one JSON object, or as a table."""
    if as_json:
        print(json.dumps(found))
    else:
        print_rows(_rows(found))


def _one(
    args: argparse.Namespace, problem: Problem, history: History, longest: int | None
) -> tuple[Trace, dict[str, Any]]:
    """Return the trace of a step, and what is said of it."""
    name = args.policy or CHOSEN
    known = history.known(problem, longest)
    trace = simulate_hidden(problem, name, known, args.swap)
    first, told = simulate_hidden(problem, "fcfs"), simulate_told(problem)
    bound = bound_of_runs(problem, (trace, first, told))
    lost = first.makespan - bound.seconds
    found: dict[str, Any] = {
        "policy": name,
        "makespan_s": trace.makespan,
        "fcfs_s": first.makespan,
        "bound_s": bound.seconds,
        "bound_source": bound.source,
        "gap": trace.makespan / bound.seconds - 1,
        "recovered": None if lost <= 0 else (first.makespan - trace.makespan) / lost,
        "recovered_told_lengths": None if lost <= 0 else (first.makespan - told.makespan) / lost,
        "intraclass_correlation": shared_variance(problem, trace),
        "evictions": trace.evictions,
        "prefill_stages": trace.prefill_stages,
        "requests": len(problem),
        "slots": problem.slots,
    }
    if history.workloads:
        expected = Interval.of(drawn_makespans(problem, history, name, longest, args.swap))
        found |= {f"expected_{key}_s": value for key, value in asdict(expected).items()}
        found["coverage"] = COVERAGE
    return trace, found


def _several(
    args: argparse.Namespace, problem: Problem, history: History, longest: int | None
) -> dict[str, Any]:
    """Return what is said of several steps."""
    if not is_table(args.workload):
        message = "--steps is for a table of lengths, that has a column of steps"
        raise InputError(message, file=args.workload, hint="Give a table, or leave --steps out.")
    step = read_steps(args.workload, args.steps)
    if len(step) != len(problem):
        raise InputError(
            "rows were left out, so that steps fit no more", file=args.workload, hint="Give whole rows."
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
    """Return the tokens that no completion is longer than, by the option and by what requests state."""
    caps = inputs.job.lengths.capped([record.max_tokens for record in inputs.job.records])
    stated = [cap for cap in caps if cap is not None]
    most = max(stated) if stated and len(stated) == len(caps) else inputs.job.lengths.longest
    if any(cap != most for cap in caps):
        reach = "go on for ever" if most is None else f"reach {most:,}"
        note(f"some requests state fewer tokens: what to expect is said as if every one might {reach}")
    return most


def _longest(inputs: Inputs) -> int | None:
    """Return the decode steps after which every completion is cut, if anybody says."""
    most = _longest_stated(inputs)
    return None if most is None else max(1, most - int(inputs.problem.prefill_emits_first_token))


def _rows(found: Mapping[str, Any]) -> list[Row]:
    """Return the lines of a table for people."""
    from ...executor.reports.tables import Row, duration, percent

    shares = {
        "gap": "above the bound",
        "recovered": "of FCFS's loss recovered",
        "recovered_told_lengths": "by one told each group's lengths, not whose",
        "intraclass_correlation": "alike within a group (ICC)",
        "saved": "less time than FCFS with a barrier",
        "stale_share": "completions begun in an earlier step",
        "kept_length_bias": "kept completions longer by",
        "early_length_bias": "those before the last step longer by",
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
