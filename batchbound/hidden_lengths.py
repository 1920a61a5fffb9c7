"""Simulate policies that see no length on a file of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from .data.bound import Bound
from .data.files.disk import InputError
from .data.fleet import Fleet
from .data.lengths.interval import COVERAGE, Interval
from .data.problem import Problem
from .data.trace import Trace
from .heuristics.simulate import simulate
from .heuristics.unknown_lengths.groups import group_numbers, has_groups
from .heuristics.unknown_lengths.lengths import Known, LengthModel, Observed
from .heuristics.unknown_lengths.registry import CHOSEN, hidden_policy, without_lengths
from .inputs import Inputs, each_once, read_inputs
from .listening import note
from .models.bounds.fleet import work_bound
from .models.bounds.prove import proven_bound
from .options.simulate import SimulateOptions, hidden_entry
from .planning.history import History, earlier_completions
from .planning.step_changes import simulate_file_steps

SAMPLES = {200: 99, 500: 39}
"""Sampled sets of lengths by the job's most requests; more are more exact and slower."""

SAMPLES_OF_MANY = 19
"""Sampled sets of lengths of larger jobs; the interval is from the least makespan to the largest."""


def simulate_file_hidden(
    options: SimulateOptions, tell: Callable[[str], None]
) -> tuple[dict[str, Any], tuple[Trace, ...]]:
    """Simulate; return the figures, and the traces of a single step."""
    hidden_entry(options.policy)
    inputs = read_inputs(options, options.workload, keep_arrivals=options.steps is None, says_costs=False)
    problem = inputs.problem
    if options.swap is not None and not has_groups(problem):
        message = "--swap has no effect: preemption goes by groups, and no group has two requests"
        raise InputError(message, file=options.workload, hint="Name groups, or leave it out.")
    history = History(tuple(earlier_completions(path) for path in each_once(options.history)))
    if options.steps is None:
        trace, found = _one(options, problem, history, _longest(inputs), tell)
        return found, (trace,)
    return simulate_file_steps(options, problem, history.known(problem, _longest(inputs))), ()


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
        "intraclass_correlation": shared_variance(problem, trace) if has_groups(problem) else None,
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


def samples_of(problem: Problem) -> int:
    """Return the number of sampled sets of lengths of a job."""
    return next((found for most, found in SAMPLES.items() if len(problem) <= most), SAMPLES_OF_MANY)


def drawn_makespans(
    problem: Problem,
    history: History,
    policy: str,
    longest: int | None,
    swap: float | None = None,
    seed: int = 0,
) -> Iterator[float]:
    """Yield the makespans of many sampled sets of lengths, in seconds.

    Each set has an effect of its own, as steps differ.

    history: At least one workload.
    policy: Key of :data:`~batchbound.heuristics.unknown_lengths.registry.WITHOUT_LENGTHS`.
    longest: Cap in decode steps.
    swap: Seconds to move a KV token to the host or back, None if impossible.
    """
    blind, rng = without_lengths(problem), np.random.default_rng(seed)
    known, predictive = history.known(problem, longest), history.predictive(problem, longest)
    for _ in range(samples_of(problem)):
        truth = predictive.draw(rng)
        made = hidden_policy(policy, blind, known, swap)
        yield simulate(blind, made, truth, swap=swap).makespan


def simulate_hidden(
    problem: Problem,
    policy: str = CHOSEN,
    known: Known | None = None,
    swap: float | None = None,
) -> Trace:
    """Simulate a job under a policy that sees no length.

    swap: Seconds to move a KV token to the host or back, None if impossible.
    """
    blind = without_lengths(problem)
    made = hidden_policy(policy, blind, Known() if known is None else known, swap)
    return simulate(blind, made, problem.workload.output_tokens, swap=swap)


def bound_of_runs(problem: Problem, runs: Sequence[Trace]) -> Bound:
    """Bound all runs; allow evictions if any run evicts."""
    if not any(run.evictions for run in runs):
        return proven_bound(problem)
    # A request of unknown length may outgrow the capacities: they are left out.
    free = replace(problem, kv_capacity=None, prefill_token_cap=None, max_position=None)
    return work_bound(Fleet.of(free, 1))


def shared_variance(problem: Problem, trace: Trace) -> float:
    """Return the intraclass correlation of a job's lengths, from 0 to 1."""
    numbers, groups = group_numbers(problem)
    emitted = int(problem.prefill_emits_first_token)
    ended = np.ones(len(problem), dtype=np.bool_)
    return LengthModel.learnt(Observed(numbers, trace.tokens - emitted, ended), groups).share
