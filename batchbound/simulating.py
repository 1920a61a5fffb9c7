"""Simulate a policy, a plan or replicas on a file of requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .data.arrays import IntArray
from .data.files.disk import InputError
from .data.files.outputs import refuse_outputs
from .data.plan import Plan
from .data.readers.length_source import longest_planned
from .data.report import Report
from .data.trace import Trace
from .executor.reports.report import fleet_report, report
from .heuristics.dispatch import dispatch
from .heuristics.fleet.policy import FleetPolicy, serve_with_backoff
from .heuristics.fleet.simulation import simulate_fleet
from .heuristics.follow import plan_policy
from .heuristics.registry import POLICIES, policy_named
from .heuristics.simulate import simulate as simulate_problem
from .heuristics.simulator import KEEPS_KV
from .hidden_lengths import simulate_file_hidden
from .inputs import assumes_costs, read_inputs
from .judging import report as report_of
from .listening import working
from .models.bounds.fleet import fleet_bound
from .models.bounds.packing.partition import solve_partition
from .models.bounds.prove import evicting_bound, proven_bound
from .options.option import Either, PathText, takes
from .options.simulate import DEFAULT_POLICY, SimulateOptions
from .planning.fleet import fleet_of
from .run_job.outputs import trace_paths


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulation: its report, or the figures of hidden lengths, and the traces.

    assumes_costs: True if no costs were stated or kept, so that seconds are of no engine.
    """

    report: Report | dict[str, Any]
    traces: tuple[Trace, ...]
    assumes_costs: bool = False


@takes(SimulateOptions)
def simulate_file(options: SimulateOptions) -> Simulation:
    """Simulate a policy, a plan or replicas on a file of requests.

    It takes the options of ``batchbound simulate`` as keywords.
    """
    begun = time.perf_counter()
    with working("simulating") as tell:
        if options.hidden_lengths:
            _check_traces(options, 1)
            simulation = Simulation(*simulate_file_hidden(options, tell), assumes_costs(options))
        elif options.plan is not None:
            simulation = _followed(options, options.plan)
        elif options.replicas is not None:
            simulation = _by_fleet(options, options.replicas)
        else:
            simulation = _by_policy(options)
    if options.trace is not None:
        paths = trace_paths(str(options.trace), len(simulation.traces))
        for path, trace in zip(paths, simulation.traces, strict=True):
            trace.save(path)
    report, seconds = simulation.report, time.perf_counter() - begun
    timed = report | {"seconds": seconds} if isinstance(report, dict) else replace(report, seconds=seconds)
    return replace(simulation, report=timed)


simulate = Either(simulate_file, simulate_problem)


def _check_traces(options: SimulateOptions, replicas: int) -> None:
    if options.trace is not None and replicas > 1:
        refuse_outputs(trace_paths(str(options.trace), replicas), options.overwrite, options.read_files())
    else:
        options.check_outputs("trace")


def _by_policy(options: SimulateOptions) -> Simulation:
    _check_traces(options, 1)
    problem = read_inputs(options, options.workload, keep_arrivals=True, says_costs=False).problem
    policy, assignment = options.policy or DEFAULT_POLICY, None
    if options.assignment == "optimal":
        if POLICIES[policy].assignment is None:
            message = f"the policy {policy!r} starts from no assignment"
            raise InputError(message, hint="Leave --assignment out.")
        assignment = solve_partition(problem.decode_steps, problem.slots).assignment
    trace = simulate_problem(problem, policy_named(policy, problem, assignment))
    found = report(problem, trace, proven_bound(problem), None)
    if trace.evictions:
        # The simulator obeys the KV capacity, so the stronger bound holds.
        seconds = max(found.run_bound or 0.0, evicting_bound(problem).seconds)
        found = replace(found, run_bound=seconds)
    return Simulation(replace(found, bound_of=problem.bound_of), (trace,), assumes_costs(options))


def _by_fleet(options: SimulateOptions, replicas: str) -> Simulation:
    inputs = read_inputs(options, options.workload, keep_arrivals=False, says_costs=False)
    fleet = fleet_of(inputs.problem, replicas, inputs.prompts)
    _check_traces(options, len(fleet.replicas))
    policy = options.policy or DEFAULT_POLICY
    try:
        replica_of = dispatch(fleet, options.dispatch or "lpt")
    except ValueError as error:
        raise InputError(str(error), where="--dispatch", hint="Choose another rule.") from None
    ran = simulate_fleet(fleet, replica_of, policy=lambda problem: policy_named(policy, problem))
    report = fleet_report(fleet, ran.traces, fleet_bound(fleet), served_by=replica_of)
    report = replace(report, bound_of=inputs.problem.bound_of)
    return Simulation(report, tuple(ran.traces), assumes_costs(options))


def _followed(options: SimulateOptions, plan_path: PathText) -> Simulation:
    plan = Plan.load(plan_path)
    _check_traces(options, len(plan.fleet.replicas))
    longest = options.longest_completion
    if longest is None:
        # A run of the plan stops there.
        longest = longest_planned(plan.provenance.lengths, file=str(plan_path))
    slots = max(replica.slots for replica in plan.fleet.replicas)
    limits = replace(options, plan=None, slots=slots, max_position=None, longest_completion=longest)
    answered = read_inputs(limits, options.workload, keep_arrivals=False).problem.workload
    ids = plan.workload.ids.tolist()
    row_of = {name: row for row, name in enumerate(answered.ids.tolist())}
    missing = next((name for name in ids if name not in row_of), None)
    if missing is not None or len(ids) != len(answered):
        what = f"{len(answered)} requests for the plan's {len(ids)}" if missing is None else f"no {missing!r}"
        raise InputError(f"has {what}", file=options.workload, hint="Give the requests that were planned.")
    truth = answered.output_tokens[[row_of[name] for name in ids]]
    traces = _carried_out(plan, truth)
    return Simulation(report_of(plan, traces), tuple(traces))


def _carried_out(plan: Plan, truth: IntArray) -> Sequence[Trace]:
    """Return each replica's trace, by its queue or schedule."""
    swap = None if plan.followed is None else KEEPS_KV
    if len(plan.fleet.replicas) == 1:
        policy_made = plan_policy(plan, plan.schedule, plan.problem)
        return [simulate_problem(plan.problem, policy_made, truth, swap=swap)]
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
            policy_made = plan_policy(plan, schedule, problem)
            traces.append(simulate_problem(problem, policy_made, truth[mine], swap=swap))
    return traces
