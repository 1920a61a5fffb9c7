"""``batchbound run PROMPTS``: plan prompts from earlier lengths and costs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..cost_cache import CostCache
from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.files.record import plain
from ..data.plan import Maker, Plan, Provenance, holds_requests
from ..data.problem import Problem
from ..data.prompts.table import prompts_digest
from ..data.readers.length_source import LengthSource
from ..data.readers.openai_batch import PromptRecord, model_names, refuse_other_models
from ..data.schedule import Schedule
from ..gain import GainParams
from ..heuristics.loop import schedule_of
from ..heuristics.simulate import simulate
from ..heuristics.unknown_lengths.kinds import worth_of_lengths
from ..inputs import read_inputs
from ..options.plan import PlanOptions
from ..planning.plan import make_plan
from ..run_job.earlier import ASSUMED, earlier_lengths, next_plan, plan_beside
from ..solvers.result import Limits, Status, StoppedBy
from ..version import __version__
from .inputs import (
    DEFAULT_SLOTS,
    Inputs,
    add_columns,
    add_longest,
    columns_of,
    provenance_of,
    slot_count,
)
from .model import model_options
from .output import note
from .parser import Parser

PLANNING = (
    "slots",
    "lengths",
    "longest_completion",
    "cost",
    "prompt_column",
    "id_column",
    "max_tokens_column",
    "drop_last_assistant",
    "raw",
)
"""Options of ``run`` that plan prompts; a plan fixes them."""


def add_planning(parser: Parser) -> None:
    """Add the options for planning prompts."""
    group = parser.add_argument_group("prompts instead of a plan")
    group.add_argument(
        "--slots",
        type=slot_count,
        metavar="N",
        everyday=True,
        help=f"maximum number of requests in progress (default {DEFAULT_SLOTS}); on a server,"
        " vLLM's --max-num-seqs (default: the plan's)",
    )
    group.add_argument(
        "--lengths",
        type=_length_spec,
        metavar="SOURCE",
        everyday=True,
        help="completion lengths, as in `plan --lengths`; auto: stated lengths, else those of an earlier run"
        " of the same prompts, else none (default: auto)",
    )
    add_longest(group, "maximum tokens of a completion, as in `plan`")
    group.add_argument(
        "--cost",
        metavar="FILE",
        help="cost model of `batchbound profile` (default: costs measured by an earlier run of the model)",
    )
    add_columns(group)


def _length_spec(text: str) -> str | None:
    return None if text == "auto" else text


def has_prompts(args: argparse.Namespace) -> bool:
    """Return whether ``run`` is given requests instead of a plan."""
    return args.prompt_column is not None or Path(args.plan).is_dir() or holds_requests(args.plan)


def plan_of_prompts(args: argparse.Namespace) -> Path:
    """Return the path of the prompts' plan, which may be new.

    It is next to the completions, so that the same command resumes an interrupted run. Raises
    KeyboardInterrupt, without a plan, if planning is interrupted.
    """
    from ..executor.jobs.job import journal_path
    from ..executor.jobs.journal import finished_in

    path, kept = plan_beside(args.output), finished_in(journal_path(args.output))
    if path.exists() and (kept or not args.overwrite):
        _check_same_job(path, args, kept)
        note(f"{path}: following the plan of an earlier run; --overwrite plans again")
        return path
    refuse_outputs(
        [args.output, args.trace], args.overwrite, [args.plan, *([args.cost] if args.cost else [])]
    )
    refuse_outputs([path], True, [args.plan, args.output, args.trace])
    inputs = read_inputs(_plan_options(args), args.plan, keep_arrivals=False)
    if not args.any_model:
        served = (*model_names(args.model), *args.adapters)
        refuse_other_models(inputs.job.records, served, inputs.job.source)
    if args.cost is None:
        inputs = _with_costs(inputs, args)
    if args.lengths is None and inputs.job.lengths.kind == "cap":
        inputs = _with_earlier_lengths(inputs, args)
    provenance = provenance_of(inputs, path)
    if _unknown(provenance):
        plan = _policy_plan(inputs.problem, provenance, args.seed)
    else:
        plan = _searched_plan(inputs.problem, provenance, args)
    if path.exists() and not args.overwrite:
        # The same command runs twice, and the other one has already written a plan.
        _check_same_job(path, args, kept)
        note(f"{path}: following the plan of another run of this command")
        return path
    plan.save(path)
    note(_expectation(plan, inputs.job.records))
    return path


def policy_of(plan: Plan) -> str | None:
    """Return the policy for unknown lengths; None for planned lengths."""
    if not _unknown(plan.provenance) or len(plan.fleet.replicas) > 1:
        return None
    return "lpt-paced" if _caps_differ(plan) else "fcfs-paced"


def lengths_repeat(records: Sequence[PromptRecord], args: argparse.Namespace) -> bool:
    """Return whether lengths repeat in the next run.

    They do for greedy decoding, or with a seed.
    """
    if args.seed is not None:
        return True
    given = {} if args.temperature is None else {"temperature": args.temperature}
    drawn = [one for one in records if one.sampling(**given).temperature and "seed" not in one.asked]
    unasked = any("temperature" not in {**one.asked, **given} for one in records)
    return not drawn and not (unasked and _samples_unasked(args))


def _samples_unasked(args: argparse.Namespace) -> bool:
    from ..executor.models.request_rules import declared_sampling

    try:
        return "temperature" in declared_sampling(model_options(args).shape())
    except ValueError:
        return False  # the run will report the error


def _unknown(provenance: Provenance) -> bool:
    return provenance.lengths.get("kind") == "cap"


def _caps_differ(plan: Plan) -> bool:
    """Return whether caps differ by more than the prompts' lengths."""
    caps = plan.workload.output_tokens
    return bool(caps.min() < 0.9 * caps.max())


