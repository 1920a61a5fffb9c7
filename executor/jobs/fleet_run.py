"""Runs of a plan on several replicas, as Ray actors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...data.arrays import IntArray
from ...data.fleet import Fleet, FleetSchedule
from ...data.plan import Plan
from ...data.schedule import Schedule
from ...data.trace import Stage
from ...heuristics.fleet.policy import FleetPolicy, NamedPolicy
from ...heuristics.simulate import remaining_schedule
from .job import Job, Outcome
from .journal import Journal

if TYPE_CHECKING:
    from ..processes.engine_spec import EngineSpec


def run_on_replicas(
    job: Job,
    journal: Journal,
    *,
    spec: EngineSpec,
    address: str | None = None,
    patience: float | None = None,
    on_stage: Callable[[Stage, int], None] | None = None,
) -> Outcome:
    """Serve the unfinished requests on the planned replicas.

    address: Address of a running Ray cluster; None starts Ray on this machine for the run.
    patience: Seconds of silence after which a replica is dropped, if another is alive; None for never.
    """
    from ..processes.ray_fleet import Listener, RayFleet

    plan, resumed = job.plan, len(journal.finished)
    job.answer_refused(journal)
    waiting = job.left(journal)
    if not waiting.size:
        return Outcome((), len(plan.workload))
    names = plan.workload.ids.tolist()

    def keep(request: int, tokens: list[int]) -> None:
        index = int(waiting[request])
        journal.append(names[index], job.answer(index, tokens))

    def fail(request: int, why: str) -> None:
        job.fail(journal, int(waiting[request]), "model_failed", why)

    def staged(_: int, stage: Stage) -> None:
        if on_stage is not None:
            on_stage(stage, len(journal.finished) - resumed)

    fleet, schedule = remaining_shares(plan, waiting)
    replicas = RayFleet(spec, len(plan.fleet.replicas), address, patience)
    try:
        outcome = replicas.serve(
            fleet,
            schedule,
            [job.prompts.tokens[i] for i in waiting],
            job.most_tokens[waiting],
            keep,
            backoff=plan.groups == "any",
            policy=_policy(plan, waiting),
            listener=Listener(staged, fail if job.record_failures else None),
        )
    finally:
        replicas.close()
    served = sum(len(trace.ids) for trace in outcome.traces)
    return Outcome(outcome.traces, len(plan.workload) - served)


def _policy(plan: Plan, left: IntArray) -> FleetPolicy | NamedPolicy | None:
    """Return the policy that replicas follow; None if they replay their schedules."""
    if plan.followed is not None:
        return NamedPolicy(plan.followed.policy)
    return None if plan.expected is None else FleetPolicy.of(plan.expected).select(left)


def remaining_shares(plan: Plan, left: IntArray) -> tuple[Fleet, FleetSchedule]:
    """Return the fleet and the schedule of the remaining requests."""
    schedules: list[Schedule | None] = []
    for k, schedule in enumerate(plan.shares.schedules):
        members = plan.shares.members(k)
        rows = np.flatnonzero(np.isin(members, left))
        if schedule is None or not rows.size:
            schedules.append(None)
        else:
            schedules.append(remaining_schedule(plan.fleet.problem_of(k, members), schedule, rows)[1])
    fleet = replace(plan.fleet, workload=plan.workload.select(left))
    return fleet, FleetSchedule(plan.shares.replica_of[left], tuple(schedules))
