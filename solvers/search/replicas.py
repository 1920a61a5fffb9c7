"""One compiled search over equal replicas of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...data.arrays import IntArray
from ...data.fleet import Fleet
from ...data.schedule import Schedule
from .core.compiled import Allowance, call
from .core.parameters import CoreParameters
from .core.phases import is_compiled, is_curved
from .core.plans import CompiledJob

Part = tuple[IntArray, Schedule]
"""Requests of a replica, and their schedule."""


def are_one_search(fleet: Fleet, schedules: Sequence[Schedule]) -> bool:
    """Return whether the compiled search can plan all replicas at once.

    They are equal, all decode, and only slots bind.
    """
    several = 1 < len(schedules) == len(fleet.replicas)
    alike = len(set(fleet.replicas)) == 1
    if not (several and alike) or any(not schedule.decode_steps.any() for schedule in schedules):
        return False
    problem = fleet.problem()
    free = not is_curved(problem) and fleet.workload.tree is None
    return free and is_compiled(problem) and not problem.memory_can_run_out


def anneal_replicas(
    fleet: Fleet, parts: Sequence[Part], core: CoreParameters, seconds: float, work: int | None, seed: int
) -> tuple[list[Part], bool]:
    """Return the best parts found, and whether the search was interrupted.

    The parts are none if no schedule was found. In the search replicas stand one after another.
    """
    job = CompiledJob(fleet.problem(), memory=False)
    start, stage, slot = np.zeros((3, len(fleet)), dtype=np.int64)
    replica_of = np.empty(len(fleet), dtype=np.int64)
    end = stages = 0
    for k, (requests, schedule) in enumerate(parts):
        runs = fleet.decode_steps[requests] > 0
        replica_of[requests] = k
        start[requests] = end + schedule.starts[schedule.bin_of]
        stage[requests] = stages + schedule.bin_of
        used = np.unique(schedule.slot_of[runs], return_inverse=True)[1]
        slot[requests[runs]] = k * job.job.slots + used
        end = int((start + fleet.decode_steps)[requests].max())
        stages += len(schedule.decode_steps)
    plan = (start[job.members], stage[job.members], slot[job.members])
    moves = None if work is None else core.moves_per_work * work
    allowance = Allowance(seconds, moves, seed=seed)
    plan_found = call("core_spans", job.job, core.spans, allowance, plan, end)
    if not np.isfinite(plan_found.cost) or len(np.unique(plan_found.slot)) < len(parts):
        return [], plan_found.interrupted
    start[job.members], stage[job.members], replica_of[job.members] = (
        plan_found.start,
        plan_found.stage,
        plan_found.slot,
    )
    schedules = []
    for k in range(len(parts)):
        requests = np.flatnonzero(replica_of == k)
        part = CompiledJob(fleet.problem_of(k, requests), memory=False)
        mine = requests[part.members]
        first = start[mine] - start[mine].min()
        replica_plan = replace(plan_found, start=first.astype(np.int32), stage=stage[mine].astype(np.int32))
        planned = part.schedule(replica_plan)
        assert planned is not None, "found schedules have a cost"
        schedules.append((requests, planned))
    return schedules, plan_found.interrupted
