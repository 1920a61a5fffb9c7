"""Options of ``batchbound search``."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..models.exegpt.configuration import Targets
from ..models.exegpt.roofline import ROOFLINE_DEVICES
from .link import LINK, LinkOptions
from .option import Rule, everyday, option
from .problem import ProblemOptions
from .values import AnyPath, File, Positive, Seconds

MOST_ENCODE_BATCH = 256
"""Largest encoding batch to search by default, in requests."""

_BOUNDS = ("latency_bound", "ttft_bound", "tpot_bound")
_COSTS = ("profile", "roofline", "device_rates")


def _has_profiles(options: Any) -> bool:
    return bool(options.profile or options.roofline or options.device_rates)


@dataclass(frozen=True, kw_only=True)
class ConfigurationOptions(LinkOptions):
    """Bounds, layer profiles, devices and batches of a search."""

    TITLE = "search"

    latency_bound: Seconds | None = everyday(
        None,
        "maximum latency of a completion of 99th-percentile length, in seconds (default: no bound)",
        metavar="S",
    )
    ttft_bound: Seconds | None = option(
        None, "maximum seconds to its first token (default: no bound)", metavar="S"
    )
    tpot_bound: Seconds | None = option(
        None, "maximum seconds per further token (default: no bound)", metavar="S"
    )
    profile: tuple[AnyPath, ...] = everyday(
        (),
        "layer profiles, one per tensor-parallel degree: files, or folders in LLMServingSim's format"
        " (default: the cost model of --cost, one device)",
        words="append",
    )
    roofline: str | None = option(
        None,
        "estimate the costs of --model-config's model from this device's rates, with an error bar"
        f" ({', '.join(sorted(ROOFLINE_DEVICES))})",
        metavar="DEVICE",
        choices=tuple(sorted(ROOFLINE_DEVICES)),
        excludes=("profile",),
    )
    device_rates: File | None = option(
        None,
        "like --roofline, for another device: JSON with name, flops (16 bits, per second), bandwidth"
        " (bytes per second), memory (bytes), and optionally flops_8bit and flops_4bit",
        excludes=("profile", "roofline"),
    )
    model_config: File | None = option(
        None, "config.json of the model, for --roofline", needs=("roofline", "device_rates")
    )
    devices: Positive = option(1, "number of devices (default %(default)s)")
    latency_margin: float = option(
        0.0,
        "share of each bound kept in reserve for slower phases (default %(default)s)",
        metavar="SHARE",
        needs=_BOUNDS,
    )
    most_encode_batch: Positive | None = option(
        None, f"largest encoding batch to search (default {MOST_ENCODE_BATCH})", excludes=("encode_batch",)
    )
    encode_batch: Positive | None = option(
        None,
        "encoding batch to keep; search only the rest (RRA's decode steps, if lengths changed)",
    )
    frontier: bool = option(False, "also print throughput against latency")

    @property
    def targets(self) -> Targets:
        """Bounds of latency, first token and further tokens."""
        bounds = (getattr(self, name) for name in _BOUNDS)
        return Targets(*(math.inf if bound is None else bound for bound in bounds))


@dataclass(frozen=True)
class SearchOptions(ConfigurationOptions, ProblemOptions):
    """A problem, the configurations to search, and the file of the plan."""

    TITLE = ""
    RULES = (
        Rule(("slots",), when=_has_profiles, where="on a search with layer profiles"),
        Rule(
            ("cost",),
            when=lambda options: options.output is None and _has_profiles(options),
            where="on a search with layer profiles",
        ),
        Rule(LINK, when=lambda options: options.devices == 1, where="on one device"),
    )

    _: KW_ONLY
    output: File | None = everyday(
        None, "write a plan for `batchbound run` (RRA on one device, or WAA on two)", short="-o", writes=True
    )
    overwrite: bool = option(False, "replace the plan if it exists", needs=("output",))
    json: bool = everyday(False, "print one JSON object instead of a table")