def _searched_plan(problem: Problem, provenance: Provenance, args: argparse.Namespace) -> Plan:
    """Plan known lengths, no worse than an earlier run's plan."""
    searched = GainParams().seconds(simulate(problem, GainParams().policy).makespan)
    limits = Limits(seconds=searched, seed=args.seed or 0)
    plan = make_plan(problem, limits=limits, start=_announced(problem, args.output), provenance=provenance)
    if plan.maker.stopped_by == StoppedBy.INTERRUPT:
        raise KeyboardInterrupt
    return plan


def _announced(problem: Problem, output: str) -> Schedule | None:
    path = next_plan(output)
    if not path.is_file():
        return None
    try:
        plan = Plan.load(path)
    except InputError:
        return None  # of another version
    ours, kept = problem.workload, plan.workload
    same = ours.ids.tolist() == kept.ids.tolist() and plan.problem.slots == problem.slots
    same = same and ours.output_tokens.tolist() == kept.output_tokens.tolist()
    return plan.schedule if same and plan.schedule.check(problem) is None else None


def _policy_plan(problem: Problem, provenance: Provenance, seed: int | None) -> Plan:
    """Plan unknown lengths: a policy simulated at the caps."""
    schedule = schedule_of(simulate(problem, "lpt-ski"))
    maker = Maker("lpt-ski", __version__, Status.FEASIBLE, StoppedBy.GAVE_UP, 0.0, seed or 0)
    return Plan.of(problem, schedule, None, maker, provenance=provenance)


