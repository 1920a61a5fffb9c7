"""``batchbound run`` on several replicas: each follows its own schedule, on Ray."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.costs.cost import IntArray
from ..data.files.disk import InputError
from ..data.fleet import Fleet, FleetSchedule
from ..data.fleet_plan import FleetPlan, is_fleet_plan
from ..data.plan import Plan
from ..data.schedule import Schedule
from ..heuristics.simulate import remaining_schedule
from ..planning.fleet import make_fleet_plan
from ..solvers.search.constructive import ski_rental_schedule
from . import INTERRUPTED
from .inputs import named_files, refuse_outputs
from .output import note
from .progress import progress
from .report_fleet import print_fleet_report, shared_plan_path, trace_paths

if TYPE_CHECKING:
    from ..executor.processes.engine_spec import EngineSpec
    from ..executor.runs.job import Job


def run_fleet(args: argparse.Namespace) -> int:
    """
    Serve what is not answered yet on a plan's replicas, write answers and traces, and print the report.

    A plan for one replica is shared out anew over as many as the options say.

    Parameters
    ----------
    args
        The options of ``run``.
    """
    from ..executor.processes.ray_fleet import FleetLostError, RayFleet
    from ..executor.reports.fleet_report import fleet_report
    from ..executor.reports.perfetto import save_perfetto
    from ..executor.runs.job import journal_path
    from ..executor.runs.journal import Journal
    from .commands.run import load_job, run_identity, say_stopped

    begun = time.perf_counter()
    for option, given in (
        ("--policy", args.policy),
        ("--kv-tokens", args.kv_tokens),
        ("--encode-device", args.encode_device),
        ("--replan", args.replan),
        ("--tensor-parallel", None if args.tensor_parallel == 1 else args.tensor_parallel),
    ):
        if given is not None:
            raise InputError(f"{option} is for one replica", hint="Leave it out, or plan for one replica.")
    plan, planned = _plans(args)
    count = len(planned.fleet.replicas)
    paths = trace_paths(args.trace, count)
    merged = Path(args.trace).with_suffix(".perfetto.json")
    # A plan for one replica does not say who was to serve what: that is kept beside the traces.
    shared = None if is_fleet_plan(args.plan) else shared_plan_path(args.trace)
    written = [args.output, *paths, merged, *([] if shared is None else [shared])]
    refuse_outputs(written, args.overwrite, named_files(args, "output", "trace"))
    job = load_job(plan, args, _shape(args))
    names: list[str] = plan.problem.workload.ids.tolist()
    journal = Journal(journal_path(args.output), run_identity(plan, job, args))
    with journal:
        left = np.array([i for i, name in enumerate(names) if name not in journal.finished], dtype=np.int64)
        resumed = len(journal.finished)
        if resumed:
            note(f"{args.output}: going on after {resumed} finished answers")
        if left.size:
            fleet, schedule = left_of(planned, left)
            replicas = RayFleet(engine_spec(args, job), count, args.ray_address)
            try:
                with progress(len(left), "requests") as advance:

                    def keep(request: int, tokens: list[int]) -> None:
                        index = int(left[request])
                        journal.append(names[index], job.answer(index, tokens))
                        advance(len(journal.finished) - resumed)

                    outcome = replicas.serve(
                        fleet,
                        schedule,
                        [job.prompts.tokens[i] for i in left],
                        job.most_tokens[left],
                        keep,
                        backoff=planned.groups == "any",
                    )
            except FleetLostError as error:
                say_stopped(str(error), journal)
                return 1
            except KeyboardInterrupt:
                say_stopped("interrupted", journal)
                return INTERRUPTED
            finally:
                replicas.close()
    job.write_answers(journal, args.output)
    if not left.size:
        note(f"{args.output}: every answer was there already")
        return 0
    if shared is not None:
        _placed(planned, Path(args.plan).parent, shared.parent).save(shared)
    for path, trace in zip(paths, outcome.traces, strict=True):
        trace.save(path)
    save_perfetto(merged, outcome.traces)
    report = fleet_report(planned, outcome.traces)
    if args.json:
        print(json.dumps(report.to_json() | {"seconds": time.perf_counter() - begun}))
        return 0
    gap = "no bound" if report.run_gap is None else f"{report.run_gap:.2%} above the fleet's proven bound"
    before = f" after {resumed:,} from before" if resumed else ""
    print(
        f"{args.output}: {len(left):,} answers{before} from {count} replicas in {report.makespan:,.2f} s,"
        f" {gap}, in the cost model's seconds"
    )
    print_fleet_report(report, as_json=False)
    print(f"{merged}: all replicas, for ui.perfetto.dev")
    if shared is not None:
        print(f"{shared}: the plan shared out; `batchbound report {args.plan} {paths[0]}` shows this again")
    return 0


def _plans(args: argparse.Namespace) -> tuple[Plan, FleetPlan]:
    """Return the job as one plan, for its requests and prompts, and as the fleet's."""
    if not is_fleet_plan(args.plan):
        plan = Plan.load(args.plan)
        note(f"{args.plan} is for one replica: shared out over {args.replicas}")
        return plan, make_fleet_plan(
            Fleet.of(plan.problem, args.replicas),
            lengths=plan.lengths,
            cost_source=plan.cost_source,
            prompts=plan.prompts,
        )
    planned = FleetPlan.load(args.plan)
    count = len(planned.fleet.replicas)
    if args.replicas not in (1, count):
        message = f"the plan is for {count} replicas, not {args.replicas}"
        raise InputError(message, file=args.plan, hint="Leave --replicas out, or plan again.")
    problem = planned.fleet.problem_of(0, np.arange(len(planned.fleet)))
    schedule = ski_rental_schedule(problem)
    seconds, source = schedule.makespan(problem), planned.cost_source
    plan = Plan(problem, schedule, seconds, None, planned.maker, planned.lengths, source, planned.prompts)
    return plan, planned


