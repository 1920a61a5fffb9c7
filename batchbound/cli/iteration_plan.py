"""``plan --for``: plans for engines that mix prefill and decode."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ..data.claims.assumptions import assumed_line, least_label
from ..data.costs.communication import with_all_reduce
from ..data.costs.cost import CostModel
from ..data.costs.iteration_rates import IterationRates
from ..data.costs.layer_profile import LayerProfile
from ..data.costs.link import usual_link
from ..data.files.disk import InputError
from ..data.files.kinds import is_of_kind, refuse_other_kinds
from ..data.fleet import Replica
from ..data.iteration_plan import IterationPlan
from ..data.iterations import EngineLimits
from ..data.plan import PromptSource, Provenance, relative_path
from ..data.problem import Problem
from ..data.prompts.table import is_prompt_table
from ..data.readers.profile_readers import read_profile
from ..integrations.handover import ENGINES, hand_over, handover_paths, write_handover
from ..planning.fleet import fleet_of
from ..planning.iterations import Engines, make_iteration_plan
from ..planning.mixed_job import ReadJob, read_mixed_job
from ..planning.plan import PlanningError
from ..solvers.result import Limits, Status, StoppedBy
from . import INTERRUPTED
from .inputs import check_counted, columns_of, positive
from .interrupts import terminating
from .output import fail, note
from .parser import Parser, Rule
from .progress import working
from .streams import say

USUAL_BUDGET, USUAL_BLOCK = 2048, 16
"""Simulated tokens per iteration and per block by default: vLLM's on most devices."""


def add_mixing(parser: Parser) -> None:
    """Add the options of a plan for a server."""
    group = parser.add_argument_group(
        "engines that mix prompts with generated tokens",
        "Without --for, a plan is for batchbound's own engine, which alternates prefill stages and decode"
        " steps. vLLM and SGLang mix both in their iterations: --for plans the order of requests, the number"
        " in flight, and the iterations with their lower bound. --slots is then max_num_seqs, and"
        " --kv-capacity the KV capacity of the engine.",
    )
    group.add_argument(
        "--for",
        dest="engine",
        choices=ENGINES,
        everyday=True,
        help="engine, or trainer with one; its input is written next to the plan: a batch with priorities per"
        " replica (vllm, sglang), or an order with priorities and settings (verl, openrlhf, trl). --cost is"
        " then a file of `audit --save-cost` or a layer profile, and adds seconds",
    )
    group.add_argument(
        "--token-budget",
        type=positive,
        metavar="TOKENS",
        needs=["--for"],
        help=f"maximum tokens per iteration, vLLM's max_num_batched_tokens (default: {USUAL_BUDGET} in the"
        " simulation, no limit in the bound)",
    )
    group.add_argument(
        "--block-tokens",
        type=positive,
        metavar="TOKENS",
        needs=["--for"],
        help=f"tokens per block of KV cache (default: {USUAL_BLOCK} in the simulation, 1 in the bound)",
    )
    group.add_argument(
        "--no-prefix-caching",
        action="store_true",
        needs=["--for"],
        help="compute each prompt in full, as vLLM with --no-enable-prefix-caching (default: compute a common"
        " beginning of prompts once)",
    )
    of_stages = {
        "--prefill-token-cap": "Say --token-budget.",
        "--prefix-cache": "The engine keeps prompts in its KV cache.",
        "--first-token": "The last chunk of a prompt yields it.",
        "--length-error": "Give the best --lengths available.",
        "--solver": "Orders are simulated.",
        "--threads": "",
    }
    parser.rules += [Rule((name,), conflicts=("--for",), hint=hint) for name, hint in of_stages.items()]
    parser.rules += [
        Rule(
            ("--slots auto",),
            when=lambda args: args.engine is not None and not args.slots,
            where="with --for {engine}",
            hint="Give the engine's own limit (max_num_seqs).",
        ),
        Rule(
            ("--price",),
            when=lambda args: args.engine is not None and args.cost == "paper",
            where="with --for {engine} and no --cost",
            hint="Give the cost of an iteration as --cost FILE.",
        ),
    ]


def engine_files(args: argparse.Namespace) -> tuple[Path, ...]:
    """Return the plan's engine files that exist or will be written."""
    if args.engine is None:
        return ()
    first = handover_paths(args.output, args.engine, 1)
    pattern = f"{Path(args.output).stem}.{args.engine}.*.jsonl"
    return (*first, *sorted(Path(args.output).parent.glob(pattern)))


