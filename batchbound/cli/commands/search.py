"""``batchbound search``: find the fastest configuration under a latency bound."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from ...data.costs.layer_profile import LayerProfile
from ...data.costs.link import Link
from ...data.files.disk import InputError
from ...data.files.record import plain
from ...data.readers.profile_readers import read_profile
from ...models.exegpt.configuration import Strategy, Targets
from ...models.exegpt.roofline import ROOFLINE_DEVICES, RooflineDevice
from ...searching import ConfigurationSearch, refuse_timeless, roofline_profiles, search
from ...solvers.exegpt.execution_search import Found
from ..inputs import (
    Inputs,
    add_problem,
    check_outputs,
    positive,
    provenance_of,
    read_inputs,
    seconds,
)
from ..links import add_link, link_of, say_link
from ..output import note
from ..parser import Parser, Rule
from ..streams import say

_COLUMNS = (
    "strategy", "TP", "B_E", "N_D", "B_m", "groups", "stages", "B_D", "GB", "latency", "TTFT", "TPOT",
    "req/s", "looked at",
)  # fmt: skip

_LEGEND = """  TP: devices per layer; B_E: prompts per encoding phase; N_D: decode iterations between phases;
  B_m: parts of a decode batch; groups: groups of TP devices; stages: pipeline stages;
  B_D: decoding requests; GB: memory of the fullest device; latency: start of a prompt to last token;
  TTFT: to first token; TPOT: time per further token"""

_BOUNDS = ("--latency-bound", "--ttft-bound", "--tpot-bound")

MOST_ENCODE_BATCH = 256
"""Largest encoding batch to search by default, in requests."""


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    add_problem(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--latency-bound",
        type=seconds,
        metavar="S",
        everyday=True,
        help="maximum latency of a completion of 99th-percentile length, in seconds (default: no bound)",
    )
    group.add_argument(
        "--ttft-bound",
        type=seconds,
        metavar="S",
        help="maximum seconds to its first token (default: no bound)",
    )
    group.add_argument(
        "--tpot-bound",
        type=seconds,
        metavar="S",
        help="maximum seconds per further token (default: no bound)",
    )
    costs = group.add_mutually_exclusive_group()
    costs.add_argument(
        "--profile",
        action="append",
        metavar="PATH",
        everyday=True,
        help="layer profiles, one per tensor-parallel degree: files, or folders in LLMServingSim's"
        " format (default: the cost model of --cost, one device)",
    )
    costs.add_argument(
        "--roofline",
        metavar="DEVICE",
        choices=sorted(ROOFLINE_DEVICES),
        help="estimate the costs of --model-config's model from this device's rates, with an error bar"
        f" ({', '.join(sorted(ROOFLINE_DEVICES))})",
    )
    costs.add_argument(
        "--device-rates",
        metavar="FILE",
        help="like --roofline, for another device: JSON with name, flops (16 bits, per second), bandwidth"
        " (bytes per second), memory (bytes), and optionally flops_8bit and flops_4bit",
    )
    group.add_argument(
        "--model-config",
        metavar="FILE",
        needs=["--roofline", "--device-rates"],
        help="config.json of the model, for --roofline",
    )
    group.add_argument("--devices", type=positive, default=1, help="number of devices (default %(default)s)")
    link = len(parser._actions)
    add_link(group)
    links = parser.names_since(link)
    group.add_argument(
        "--latency-margin",
        type=float,
        default=0.0,
        metavar="SHARE",
        needs=list(_BOUNDS),
        help="share of each bound kept in reserve for slower phases (default %(default)s)",
    )
    batch = group.add_mutually_exclusive_group()
    batch.add_argument(
        "--most-encode-batch",
        type=positive,
        metavar="N",
        help=f"largest encoding batch to search (default {MOST_ENCODE_BATCH})",
    )
    batch.add_argument(
        "--encode-batch",
        type=positive,
        metavar="N",
        help="encoding batch to keep; search only the rest (RRA's decode steps, if lengths changed)",
    )
    group.add_argument("--frontier", action="store_true", help="also print throughput against latency")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        everyday=True,
        help="write a plan for `batchbound run` (RRA on one device, or WAA on two)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", needs=["--output"], help="replace the plan if it exists"
    )
    parser.add_argument(
        "--json", action="store_true", everyday=True, help="print one JSON object instead of a table"
    )
    parser.rules += [
        Rule(
            ("--slots",),
            when=lambda args: args.profile or args.roofline or args.device_rates,
            where="on a search with layer profiles",
        ),
        Rule(
            ("--cost",),
            when=lambda args: args.output is None and (args.profile or args.roofline or args.device_rates),
            where="on a search with layer profiles",
        ),
        Rule(links, when=lambda args: args.devices == 1, where="on one device"),
    ]


def run(args: argparse.Namespace) -> int:
    """Search, print the table and write the plan."""
    check_outputs(args, "output")
    bounds = (args.latency_bound, args.ttft_bound, args.tpot_bound)
    begun = time.perf_counter()
    inputs, profiles = read_inputs(args, keep_arrivals=False), _profiles(args)
    if args.profile and args.cost == "paper":
        first = min(range(len(profiles)), key=lambda at: profiles[at].tensor_parallel)
        inputs = _with_cost_of(inputs, profiles[first], args.profile[first])
    if not profiles:
        refuse_timeless(inputs.problem.cost, args.cost)
    kept = args.encode_batch
    found = search(
        inputs.problem,
        profiles,
        devices=args.devices,
        latency_bound=Targets(*(math.inf if each is None else each for each in bounds)),
        latency_margin=args.latency_margin,
        encode_batches=(kept, kept) if kept else (1, args.most_encode_batch or MOST_ENCODE_BATCH),
        link=_link(args, profiles),
    )
    _say_limits(found)
    curve = found.frontier() if args.frontier else None
    _print(found, curve, time.perf_counter() - begun, as_json=args.json)
    _say_extrapolated(found)
    if args.output is not None:
        plan = found.plan(provenance=provenance_of(inputs, args.output))
        plan.save(args.output)
        assert plan.configuration is not None
        note(f"{args.output}: the {plan.configuration.strategy} configuration as a plan for `batchbound run`")
    return 0 if found.best else 1


def _link(args: argparse.Namespace, profiles: Sequence[LayerProfile]) -> Link | None:
    if args.devices == 1:
        return None
    link = link_of(args, profiles[0].device if profiles else "")
    if link is not None:
        say_link(link)
    return link


def _say_limits(found: ConfigurationSearch) -> None:
    correlation = found.timelines[False].lengths.correlation
    if abs(correlation) > 0.1:
        note(f"input and output lengths correlate at {correlation:+.2f}; taken into account")
    if found.devices > len(found.timelines) == 1:
        note("WAA is left out: the profile has no interference of two workers")


def _say_extrapolated(found: ConfigurationSearch) -> None:
    for config, at_once, measured in found.extrapolated():
        note(
            f"{config.strategy.value}: {at_once:,.0f} requests decode at a time, the profile was measured"
            f" with {measured:,.0f} at most: its figures are extrapolated (profile with more --slots)"
        )


def _profiles(args: argparse.Namespace) -> list[LayerProfile]:
    profiles: list[LayerProfile] = []
    if args.profile:
        profiles = [read_profile(path) for path in args.profile]
    elif args.roofline or args.device_rates:
        if args.model_config is None:
            name = "--roofline" if args.roofline else "--device-rates"
            raise InputError(f"{name} needs a model", hint="Give its config.json as --model-config.")
        device = (
            RooflineDevice.load(args.device_rates) if args.device_rates else ROOFLINE_DEVICES[args.roofline]
        )
        link = link_of(args, device.name) if args.devices > 1 else None
        profiles = roofline_profiles(args.model_config, device, args.devices, link)
        note(profiles[0].source)
    for profile in profiles:
        for warning in profile.warnings:
            note(f"{profile.device}, tensor parallel {profile.tensor_parallel}: {warning}")
    return profiles


def _with_cost_of(inputs: Inputs, profile: LayerProfile, file: str) -> Inputs:
    from ...executor.profiling.calibrate import calibrate_to_profile

    try:
        fitted = calibrate_to_profile(profile)
    except ValueError as error:
        raise InputError(f"no costs can be fitted to it: {error}", file=file) from None
    source: dict[str, object] = {"name": f"fitted to the layer profile of {profile.device}"}
    if profile.operation("loop") is not None:
        # For profiles of batchbound's engine, a run can check that the machine is the same.
        source |= plain(fitted)
    return replace(inputs, problem=replace(inputs.problem, cost=fitted.cost), cost_source=source)


def _print(
    found: ConfigurationSearch, curve: list[tuple[float, float]] | None, took: float, *, as_json: bool
) -> None:
    timeline, targets = found.timelines[False], found.targets
    if as_json:
        value = {
            "advice": found.advice(),
            "costs": timeline.profile.source,
            "latency_bound_s": _finite(targets.latency),
            "ttft_bound_s": _finite(targets.ttft),
            "tpot_bound_s": _finite(targets.tpot),
            "latency_length": timeline.longest,
            "correlation": timeline.lengths.correlation,
            "configurations": [_row(each, timeline.longest) for each in found.found],
            "seconds": took,
        }
        if curve is not None:
            value["frontier"] = [{"latency_s": at, "requests_per_s": rate} for at, rate in curve]
        say(json.dumps(value))
        return
    say(f"latency bound {targets}, for {timeline.longest} decode iterations (99th percentile)")
    say(found.advice())
    say("  " + " ".join(f"{name:>9s}" for name in _COLUMNS))
    for each in found.found:
        say("  " + " ".join(f"{text:>9s}" for text in _cells(each, timeline.longest)))
    say(_LEGEND)
    if curve is not None:
        say("throughput against latency, of the whole grid")
        for latency, rate in curve:
            say(f"  {latency:9.3f} s {rate:9.2f} requests/s")


def _finite(target: float) -> float | None:
    return target if math.isfinite(target) else None


def _row(each: Found, longest: int) -> dict[str, object]:
    config, reached = each.config, each.performance
    violated = [result.violations for result in each.results]
    row: dict[str, object] = {
        "strategy": each.strategy.value,
        "tensor_degree": each.tensor_degree,
        "evaluated": each.evaluated,
        "grid": each.grid,
        "proven": "within the gap of the best on the grid",
        "violations": {
            "pairs": sum(found.pairs for found in violated),
            "latency": sum(found.latency for found in violated),
            "throughput": sum(found.throughput for found in violated),
            "worst_latency": max((found.worst_latency for found in violated), default=0.0),
            "worst_throughput": max((found.worst_throughput for found in violated), default=0.0),
        },
    }
    if config is not None and reached is not None:
        row |= {
            "encode_batch": config.encode_batch,
            "decode_steps": config.decode_steps,
            "micro_batches": config.micro_batches,
            "tensor_groups": config.tensor_groups,
            "stages": list(reached.stages),
            "decode_batch": reached.decode_batch,
            "device_bytes": reached.device_bytes,
            "latency_s": reached.latency,
            "ttft_s": reached.ttft,
            "tpot_s": (reached.latency - reached.ttft) / longest,
            "requests_per_s": reached.throughput,
        }
    return row


def _cells(each: Found, longest: int) -> list[str]:
    config, reached = each.config, each.performance
    looked = f"{each.evaluated}/{each.grid}"
    if config is None or reached is None:
        return [each.strategy.value, str(each.tensor_degree), *["-"] * 11, looked]
    stages = (
        "+".join(map(str, reached.stages)) if each.strategy is not Strategy.RRA else str(reached.stages[0])
    )
    return [
        each.strategy.value,
        str(each.tensor_degree),
        str(config.encode_batch),
        str(config.decode_steps),
        str(config.micro_batches),
        str(config.tensor_groups),
        stages,
        f"{reached.decode_batch:.0f}",
        f"{reached.device_bytes / 1e9:.1f}",
        f"{reached.latency:.3f} s",
        f"{reached.ttft:.3f} s",
        f"{1e3 * (reached.latency - reached.ttft) / longest:.1f} ms",
        f"{reached.throughput:.2f}",
        looked,
    ]
