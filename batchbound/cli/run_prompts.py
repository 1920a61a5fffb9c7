"""``batchbound run PROMPTS``: the model measured, the prompts planned, and the plan's file for ``run``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ..data.costs.calibration import CalibratedCost
from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.files.record import plain
from ..data.plan import Plan, holds_requests, relative_path
from ..data.prompts.table import prompts_digest
from ..data.readers.length_source import LengthSource
from ..data.readers.openai_batch import model_names, refuse_other_models
from ..planning.plan import make_plan
from ..solvers.result import Limits, StoppedBy
from ..solvers.solve import DEFAULT_SECONDS
from .inputs import (
    DEFAULT_SLOTS,
    Inputs,
    add_columns,
    add_longest,
    columns_of,
    provenance_of,
    read_inputs,
    slot_count,
)
from .output import note
from .parser import Parser

_POINTS, _REPEATS, _LONGEST_PROMPT = 3, 2, 512
"""A measurement of seconds, not minutes: ``batchbound profile`` measures a finer grid."""

PLANNING = (
    "slots",
    "lengths",
    "longest_completion",
    "cost",
    "prompt_column",
    "id_column",
    "max_tokens_column",
    "drop_last_assistant",
)
"""Options of ``run`` that say how prompts are planned; a plan has settled them."""


def add_planning(parser: Parser) -> None:
    """Add the options that say how prompts are planned, by ``run`` itself or for a server."""
    group = parser.add_argument_group("prompts in place of a plan")
    group.add_argument(
        "--slots",
        type=slot_count,
        metavar="N",
        everyday=True,
        help=f"requests in progress at a time (default {DEFAULT_SLOTS}); on a server, vLLM's --max-num-seqs"
        " (default: the plan's)",
    )
    group.add_argument(
        "--lengths",
        metavar="SOURCE",
        everyday=True,
        help="completion lengths, as of `plan --lengths` (default: known where given, else cap)",
    )
    add_longest(group, "most tokens of a completion, as of `plan`")
    group.add_argument(
        "--cost",
        metavar="FILE",
        help="cost model of `batchbound profile` (default: measured in a minute or less)",
    )
    add_columns(group)


def has_prompts(args: argparse.Namespace) -> bool:
    """Tell whether ``run`` is given requests instead of a plan."""
    return args.prompt_column is not None or Path(args.plan).is_dir() or holds_requests(args.plan)


def planned_beside(args: argparse.Namespace) -> Path:
    """
    Return the plan of a run's prompts, made now or by an earlier run of the same command.

    It lies next to the completions, so that the same command resumes an interrupted run. KeyboardInterrupt is
    raised if planning was interrupted; no plan is written then.
    """
    path = Path(args.output).with_suffix(".plan.json")
    if path.exists() and not args.overwrite:
        _check_same_job(path, args)
        note(f"{path}: the plan of an earlier run is followed; --overwrite plans again")
        return path
    outputs = [path, args.output, args.trace]
    refuse_outputs(outputs, args.overwrite, [args.plan, *([args.cost] if args.cost else [])])
    inputs = read_inputs(_plan_options(args), keep_arrivals=False)
    if not args.any_model:
        refuse_other_models(inputs.job.records, model_names(args.model), inputs.job.source)
    if args.cost is None:
        inputs = _measured(inputs, args)
    limits = Limits(seconds=DEFAULT_SECONDS, seed=args.seed or 0)
    plan = make_plan(inputs.problem, limits=limits, provenance=provenance_of(inputs, path))
    if plan.maker.stopped_by == StoppedBy.INTERRUPT:
        raise KeyboardInterrupt
    if path.exists() and not args.overwrite:
        # The same command was typed twice, and the other one goes by its own plan already.
        _check_same_job(path, args)
        note(f"{path}: the plan of another run of this command is followed")
        return path
    plan.save(path)
    note(f"{path}: {_told(plan)}")
    return path


def _check_same_job(path: Path, args: argparse.Namespace) -> None:
    """Raise InputError if a plan is of other prompts, or of other settings than the options say."""
    plan, hint = Plan.load(path), "Name another --output, or plan again with --overwrite."
    planned = plan.provenance.prompts
    if planned is None or prompts_digest(args.plan) != planned.sha256:
        raise InputError(f"is no plan of {args.plan} as it is now", file=path, hint=hint)
    longest = plan.provenance.lengths.get("longest")
    lengths = None if args.lengths is None else LengthSource.parse(args.lengths)
    differing = {
        "--slots": args.slots is not None and args.slots != plan.problem.slots,
        "--longest-completion": args.longest_completion is not None and args.longest_completion != longest,
        "--lengths": lengths is not None
        and {**lengths.to_json(), "longest": longest} != {**plan.provenance.lengths, "longest": longest},
        "--cost": args.cost is not None and args.cost != plan.provenance.cost_source.get("name"),
        "--prompt-column": columns_of(args) != planned.columns,
        "--model" if args.tokenizer is None else "--tokenizer": not _counts_alike(
            planned.tokenizer, args.tokenizer or args.model, path.parent
        ),
    }
    for option in (name for name, differs in differing.items() if differs):
        raise InputError(f"was planned with another {option}", file=path, hint=hint)


def _counts_alike(planned: str, tokenizer: str, folder: Path) -> bool:
    """Return whether a tokenizer is the one that counted a plan's prompts; tiny models all count bytes."""
    named = relative_path(tokenizer, folder) if Path(tokenizer).is_dir() else tokenizer
    return named == planned or all(name.startswith("tiny:") for name in (named, planned))


def _plan_options(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options of ``plan`` that those of ``run`` amount to."""
    from .commands import plan

    parser = Parser()
    plan.configure(parser)
    options = parser.parse_args([args.plan])
    given = {name: getattr(args, name) for name in (*PLANNING, "model", "tokenizer")}
    vars(options).update({name: value for name, value in given.items() if value is not None})
    return options


def _measured(inputs: Inputs, args: argparse.Namespace) -> Inputs:
    """Return the problem in the seconds of the model on this machine, measured quickly."""
    from .commands.profile import measure
    from .model import load, tier_of

    problem = inputs.problem
    note(f"{args.model}: measured quickly, for the plan; `batchbound profile` and --cost do it finely")
    model = load(args)
    calibrated: CalibratedCost = measure(
        model,
        slots=max(2, min(problem.slots, len(problem))),
        prompt_tokens=min(_LONGEST_PROMPT, int(problem.prompt_tokens.max())),
        points=_POINTS,
        repeats=_REPEATS,
        tier=tier_of(model, args),
    )
    source = {"name": "measured by run", **plain(calibrated)}
    return replace(inputs, problem=replace(problem, cost=calibrated.cost), cost_source=source)


def _told(plan: Plan) -> str:
    """Return what a plan comes to, in a line."""
    text = f"{len(plan.workload):,} requests on {plan.problem.slots} slots, {plan.makespan:,.1f} s predicted"
    return text if plan.gap is None else f"{text}, {plan.gap:.2%} above the proven bound"
