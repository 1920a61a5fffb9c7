"""Search for the configuration of highest throughput under a latency bound (ExeGPT)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .data.configuration import PlannedConfiguration
from .data.costs.cost import CostModel
from .data.costs.layer_profile import LayerProfile
from .data.costs.link import LINKS, Link, usual_link
from .data.costs.model_shape import ModelShape
from .data.files.disk import InputError, read_json_object
from .data.files.record import plain
from .data.lengths.pair import LengthPair
from .data.plan import Maker, Plan, Provenance
from .data.problem import Problem, limit_of
from .data.readers.profile_readers import read_profile
from .heuristics.exegpt.round_robin import RoundRobinAllocation
from .heuristics.loop import schedule_of
from .heuristics.simulate import simulate
from .inputs import Inputs, provenance_of, read_inputs
from .listening import note
from .models.bounds.prove import proven_bound
from .models.exegpt.configuration import Cluster, ExecConfig, Strategy, Targets
from .models.exegpt.roofline import ROOFLINE_DEVICES, Roofline, RooflineDevice
from .models.exegpt.run_profile import can_hand_over, profile_of_run
from .models.exegpt.timeline import Timeline
from .models.exegpt.whole_model_profile import whole_model_profile
from .models.iterations.layer_cost import LayerCost
from .options.option import Either, PathText, takes
from .options.search import MOST_ENCODE_BATCH, SearchOptions
from .solvers.exegpt.execution_search import Found, search_all, whole_frontier
from .version import __version__

_STRATEGIES: Mapping[bool, tuple[Strategy, ...]] = {
    False: (Strategy.RRA,),
    True: (Strategy.WAA_C, Strategy.WAA_M),
}
"""Strategies with (True) and without (False) a separate encoding worker."""

_APART = 0.01
"""Least gain in throughput between neighbours on the frontier."""


@dataclass(frozen=True, slots=True, eq=False)
class ConfigurationSearch:
    """Result of a search for a configuration.

    problem: Requests and cost model.
    timelines: Timelines that give latency and throughput, of RRA (False) and of WAA (True).
    found: Best configuration of each strategy and tensor-parallel degree. The highest throughput is first,
        infeasible ones are last.
    targets: Latency targets of a completion of 99th-percentile length.
    encode_batches: Smallest and largest encoding batch searched.
    profiled: True if layer profiles were used, which choose the running requests.
    """

    problem: Problem
    timelines: Mapping[bool, Timeline]
    found: tuple[Found, ...]
    devices: int
    targets: Targets
    encode_batches: tuple[int, int]
    profiled: bool
    seconds: float = 0.0
    """Seconds of the search."""

    @property
    def best(self) -> ExecConfig | None:
        """Configuration of highest throughput, or None."""
        return next((each.config for each in self.found if each.config), None)

    def extrapolated(self) -> tuple[tuple[ExecConfig, float, float], ...]:
        """Return configurations that decode more requests than measured.

        Each comes with both numbers.
        """
        beyond = []
        for each in self.found:
            if each.config is None or each.performance is None:
                continue
            config, profile = each.config, self.timelines[each.config.strategy is not Strategy.RRA].profile
            at_once = each.performance.decode_batch / (
                each.performance.stages[1] if config.strategy is Strategy.RRA else config.micro_batches
            )
            if at_once > profile.most_decoding:
                beyond.append((config, at_once, profile.most_decoding))
        return tuple(beyond)

    def frontier(self) -> list[tuple[float, float]]:
        """Return the Pareto frontier of latency (s) and throughput (requests/s).

        Latency rises. Configurations that miss a target per token are left out. So are points with hardly
        more throughput than the one before, except the last.
        """
        curve: list[tuple[float, float]] = []
        for latency, throughput in sorted(
            point
            for handed_over, timeline in self.timelines.items()
            for point in whole_frontier(
                timeline,
                strategies=_STRATEGIES[handed_over],
                encode_batches=self.encode_batches,
                targets=replace(self.targets, latency=math.inf),
            )
        ):
            if not curve or throughput > curve[-1][1]:
                curve.append((latency, throughput))
        kept = curve[:1]
        for at, point in enumerate(curve[1:], 1):
            if point[1] > (1 + _APART) * kept[-1][1] or at == len(curve) - 1:
                kept.append(point)
        return kept

    def advice(self) -> str:
        """Return a sentence with the best configuration, or the least latency possible."""
        best = next((each for each in self.found if each.config and each.performance), None)
        if best is None or best.config is None or best.performance is None:
            least = next(iter(self.frontier()), None)
            if least is None and self.targets.of_latency_alone:
                return "No configuration fits into the memory of the devices."
            if least is None:
                others = replace(self.targets, latency=math.inf)
                return f"No configuration meets {others}, at any latency."
            return (
                f"No configuration stays under {self.targets}: the least possible is"
                f" {least[0]:.3f} s, at {least[1]:.2f} requests/s."
            )
        config, reached = best.config, best.performance
        how = f"{config.encode_batch} prompts at a time"
        if config.strategy is Strategy.RRA:
            how += f", then {config.decode_steps} decode iterations"
            how += f" of about {reached.decode_batch:.0f} requests"
        else:
            how += f" on {reached.stages[0]} of the devices, about {reached.decode_batch:.0f} requests decode"
        shared = f", {config.tensor_degree} devices per layer" if config.tensor_degree > 1 else ""
        longest = self.timelines[config.strategy is not Strategy.RRA].longest
        return (
            f"Take {config.strategy.value}: {how}{shared}. It serves {reached.throughput:.2f} requests/s,"
            f" one of {longest} decode iterations in {reached.latency:.3f} s."
        )

    def plan(self, *, provenance: Provenance | None = None) -> Plan:
        """Return the best configuration that ``run`` supports, as a plan.

        Raises InputError if there is none.
        """
        runs = self.runnable
        if not runs:
            bounds = {name: getattr(self.targets, name) for name in ("latency", "ttft", "tpot")}
            given = [f"--{name}-bound" for name, value in bounds.items() if math.isfinite(value)]
            hint = "Search with --devices 1 or 2." if self.devices > 2 else "Take devices with more memory."
            if self.devices < 3 and given:
                hint = f"Loosen {' or '.join(given)}."
            what = "no configuration that `batchbound run` can execute was found"
            raise InputError(what, hint=f"{self.advice()} {hint}")
        timeline = self.timelines[runs[0].strategy is not Strategy.RRA]
        latency = self.targets.latency
        bound = None if math.isinf(latency) else latency
        return self._plan(planned_configuration(timeline, runs[0], bound), provenance or Provenance())

    @property
    def runnable(self) -> list[ExecConfig]:
        """Configurations that ``run`` supports: RRA on one device, WAA on two."""
        configurations = [each.config for each in self.found if each.config]
        return [
            config
            for config in configurations
            if self.devices == (1 if config.strategy is Strategy.RRA else 2)
        ]

    def _plan(self, configuration: PlannedConfiguration, provenance: Provenance) -> Plan:
        begun, problem = time.perf_counter(), self.problem
        if configuration.handed_over:
            # The plan is for the decoding worker, to which prefill is almost free.
            problem = replace(problem, cost=problem.cost.with_free_prefill())
        if self.profiled:
            # With profiles the search chose the number of running requests.
            problem = replace(problem, slots=min(len(problem), configuration.slots))
        schedule = schedule_of(simulate(problem, RoundRobinAllocation.of(configuration)))
        name = (
            f"exegpt-{configuration.strategy.lower()} B_E={configuration.encode_batch}"
            f" N_D={configuration.decode_steps}"
        )
        maker = Maker(name, __version__, "feasible", "search", time.perf_counter() - begun, 0)
        bound = proven_bound(problem)
        return Plan.of(problem, schedule, bound, maker, provenance=provenance, configuration=configuration)


def search_problem(
    problem: Problem,
    profiles: Sequence[LayerProfile] = (),
    *,
    devices: int = 1,
    latency_bound: float | Targets = math.inf,
    latency_margin: float = 0.0,
    encode_batches: tuple[int, int] = (1, 256),
    link: Link | None = None,
) -> ConfigurationSearch:
    """Search for the highest throughput under a latency bound.

    Parameters
    ----------
    problem
        Requests, all present at the start. Without profiles, the search uses its cost model and slots.
    profiles
        Layer profiles of the model on one kind of device, one per tensor-parallel degree, including degree 1.
    devices
        Number of devices.
    latency_bound
        Maximum latency of a completion of 99th-percentile length, in seconds; or targets, also for the first
        token and those after it.
    latency_margin
        Fraction of each target kept in reserve for slower phases of the machine.
    encode_batches
        Smallest and largest encoding batch.
    link
        Link between the devices; by default the usual one for the profile's kind of device.

    Raises
    ------
    InputError
        If the problem has a token cap, no profile has degree 1, stages take no time, the margin is not in
        [0, 1), or the link between several devices is unknown.
    ValueError
        If an encoding batch or a target is out of its range.
    """
    if not 0 <= latency_margin < 1:
        hint = "Give a share of the bound, as 0.1."
        raise InputError(f"{latency_margin} is not in [0, 1)", where="--latency-margin", hint=hint)
    if problem.prefill_token_cap is not None:
        what = "a configuration limits the requests of a prefill stage, not their tokens"
        raise InputError(what, where="--prefill-token-cap", hint="Give --most-encode-batch instead.")
    devices = limit_of("devices", devices, 1)
    smallest, largest = (limit_of("encode_batches", size, 1) for size in encode_batches)
    if largest < smallest:
        raise ValueError(f"encode_batches is {encode_batches}; the smallest comes first")
    targets = Targets.of(latency_bound)
    if not profiles:
        refuse_timeless(problem.cost)
    given = sorted(profiles, key=lambda profile: profile.tensor_parallel)
    if given and given[0].tensor_parallel != 1:
        raise InputError("no profile has tensor-parallel degree 1", where="--profile", hint="Add one.")
    if devices > 1 and link is None and (not given or usual_link(given[0].device) is None):
        what = "the link between the devices is not known"
        raise InputError(what, where="--link", hint=f"Name one of {', '.join(LINKS)}.")
    # Lengths count decode steps, so a first token from prefill does not count.
    workload = problem.workload.with_output_tokens(problem.decode_steps.clip(min=1))
    timelines = timelines_of(
        given or [whole_model_profile(problem.cost, "the problem's cost model")],
        LengthPair.observed(workload),
        devices,
        slots=0 if given else problem.slots,
        kv_capacity=problem.kv_capacity,
        link=link,
    )
    found = [
        each
        for handed_over, timeline in timelines.items()
        for each in search_all(
            timeline,
            targets.tightened(latency_margin),
            strategies=_STRATEGIES[handed_over],
            encode_batches=(smallest, largest),
        )
    ]
    found.sort(key=lambda each: -each.performance.throughput if each.performance else math.inf)
    return ConfigurationSearch(
        problem, timelines, tuple(found), devices, targets, (smallest, largest), profiled=bool(given)
    )


def refuse_timeless(cost: CostModel, file: PathText | None = None) -> None:
    """Raise InputError if prefill or decoding takes no time."""
    if 0 in (cost.prefill_seconds(1), cost.decode_seconds(1, 1)):
        what = "the search needs both prefill and decoding to take time"
        raise InputError(what, file=file, hint="Measure a model with `batchbound profile`.")


def roofline_profiles(
    config: str | os.PathLike[str], device: RooflineDevice, devices: int, link: Link | None = None
) -> list[LayerProfile]:
    """Return estimated profiles of a model from a device's rates."""
    path = Path(config)
    try:
        shape = ModelShape.from_config(read_json_object(path), path.stem)
    except InputError as error:
        if error.file is not None:
            raise
        raise InputError(str(error).removeprefix("config, ").removeprefix("config: "), file=path) from None
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= devices]
    return [Roofline(shape, device, degree, link=link).profile() for degree in degrees]


