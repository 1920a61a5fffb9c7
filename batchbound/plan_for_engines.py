"""Plan a file of requests for an engine that mixes prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .data.claims.assumptions import assumed_line
from .data.costs.communication import with_all_reduce
from .data.costs.cost import CostModel
from .data.costs.iteration_rates import IterationRates
from .data.costs.layer_profile import LayerProfile
from .data.costs.link import usual_link
from .data.files.disk import InputError
from .data.files.kinds import is_of_kind, refuse_other_kinds
from .data.files.outputs import refuse_outputs
from .data.files.sources import opened_once
from .data.fleet import Replica
from .data.iteration_plan import IterationPlan
from .data.iterations import EngineLimits
from .data.objective import Objective
from .data.plan import PromptSource, Provenance, relative_path
from .data.problem import Problem
from .data.prompts.table import is_prompt_table
from .data.readers.profile_readers import read_profile
from .inputs import check_counted, unknown_lengths
from .integrations.handover import ENGINES, Handover, hand_over, handover_paths, write_handover
from .listening import note, working
from .options.option import PathText, takes
from .options.plan import DEFAULT_OUTPUT, USUAL_BLOCK, USUAL_BUDGET, PlanOptions
from .planning.fleet import fleet_of
from .planning.iterations import Engines, make_iteration_plan
from .planning.mixed_job import ReadJob, read_mixed_job
from .planning.plan import PlanningError


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A plan for an engine, and what is handed to the engine.

    files: Files written for the engine.
    """

    plan: IterationPlan
    handover: Handover
    files: tuple[Path, ...]


@takes(PlanOptions)
def plan_for_engine(options: PlanOptions) -> EnginePlan:
    """Plan a file of requests for another engine, and write its input.

    It takes the options of ``batchbound plan --for`` as keywords; ``engine`` is the engine.
    """
    engine, output = options.engine, options.output or DEFAULT_OUTPUT
    if engine is None:
        raise InputError("there is no engine to plan for", hint=f"Choose one of {', '.join(ENGINES)}.")
    refuse_outputs([output, *_engine_files(output, engine)], options.overwrite, options.read_files())
    with working(f"reading {options.workload}"), opened_once():
        read = _read(options)
        engines = _engines(options, engine, read)
        batch = None if is_prompt_table(read.source) else read.requests
    try:
        with working(f"planning {len(read.job.workload):,} completions"):
            plan = make_iteration_plan(
                read.job,
                engines,
                groups=options.groups or "any",
                rule=options.dispatch,
                limits=options.limits,
                provenance=_provenance(options, read),
                objective=_aim(options, read),
            )
    except PlanningError:
        raise
    except ValueError as error:
        raise InputError(str(error), file=read.source, hint="Correct the option, or the requests.") from None
    plan.save(output)
    handover = hand_over(plan, max_position=options.max_position)
    files = write_handover(handover, plan, output, batch)
    assuming = assumed_line(plan.relied_on)
    for remark in (*plan.remarks, *([] if assuming is None else [assuming]), *handover.remarks):
        note(remark)
    return EnginePlan(plan, handover, tuple(files))


def _engine_files(output: PathText, engine: str) -> tuple[Path, ...]:
    """Return the plan's engine files that exist or will be written."""
    pattern = f"{Path(output).stem}.{engine}.*.jsonl"
    return (*handover_paths(output, engine, 1), *sorted(Path(output).parent.glob(pattern)))


def _read(options: PlanOptions) -> ReadJob:
    name = options.tokenizer or options.model
    tokenizer = None
    if name is not None:
        from .executor.models.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(name)
    read = read_mixed_job(
        options.workload,
        tokenizer,
        lengths=options.lengths,
        longest=options.longest_completion,
        columns=options.columns_of(name),
        drop_unanswered=options.drop_unanswered,
        unit=None if options.no_prefix_caching else options.unit or 1,
    )
    check_counted(options, options.workload, counts=read.digest is not None, positions=False)
    work = read.job.workload
    longest = int((work.input_tokens + work.output_tokens).max())
    if options.max_position is not None and longest > options.max_position:
        what = f"a request has {longest:,} tokens, beyond --max-position {options.max_position:,}"
        raise InputError(
            what, file=read.source, hint="Cap completions with --longest-completion, or raise it."
        )
    return read


