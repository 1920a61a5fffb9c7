"""Verify plans, bound and export problems, and validate the simulator."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from .cost_cache import costs_of
from .data.bound import PROVEN_WITHIN, Bound
from .data.costs.link import FREE_LINK, Link
from .data.files.disk import InputError
from .data.files.kinds import is_of_kind
from .data.files.outputs import refuse_outputs
from .data.files.record import record
from .data.fleet import Fleet
from .data.iteration_plan import IterationPlan, load_plan
from .data.plan import Plan
from .data.problem import Problem
from .data.readers.measured_run import read_vllm_run
from .data.readers.openai_batch import each_sample, read_batch
from .data.readers.profile_readers import read_profile
from .data.readers.replayed import KIND as REPLAY
from .data.readers.replayed import Replayed
from .data.schedule import Violation
from .data.trace import PLANNED, Trace
from .executor.profiling.validate import Validation, validate_run, validate_trace
from .executor.reports.report import model_seconds, run_bound_of, served_part
from .gain import KEPT, Gain
from .heuristics.iterations.replay import mismatches
from .inputs import read_cost, read_inputs
from .judging import verify
from .listening import note
from .models.bounds.fleet import work_bound
from .models.bounds.makespan import difference_set_bound, paper_bound, trivial_bound
from .models.bounds.packing.partition import solve_partition
from .models.bounds.prove import proven_bound
from .models.certificates.beginnings import Beginnings
from .models.certificates.computed_once import verify_counted_bound
from .models.certificates.fleet import verify_fleet_bound
from .models.formulations.full_model import UnsupportedProblemError
from .models.formulations.linear_files import write_mps
from .models.formulations.linear_model import LinearModel
from .models.formulations.named import MODELS
from .options.bound import BoundOptions, ExportOptions
from .options.judging import ValidateOptions, VerifyOptions
from .options.link import LINK
from .options.option import takes
from .planning.mixed_job import completion_prompts
from .run_job.earlier import trace_of
from .solvers.backends.lp_file import write_lp

BIT_FACTS = {
    "run": "plan, model or sampling",
    "dtype": "number format",
    "threads": "threads",
    "torch": "torch",
    "product_rows": "rows of a product",
    "processor": "processor",
}
"""Facts of a trace that determine a run's bits, with users' names."""


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """Bound of a run whose plan knew no lengths.

    trace: File of the run.
    bound: Bound of its completions, by the costs of its end screen, else by the plan's.
    seconds: Seconds of its stages by these costs.
    fitted: Whether its stages fit costs.
    """

    trace: Path
    bound: Bound
    seconds: float
    fitted: bool


@dataclass(frozen=True, slots=True)
class Verified:
    """A plan, its violation or None, and the run of a plan without lengths.

    from_prompts: True if the tree of shared beginnings was derived from the prompts again.
    replayed: The plan's replay on a server, or None.
    """

    plan: Plan | IterationPlan
    violation: Violation | None
    run: VerifiedRun | None = None
    from_prompts: bool = False
    replayed: Replayed | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Digests of two runs, and the facts in which the runs differ.

    differing: Keys of :data:`BIT_FACTS`, with the values of both runs.
    """

    digests: tuple[object, object]
    differing: dict[str, tuple[object, object]]

    @property
    def same(self) -> bool:
        """Whether the runs agree bit by bit."""
        return self.digests[0] == self.digests[1]


@takes(VerifyOptions)
def verify_file(options: VerifyOptions) -> Verified | Compared:
    """Verify a file's plan or replay without its solver, or compare two runs."""
    if options.same_as is not None:
        return _compared(options.plan, options.same_as)
    if is_of_kind(options.plan, REPLAY):
        replayed = Replayed.load(options.plan)
        return Verified(replayed.plan, verify(replayed.plan), replayed=replayed)
    plan = load_plan(options.plan)
    if options.prompts is not None:
        tree = plan.tree if isinstance(plan, IterationPlan) else plan.workload.tree
        if tree is None:
            hint = "Leave --prompts out: its bound does not depend on shared beginnings."
            raise InputError("holds no tree of prompts", file=options.plan, hint=hint)
        again = _of_prompts(plan, tree.unit, options)
        wrong = again if isinstance(again, Violation) else verify(again)
        return replace(_of_run(plan, options), violation=wrong, from_prompts=True)
    if isinstance(plan, Plan) and plan.claim is None:
        return _of_run(plan, options)
    return Verified(plan, verify(plan))


