"""``batchbound run --replicas N``: a plan's requests served by several engines on Ray."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..data.fleet import Fleet
from ..data.plan import Plan
from ..data.problem import Problem
from ..data.trace import Trace
from ..models.bounds import best_bound
from ..models.fleet_bound import fleet_bound
from .inputs import refuse_existing
from .output import note
from .progress import progress

if TYPE_CHECKING:
    from ..executor.job import Job
    from ..executor.ray_fleet import EngineSpec, FleetOutcome


def run_fleet(args: argparse.Namespace, plan: Plan, job: Job) -> int:
    """
    Serve what is not answered yet on so many replicas, write answers and traces, and print the report.

    Parameters
    ----------
    args
        The options of ``run``.
    plan
        What to run; its slots and limits are each replica's.
    job
        The plan's job. Its model is only looked at for its shape: each replica loads its own.
    """
    from ..executor.job import journal_path
    from ..executor.journal import Journal
    from ..executor.perfetto import save_perfetto
    from ..executor.ray_fleet import FleetLostError, RayFleet
    from .run import run_identity

    paths = [Path(args.trace).with_suffix(f".{k}.jsonl") for k in range(args.replicas)]
    merged = Path(args.trace).with_suffix(".perfetto.json")
    for path in (*paths, merged):
        refuse_existing(path, args.overwrite)
    begun = time.perf_counter()
    names: list[str] = plan.problem.workload.ids.tolist()
    fleet = RayFleet(engine_spec(args, job), args.replicas, args.ray_address)
    try:
        journal = Journal(journal_path(args.output), run_identity(plan, job, args))
        rows = [i for i, name in enumerate(names) if name not in journal.finished]
        left = np.array(rows, dtype=np.int64)
        if not rows:
            job.write_answers(journal, args.output)
            note(f"{args.output}: every answer was there already")
            return 0
        count = len(journal.finished)
        if count:
            note(f"{args.output}: going on after {count} finished answers")
        with journal, progress(len(rows), "requests") as advance:

            def keep(request: int, tokens: list[int]) -> None:
                index = rows[request]
                journal.append(names[index], job.answer(index, tokens))
                advance(len(journal.finished) - count)

            outcome = fleet.serve(
                Fleet.of(plan.problem, 1).problem_of(0, left),
                [job.prompts.tokens[i] for i in rows],
                job.most_tokens[left],
                keep,
            )
    except FleetLostError as error:
        note(f"stopped: {error}")
        note(f"finished answers are in {journal_path(args.output)}; the same command goes on")
        return 1
    finally:
        fleet.close()
    for path, trace in zip(paths, outcome.traces, strict=True):
        trace.save(path)
    save_perfetto(merged, outcome.traces)
    job.write_answers(journal, args.output)
    facts = fleet_report(plan.problem, outcome, len(rows)) | {"seconds": time.perf_counter() - begun}
    if args.json:
        print(json.dumps(facts))
        return 0
    print(
        f"{args.output}: {len(rows):,} answers from {args.replicas} replicas in {facts['makespan_s']:,.2f} s,"
        f" {facts['gap']:.2%} above the fleet's proven bound, in the cost model's seconds"
    )
    for k, replica in enumerate(facts["replicas"]):  # type: ignore[arg-type,var-annotated]
        fate = (
            f", died ({outcome.lost[k]}): its unfinished requests ran elsewhere" if k in outcome.lost else ""
        )
        gap = "nothing served" if replica["gap"] is None else f"gap {replica['gap']:.2%}"
        print(f"  replica {k}: {replica['requests']:,} answers, {replica['model_s']:,.2f} s, {gap}{fate}")
    print(f"{merged}: all replicas, for ui.perfetto.dev")
    return 0


def fleet_report(problem: Problem, outcome: FleetOutcome, requests: int) -> dict[str, object]:
    """
    Return the fleet's gap and each replica's, to bounds of the lengths that came out.

    Parameters
    ----------
    problem
        The plan's; its slots and costs are each replica's.
    outcome
        What the replicas did.
    requests
        How many were to be served.
    """
    row_of = {name: row for row, name in enumerate(problem.workload.ids.tolist())}
    free = dataclasses.replace(problem, kv_capacity=None, prefill_token_cap=None, max_position=None)
    replicas: list[dict[str, object]] = []
    rows: list[int] = []
    tokens: list[int] = []
    for trace in outcome.traces:
        mine = [row_of[name] for name in trace.ids]
        rows += mine
        tokens += trace.tokens.tolist()
        model, gap = model_seconds(problem, trace), None
        if mine:
            workload = problem.workload.select(mine).with_output_tokens(trace.tokens)
            bound = best_bound(dataclasses.replace(free, workload=workload))
            gap = bound.gap(model) if bound.seconds > 0 else None
        replicas.append({"requests": len(mine), "model_s": model, "gap": gap, "seconds": trace.makespan})
    workload = problem.workload.select(rows).with_output_tokens(tokens)
    whole = fleet_bound(Fleet.of(dataclasses.replace(free, workload=workload), len(replicas)))
    makespan = max(model_seconds(problem, trace) for trace in outcome.traces)
    return {
        "requests": requests,
        "makespan_s": max(trace.makespan for trace in outcome.traces),
        "model_s": makespan,
        "bound_s": whole.seconds,
        "gap": whole.gap(makespan),
        "moved": outcome.moved,
        "lost": {str(k): why for k, why in outcome.lost.items()},
        "replicas": replicas,
    }


def model_seconds(problem: Problem, trace: Trace) -> float:
    """Return what a trace's stages take by the problem's cost model."""
    cost, total = problem.cost, 0.0
    for stage in trace.stages:
        if stage.kind == "prefill":
            total += cost.prefill_seconds(stage.tokens)
        else:
            rounds = stage.rounds * cost.decode_seconds(stage.active)
            total += rounds + cost.decode_per_kv_token * stage.kv_tokens
    return total


def engine_spec(args: argparse.Namespace, job: Job) -> EngineSpec:
    """Return what a process of its own has to load to serve a job as this command would."""
    from ..executor.ray_fleet import EngineSpec

    return EngineSpec(
        model=args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
        seed=args.seed or 0,
        tier=args.tier,
        eos_ids=() if args.pinned else tuple(job.tokenizer.eos_ids),
        sampling=dataclasses.asdict(job.sampler),
        threads=args.threads or 1,
    )