def planned_configuration(
    timeline: Timeline, config: ExecConfig, latency_bound: float | None = None
) -> PlannedConfiguration:
    """Return a configuration for a plan, with its latency bound (s)."""
    reached, lengths = timeline(config), timeline.lengths
    batch, lead = reached.decode_batch, 0
    if config.strategy is not Strategy.RRA:
        lead = timeline.waa_lead(config)
        batch = timeline.waa_planned(config) or 0.0
    return PlannedConfiguration(
        strategy=config.strategy.value,
        encode_batch=config.encode_batch,
        decode_steps=config.decode_steps,
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


def timelines_of(
    profiles: Sequence[LayerProfile],
    lengths: LengthPair,
    devices: int,
    *,
    slots: int = 0,
    kv_capacity: int | None = None,
    link: Link | None = None,
) -> dict[bool, Timeline]:
    """Return the timelines of RRA (False) and WAA (True)."""
    first = profiles[0]
    known = link or usual_link(first.device)
    cluster = Cluster(
        devices,
        first.device_bytes,
        link_bandwidth=known.bandwidth if known else Cluster(1).link_bandwidth,
        link_latency=known.latency if known else Cluster(1).link_latency,
        # If the profile measured the transfer of the KV cache, the link adds nothing.
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


@takes(SearchOptions)
def search_file(options: SearchOptions) -> ConfigurationSearch:
    """Search for the configuration of a file's requests, and write its plan."""
    begun = time.perf_counter()
    options.check_outputs("output")
    inputs = read_inputs(options, options.workload, keep_arrivals=False)
    profiles = _profiles(options)
    if options.profile and options.cost in (None, "paper"):
        first = min(range(len(profiles)), key=lambda at: profiles[at].tensor_parallel)
        inputs = _with_cost_of(inputs, profiles[first], options.profile[first])
    if not profiles:
        refuse_timeless(inputs.problem.cost, str(inputs.cost_source["name"]))
    kept = options.encode_batch
    found = search_problem(
        inputs.problem,
        profiles,
        devices=options.devices,
        latency_bound=options.targets,
        latency_margin=options.latency_margin,
        encode_batches=(kept, kept) if kept else (1, options.most_encode_batch or MOST_ENCODE_BATCH),
        link=_link(options, profiles),
    )
    if options.output is not None:
        found.plan(provenance=provenance_of(inputs, options.output)).save(options.output)
    return replace(found, seconds=time.perf_counter() - begun)


search = Either(search_file, search_problem)


def _link(options: SearchOptions, profiles: Sequence[LayerProfile]) -> Link | None:
    if options.devices == 1:
        return None
    link = options.link_of(profiles[0].device if profiles else "")
    if link is not None:
        note(link.text())
    return link


def _profiles(options: SearchOptions) -> list[LayerProfile]:
    profiles = [read_profile(path) for path in options.profile]
    if options.roofline or options.device_rates:
        if options.model_config is None:
            name = "--roofline" if options.roofline else "--device-rates"
            raise InputError(f"{name} needs a model", hint="Give its config.json as --model-config.")
        rates, known = options.device_rates, options.roofline
        device = ROOFLINE_DEVICES[known] if rates is None and known else RooflineDevice.load(rates or "")
        link = options.link_of(device.name) if options.devices > 1 else None
        profiles = roofline_profiles(options.model_config, device, options.devices, link)
        note(profiles[0].source)
    for profile in profiles:
        for warning in profile.warnings:
            note(f"{profile.device}, tensor parallel {profile.tensor_parallel}: {warning}")
    return profiles


def _with_cost_of(inputs: Inputs, profile: LayerProfile, file: PathText) -> Inputs:
    from .executor.profiling.calibrate import calibrate_to_profile

    try:
        fitted = calibrate_to_profile(profile)
    except ValueError as error:
        raise InputError(f"no costs can be fitted to it: {error}", file=file) from None
    source: dict[str, object] = {"name": f"fitted to the layer profile of {profile.device}"}
    if profile.operation("loop") is not None:
        # For profiles of batchbound's engine, a run can check that the machine is the same.
        source |= plain(fitted)
    return replace(inputs, problem=replace(inputs.problem, cost=fitted.cost), cost_source=source)
