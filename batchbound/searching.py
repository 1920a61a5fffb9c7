"""The execution configuration of most throughput under a latency bound (ExeGPT), and a plan of it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import __version__
from .data.configuration import PlannedConfiguration
from .data.costs.cost import CostModel
from .data.costs.layer_profile import LayerProfile
from .data.costs.link import LINKS, Link, usual_link
from .data.costs.model_shape import ModelShape
from .data.files.disk import InputError, read_json_object
from .data.lengths.pair import LengthPair
from .data.plan import Maker, Plan, Provenance
from .data.problem import Problem, limit_of
from .heuristics.exegpt.configured import rra_policy
from .heuristics.loop import schedule_of
from .heuristics.simulate import simulate
from .models.bounds.prove import proven_bound
from .models.exegpt.configuration import Cluster, ExecConfig, Strategy, Targets
from .models.exegpt.layer_cost import LayerCost
from .models.exegpt.roofline import Roofline, RooflineDevice
from .models.exegpt.run_profile import can_hand_over, profile_of_run
from .models.exegpt.timeline import Timeline
from .models.exegpt.whole_model_profile import whole_model_profile
from .solvers.exegpt.execution_search import Found, search_all, whole_frontier

_STRATEGIES: Mapping[bool, tuple[Strategy, ...]] = {
    False: (Strategy.RRA,),
    True: (Strategy.WAA_C, Strategy.WAA_M),
}
"""Strategies with (True) and without a hand-over of prompts."""

_APART = 0.01
"""Share by which a point of the frontier has more throughput than the one before it."""


@dataclass(frozen=True, slots=True, eq=False)
class ConfigurationSearch:
    """
    What a search of configurations found.

    problem: The requests, and what a plan of theirs costs.
    timelines: That latency and throughput were read from: of RRA (False), and of WAA (True) where prompts are
        handed over.
    found: The best of each strategy and tensor-parallel degree, most throughput first; those without one
        last.
    devices: How many there are.
    targets: What a completion of the 99th-percentile length must keep to.
    encode_batches: The smallest and the largest that were looked at.
    profiled: Whether the layers were profiled, so that the search chose how many requests run at a time.
    """

    problem: Problem
    timelines: Mapping[bool, Timeline]
    found: tuple[Found, ...]
    devices: int
    targets: Targets
    encode_batches: tuple[int, int]
    profiled: bool

    @property
    def best(self) -> ExecConfig | None:
        """The configuration of most throughput, or None if none meets the bound."""
        return next((each.config for each in self.found if each.config), None)

    def extrapolated(self) -> tuple[tuple[ExecConfig, float, float], ...]:
        """Return configurations that decode more requests at a time than was measured; both numbers too."""
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
        """
        Return latency (s) and throughput (requests/s) of what nothing beats in both, by rising latency.

        What misses a target for the first token, or for those after it, is left out; and a point, but for
        the last, of hardly more throughput than the one before it.
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
        """Return in one sentence which configuration to take, or which latency is the least there is."""
        best = next((each for each in self.found if each.config and each.performance), None)
        if best is None or best.config is None or best.performance is None:
            least = next(iter(self.frontier()), None)
            if least is None and self.targets.of_latency_alone:
                return "No configuration fits into the memory of the devices."
            if least is None:
                others = replace(self.targets, latency=math.inf)
                return f"No configuration keeps to {others}, whatever its latency."
            return (
                f"No configuration stays under {self.targets}: the least that can be reached is"
                f" {least[0]:.3f} s, at {least[1]:.2f} requests/s."
            )
        config, reached = best.config, best.performance
        how = f"{config.encode_batch} prompts at a time"
        if config.strategy is Strategy.RRA:
            how += f", then {config.decode_steps} decode iterations"
            how += f" of about {reached.decode_batch:.0f} requests"
        else:
            how += f" on {reached.stages[0]} of the devices, about {reached.decode_batch:.0f} requests decode"
        shared = f", {config.tensor_degree} devices a layer" if config.tensor_degree > 1 else ""
        longest = self.timelines[config.strategy is not Strategy.RRA].longest
        return (
            f"Take {config.strategy.value}: {how}{shared}. It serves {reached.throughput:.2f} requests/s,"
            f" one of {longest} decode iterations in {reached.latency:.3f} s."
        )

    def plan(self, *, provenance: Provenance | None = None) -> Plan:
        """
        Return the best configuration that ``run`` can carry out on as many devices, as a plan.

        Parameters
        ----------
        provenance
            Where lengths, costs and prompts come from.

        Raises
        ------
        InputError
            If there is none: RRA runs on one device, WAA on two.
        """
        runs = [each.config for each in self.found if each.config and self._runs(each.config)]
        if not runs:
            bounds = {name: getattr(self.targets, name) for name in ("latency", "ttft", "tpot")}
            given = [f"--{name}-bound" for name, value in bounds.items() if math.isfinite(value)]
            hint = "Search with --devices 1 or 2." if self.devices > 2 else "Take devices with more memory."
            if self.devices < 3 and given:
                hint = f"Loosen {' or '.join(given)}."
            raise InputError("no configuration that `batchbound run` can execute was found", hint=hint)
        timeline = self.timelines[runs[0].strategy is not Strategy.RRA]
        latency = self.targets.latency
        bound = None if math.isinf(latency) else latency
        return self._plan(planned_configuration(timeline, runs[0], bound), provenance or Provenance())

    def _runs(self, config: ExecConfig) -> bool:
        """Tell whether a run has as many workers: one for RRA, one of each kind for WAA."""
        return self.devices == (1 if config.strategy is Strategy.RRA else 2)

    def _plan(self, configuration: PlannedConfiguration, provenance: Provenance) -> Plan:
        begun, problem = time.perf_counter(), self.problem
        if configuration.handed_over:
            # The plan is of the worker that decodes: to it, a batch that joins costs next to nothing.
            problem = replace(problem, cost=problem.cost.with_free_prefill())
        if self.profiled:
            # How many requests run at a time is the search's choice.
            problem = replace(problem, slots=min(len(problem), configuration.slots))
        schedule = schedule_of(simulate(problem, rra_policy(configuration)))
        name = (
            f"exegpt-{configuration.strategy.lower()} B_E={configuration.encode_batch}"
            f" N_D={configuration.decode_steps}"
        )
        maker = Maker(name, __version__, "feasible", "search", time.perf_counter() - begun, 0)
        bound = proven_bound(problem)
        return Plan.of(problem, schedule, bound, maker, provenance=provenance, configuration=configuration)


