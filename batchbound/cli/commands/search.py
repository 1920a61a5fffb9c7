"""``batchbound search``: the execution configuration of most throughput under a latency bound."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ... import __version__
from ...data.configuration import PlannedConfiguration
from ...data.costs.layer_profile import LayerProfile, ModelShape
from ...data.files.disk import InputError, read_json_object
from ...data.files.record import plain
from ...data.lengths.pair import LengthPair
from ...data.plan import Maker, Plan
from ...data.problem import Problem
from ...data.readers.profile_readers import read_profile
from ...heuristics.exegpt.configured import rra_policy
from ...heuristics.loop import schedule_of
from ...heuristics.simulate import simulate
from ...models.exegpt.configuration import Cluster, ExecConfig, Strategy
from ...models.exegpt.layer_cost import LayerCost
from ...models.exegpt.roofline import ROOFLINE_DEVICES, roofline_profile
from ...models.exegpt.run_profile import can_hand_over, profile_of_run
from ...models.exegpt.timeline import Timeline
from ...models.exegpt.whole_model_profile import whole_model_profile
from ...solvers.bounds.proven_bound import proven_bound
from ...solvers.exegpt.execution_search import Found, search_all, whole_frontier
from ..inputs import (
    Inputs,
    add_problem,
    named_files,
    positive,
    provenance_of,
    read_inputs,
    refuse_outputs,
    seconds,
)
from ..output import note

_STRATEGIES: Mapping[bool, tuple[Strategy, ...]] = {
    False: (Strategy.RRA,),
    True: (Strategy.WAA_C, Strategy.WAA_M),
}
"""Whether prompts are handed over, and the strategies that do or do not."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_problem(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--latency-bound",
        type=seconds,
        metavar="S",
        help="seconds in which an answer of the 99th-percentile length must be there (default: no bound)",
    )
    group.add_argument(
        "--profile",
        action="append",
        metavar="PATH",
        help="layer profile, one for each tensor-parallel degree: a file, or a folder in LLMServingSim's"
        " format (default: the cost model of --cost, one device)",
    )
    group.add_argument(
        "--roofline",
        metavar="DEVICE",
        choices=sorted(ROOFLINE_DEVICES),
        help="without a profile: a device's peak rates, not measured, for the model of --model-config"
        f" ({', '.join(sorted(ROOFLINE_DEVICES))})",
    )
    group.add_argument("--model-config", metavar="FILE", help="the model's config.json, for --roofline")
    group.add_argument("--devices", type=positive, default=1, help="default %(default)s")
    group.add_argument(
        "--latency-margin",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the bound kept back, for a machine that is slower at times (default %(default)s)",
    )
    group.add_argument(
        "--most-encode-batch", type=positive, default=256, metavar="N", help="default %(default)s"
    )
    group.add_argument(
        "--encode-batch",
        type=positive,
        metavar="N",
        help="keep this batch and search the rest: the decode rounds of RRA, after lengths have changed",
    )
    group.add_argument(
        "--independent", action="store_true", help="take input and output lengths as independent"
    )
    group.add_argument("--frontier", action="store_true", help="print throughput against latency, too")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write a plan for `batchbound run` (RRA on one device, or WAA on two)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the plan if it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Search, print the table, and write the plan."""
    if args.output is not None:
        refuse_outputs([args.output], args.overwrite, named_files(args, "output"))
    begun = time.perf_counter()
    inputs = read_inputs(args, keep_arrivals=False)
    profiles = _profiles(args, inputs.problem)
    if args.profile and args.cost == "paper":
        inputs = _with_cost_of(inputs, profiles[0])
    whole = not args.profile and not args.roofline
    cost = inputs.problem.cost
    if whole and 0 in (cost.prefill_seconds(1), cost.decode_seconds(1, 1)):
        what = "prefilling or decoding takes no time, and a search weighs the one against the other"
        raise InputError(what, file=args.cost, hint="Measure a model with `batchbound profile`.")
    timelines = timelines_of(
        profiles,
        _lengths(args, inputs.problem),
        args.devices,
        slots=inputs.problem.slots if whole else 0,
        kv_capacity=inputs.problem.kv_capacity,
    )
    if args.devices > len(timelines) == 1:
        note("WAA is left out: the profile does not say what two workers cost each other")
    bound = math.inf if args.latency_bound is None else args.latency_bound
    if not 0 <= args.latency_margin < 1:
        hint = "Give a share of the bound, as 0.1."
        raise InputError(f"{args.latency_margin} is not in [0, 1)", where="--latency-margin", hint=hint)
    found = [
        each
        for handed_over, timeline in timelines.items()
        for each in search_all(
            timeline,
            bound * (1 - args.latency_margin),
            strategies=_STRATEGIES[handed_over],
            encode_batches=_encode_batches(args),
        )
    ]
    found.sort(key=lambda each: -each.performance.throughput if each.performance else math.inf)
    curve = _frontier(args, timelines) if args.frontier else None
    _print(timelines[False], found, bound, curve, time.perf_counter() - begun, as_json=args.json)
    _say_extrapolated(timelines, found)
    if args.output is not None:
        chosen = next((each.config for each in found if each.config and _can_run(each.config, args)), None)
        if chosen is None:
            hint = (
                "Loosen --latency-bound, or keep back less of it (--latency-margin)."
                if args.devices < 3
                else "Search with --devices 1 or 2."
            )
            raise InputError("no configuration that `batchbound run` can execute was found", hint=hint)
        timeline = timelines[chosen.strategy is not Strategy.RRA]
        configuration = planned_configuration(timeline, chosen, args.latency_bound)
        _plan(inputs, configuration, args).save(args.output)
        note(f"{args.output}: the {chosen.strategy.value} configuration as a plan for `batchbound run`")
    return 0 if any(each.config for each in found) else 1


def _say_extrapolated(timelines: Mapping[bool, Timeline], found: Sequence[Found]) -> None:
    """Say which configurations decode more requests at a time than anybody measured."""
    for each in found:
        if each.config is None or each.performance is None:
            continue
        config, profile = each.config, timelines[each.config.strategy is not Strategy.RRA].profile
        at_once = each.performance.decode_batch / (
            each.performance.stages[1] if config.strategy is Strategy.RRA else config.micro_batches
        )
        if at_once > profile.most_decoding:
            note(
                f"{config.strategy.value}: {at_once:,.0f} requests decode at a time, the profile was measured"
                f" with {profile.most_decoding:,.0f} at most: its figures are extrapolated (profile with more"
                " --slots)"
            )


def planned_configuration(
    timeline: Timeline, config: ExecConfig, latency_bound: float | None = None
) -> PlannedConfiguration:
    """
    Return what a plan says of a configuration.

    Parameters
    ----------
    timeline
        Of the lengths planned for.
    config
        The configuration.
    latency_bound
        Seconds, that it was chosen under.
    """
    reached, lengths = timeline(config), timeline.lengths
    batch, lead = reached.decode_batch, 0
    if config.strategy is not Strategy.RRA:
        lead = timeline.waa_lead(config)
        batch = timeline.waa_planned(config) or 0.0
    return PlannedConfiguration(
        strategy=config.strategy.value,
        encode_batch=config.encode_batch,
        decode_rounds=config.decode_rounds,
        decode_batch=batch,
        lead=lead,
        input_tokens=lengths.inputs.mean,
        input_deviation=lengths.inputs.sd,
        iterations=lengths.outputs.mean,
        iterations_deviation=lengths.outputs.sd,
        latency_bound=latency_bound,
        latency=reached.latency,
        throughput=reached.throughput,
        reference=timeline.profile.reference,
    )


def _can_run(config: ExecConfig, args: argparse.Namespace) -> bool:
    """Tell whether `batchbound run` has as many workers: one for RRA, one of each kind for WAA."""
    workers = 1 if config.strategy is Strategy.RRA else 2
    return workers == int(args.devices)


def _profiles(args: argparse.Namespace, problem: Problem) -> list[LayerProfile]:
    if args.profile:
        profiles = [read_profile(path) for path in args.profile]
    elif args.roofline:
        if args.model_config is None:
            raise InputError("--roofline needs a model", hint="Say --model-config with its config.json.")
        path = Path(args.model_config)
        shape = ModelShape.from_config(read_json_object(path), path.stem)
        degrees = [degree for degree in (1, 2, 4, 8) if degree <= args.devices]
        device = ROOFLINE_DEVICES[args.roofline]
        profiles = [roofline_profile(shape, device, degree) for degree in degrees]
        note(profiles[0].source)
    else:
        profiles = [whole_model_profile(problem.cost, str(args.cost))]
    for profile in profiles:
        for warning in profile.warnings:
            note(f"{profile.device}, tensor parallel {profile.tensor_parallel}: {warning}")
    profiles.sort(key=lambda profile: profile.tensor_parallel)
    if profiles[0].tensor_parallel != 1:
        raise InputError("no profile is of tensor-parallel degree 1", where="--profile", hint="Add one.")
    return profiles


def _with_cost_of(inputs: Inputs, profile: LayerProfile) -> Inputs:
    """Return the inputs with the costs that a profile comes nearest to: a plan's seconds are the model's."""
    from ...executor.profiling.calibrate import calibrate_to_profile

    fitted = calibrate_to_profile(profile)
    source: dict[str, object] = {"name": f"fitted to the layer profile of {profile.device}"}
    if profile.operation("loop") is not None:
        # Measured on an engine of ours: a run can tell whether it is on the same machine.
        source |= plain(fitted)
    return replace(inputs, problem=replace(inputs.problem, cost=fitted.cost), cost_source=source)


def _lengths(args: argparse.Namespace, problem: Problem) -> LengthPair:
    # What decodes is counted, so an answer whose first token the prefill yields is one shorter.
    workload = problem.workload.with_output_tokens(problem.rounds.clip(min=1))
    lengths = LengthPair.observed(workload, independent=args.independent)
    if abs(lengths.correlation) > 0.1:
        note(f"input and output lengths correlate at {lengths.correlation:+.2f}; taken into account")
    return lengths


def _encode_batches(args: argparse.Namespace) -> tuple[int, int]:
    kept = args.encode_batch
    return (kept, kept) if kept else (1, args.most_encode_batch)


def _frontier(args: argparse.Namespace, timelines: Mapping[bool, Timeline]) -> list[dict[str, float]]:
    """Return latency and throughput of what no other configuration beats in both, by rising latency."""
    curve: list[dict[str, float]] = []
    for latency, throughput in sorted(
        point
        for handed_over, timeline in timelines.items()
        for point in whole_frontier(
            timeline, strategies=_STRATEGIES[handed_over], encode_batches=_encode_batches(args)
        )
    ):
        if not curve or throughput > curve[-1]["requests_per_s"]:
            curve.append({"latency_s": latency, "requests_per_s": throughput})
    return curve


def timelines_of(
    profiles: Sequence[LayerProfile],
    lengths: LengthPair,
    devices: int,
    *,
    slots: int = 0,
    kv_capacity: int | None = None,
) -> dict[bool, Timeline]:
    """
    Return the timeline of RRA (False), and on two devices or more that of WAA (True), if it was measured.

    Parameters
    ----------
    profiles
        Of a model on one kind of device, one for each tensor-parallel degree, that of degree 1 first.
    lengths
        Of prompts, and of answers in decode iterations.
    devices
        How many there are.
    slots
        Requests that run at once at most; 0 for any number.
    kv_capacity
        Tokens of keys and values held at most, besides what the profile says.
    """
    first = profiles[0]
    cluster = Cluster(
        devices,
        first.device_bytes,
        # What is handed over is measured where the profile knows it: no link comes on top.
        host_bandwidth=math.inf if first.operation("send") else Cluster(1).host_bandwidth,
        slots=slots,
        kv_tokens=min((tokens for tokens in (kv_capacity, first.kv_tokens) if tokens), default=0),
    )
    timelines = {}
    two_workers = devices > 1 and all(map(can_hand_over, profiles))
    for handed_over in (False, True) if two_workers else (False,):
        costs = {
            profile.tensor_parallel: LayerCost(
                profile_of_run(
                    profile, lengths.outputs.mean, handed_over=handed_over, input_tokens=lengths.inputs.mean
                )
            )
            for profile in profiles
        }
        timelines[handed_over] = Timeline(costs, cluster, lengths)
    return timelines


def _plan(inputs: Inputs, configuration: PlannedConfiguration, args: argparse.Namespace) -> Plan:
    begun = time.perf_counter()
    problem = inputs.problem
    if configuration.handed_over:
        # The plan is of the worker that decodes: to it, a batch that joins costs next to nothing.
        problem = replace(problem, cost=problem.cost.with_free_prefill())
    if args.profile:
        # How many requests run at a time is the search's choice.
        problem = replace(problem, slots=min(len(problem), configuration.slots))
    schedule = schedule_of(simulate(problem, rra_policy(configuration)))
    name = (
        f"exegpt-{configuration.strategy.lower()} B_E={configuration.encode_batch}"
        f" N_D={configuration.decode_rounds}"
    )
    maker = Maker(name, __version__, "feasible", "search", time.perf_counter() - begun, 0)
    return Plan.of(
        problem,
        schedule,
        proven_bound(problem),
        maker,
        provenance=provenance_of(inputs, args.output),
        configuration=configuration,
    )


def _print(
    timeline: Timeline,
    found: list[Found],
    bound: float,
    curve: list[dict[str, float]] | None,
    took: float,
    *,
    as_json: bool,
) -> None:
    rows = [_row(each) for each in found]
    if as_json:
        value = {
            "latency_bound_s": None if math.isinf(bound) else bound,
            "latency_length": timeline.longest,
            "correlation": timeline.lengths.correlation,
            "configurations": rows,
            "seconds": took,
        }
        print(json.dumps(value if curve is None else value | {"frontier": curve}))
        return
    limit = "none" if math.isinf(bound) else f"{bound:g} s"
    print(f"latency bound {limit}, for {timeline.longest} decode iterations (99th percentile)")
    head = (
        "strategy",
        "TP",
        "B_E",
        "N_D",
        "B_m",
        "groups",
        "stages",
        "B_D",
        "GB",
        "latency",
        "req/s",
        "looked at",
    )
    print("  " + " ".join(f"{name:>9s}" for name in head))
    for each in found:
        print("  " + " ".join(f"{text:>9s}" for text in _cells(each)))
    if curve is not None:
        print("throughput against latency, of the whole grid")
        for point in curve:
            print(f"  {point['latency_s']:9.3f} s {point['requests_per_s']:9.2f} requests/s")


def _row(each: Found) -> dict[str, object]:
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
            "decode_rounds": config.decode_rounds,
            "micro_batches": config.micro_batches,
            "tensor_groups": config.tensor_groups,
            "stages": list(reached.stages),
            "decode_batch": reached.decode_batch,
            "device_bytes": reached.device_bytes,
            "latency_s": reached.latency,
            "requests_per_s": reached.throughput,
        }
    return row


def _cells(each: Found) -> list[str]:
    config, reached = each.config, each.performance
    looked = f"{each.evaluated}/{each.grid}"
    if config is None or reached is None:
        return [each.strategy.value, str(each.tensor_degree), *["-"] * 9, looked]
    stages = (
        "+".join(map(str, reached.stages)) if each.strategy is not Strategy.RRA else str(reached.stages[0])
    )
    return [
        each.strategy.value,
        str(each.tensor_degree),
        str(config.encode_batch),
        str(config.decode_rounds),
        str(config.micro_batches),
        str(config.tensor_groups),
        stages,
        f"{reached.decode_batch:.0f}",
        f"{reached.device_bytes / 1e9:.1f}",
        f"{reached.latency:.3f} s",
        f"{reached.throughput:.2f}",
        looked,
    ]
