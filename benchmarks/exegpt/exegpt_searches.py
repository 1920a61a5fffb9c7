"""ExeGPT's tasks on measured profiles: every search against the whole grid, the timeline against sampling.

python benchmarks/exegpt/exegpt_searches.py PROFILE_TP1 [PROFILE_TP2] --tasks S T --devices 1 4

The timeline tells what is to be expected; a run of sampled requests also has its own luck. Where a decode
batch is as fast at several sizes, it keeps near one of them for longer than a run lasts, and its latency
differs from run to run by more than what is asked for here. So the expectation is judged by the mean of some
independent runs, and runs that deviate alone are counted beside it.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

import numpy as np
from exegpt_phases import simulate_phases

from batchbound.data.lengths.pair import LengthPair
from batchbound.data.readers.generators import GENERATORS
from batchbound.data.readers.profile_readers import read_layer_profiles
from batchbound.models.exegpt.configuration import Cluster, ExecConfig, Performance, Strategy
from batchbound.models.exegpt.timeline import Timeline
from batchbound.models.iterations.layer_cost import LayerCost
from batchbound.solvers.exegpt.execution_search import GAP, search, spaces, whole_grid

BOUNDS = (0.1, 0.3, 0.7, 1.0)
"""Shares of the grid's latencies, as the paper chooses its bounds; the last is no bound."""
LEAST_GRID = 10_000
MOST_ERROR = 0.03


@dataclass(slots=True)
class Worst:
    """The worst of all searches, and of all configurations they chose."""

    searches: int = 0
    loss: float = 0.0
    evaluated: float = 0.0
    seconds: float = 0.0
    simulated: int = 0
    throughput: float = 0.0
    latency: float = 0.0
    percentile: float = 0.0
    missed: int = 0
    runs: int = 0
    missed_runs: int = 0