def _aim(options: PlanOptions, read: ReadJob) -> Objective | None:
    aim = options.aim
    if aim is not None and read.lengths.kind == "cap":
        raise unknown_lengths(read.source)
    return aim


def _engines(options: PlanOptions, engine: str, read: ReadJob) -> Engines:
    slots = options.slots
    assert slots != "auto", "it has no effect on engines"
    rates, profile = _cost(options.cost)
    budget = options.token_budget or max(USUAL_BUDGET, slots)
    block = options.block_tokens or USUAL_BLOCK
    try:
        one = EngineLimits(slots, budget, options.kv_capacity, block)
        limits = (one,) if options.replicas is None else _replicas(options, options.replicas, read, one)
        _check_budgets(limits)
        if options.block_tokens is not None and all(each.kv_tokens is None for each in limits):
            what = "--block-tokens has no effect on an engine without a KV capacity"
            raise InputError(what, hint="Give --kv-capacity as well, or leave it out.")
        return Engines(
            limits,
            engine,
            budget_stated=options.token_budget is not None,
            blocks_stated=options.block_tokens is not None,
            rates=rates,
            profile=profile,
        )
    except InputError:
        raise
    except ValueError as error:
        stated = "Give --token-budget." if "state them" in str(error) else "Correct the limits."
        hint = "Raise --kv-capacity, or lower --block-tokens." if "no block" in str(error) else stated
        raise InputError(str(error), hint=hint) from None


def _check_budgets(limits: Sequence[EngineLimits]) -> None:
    for each in limits:
        if each.batched_tokens < each.sequences:
            what = f"{each.batched_tokens} tokens an iteration are fewer than {each.sequences} slots"
            raise InputError(what, hint="Raise --token-budget, or lower --slots: no engine starts like this.")


def _replicas(
    options: PlanOptions, replicas: str, read: ReadJob, one: EngineLimits
) -> tuple[EngineLimits, ...]:
    alone = Problem(read.job.workload.select([0]), CostModel.paper(), one.sequences)
    usual = Replica(alone.cost, one.sequences)
    limits = []
    for replica in fleet_of(alone, replicas).replicas:
        if replica.cost != usual.cost or replica.busy:
            what = "iterations do not depend on the speed or the busy time of a replica"
            raise InputError(what, file=replicas, hint="Leave out speed and busy.")
        limits.append(
            EngineLimits(
                replica.slots,
                replica.prefill_token_cap or one.batched_tokens,
                replica.kv_capacity or one.kv_tokens,
                one.block_tokens,
            )
        )
    return tuple(limits)


def _cost(spec: PathText | CostModel | None) -> tuple[IterationRates | None, LayerProfile | None]:
    if spec in (None, "paper"):
        return None, None
    if isinstance(spec, CostModel):
        raise InputError("a cost of stages prices no iteration", hint="Give the file of an iteration's cost.")
    path, taken = Path(spec), {"batchbound_iteration_cost", "batchbound_layer_profile"}
    hint = "Give a file of `batchbound audit --save-cost`, or a layer profile."
    if not path.exists():
        raise InputError("no such cost of an iteration", file=spec, hint=hint)
    refuse_other_kinds(path, "not what an iteration costs", taken)
    if is_of_kind(path, "batchbound_iteration_cost"):
        return IterationRates.load(path), None
    profile = read_profile(path)
    link = usual_link(profile.device)
    if profile.tensor_parallel > 1 and link is None:
        what = f"the link between the {profile.tensor_parallel} devices of {profile.device} is not known"
        raise InputError(what, file=spec, hint="Give a profile of one device.")
    return None, profile if link is None else with_all_reduce(profile, link)


def _provenance(options: PlanOptions, read: ReadJob) -> Provenance:
    lengths, cost = (
        read.lengths.to_json(),
        {"name": None if options.cost == "paper" else options.cost},
    )
    if read.digest is None:
        return Provenance(lengths, cost)
    folder, tokenizer = (
        Path(options.output or DEFAULT_OUTPUT).resolve().parent,
        options.tokenizer or options.model or "",
    )
    if tokenizer and Path(tokenizer).is_dir():
        tokenizer = relative_path(tokenizer, folder)
    path = relative_path(read.source, folder).removeprefix("./")
    return Provenance(
        lengths,
        cost,
        PromptSource(path, read.digest, tokenizer, options.columns_of(options.tokenizer or options.model)),
    )
