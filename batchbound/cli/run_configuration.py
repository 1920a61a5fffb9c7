"""``batchbound run`` of a plan of `batchbound search`: its configuration, carried out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..data.configuration import PlannedConfiguration
from ..data.files import InputError
from ..data.plan import Plan
from ..data.trace import Trace
from ..models.length_drift import LengthDrift
from .output import note

if TYPE_CHECKING:
    from ..executor.job import Job, Outcome


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the option of a configuration with two workers."""
    parser.add_argument(
        "--encode-device",
        metavar="DEVICE",
        help="of the worker that encodes, for a WAA plan of `search` (default: that of --device)",
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
        raise InputError("--ray-address is for several replicas", mend="Leave it out, or give --replicas N.")
    handed_over = plan.configuration is not None and plan.configuration.handed_over
    if args.encode_device is not None and not (handed_over and args.policy is None):
        message = "--encode-device is for a plan whose prompts another worker encodes (WAA)"
        raise InputError(message, file=args.plan, mend="Leave it out.")


def serving(plan: Plan, job: Job, args: argparse.Namespace) -> Callable[..., Outcome]:
    """Return what serves a plan's job: its configuration if it has one (and no --policy), or the job."""
    if plan.configuration is None or args.policy is not None:
        return job.run
    from ..executor.configuration_run import run_configuration
    from .run_fleet import engine_spec

    spec = engine_spec(args, job)
    worker = replace(spec, device=args.encode_device or spec.device)
    return partial(run_configuration, job, plan.configuration, worker=worker)


def say_reached(configuration: PlannedConfiguration, trace: Trace) -> None:
    """Say what a run reached of what was planned, and whether answers were as long as planned."""
    from ..executor.configuration_run import steady_state

    reached = steady_state(trace)
    if reached is None:
        note("the run was too short to reach its steady state: nothing to compare with the plan")
    else:
        bound, ahead = configuration.latency_bound, configuration.throughput / reached.throughput - 1
        note(
            f"{configuration.strategy}: {reached.throughput:.2f} requests/s in the steady state, planned"
            f" {configuration.throughput:.2f} ({ahead:+.1%}); 99 % took at most {reached.latency:.3f} s,"
            f" planned {configuration.latency:.3f} s"
        )
        if bound is not None:
            note(f"the latency bound of {bound:g} s is {'met' if reached.latency <= bound else 'missed'}")
    drift = LengthDrift.of(configuration, np.maximum(1, trace.tokens - 1))
    if drift.drifted:
        rounds = (
            f" (and --encode-batch {configuration.encode_batch}, to change the decode rounds alone)"
            if not configuration.handed_over
            else ""
        )
        note(f"{drift}: search again with --lengths answers:FILE{rounds}")