def main() -> None:
    """Print one line for each task, number of devices, strategy, degree and bound, then the worst of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", nargs="+")
    parser.add_argument("--tasks", nargs="+", default=["S", "T", "G", "C1", "C2"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=10_000, help="sampled for each run")
    parser.add_argument("--runs", type=int, default=5, help="simulated, of each configuration; 0 for none")
    args = parser.parse_args()
    profiles = [read_layer_profiles(path) for path in args.profile]
    costs = {profile.tensor_parallel: LayerCost(profile) for profile in profiles}
    worst, begun = Worst(), time.process_time()
    for task in args.tasks:
        generator = GENERATORS[f"exegpt-{task}"]
        lengths = LengthPair(generator.input_tokens(), generator.output_tokens())
        for devices in args.devices:
            for strategy in Strategy:
                for degree in sorted(costs):
                    timeline = Timeline(costs, Cluster(devices, profiles[0].device_bytes), lengths)
                    _compare(timeline, task, strategy, degree, (args.requests, args.runs), worst)
    print(
        f"{worst.searches} searches: loss at most {worst.loss:.2%} (its tolerance is {GAP:.1%}), evaluated at"
        f" most {worst.evaluated:.2%} of {LEAST_GRID} configurations or more, {worst.seconds:.2f} CPU seconds"
    )
    print(
        f"{worst.simulated} configurations sampled: throughput off by at most {worst.throughput:.1%}, latency"
        f" of the 99th-percentile length by {worst.latency:.1%}; {worst.missed} beyond {MOST_ERROR:.0%} in"
        f" either (99th percentile of latencies: {worst.percentile:.1%})"
    )
    print(f"{worst.missed_runs} of {worst.runs} runs alone beyond {MOST_ERROR:.0%} in either")
    print(f"{time.process_time() - begun:.0f} CPU seconds in all")


def _compare(
    timeline: Timeline, task: str, strategy: Strategy, degree: int, sampled: tuple[int, int], worst: Worst
) -> None:
    batches = (1, 256)
    while grid := sum(space.grid for space in spaces(timeline, strategy, degree, encode_batches=batches)):
        if grid >= LEAST_GRID:
            break
        batches = (1, 2 * batches[1])
    if not grid:
        return
    head = f"{task:2s} x{timeline.cluster.devices} {strategy.value:5s} TP{degree}"
    latency, throughput = whole_grid(timeline, strategy, degree, encode_batches=batches)
    finite = latency[np.isfinite(latency)]
    if not len(finite):
        print(f"{head} of {grid} configurations none fits into memory")
        return
    known: dict[object, str] = {}
    for share in BOUNDS:
        bound = math.inf if share == 1.0 else float(np.quantile(finite, share))
        fresh = Timeline(timeline.costs, timeline.cluster, timeline.lengths)
        begun = time.process_time()
        found = search(fresh, strategy, degree, bound, encode_batches=batches)
        seconds = time.process_time() - begun
        if found.config is None or found.performance is None:
            raise AssertionError(f"{head} bound {bound}: found nothing where something is")
        reached, config = found.performance, found.config
        loss = 1 - reached.throughput / throughput[np.isfinite(latency) & (latency <= bound)].max()
        worst.searches += 1
        worst.loss, worst.seconds = max(worst.loss, loss), max(worst.seconds, seconds)
        worst.evaluated = max(worst.evaluated, found.evaluated / found.grid)
        violations = [result.violations for result in found.results]
        if config not in known and min(sampled) > 0:
            known[config] = _sampled(timeline, config, reached, sampled, worst)
        print(
            f"{head} within {bound:6.2f} s: B_E {config.encode_batch:3d} N_D {config.decode_steps:3d} B_m"
            f" {config.micro_batches} groups {config.tensor_groups}, {reached.throughput:7.2f}/s"
            f" {reached.latency:6.2f} s | loss {loss:.0e}, {found.evaluated}/{found.grid} ="
            f" {found.evaluated / found.grid:.2%}, {seconds:.2f} s | not monotone by"
            f" {max(each.worst_latency for each in violations):.1%} and"
            f" {max(each.worst_throughput for each in violations):.1%} | {known.get(config, '')}",
            flush=True,
        )


def _sampled(
    timeline: Timeline, config: ExecConfig, reached: Performance, sampled: tuple[int, int], worst: Worst
) -> str:
    requests, count = sampled
    decode_steps = config.decode_steps if config.strategy is Strategy.RRA else None
    runs = [simulate_phases(timeline, config, requests=requests, seed=seed) for seed in range(count)]
    # Throughput, latency of an answer of the 99th-percentile length, and the 99th percentile of latencies.
    seen = np.array(
        [[run.throughput, run.latency_near(timeline.longest, decode_steps), run.tail_latency] for run in runs]
    )
    expected = np.array([reached.throughput, reached.latency, reached.latency])
    # A run without a request of as many phases (nan) says nothing of how late one is.
    off, late, percentile = expected / np.nanmean(seen, axis=0) - 1
    alone = expected / seen - 1
    missed = not (abs(off) <= MOST_ERROR and abs(late) <= MOST_ERROR)
    worst.simulated, worst.missed = worst.simulated + 1, worst.missed + missed
    worst.runs += count
    worst.missed_runs += int((np.abs(alone[:, :2]) > MOST_ERROR).any(axis=1).sum())
    worst.throughput, worst.latency = max(worst.throughput, abs(off)), max(worst.latency, abs(late))
    worst.percentile = max(worst.percentile, abs(percentile))
    (least_off, least_late), (most_off, most_late) = np.nanmin(alone[:, :2], 0), np.nanmax(alone[:, :2], 0)
    return (
        f"throughput {off:+.1%} ({least_off:+.1%} to {most_off:+.1%}), latency {late:+.1%} ({least_late:+.1%}"
        f" to {most_late:+.1%}), percentile {percentile:+.1%}" + " (!)" * missed
    )


if __name__ == "__main__":
    main()
