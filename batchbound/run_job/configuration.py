"""Runs of searched configurations, adapted when lengths drift."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.arrays import IntArray
from ..data.configuration import PlannedConfiguration
from ..data.files.disk import InputError
from ..data.lengths.pair import LengthPair
from ..data.plan import Plan
from ..data.problem import Problem
from ..data.readers.profile_readers import read_profile
from ..data.workload import Workload
from ..models.exegpt.configuration import ExecConfig, Strategy
from ..models.exegpt.length_drift import LengthDrift
from ..models.exegpt.run_profile import can_hand_over
from ..searching import planned_configuration, timelines_of
from ..solvers.exegpt.replan import replan
from .options import ModelOptions, RunOptions

if TYPE_CHECKING:
    from ..data.costs.layer_profile import LayerProfile
    from ..executor.jobs.job import Job, Outcome


def refuse_unused(plan: Plan, path: Path, options: RunOptions) -> None:
    """Raise InputError for an option without effect on one replica."""
    if options.ray_address is not None:
        raise InputError("--ray-address is for several replicas", hint="Leave it out, or give --replicas N.")
    handed_over = plan.configuration is not None and plan.configuration.handed_over
    if options.encode_device is not None and not (handed_over and options.policy is None):
        message = "--encode-device is for a WAA plan, in which another worker encodes the prompts"
        raise InputError(message, file=path, hint="Leave it out.")
    if options.replan is not None and (plan.configuration is None or options.policy is not None):
        message = "--replan is for a plan of `batchbound search`, run without --policy"
        raise InputError(message, file=path, hint="Leave it out.")
    if options.tensor_parallel > 1 and (
        plan.configuration is None or handed_over or options.policy is not None
    ):
        message = "--tensor-parallel is for an RRA plan of `batchbound search`, run without --policy"
        raise InputError(message, file=path, hint="Leave it out.")
    if options.on_error is not None and plan.configuration is not None and options.policy is None:
        message = "--on-error is for a plan without a configuration: this one stops at an error"
        raise InputError(message, file=path, hint="Leave it out.")
    if options.tensor_parallel > 1 and options.replan is not None:
        message = "--replan has no effect with --tensor-parallel"
        raise InputError(message, hint="Leave it or --tensor-parallel out.")


def serving(
    plan: Plan, job: Job, source: ModelOptions, options: RunOptions, remark: Callable[[str], None]
) -> Callable[..., Outcome]:
    """Return the function that runs a job by its plan."""
    if plan.configuration is None or options.policy is not None:
        return job.run
    from ..executor.jobs.configuration_run import run_configuration
    from ..executor.processes.tensor_parallel import check_shared

    spec = source.spec(job)
    worker = replace(spec, device=options.encode_device or spec.device)
    replanning = None
    if options.replan is not None:
        profile = read_profile(options.replan)
        if plan.configuration.handed_over and not can_hand_over(profile):
            message = "the profile has no interference of two workers (WAA)"
            raise InputError(message, file=options.replan, hint="Profile again, with an --encode-device.")
        replanning = partial(_changed, profile, plan.problem, remark)
    if options.tensor_parallel > 1:
        try:
            check_shared(job.model.config, options.tensor_parallel)
        except ValueError as error:
            raise InputError(str(error), where="--tensor-parallel", hint="Give another number.") from error
    return partial(
        run_configuration,
        job,
        plan.configuration,
        worker=worker,
        replanning=replanning,
        tensor_parallel=options.tensor_parallel,
    )


def _changed(
    profile: LayerProfile,
    problem: Problem,
    remark: Callable[[str], None],
    running: PlannedConfiguration,
    tokens: IntArray,
    iterations: IntArray,
) -> PlannedConfiguration | None:
    """Return a configuration for observed lengths, or None for no change."""
    from ..executor.jobs.configuration_run import MOST_GROWTH

    begun = time.perf_counter()
    drift = LengthDrift.of(running, iterations)
    timeline = timelines_of(
        [profile],
        LengthPair.observed(Workload.from_lengths(tokens, iterations)),
        1 + running.handed_over,
        slots=problem.slots,
        kv_capacity=problem.kv_capacity,
    )[running.handed_over]
    config = ExecConfig(Strategy(running.strategy), running.encode_batch, running.decode_steps)
    bound = math.inf if running.latency_bound is None else running.latency_bound
    batches = (1, MOST_GROWTH * running.encode_batch)
    found = replan(timeline, timeline, config, bound, encode_batches=batches)
    took = f"{time.perf_counter() - begun + found.reload_seconds:.2f} s to change"
    if found.config is None or found.performance is None:
        remark(f"{drift}; no other configuration meets the bound: it stays ({took})")
        return None
    changed, old = planned_configuration(timeline, found.config, running.latency_bound), found.unchanged
    remark(
        f"{drift}; from B_E {running.encode_batch}, N_D {running.decode_steps}, expected to reach"
        f" {old.throughput:.2f} requests/s in {old.latency:.3f} s, to B_E {changed.encode_batch}, N_D"
        f" {changed.decode_steps}: {changed.throughput:.2f} requests/s in {changed.latency:.3f} s ({took})"
    )
    return changed