def plan_for_engine(args: argparse.Namespace, limits: Limits, begun: float) -> int:
    """Make a plan for a server, write it and print its summary."""
    with working(f"reading {args.workload}"):
        read = _read(args)
        engines = _engines(args, read)
    try:
        with working(f"planning {len(read.job.workload):,} completions"), terminating():
            plan = make_iteration_plan(
                read.job,
                engines,
                groups=args.groups or "any",
                rule=args.dispatch,
                limits=limits,
                provenance=_provenance(args, read),
            )
    except PlanningError as error:
        return fail(str(error))
    except ValueError as error:
        raise InputError(str(error), file=read.source, hint="Correct the option, or the requests.") from None
    plan.save(args.output)
    handover = hand_over(plan, max_position=args.max_position)
    batch = None if is_prompt_table(read.source) else read.requests
    files = write_handover(handover, plan, args.output, batch)
    assuming = assumed_line(plan.relied_on)
    for remark in (*plan.remarks, *([] if assuming is None else [assuming]), *handover.remarks):
        note(remark)
    summary = iteration_summary(plan) | {
        "files": [str(path) for path in files],
        "command": shlex.join(handover.command) or None,
        "settings": dict(handover.settings),
        "seconds": time.perf_counter() - begun,
        **_paid(plan, args.price),
    }
    if args.json:
        say(json.dumps(summary))
    else:
        say(f"{args.output}: {_what(plan)}")
        show_iterations(summary)
        _show_handover(summary)
    if plan.maker.stopped_by != StoppedBy.INTERRUPT:
        return 0
    note(f"interrupted: {args.output} holds the best plan found until then")
    return INTERRUPTED


def _read(args: argparse.Namespace) -> ReadJob:
    name = args.tokenizer or args.model
    tokenizer = None
    if name is not None:
        from ..executor.models.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(name)
    read = read_mixed_job(
        args.workload,
        tokenizer,
        lengths=args.lengths,
        longest=args.longest_completion,
        columns=columns_of(args, name),
        drop_unanswered=args.drop_unanswered,
        prefix_caching=not args.no_prefix_caching,
    )
    check_counted(args, counts=read.digest is not None, positions=False)
    work = read.job.workload
    longest = int((work.input_tokens + work.output_tokens).max())
    if args.max_position is not None and longest > args.max_position:
        what = f"a request has {longest:,} tokens, beyond --max-position {args.max_position:,}"
        raise InputError(
            what, file=read.source, hint="Cap completions with --longest-completion, or raise it."
        )
    return read


