"""
Fleets: what prediction errors cost 8 replicas, and planning and dispatching at scale.

``errors``  8 replicas serve answers whose lengths a real predictor foretold (SSJF's data: true lengths, and
            the class its proxy model gave each): our policy with backoff beside MICO's dispatch,
            Karmarkar-Karp and round robin, each with backoff. Every policy knows the same: the class of each
            request, and the lengths of a disjoint half of the data. Makespans are held against the fleet's
            bound with the true lengths.
``grid``    gaps of planned fleets: jobs of `plan_grid.py` on 4 replicas x 16 slots, limits in CPU seconds.
``scale``   a fleet plan of 100,000 requests on 64 replicas x 256 slots; dispatch of a million requests.

Run: ``python benchmarks/fleet.py errors`` (``BATCHBOUND_DATA`` names the folder of public data).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
from cpu_clock import limit_cpu_seconds
from plan_grid import REGIMES

from batchbound.data.arrays import IntArray
from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet, Replica
from batchbound.data.lengths.prediction_error import MeasuredError
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.heuristics.dispatch import Units, dispatch, mico
from batchbound.heuristics.fleet.policy import FleetPolicy, choose_fleet_policy, serve_with_backoff
from batchbound.heuristics.fleet.simulation import FleetRun, simulate_fleet
from batchbound.heuristics.policy import Policy
from batchbound.heuristics.registry import policy_named
from batchbound.models.bounds.fleet import fleet_bound
from batchbound.models.certificates.fleet import verify_fleet_bound
from batchbound.solvers.fleet import plan_fleet
from batchbound.solvers.result import Limits

DATA = Path(os.environ.get("BATCHBOUND_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
REPLICAS = 8
COSTS = {
    "mico": ("70 ms an iteration, 1 ms an insertion", CostModel(0.001, 0.0, 0.070, 0.0)),
    "paper": ("29 ms + 0.21 ms/slot a decode step, 25 ms + 0.13 ms/token a stage", CostModel.paper()),
}
RIVALS = {"MICO": "mico", "Karmarkar-Karp": "karmarkar-karp", "round robin": "round-robin"}


def ssjf() -> tuple[IntArray, IntArray]:
    """Return true lengths and predicted classes."""
    table = pd.read_csv(DATA / "ssjf" / "predictions_warmup_cls_1000K.csv")
    return table["output_token_length"].to_numpy(), table["predicted_length"].to_numpy()


def prefill_first(problem: Problem) -> Policy:
    """Return MICO's own rule, and that of most engines: arrival order, insert at once."""
    return policy_named("fcfs", problem)


class Table:
    """Gaps to the bound by the name of what ended there, and where the time above the bound went."""

    def __init__(self) -> None:
        self._gaps: dict[str, list[float]] = {}
        self._parts: dict[str, list[tuple[float, float]]] = {}

    def note(self, name: str, fleet: Fleet, run: FleetRun, bound: Bound) -> None:
        """Note a run; seconds of prefill stages and of idle slots are the replicas' means."""
        cost, slots = fleet.replicas[0].cost, fleet.replicas[0].slots
        stages = [stage for trace in run.traces for stage in trace.stages]
        prefill = sum(stage.seconds for stage in stages if stage.kind == "prefill")
        least = len(fleet) * cost.prefill_base / slots
        least += cost.prefill_per_token * int(fleet.workload.input_tokens.sum())
        idle = sum((slots - stage.active) * stage.decode_steps for stage in stages if stage.kind == "decode")
        whole = bound.seconds * len(fleet.replicas)
        self._gaps.setdefault(name, []).append(bound.gap(run.makespan))
        self._parts.setdefault(name, []).append(
            ((prefill - least) / whole, idle / slots * cost.decode_base / whole)
        )

    def show(self, ours: str) -> None:
        """Print the table, with how many seeds end later than ours."""
        print(
            "| dispatch and rule | gap to the bound with true lengths | worst | of it prefill stages"
            " | idle slots | seeds ours ends before |"
        )
        print("|---|---|---|---|---|---|")
        best = np.array(self._gaps[ours])
        for name, gaps in self._gaps.items():
            prefill, idle = np.mean(self._parts[name], axis=0)
            print(
                f"| {name} | {np.mean(gaps):.2%} ± {np.std(gaps):.2%} | {max(gaps):.2%} | {prefill:.2%}"
                f" | {idle:.2%} | {int((best < np.array(gaps)).sum())} of {len(gaps)} |",
                flush=True,
            )


