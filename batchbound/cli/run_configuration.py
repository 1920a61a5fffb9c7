"""``batchbound run`` of a plan of `batchbound search`: its configuration, carried out."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..data.configuration import PlannedConfiguration
from ..data.costs.cost import IntArray
from ..data.files.disk import InputError
from ..data.lengths.pair import LengthPair
from ..data.plan import Plan
from ..data.problem import Problem
from ..data.reached import Reached
from ..data.readers.profile_readers import read_profile
from ..data.trace import Trace
from ..data.workload import Workload
from ..models.exegpt.configuration import ExecConfig, Strategy
from ..models.exegpt.length_drift import LengthDrift
from ..models.exegpt.run_profile import can_hand_over
from ..searching import planned_configuration, timelines_of
from ..solvers.exegpt.replan import replan
from .inputs import positive
from .model import engine_spec
from .output import note

if TYPE_CHECKING:
    from ..data.costs.layer_profile import LayerProfile
    from ..executor.runs.job import Job, Outcome


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the option of a configuration with two workers."""
    parser.add_argument(
        "--encode-device",
        metavar="DEVICE",
        help="of the worker that encodes, for a WAA plan of `search` (default: that of --device)",
    )
    parser.add_argument(
        "--replan",
        metavar="PROFILE",
        help="change the configuration of a plan of `search` when answers drift from the lengths planned for:"
        " search again with this layer profile, the one it was planned with",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="processes that share each of the model's layers, for an RRA plan of `search` (default: 1)",
    )


def refuse_unused(plan: Plan, args: argparse.Namespace) -> None:
    """
    Raise InputError if an option of ``run`` would be passed over by a run in one process on one replica.

    Parameters
    ----------
    plan, args
        The plan, and the options.
    """
    if args.ray_address is not None:
        raise InputError("--ray-address is for several replicas", hint="Leave it out, or give --replicas N.")
    handed_over = plan.configuration is not None and plan.configuration.handed_over
    if args.encode_device is not None and not (handed_over and args.policy is None):
        message = "--encode-device is for a plan whose prompts another worker encodes (WAA)"
        raise InputError(message, file=args.plan, hint="Leave it out.")
    if args.replan is not None and (plan.configuration is None or args.policy is not None):
        message = "--replan is for a plan of `batchbound search`, carried out without a --policy"
        raise InputError(message, file=args.plan, hint="Leave it out.")
    if args.tensor_parallel > 1 and (plan.configuration is None or handed_over or args.policy is not None):
        message = (
            "--tensor-parallel is for an RRA plan of `batchbound search`, carried out without a --policy"
        )
        raise InputError(message, file=args.plan, hint="Leave it out.")
    if args.on_error is not None and plan.configuration is not None and args.policy is None:
        message = "--on-error is for a plan without a configuration: this one stops at an error"
        raise InputError(message, file=args.plan, hint="Leave it out.")
    if args.tensor_parallel > 1 and args.replan is not None:
        message = "--replan would let the processes that share layers fall out of step"
        raise InputError(message, hint="Leave it or --tensor-parallel out.")


def serving(plan: Plan, job: Job, args: argparse.Namespace) -> Callable[..., Outcome]:
    """Return what serves a plan's job: its configuration if it has one (and no --policy), or the job."""
    if plan.configuration is None or args.policy is not None:
        return job.run
    from ..executor.processes.tensor_parallel import check_shared
    from ..executor.runs.configuration_run import run_configuration

    spec = engine_spec(args, job)
    worker = replace(spec, device=args.encode_device or spec.device)
    replanning = None
    if args.replan is not None:
        profile = read_profile(args.replan)
        if plan.configuration.handed_over and not can_hand_over(profile):
            message = "the profile does not say what two workers cost each other (WAA)"
            raise InputError(message, file=args.replan, hint="Profile again, with an --encode-device.")
        replanning = partial(_changed, profile, plan.problem)
    if args.tensor_parallel > 1:
        try:
            check_shared(job.model.config, args.tensor_parallel)
        except ValueError as error:
            raise InputError(str(error), where="--tensor-parallel", hint="Give another number.") from error
    return partial(
        run_configuration,
        job,
        plan.configuration,
        worker=worker,
        replanning=replanning,
        tensor_parallel=args.tensor_parallel,
    )


def _changed(
    profile: LayerProfile,
    problem: Problem,
    running: PlannedConfiguration,
    tokens: IntArray,
    iterations: IntArray,
) -> PlannedConfiguration | None:
    """Return the configuration for the lengths observed, and say so; None to keep the running one."""
    from ..executor.runs.configuration_run import MOST_GROWTH

    begun = time.perf_counter()
    drift = LengthDrift.of(running, iterations)
    timeline = timelines_of(
        [profile],
        LengthPair.observed(Workload.from_lengths(tokens, iterations)),
        1 + running.handed_over,
        slots=problem.slots,
        kv_capacity=problem.kv_capacity,
    )[running.handed_over]
    config = ExecConfig(Strategy(running.strategy), running.encode_batch, running.decode_rounds)
    bound = math.inf if running.latency_bound is None else running.latency_bound
    batches = (1, MOST_GROWTH * running.encode_batch)
    found = replan(timeline, timeline, config, bound, encode_batches=batches)
    took = f"{time.perf_counter() - begun + found.reload_seconds:.2f} s to change"
    if found.config is None or found.performance is None:
        note(f"{drift}; nothing within reach meets the bound: the configuration stays ({took})")
        return None
    changed, old = planned_configuration(timeline, found.config, running.latency_bound), found.unchanged
    note(
        f"{drift}; from B_E {running.encode_batch}, N_D {running.decode_rounds}, expected to reach"
        f" {old.throughput:.2f} requests/s in {old.latency:.3f} s, to B_E {changed.encode_batch}, N_D"
        f" {changed.decode_rounds}: {changed.throughput:.2f} requests/s in {changed.latency:.3f} s ({took})"
    )
    return changed


def say_reached(configuration: PlannedConfiguration, reached: Reached | None, trace: Trace) -> None:
    """
    Say what a run reached of what was planned, and whether answers were as long as planned.

    Parameters
    ----------
    configuration
        That was planned.
    reached
        What came of it; None if the run was too short for a steady state.
    trace
        Of the run.
    """
    if reached is None:
        note("the run was too short to reach its steady state: nothing to compare with the plan")
    else:
        note(
            f"{configuration.strategy}: {reached.throughput:.2f} requests/s in the steady state, planned"
            f" {reached.planned_throughput:.2f} ({reached.error:+.1%}); 99 % took at most"
            f" {reached.latency:.3f} s, planned {reached.planned_latency:.3f} s"
        )
        _say_speed(reached)
    drift = LengthDrift.of(configuration, np.maximum(1, trace.tokens - 1))
    if drift.drifted:
        rounds = (
            f" (and --encode-batch {configuration.encode_batch}, to change the decode rounds alone)"
            if not configuration.handed_over
            else ""
        )
        note(f"{drift}: search again with --lengths answers:FILE{rounds}")


def _say_speed(reached: Reached) -> None:
    """Say how fast the machine was, and whether the bound was met."""
    if reached.slowdown is not None:
        note(f"the machine was {reached.slowdown:.2f} times slower than while it was profiled")
    if reached.latency_bound is not None:
        met = "met" if reached.bound_met else "missed"
        note(f"the latency bound of {reached.latency_bound:g} s is {met}")