def _check_same_job(path: Path, args: argparse.Namespace, kept: int) -> None:
    """Raise InputError if a plan is of another job; ``kept`` completions wait in its journal."""
    from ..executor.models.tokenizers import counts_alike

    plan, hint = Plan.load(path), "Name another --output, or plan again with --overwrite."
    if kept:
        hint = (
            f"Name another --output: {args.output}.journal holds {kept:,} finished completions of the earlier"
            " run, which its own command continues. Delete that file to give them up."
        )
    planned = plan.provenance.prompts
    if planned is None or prompts_digest(args.plan) != planned.sha256:
        raise InputError(f"is no plan of {args.plan} as it is now", file=path, hint=hint)
    longest = plan.provenance.lengths.get("longest")
    source = {name: value for name, value in plan.provenance.lengths.items() if name != "sampled"}
    lengths = None if args.lengths is None else LengthSource.parse(args.lengths)
    differing = {
        "--slots": args.slots is not None and args.slots != plan.problem.slots,
        "--longest-completion": args.longest_completion is not None and args.longest_completion != longest,
        "--lengths": lengths is not None
        and {**lengths.to_json(), "longest": longest} != {**source, "longest": longest},
        "--cost": args.cost is not None and args.cost != plan.provenance.cost_source.get("name"),
        "--prompt-column": columns_of(args, args.tokenizer or args.model) != planned.columns,
        "--model" if args.tokenizer is None else "--tokenizer": not counts_alike(
            _seen_from(planned.tokenizer, path.parent), args.tokenizer or args.model
        ),
    }
    for option in (name for name, differs in differing.items() if differs):
        raise InputError(f"was planned with another {option}", file=path, hint=hint)


def _seen_from(tokenizer: str, folder: Path) -> str:
    return str(folder / tokenizer) if tokenizer.startswith(".") else tokenizer


def _plan_options(args: argparse.Namespace) -> PlanOptions:
    stated = {name: getattr(args, name) for name in (*PLANNING, "model", "tokenizer")}
    return PlanOptions(args.plan, **{name: value for name, value in stated.items() if value is not None})


def _with_costs(inputs: Inputs, args: argparse.Namespace) -> Inputs:
    kept = CostCache.of_user().find(args.model, inputs.problem.slots, args.threads)
    if kept is None:
        return replace(inputs, cost_source={"name": ASSUMED})
    source = {"name": "measured by an earlier run", **plain(kept)}
    return replace(inputs, problem=replace(inputs.problem, cost=kept.cost), cost_source=source)


def _with_earlier_lengths(inputs: Inputs, args: argparse.Namespace) -> Inputs:
    job, folder = inputs.job, Path(args.output).parent
    assert job.digest is not None
    source = None
    if lengths_repeat(job.records, args):
        source = earlier_lengths(folder, job.digest, job.columns, inputs.tokenizer, job.lengths.longest)
    if source is None:
        return inputs
    names, ids = [one.name for one in job.records], [one.custom_id for one in job.records]
    caps = [one.max_tokens for one in job.records]
    try:
        workload = job.workload.with_output_tokens(source.resolve(ids, caps=caps, names=names))
    except InputError:
        return inputs  # some prompts have no completion
    note(f"{source.file}: planning with the lengths of an earlier run; --lengths cap ignores them")
    job = replace(job, lengths=source, workload=workload)
    return replace(inputs, job=job, problem=replace(inputs.problem, workload=workload.without_arrivals()))


def _worth(plan: Plan) -> str:
    """Return the most that known lengths could save, for small jobs."""
    if len(plan.workload) > MOST_SAMPLED:
        return ""
    worth = worth_of_lengths(plan.problem)
    spread = "evenly spread lengths"
    return (
        f"; knowing them could save up to {worth:.0%} of the steps, with {spread}" if worth >= 0.005 else ""
    )


MOST_SAMPLED = 20_000
"""Most prompts for which the saving is sampled."""


def _expectation(plan: Plan, records: Sequence[PromptRecord]) -> str:
    from ..executor.jobs.kinds import kinds_of

    text = f"{len(plan.workload):,} prompts, {plan.problem.slots} slots"
    if _unknown(plan.provenance):
        if _caps_differ(plan):
            order = "larger caps first"
        elif kinds := int(kinds_of(records).max(initial=0)):
            order = f"{kinds + 1} kinds of prompts, longer ones first once it saves"
        else:
            order = "first come, first served: no order helps yet"
        return f"{text}, lengths unknown: {order}{_worth(plan)}"
    if plan.provenance.cost_source.get("name") == ASSUMED:
        return f"{text}, lengths known, costs assumed until this run measures them"
    text += f", lengths known: {plan.seconds:,.1f} s predicted"
    return text if plan.gap is None else f"{text}, {plan.gap:.2%} above the proven bound"