def search(
    problem: Problem,
    profiles: Sequence[LayerProfile] = (),
    *,
    devices: int = 1,
    latency_bound: float | Targets = math.inf,
    latency_margin: float = 0.0,
    encode_batches: tuple[int, int] = (1, 256),
    independent: bool = False,
    link: Link | None = None,
) -> ConfigurationSearch:
    """
    Return the configurations of most throughput under a latency bound.

    Parameters
    ----------
    problem
        The requests, all there at the start; without profiles, its cost model and slots are what is searched.
    profiles
        Layer profiles of the model on one kind of device, one for each tensor-parallel degree, 1 among them.
    devices
        How many there are.
    latency_bound
        Seconds in which a completion of the 99th-percentile length must be there; or targets for its first
        token and those after it, too.
    latency_margin
        Share of each kept back, for a machine that is slower at times.
    encode_batches
        The smallest and the largest batch to encode.
    independent
        Take input and output lengths as independent.
    link
        Between the devices; by default what devices of the profile's kind usually have.

    Raises
    ------
    InputError
        If the problem has a token cap, no profile is of degree 1, stages take no time, the margin is no
        share, or there are several devices and the link between them is not known.
    ValueError
        If a batch to encode or a target is out of its range.
    """
    if not 0 <= latency_margin < 1:
        hint = "Give a share of the bound, as 0.1."
        raise InputError(f"{latency_margin} is not in [0, 1)", where="--latency-margin", hint=hint)
    if problem.prefill_token_cap is not None:
        what = "a configuration encodes so many requests at a time, however long: no token cap is kept"
        raise InputError(what, where="--prefill-token-cap", hint="Say --most-encode-batch instead.")
    devices = limit_of("devices", devices, 1)
    smallest, largest = (limit_of("encode_batches", size, 1) for size in encode_batches)
    if largest < smallest:
        raise ValueError(f"encode_batches is {encode_batches}; the smallest comes first")
    targets = Targets.of(latency_bound)
    if not profiles:
        refuse_timeless(problem.cost)
    given = sorted(profiles, key=lambda profile: profile.tensor_parallel)
    if given and given[0].tensor_parallel != 1:
        raise InputError("no profile is of tensor-parallel degree 1", where="--profile", hint="Add one.")
    if devices > 1 and link is None and (not given or usual_link(given[0].device) is None):
        what = "what the devices tell each other cannot be costed: their link is not known"
        raise InputError(what, where="--link", hint=f"Name one of {', '.join(LINKS)}.")
    # What decodes is counted, so a completion whose first token the prefill yields is one shorter.
    workload = problem.workload.with_output_tokens(problem.decode_steps.clip(min=1))
    timelines = timelines_of(
        given or [whole_model_profile(problem.cost, "the problem's cost model")],
        LengthPair.observed(workload, independent=independent),
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


def refuse_timeless(cost: CostModel, file: str | None = None) -> None:
    """Raise InputError if prefilling or decoding takes no time: a search weighs the one against the other."""
    if 0 in (cost.prefill_seconds(1), cost.decode_seconds(1, 1)):
        what = "prefilling or decoding takes no time, and a search weighs the one against the other"
        raise InputError(what, file=file, hint="Measure a model with `batchbound profile`.")


def roofline_profiles(
    config: str | os.PathLike[str], device: RooflineDevice, devices: int, link: Link | None = None
) -> list[LayerProfile]:
    """Return profiles of a model from a device's rates and the shares of them that engines reach."""
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
    """
    Return what a plan says of a configuration.

    ``latency_bound``: seconds, that it was chosen under.
    """
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
    """Return the timeline of RRA (False), and that of WAA (True) if it was measured."""
    first = profiles[0]
    known = link or usual_link(first.device)
    cluster = Cluster(
        devices,
        first.device_bytes,
        link_bandwidth=known.bandwidth if known else Cluster(1).link_bandwidth,
        link_latency=known.latency if known else Cluster(1).link_latency,
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