def _of_run(plan: Plan | IterationPlan, options: VerifyOptions) -> Verified:
    """Verify the bound of a run whose plan claims none."""
    if not isinstance(plan, Plan) or plan.claim is not None or not plan.lengths_unknown:
        return Verified(plan, None)
    trace = trace_of(options.plan) if len(plan.fleet.replicas) == 1 else None
    return Verified(plan, None) if trace is None else _verified_run(plan, trace)


def _verified_run(plan: Plan, path: Path) -> Verified:
    """Bound the completions of a run, and verify that bound by its certificate."""
    trace = Trace.load(path)
    served = served_part(plan.fleet, [trace])
    if served is None or trace.engine.get(PLANNED, plan.schedule_digest()) != plan.schedule_digest():
        return Verified(plan, None)
    kept, found = trace.engine.get(KEPT), costs_of(trace)
    # The end screen has a bound at these costs.
    own = None if kept is None else record(Gain, kept).cost
    own = own or (None if found is None else found.cost)
    problem = served.problem() if own is None else replace(served.problem(), cost=own)
    fleet = Fleet.of(problem, 1)
    prove = work_bound if trace.evictions else lambda fleet: proven_bound(fleet.problem())
    bound = run_bound_of(fleet, [trace], prove)
    if bound is None:
        return Verified(plan, None)
    seconds = model_seconds(problem.cost, trace, overheads=False)
    run = VerifiedRun(path, bound, seconds, own is not None)
    if bound.certificate.get("kind") == "common beginnings":
        return Verified(plan, verify_counted_bound(problem, trace.distinct_tokens or 0, bound), run)
    return Verified(plan, verify_fleet_bound(fleet, bound), run)


def _of_prompts(
    plan: Plan | IterationPlan, unit: int, options: VerifyOptions
) -> Plan | IterationPlan | Violation:
    """Return the plan with the tree of its prompts, derived again."""
    from .executor.models.prompts import encoded
    from .executor.models.tokenizers import load_tokenizer

    assert options.prompts is not None
    planned = plan.provenance.prompts
    tokenizer, columns = None, None
    if planned is not None:
        columns = planned.columns
        folder = Path(options.plan).resolve().parent
        name = planned.tokenizer
        tokenizer = load_tokenizer(str(folder / name) if name.startswith(".") else name) if name else None
    owners: list[str] | None
    if isinstance(plan, IterationPlan):
        names, prompts, owners = completion_prompts(options.prompts, tokenizer, columns)
    else:
        assert tokenizer is not None
        records = each_sample(read_batch(options.prompts, columns), options.prompts)
        names, prompts = [one.name for one in records], list(encoded(records, tokenizer, options.prompts))
        owners = None
    lengths = dict(zip(names, map(len, prompts), strict=True))
    for name, tokens in zip(plan.workload.ids.tolist(), plan.workload.input_tokens.tolist(), strict=True):
        if lengths.get(name) != tokens:
            what = f"the prompt of {name!r} has {lengths.get(name, 'no')} tokens, the plan says {tokens}"
            return Violation("the plan is of these prompts", what)
    if names != plan.workload.ids.tolist():
        return Violation("the plan is of these prompts", "the file has other requests, or another order")
    tree = Beginnings.of_prompts(prompts, owners, unit).tree()
    if isinstance(plan, IterationPlan):
        return replace(plan, tree=tree)
    again = replace(plan, fleet=replace(plan.fleet, workload=plan.workload.with_tree(tree.worth_keeping())))
    makespan = again.shares.makespan(again.fleet)
    if not math.isclose(makespan, plan.makespan, rel_tol=PROVEN_WITHIN):
        what = f"the schedule takes {makespan!r} s, the plan says {plan.makespan!r} s"
        return Violation("the plan's tree is that of these prompts", what)
    return again


def _compared(*paths: str | os.PathLike[str]) -> Compared:
    engines = [Trace.load(path).engine for path in paths]
    for path, engine in zip(paths, engines, strict=True):
        if "digest" not in engine:
            raise InputError("names no digest", file=path, hint="Run again with --repeatable.")
    one, other = engines
    differing = {
        name: (one.get(name), other.get(name)) for name in BIT_FACTS if one.get(name) != other.get(name)
    }
    # The fact "run" covers all others.
    others = {name: both for name, both in differing.items() if name != "run"}
    return Compared((one["digest"], other["digest"]), others or differing)