def _engines(args: argparse.Namespace, read: ReadJob) -> Engines:
    rates, profile = _cost(args.cost)
    budget = args.token_budget or max(USUAL_BUDGET, args.slots)
    block = args.block_tokens or USUAL_BLOCK
    try:
        one = EngineLimits(args.slots, budget, args.kv_capacity, block)
        limits = (one,) if args.replicas is None else _replicas(args, read, one)
        _check_budgets(limits)
        if args.block_tokens is not None and all(each.kv_tokens is None for each in limits):
            what = "--block-tokens has no effect on an engine without a KV capacity"
            raise InputError(what, hint="Give --kv-capacity as well, or leave it out.")
        return Engines(
            limits,
            args.engine,
            budget_stated=args.token_budget is not None,
            blocks_stated=args.block_tokens is not None,
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


def _replicas(args: argparse.Namespace, read: ReadJob, one: EngineLimits) -> tuple[EngineLimits, ...]:
    alone = Problem(read.job.workload.select([0]), CostModel.paper(), one.sequences)
    usual = Replica(alone.cost, one.sequences)
    limits = []
    for replica in fleet_of(alone, args.replicas).replicas:
        if replica.cost != usual.cost or replica.busy:
            what = "iterations do not depend on the speed or the busy time of a replica"
            raise InputError(what, file=args.replicas, hint="Leave out speed and busy.")
        limits.append(
            EngineLimits(
                replica.slots,
                replica.prefill_token_cap or one.batched_tokens,
                replica.kv_capacity or one.kv_tokens,
                one.block_tokens,
            )
        )
    return tuple(limits)


def _cost(spec: str) -> tuple[IterationRates | None, LayerProfile | None]:
    if spec == "paper":
        return None, None
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


def _provenance(args: argparse.Namespace, read: ReadJob) -> Provenance:
    lengths, cost = read.lengths.to_json(), {"name": None if args.cost == "paper" else args.cost}
    if read.digest is None:
        return Provenance(lengths, cost)
    folder, tokenizer = Path(args.output).resolve().parent, args.tokenizer or args.model or ""
    if tokenizer and Path(tokenizer).is_dir():
        tokenizer = relative_path(tokenizer, folder)
    path = relative_path(read.source, folder).removeprefix("./")
    return Provenance(
        lengths,
        cost,
        PromptSource(path, read.digest, tokenizer, columns_of(args, args.tokenizer or args.model)),
    )


def _paid(plan: IterationPlan, price: float | None) -> dict[str, object]:
    if plan.seconds is None:
        return {}
    from .plan_options import paid

    return paid(len(plan.shares), plan.seconds, price)


def _what(plan: IterationPlan) -> str:
    slots = sum(share.limits.sequences for share in plan.shares)
    machines = f"{len(plan.shares):,} replicas, " if len(plan.shares) > 1 else ""
    return f"{len(plan.workload):,} completions on {machines}{slots:,} slots of {plan.engine}"


def iteration_summary(plan: IterationPlan) -> dict[str, object]:
    """Return the summary of a plan by JSON key."""
    each, least = [share.predicted for share in plan.shares], plan.least_seconds
    return {
        "for": plan.engine,
        "requests": len(plan.workload),
        "slots": sum(share.limits.sequences for share in plan.shares),
        "iterations": plan.iterations,
        "bound_iterations": plan.bound.iterations,
        "bound_source": plan.bound.source,
        "bound_label": least_label(plan.assumptions, *plan.kinds),
        "gap": plan.gap,
        "makespan_s": plan.seconds,
        "bound_s": None if least is None else least.seconds,
        "seconds_gap": plan.seconds_gap,
        "orders": [share.order for share in plan.shares],
        "in_flight": [share.in_flight for share in plan.shares],
        "predicted_iterations": [None if one is None else one.iterations for one in each],
        "preemptions": [None if one is None else one.preemptions for one in each],
        "status": plan.maker.status,
        "stopped_by": plan.maker.stopped_by,
        "lengths": plan.provenance.lengths.get("kind"),
        "assumptions": [asdict(one) for one in plan.relied_on],
    }


def show_iterations(summary: Mapping[str, object]) -> None:
    """Print the table of :func:`iteration_summary`."""
    taken = summary["iterations"]
    rows = {
        "predicted iterations": "unknown: the job is too large to simulate"
        if taken is None
        else f"{taken:,}",
        str(summary["bound_label"]): f"{summary['bound_iterations']:,}, by {summary['bound_source']}",
        "gap to the bound": _percent(summary["gap"]),
        "predicted seconds": _seconds(summary["makespan_s"]),
        f"{summary['bound_label']}, in seconds": _seconds(summary["bound_s"]),
        "gap in seconds": _percent(summary["seconds_gap"]),
        "device-hours": _decimals(summary.get("device_hours"), 4),
        "cost of the job": _decimals(summary.get("money"), 2),
        "status": _status(summary),
        "completion lengths": summary["lengths"],
    }
    widest = max(22, *(len(name) for name, value in rows.items() if value is not None))
    for name, value in rows.items():
        if value is not None:
            say(f"  {name:{widest}s} {value}")
    columns = [summary[name] for name in ("orders", "in_flight", "predicted_iterations", "preemptions")]
    assert all(isinstance(column, list) for column in columns)
    for k, (order, flying, iterations, put_back) in enumerate(zip(*columns, strict=True)):
        expected = "" if iterations is None else f", {iterations:,} iterations, {put_back:,} preemptions"
        say(f"  replica {k}: {order}; {flying:,} completions in flight{expected}")


def _status(summary: Mapping[str, object]) -> str:
    holds = summary["status"] != Status.OPTIMAL or summary["bound_label"] == "proven least"
    condition = "" if holds else " if assumptions hold"
    return f"{summary['status']}{condition}, stopped by {summary['stopped_by']}"


def _show_handover(summary: Mapping[str, object]) -> None:
    files, settings = summary["files"], summary["settings"]
    assert isinstance(files, list)
    assert isinstance(settings, Mapping)
    say(f"  for {summary['for']}")
    for line in (*files, summary["command"], *(f"{name}={value}" for name, value in settings.items())):
        if line:
            say(f"    {line}")


def _percent(value: object) -> str | None:
    return f"{value:.2%}" if isinstance(value, float) else None


def _seconds(value: object) -> str | None:
    return f"{value:,.3f} s" if isinstance(value, float) else None


def _decimals(value: object, digits: int) -> str | None:
    return f"{value:,.{digits}f}" if isinstance(value, float) else None
