"""Simulate policies that see no length on a file of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .data.files.disk import InputError
from .data.lengths.interval import COVERAGE, Interval
from .data.lengths.steps import BARRIER, Way
from .data.problem import Problem
from .data.readers.tables import is_table, read_steps
from .data.trace import Trace
from .heuristics.unknown_lengths.groups import has_groups
from .heuristics.unknown_lengths.registry import CHOSEN
from .inputs import Inputs, each_once, read_inputs
from .listening import note
from .options.simulate import SimulateOptions, hidden_entry
from .planning.history import History, earlier_completions
from .planning.unknown_lengths import (
    bound_of_runs,
    drawn_makespans,
    samples_of,
    shared_variance,
    simulate_hidden,
    simulate_hidden_steps,
)


def simulate_file_hidden(
    options: SimulateOptions, tell: Callable[[str], None]
) -> tuple[dict[str, Any], tuple[Trace, ...]]:
    """Simulate; return the figures, and the traces of a single step."""
    hidden_entry(options.policy)
    inputs = read_inputs(options, options.workload, keep_arrivals=options.steps is None)
    problem = inputs.problem
    if options.swap is not None and not has_groups(problem):
        message = "--swap has no effect: preemption goes by groups, and no group has two requests"
        raise InputError(message, file=options.workload, hint="Name groups, or leave it out.")
    history = History(tuple(earlier_completions(path) for path in each_once(options.history)))
    if options.steps is None:
        trace, found = _one(options, problem, history, _longest(inputs), tell)
        return found, (trace,)
    return _several(options, options.steps, problem, history, _longest(inputs)), ()


def _one(
    options: SimulateOptions,
    problem: Problem,
    history: History,
    longest: int | None,
    tell: Callable[[str], None],
) -> tuple[Trace, dict[str, Any]]:
    name = options.policy or CHOSEN
    known = history.known(problem, longest)
    trace = simulate_hidden(problem, name, known, options.swap)
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
        for each in drawn_makespans(problem, history, name, longest, options.swap):
            seconds.append(each)
            tell(f"simulating sampled lengths, {len(seconds)} of {samples}")
        expected = Interval.of(seconds)
        found |= {f"expected_{key}_s": value for key, value in asdict(expected).items()}
        found["coverage"] = COVERAGE
    return trace, found


def _several(
    options: SimulateOptions, column: str, problem: Problem, history: History, longest: int | None
) -> dict[str, Any]:
    if not is_table(options.workload):
        message = "--steps needs a table of lengths with a column of steps"
        raise InputError(message, file=options.workload, hint="Give a table, or leave --steps out.")
    step = read_steps(options.workload, column)
    if len(step) != len(problem):
        raise InputError(
            "rows were left out, so steps do not match the rows",
            file=options.workload,
            hint="Give whole rows.",
        )
    name = options.policy or CHOSEN
    known, truth = history.known(problem, longest), problem.workload.output_tokens
    try:
        way = Way(options.ahead or 0.0, options.keep, options.restart, options.keep_kv)
        ran = simulate_hidden_steps(problem, step, way, name, known)
    except ValueError as error:
        raise InputError(str(error), file=options.workload, hint="Correct the table or the option.") from None
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