def _placed(plan: FleetPlan, before: Path, folder: Path) -> FleetPlan:
    """Return the plan as it has to be written to another folder: prompts are named as seen from there."""
    if plan.prompts is None:
        return plan
    path = os.path.relpath((before / plan.prompts.path).resolve(), folder.resolve())
    return dataclasses.replace(plan, prompts=dataclasses.replace(plan.prompts, path=path))


def left_of(plan: FleetPlan, left: IntArray) -> tuple[Fleet, FleetSchedule]:
    """
    Return the fleet and the schedule of some of a plan's requests, each where it was planned.

    Parameters
    ----------
    plan
        The plan.
    left
        The requests that are left, ascending.
    """
    replica_of = plan.schedule.replica_of[left]
    schedules: list[Schedule | None] = []
    for k, schedule in enumerate(plan.schedule.schedules):
        members = plan.schedule.members(k)
        kept = np.flatnonzero(np.isin(members, left))
        if schedule is None or not kept.size:
            schedules.append(None)
        else:
            schedules.append(remaining_schedule(plan.fleet.problem_of(k, members), schedule, kept)[1])
    fleet = dataclasses.replace(plan.fleet, workload=plan.fleet.workload.select(left))
    return fleet, FleetSchedule(replica_of, tuple(schedules))


def engine_spec(args: argparse.Namespace, job: Job) -> EngineSpec:
    """Return what a process of its own has to load to serve a job as this command would."""
    from ..executor.processes.engine_spec import EngineSpec

    return EngineSpec(
        model=args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
        seed=args.seed or 0,
        tier=args.tier,
        eos_ids=() if args.pinned else tuple(job.tokenizer.eos_ids),
        sampler=job.sampler,
        threads=args.threads or 1,
    )


def _shape(args: argparse.Namespace) -> Any:
    """Return the model without its weights: the driver only looks at its vocabulary and positions."""
    from ..executor.models.source import load_config

    config = load_config(args.model)
    import torch
    from transformers import AutoModelForCausalLM

    named = config.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=named or torch.float32)  # type: ignore[no-untyped-call]
