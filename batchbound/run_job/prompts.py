"""Plans of prompts to run, from earlier lengths and costs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..cost_cache import CostCache
from ..data.figures import short_duration
from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.files.record import plain
from ..data.files.sources import first_bytes, is_url, missing_file, refuse_streams
from ..data.plan import KEPT, Maker, Plan, Provenance, holds_requests
from ..data.problem import Problem
from ..data.prompts.table import prompts_digest
from ..data.readers.length_source import LengthSource
from ..data.readers.openai_batch import PromptRecord, model_names, read_batch, refuse_other_models
from ..data.schedule import Schedule
from ..gain import GainParams
from ..heuristics.loop import schedule_of
from ..heuristics.simulate import simulate
from ..heuristics.unknown_lengths.kinds import worth_of_lengths
from ..inputs import Inputs, provenance_of, read_inputs
from ..listening import note
from ..options.plan import PlanOptions
from ..options.run import PLANNING, JobOptions
from ..planning.plan import make_plan
from ..solvers.result import Limits, Status, StoppedBy
from ..version import __version__
from .earlier import earlier_lengths, next_plan, plan_beside


def has_prompts(options: JobOptions) -> bool:
    """Return whether ``run`` is given requests instead of a plan; refuse what is neither."""
    path = options.plan
    if options.prompt_column is not None or Path(path).is_dir() or holds_requests(path):
        return True
    if is_url(path):
        return False
    refuse_streams(path)
    if not Path(path).exists():
        raise missing_file(path)
    head = first_bytes(path, 200).removeprefix(codecs.BOM_UTF8).lstrip()
    if Path(path).is_file() and head and not head.startswith((b"{", b"[")):
        raise InputError("is a text file; prompts are JSONL, CSV or Parquet", file=path, hint=_CONVERT)
    return False


_CONVERT = (
    "A prompt a line becomes a table by `jq -Rc '{prompt: .}' FILE > prompts.jsonl`: then say"
    " --prompt-column prompt."
)


def plan_of_prompts(options: JobOptions) -> Path:
    """Return the path of the prompts' plan, which may be new.

    It is next to the completions, so that the same command resumes an interrupted run. Raises
    KeyboardInterrupt, without a plan, if planning is interrupted.
    """
    from ..executor.jobs.journal import finished_in, journal_path

    path, kept = plan_beside(options.answers), finished_in(journal_path(options.answers))
    if path.exists() and (kept or not options.overwrite):
        _check_same_job(path, options, kept)
        note(f"{path}: following the plan of an earlier run; --overwrite plans again")
        return path
    refuse_outputs(
        [options.answers, options.times],
        options.overwrite,
        [options.plan, *([options.cost] if options.cost else [])],
    )
    refuse_outputs([path], True, [options.plan, options.answers, options.times])
    inputs = read_inputs(_plan_options(options), options.plan, keep_arrivals=False, says_costs=False)
    if not options.any_model:
        served = (*model_names(options.source.model), *options.adapters)
        refuse_other_models(inputs.job.records, served, inputs.job.source)
    if options.cost is None:
        inputs = _with_costs(inputs, options)
    if options.lengths is None and inputs.job.lengths.kind == "cap":
        inputs = _with_earlier_lengths(inputs, options)
    provenance = provenance_of(inputs, path)
    if _unknown(provenance):
        plan = _policy_plan(inputs.problem, provenance, options.seed)
    else:
        plan = _searched_plan(inputs.problem, provenance, options)
    if path.exists() and not options.overwrite:
        # The same command runs twice, and the other one has already written a plan.
        _check_same_job(path, options, kept)
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


def lengths_repeat(records: Sequence[PromptRecord], options: JobOptions) -> bool:
    """Return whether lengths repeat in the next run.

    They do for greedy decoding, or with a seed.
    """
    if options.seed is not None:
        return True
    given = {} if options.temperature is None else {"temperature": options.temperature}
    drawn = [one for one in records if one.sampling(**given).temperature and "seed" not in one.asked]
    unasked = any("temperature" not in {**one.asked, **given} for one in records)
    return not drawn and not (unasked and _samples_unasked(options))


def _samples_unasked(options: JobOptions) -> bool:
    from ..executor.models.request_rules import declared_sampling

    try:
        return "temperature" in declared_sampling(options.source.shape())
    except ValueError:
        return False  # the run will report the error


def _unknown(provenance: Provenance) -> bool:
    return provenance.lengths.get("kind") == "cap"


def _caps_differ(plan: Plan) -> bool:
    """Return whether caps differ by more than the prompts' lengths."""
    caps = plan.workload.output_tokens
    return bool(caps.min() < 0.9 * caps.max())


def _searched_plan(problem: Problem, provenance: Provenance, options: JobOptions) -> Plan:
    """Plan known lengths, no worse than an earlier run's plan."""
    searched = GainParams().seconds(simulate(problem, GainParams().policy).makespan)
    limits = Limits(seconds=searched, seed=options.seed or 0)
    plan = make_plan(
        problem, limits=limits, start=_announced(problem, options.answers), provenance=provenance
    )
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
    maker = Maker("lpt-ski", __version__, Status.FEASIBLE, StoppedBy.FINISHED, 0.0, seed or 0)
    return Plan.of(problem, schedule, None, maker, provenance=provenance)