def errors(requests: int, slots: int, seeds: int, costs: str) -> None:
    """Serve SSJF's answers with its proxy model's predictions; half of the pairs are the measured error."""
    actual, label = ssjf()
    known = np.random.default_rng(0).random(len(actual)) < 0.5
    means = np.array([round(actual[known & (label == k)].mean()) for k in range(label.max() + 1)])
    error = MeasuredError(means[label[known]], actual[known])
    unseen = np.flatnonzero(~known)
    title, cost = COSTS[costs]
    table, chosen, begun = Table(), [], time.process_time()
    for seed in range(seeds):
        rng = np.random.default_rng((seed, 3))
        drawn = rng.choice(unseen, requests, replace=requests > len(unseen))
        prompts = np.maximum(1, np.rint(rng.lognormal(4.0, 0.4, requests))).astype(np.int64)
        workload = Workload.from_lengths(prompts, means[label[drawn]])
        fleet, truth = Fleet(workload, (Replica(cost, slots),) * REPLICAS), actual[drawn]
        bound = fleet_bound(fleet.with_output_tokens(truth))
        policy, there = choose_fleet_policy(fleet, error, seed=seed, samples=2)
        chosen.append(policy.name)
        table.note("ours + backoff", fleet, serve_with_backoff(fleet, there, policy, truth), bound)
        for name, rule in RIVALS.items():
            dispatched = dispatch(fleet, rule)
            run = simulate_fleet(fleet, dispatched, truth, policy=prefill_first, patience=0.0)
            table.note(f"{name} + backoff", fleet, run, bound)
        queue = FleetPolicy("longest-first", policy.patience)
        for name, rule in RIVALS.items():
            dispatched = dispatch(fleet, rule)
            run = serve_with_backoff(fleet, dispatched, queue, truth)
            table.note(f"{name} + backoff, longest predicted first", fleet, run, bound)
        run = serve_with_backoff(fleet, dispatch(fleet, "mico"), policy, truth)
        table.note("MICO + backoff, our rule in each replica", fleet, run, bound)
        run = simulate_fleet(fleet, there, truth, policy=policy, backoff=False)
        table.note("ours without backoff", fleet, run, bound)
        run = simulate_fleet(fleet, None, truth, policy=policy)
        table.note("our rule, one queue for all", fleet, run, bound)
    print(f"\n## {requests:,} requests, {REPLICAS} replicas x {slots} slots, {seeds} seeds; {title}\n")
    print(f"Ours serves: {'; '.join(sorted(set(chosen)))}. {time.process_time() - begun:.0f} CPU s.\n")
    table.show("ours + backoff")


def scale() -> None:
    """Plan 100,000 requests on 64 x 256 slots, and dispatch a million."""
    fleet = Fleet(generate("table3", 0, 100_000), (Replica(CostModel.paper(), 256),) * 64)
    begun = time.perf_counter()
    result = plan_fleet(fleet, limits=Limits(seconds=50.0))
    wall = time.perf_counter() - begun
    sound = result.schedule.check(fleet) is None and verify_fleet_bound(fleet, result.bound) is None
    print(
        f"100,000 requests, 64 x 256 slots: {result.makespan:.2f} s, bound {result.bound.seconds:.2f} s,"
        f" gap {result.gap:.2%}, planned in {wall:.1f} s; schedule and certificate check: {sound}"
    )
    rng = np.random.default_rng(0)
    million = Workload.from_lengths(rng.integers(1, 300, 10**6), rng.integers(1, 1000, 10**6))
    for replicas in (2, 8, 64):
        large = Fleet(million, (Replica(CostModel.paper(), 256),) * replicas)
        begun = time.perf_counter()
        replica_of = mico(Units.of(large, np.arange(len(large))))
        wall = time.perf_counter() - begun
        tokens = np.bincount(replica_of, weights=million.output_tokens)
        spread = np.ptp(tokens) / tokens.mean()
        print(f"a million requests to {replicas} replicas by MICO: {wall:.2f} s, spread {spread:.1e}")


def grid(requests: int, seeds: int, seconds: float) -> None:
    """Plan jobs of the grid on 4 x 16 slots, and print the gap of each seed and the mean."""
    limit_cpu_seconds()
    for regime, (draw, pose) in REGIMES.items():
        gaps = []
        for seed in range(seeds):
            problem = pose(draw(np.random.default_rng(seed), requests), 16)
            found = plan_fleet(Fleet.of(problem, 4), limits=Limits(seconds=seconds, seed=seed))
            assert found.gap is not None
            gaps.append(found.gap)
        print(f"{regime:14}", *(f"{gap:7.2%}" for gap in gaps), f"  mean {np.mean(gaps):.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("errors", "grid", "scale"))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=10)
    parser.add_argument("--costs", choices=sorted(COSTS), default="mico")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.2, help="CPU seconds of each plan of the grid")
    args = parser.parse_args()
    if args.part == "errors":
        errors(args.requests, args.slots, args.seeds, args.costs)
    elif args.part == "grid":
        grid(args.requests, args.seeds, args.seconds)
    else:
        scale()


if __name__ == "__main__":
    main()
