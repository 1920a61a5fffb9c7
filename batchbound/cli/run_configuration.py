"""``batchbound run`` for the configurations of `batchbound search`."""

from __future__ import annotations

import numpy as np

from ..data.configuration import PlannedConfiguration, Reached
from ..data.trace import Trace
from ..models.exegpt.length_drift import LengthDrift
from .inputs import positive
from .output import note
from .parser import Parser


def add_workers(parser: Parser) -> None:
    """Add the options for plans of `search`."""
    parser.add_argument(
        "--encode-device",
        metavar="DEVICE",
        help="device of the worker that encodes, for a WAA plan of `search` (default: that of --device)",
    )
    parser.add_argument(
        "--replan",
        metavar="PROFILE",
        help="search again when lengths drift from the planned ones, with the layer profile that the plan of"
        " `search` was made with",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="tensor-parallel processes, for an RRA plan of `search` (default: 1)",
    )


def say_reached(configuration: PlannedConfiguration, reached: Reached | None, trace: Trace) -> None:
    """Note a run's throughput, latency and lengths against the plan.

    reached: Figures of the run; None if it was too short for a steady state.
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
        decode_steps = (
            f" (and --encode-batch {configuration.encode_batch}, to change the decode steps alone)"
            if not configuration.handed_over
            else ""
        )
        note(f"{drift}: search again with --lengths completions:FILE{decode_steps}")


def _say_speed(reached: Reached) -> None:
    if reached.slowdown is not None:
        note(f"the machine was {reached.slowdown:.2f} times slower than while it was profiled")
    if reached.latency_bound is not None:
        met = "met" if reached.bound_met else "missed"
        note(f"the latency bound of {reached.latency_bound:g} s is {met}")