@takes(BoundOptions)
def bounds(options: BoundOptions) -> tuple[Bound, ...]:
    """Return the bounds of a file's requests, the strongest first.

    The last is the hybrid paper's formula, which is not valid in general.
    """
    problem = read_inputs(options, options.workload, keep_arrivals=False).problem
    if problem.memory_can_run_out:
        note("the bounds are of schedules that evict no request: with evictions some job may take less")
    valid = [trivial_bound(problem), difference_set_bound(problem), proven_bound(problem)]
    by_source = {bound.source: bound for bound in valid}
    return (*sorted(by_source.values(), key=lambda bound: -bound.seconds), _printed(problem))


def _printed(problem: Problem) -> Bound:
    """Return the paper's formula for stages of the greatest length."""
    prompts = problem.prompt_tokens
    tokens = problem.prefill_token_cap or max(1, int(prompts.sum()) * problem.slots // len(prompts))
    packing = solve_partition(problem.decode_steps, problem.slots)
    return paper_bound(problem, [(tokens, problem.cost.prefill_seconds(tokens))], packing.makespan)


@takes(ExportOptions)
def export(options: ExportOptions) -> LinearModel:
    """Write the linear model of a file's requests as MPS or LP."""
    write = {".mps": write_mps, ".lp": write_lp}.get(Path(options.output).suffix)
    if write is None:
        hint = "Name a .mps or .lp file."
        raise InputError("a linear model is written as MPS or LP", file=options.output, hint=hint)
    refuse_outputs([options.output], options.overwrite, options.read_files())
    problem = read_inputs(options, options.workload, keep_arrivals=False, one_engine=False).problem
    try:
        # PuLP's reader ignores the constant of an objective.
        model = MODELS[options.formulation](problem).with_offset_as_column()
    except UnsupportedProblemError as error:
        hint = "Export another formulation, or fewer requests or slots, or drop that option."
        raise InputError(str(error), where=f"--formulation {options.formulation}", hint=hint) from None
    write(model, options.output)
    return model


@dataclass(frozen=True, slots=True)
class Validated:
    """The simulator's error against a run.

    warnings: Ways in which the profile and the run differ.
    link: Link of the model's devices; None on one device.
    free: The simulation with a link that takes no time, or None.
    """

    validation: Validation
    warnings: tuple[str, ...] = ()
    link: Link | None = None
    free: Validation | None = None


@takes(ValidateOptions)
def validate(options: ValidateOptions) -> Validated:
    """Simulate a measured run, and return the simulator's error."""
    run = options.run
    if Path(run).is_dir():
        if options.profile is None:
            hint = "Give the layer profile of the run's device as --profile."
            raise InputError("the run is a vLLM run and needs a layer profile", file=run, hint=hint)
        if options.cost is not None:
            raise InputError("is for a trace, not for a vLLM run", where="--cost", hint="Leave it out.")
        return _replayed(options, options.profile)
    if options.profile is not None:
        raise InputError("is for a vLLM run, not for a trace", where="--profile", hint="Leave it out.")
    trace = Trace.load(run)
    if options.cost is None:
        hint = "Give a file of `batchbound profile` as --cost."
        raise InputError("the trace needs a cost model", file=run, hint=hint)
    options.refuse(LINK, "on one device")
    if not (trace.finished > 0).all() or not len(trace):
        hint = "Give the trace of a run that served its requests."
        raise InputError("the trace has no request, or one that never finished", file=run, hint=hint)
    return Validated(validate_trace(trace, read_cost(options.cost)[0]))


def _replayed(options: ValidateOptions, profile_path: str | os.PathLike[str]) -> Validated:
    measured = read_vllm_run(options.run)
    shared = measured.tensor_parallel * measured.data_parallel if measured.expert_parallel else 1
    profile = read_profile(profile_path, expert_parallel=shared)
    several = profile.tensor_parallel * measured.data_parallel > 1
    link = options.link_of(profile.device) if several else None
    if measured.kv_capacity is None:
        note("the run does not state its KV capacity: it is taken as unlimited")
    warnings = mismatches(measured, profile)
    if link is None:
        options.refuse(LINK, "on one device")
        note("no link: the model is on one device")
        return Validated(validate_run(measured, profile, None), (*warnings, *profile.warnings))
    found, free = (validate_run(measured, profile, each) for each in (link, FREE_LINK))
    return Validated(found, tuple(warnings), link, free)
