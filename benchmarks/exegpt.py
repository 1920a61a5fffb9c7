"""ExeGPT's tasks on measured profiles: the search against the whole grid, the timeline against sampling.

python benchmarks/exegpt.py PROFILE_TP1 [PROFILE_TP2] --tasks S T --devices 1 4 [--exhaustive]
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np

from batchbound.data.generators import GENERATORS
from batchbound.data.length_pair import LengthPair
from batchbound.data.profile_readers import read_layer_profiles
from batchbound.executor.phase_simulation import simulate_phases
from batchbound.models.exec_config import Cluster, Strategy
from batchbound.models.layer_cost import LayerCost
from batchbound.models.timeline import Timeline
from batchbound.solvers.configuration_search import best_of, exhaustive
from batchbound.solvers.execution_search import search, spaces

BOUNDS = (0.1, 0.3, 0.7, 1.0)
"""Shares of the grid's latencies, as the paper chooses its bounds; the last is no bound."""
PAPER_TABLE_6 = "published (OPT 13B, task S): WAA at 3.1 s and 5.9 s, RRA at 11.5 s and without a bound"


def main() -> None:
    """Print one line for each task, number of devices, strategy and bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", nargs="+")
    parser.add_argument("--tasks", nargs="+", default=["S", "T", "G", "C1", "C2"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--most-encode-batch", type=int, default=256)
    parser.add_argument("--exhaustive", action="store_true", help="evaluate the whole grid, too")
    parser.add_argument("--requests", type=int, default=10_000, help="sampled for the discrete simulation")
    args = parser.parse_args()
    profiles = [read_layer_profiles(path) for path in args.profile]
    costs = {profile.tensor_parallel: LayerCost(profile) for profile in profiles}
    print(PAPER_TABLE_6)
    for task in args.tasks:
        generator = GENERATORS[f"exegpt-{task}"]
        lengths = LengthPair(generator.input_tokens(), generator.output_tokens())
        for devices in args.devices:
            timeline = Timeline(costs, Cluster(devices, profiles[0].device_bytes), lengths)
            for strategy in Strategy:
                _compare(timeline, task, strategy, args)


def _compare(timeline: Timeline, task: str, strategy: Strategy, args: argparse.Namespace) -> None:
    batches = (1, args.most_encode_batch)
    parts = list(spaces(timeline, strategy, 1, encode_batches=batches))
    if not parts:
        return
    rng = np.random.default_rng(0)
    sampled = []
    for part in parts:
        for _ in range(200):
            point = tuple(int(rng.integers(each.low, each.high + 1)) for each in part.variables)
            sampled.append(timeline(part.config(point)).latency)
    finite = [latency for latency in sampled if math.isfinite(latency)]
    points = (
        [
            point
            for part in parts
            for point in exhaustive(part.evaluate(timeline), part.variables, math.inf).points
        ]
        if args.exhaustive
        else []
    )
    for share in BOUNDS:
        bound = math.inf if share == 1.0 or not finite else float(np.quantile(finite, share))
        begun = time.process_time()
        found = search(timeline, strategy, 1, bound, encode_batches=batches)
        seconds = time.process_time() - begun
        line = f"{task:2s} {timeline.cluster.devices} {strategy.value:5s} bound {bound:8.2f} s"
        if found.config is None or found.performance is None:
            print(f"{line}: none")
            continue
        reached, config = found.performance, found.config
        run = simulate_phases(timeline, config, requests=args.requests)
        loss = 1 - reached.throughput / best_of(points, bound).throughput if points else math.nan
        print(
            f"{line} B_E {config.encode_batch:4d} N_D {config.decode_rounds:3d} B_m {config.micro_batches}"
            f" {reached.throughput:8.2f}/s {reached.latency:8.2f} s"
            f" | looked at {found.evaluated}/{found.grid} in {seconds:.2f} s, loss {loss:.1e}"
            f" | sampled: throughput {reached.throughput / run.throughput - 1:+.1%},"
            f" latency {reached.latency / run.latency_of(timeline.longest) - 1:+.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