def _takes_late_cap(plan: Plan, options: JobOptions) -> bool:
    """Return whether a plan has completions without a cap, so that those left may get one."""
    if not _unknown(plan.provenance):
        return False
    columns = options.columns_of(options.tokenizer or options.model)
    return any(record.max_tokens is None for record in read_batch(options.plan, columns))


def _check_same_job(path: Path, options: JobOptions, kept: int) -> None:
    """Raise InputError if a plan is of another job; ``kept`` completions wait in its journal."""
    from ..executor.models.tokenizers import counts_alike

    plan, hint = Plan.load(path), "Name another --output, or plan again with --overwrite."
    if kept:
        hint = (
            f"Name another --output: {options.answers}.journal holds {kept:,} finished completions of the"
            " earlier run, which its own command continues. Delete that file to give them up."
        )
    planned = plan.provenance.prompts
    if planned is None or prompts_digest(options.plan) != planned.sha256:
        raise InputError(f"is no plan of {options.plan} as it is now", file=path, hint=hint)
    longest = plan.provenance.lengths.get("longest")
    source = {name: value for name, value in plan.provenance.lengths.items() if name != "sampled"}
    lengths = None if options.lengths is None else LengthSource.parse(options.lengths)
    differing = {
        "--slots": options.slots is not None and options.slots != plan.problem.slots,
        "--longest-completion": options.longest_completion is not None
        and options.longest_completion != longest
        and not (longest is None and _takes_late_cap(plan, options)),
        "--lengths": lengths is not None
        and {**lengths.to_json(), "longest": longest} != {**source, "longest": longest},
        "--cost": options.cost is not None and options.cost != plan.provenance.cost_source.get("name"),
        "--model" if options.tokenizer is None else "--tokenizer": not counts_alike(
            _seen_from(planned.tokenizer, path.parent), options.tokenizer or options.source.model
        ),
    }
    # The content of a column depends on the model's chat template.
    asked, had = options.columns_of(options.tokenizer or options.model), planned.columns
    if asked is not None and had is not None:
        differing |= {
            "--id-column": asked.id != had.id,
            "--max-tokens-column": asked.max_tokens != had.max_tokens,
        }
    differing["--prompt-column"] = asked != had
    for option in (name for name, differs in differing.items() if differs):
        raise InputError(f"was planned with another {option}", file=path, hint=hint)


def _seen_from(tokenizer: str, folder: Path) -> str:
    return str(folder / tokenizer) if tokenizer.startswith(".") else tokenizer


def _plan_options(options: JobOptions) -> PlanOptions:
    stated = {name: getattr(options, name) for name in (*PLANNING, "model", "tokenizer")}
    return PlanOptions(options.plan, **{name: value for name, value in stated.items() if value is not None})


def _with_costs(inputs: Inputs, options: JobOptions) -> Inputs:
    kept = CostCache.of_user().find(options.source.model, inputs.problem.slots, options.threads)
    if kept is None:
        return inputs
    source = {"name": KEPT, **plain(kept)}
    return replace(inputs, problem=replace(inputs.problem, cost=kept.cost), cost_source=source)


def _with_earlier_lengths(inputs: Inputs, options: JobOptions) -> Inputs:
    job, folder = inputs.job, Path(options.answers).parent
    assert job.digest is not None
    source = None
    if lengths_repeat(job.records, options):
        source = earlier_lengths(folder, job.digest, job.columns, inputs.tokenizer, job.lengths.longest)
    if source is None:
        return inputs
    names, ids = [one.name for one in job.records], [one.custom_id for one in job.records]
    caps = [one.max_tokens for one in job.records]
    try:
        lengths = source.resolve(ids, caps=caps, names=names)
    except InputError:
        return inputs  # some prompts have no completion
    note(f"{source.file}: planning with the lengths of an earlier run; --lengths cap plans without them")
    job = replace(job, lengths=source, workload=job.workload.with_output_tokens(lengths))
    workload = inputs.problem.workload.with_output_tokens(lengths)
    return replace(inputs, job=job, problem=replace(inputs.problem, workload=workload))


def _worth(plan: Plan) -> str:
    """Return the most that known lengths could save, for small jobs."""
    if len(plan.workload) > MOST_SAMPLED:
        return ""
    worth = worth_of_lengths(plan.problem)
    spread = "if they are spread evenly up to the caps"
    return f"; known lengths could save {worth:.0%} of the steps, {spread}" if worth >= 0.005 else ""


MOST_SAMPLED = 20_000
"""Most prompts for which the saving is sampled."""


def _expectation(plan: Plan, records: Sequence[PromptRecord]) -> str:
    from ..executor.jobs.kinds import kinds_of

    text = "1 prompt" if len(plan.workload) == 1 else f"{len(plan.workload):,} prompts"
    text += f", {plan.problem.slots} slots"
    if _unknown(plan.provenance):
        if _caps_differ(plan):
            order = "larger caps first"
        elif kinds := int(kinds_of(records).max(initial=0)):
            order = f"{kinds + 1} kinds of prompts, longer ones first once it saves"
        else:
            order = "file order; prefill waits to be shared only once completions show that it saves"
        return f"{text}, lengths unknown: {order}{_worth(plan)}"
    if plan.provenance.assumes_costs:
        return f"{text}, lengths known, costs assumed until this run measures them"
    seconds = f"{plan.seconds:,.1f} s" if plan.seconds >= 0.1 else short_duration(plan.seconds)
    text += f", lengths known: {seconds} predicted"
    return text if plan.gap is None else f"{text}, {plan.gap:.2%} above the proven bound"
