"""
ExeGPT's Figures 9 and 10 on its own machines, their costs estimated from the devices' rates.

    python benchmarks/exegpt/exegpt_figures.py [--trace NAME=TABLE]

Figure 9: memory of static batching and of WAA, without a latency bound. Figure 10: throughput on the
lengths of real datasets. The paper's (WMT, Alpaca, CNN/DailyMail) are not at hand; by default those of
Azure's traces are taken. A tenth of a dataset says its lengths, the rest is served.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
from exegpt_baselines import StaticBatching, best_within
from exegpt_machines import MACHINES, paper_machine
from exegpt_phases import simulate_phases
from exegpt_study import Study

from batchbound.data.lengths.pair import LengthPair
from batchbound.data.readers.requests import read_workload
from batchbound.data.workload import Workload
from batchbound.models.exegpt.configuration import Strategy
from batchbound.models.exegpt.timeline import Timeline
from batchbound.solvers.exegpt.execution_search import search_all

_GB = 1e9
BATCHES = np.arange(4, 1025, 4)
POSITIONS = 2048
"""Tokens that the models of Table 1 have positions for."""
WAYS = {"RRA": [Strategy.RRA], "WAA": [Strategy.WAA_C, Strategy.WAA_M]}


def memory(name: str, task: str) -> None:
    """Print Figure 9's bars: GB of weights and of keys and values on a device."""
    study = Study(*paper_machine(name))
    timeline, static, devices = study.task(task), StaticBatching, study.cluster.devices
    known = best_within(*static(timeline, study.degree).reach(BATCHES), math.inf)
    found = search_all(timeline, math.inf, strategies=WAYS["WAA"])[0]
    if known is None or found.config is None:
        print(f"{name:9s} {task}: {'static batches' if known is None else 'WAA'}: nothing fits")
        return
    shape, lengths, config = timeline.shape, timeline.lengths, found.config
    token = shape.layers * shape.kv_bytes_per_layer_token
    held = BATCHES[known[2]] * (lengths.inputs.high + lengths.outputs.high) * token
    row = timeline.waa_row(config, config.encode_batch)
    assert row is not None
    encoders = int(timeline.encoders(config.strategy, np.array([config.encode_batch]))[0])
    decoders = devices - encoders
    waiting = row.lead(config.encode_batch) * config.encode_batch * lengths.inputs.mean * token
    batch = np.array([float(config.encode_batch * row.batches)])
    running = float(timeline.peak(timeline.occupancy(1), batch)[0])
    bars = {
        f"static, {devices}": (shape.weight_bytes / devices, held / devices),
        f"WAA, {encoders} encoding": (shape.weight_bytes / encoders, waiting / encoders),
        f"WAA, {decoders} decoding": (shape.weight_bytes / decoders, running / decoders),
    }
    whole = study.cluster.device_bytes / _GB
    print(f"{name:9s} {task}: {config.strategy.value} B_E {config.encode_batch}, of {whole:.0f} GB")
    for who, (weights, keys) in bars.items():
        print(f"  {who:16s} weights {weights / _GB:5.1f} GB, keys and values {keys / _GB:5.1f} GB")


def served(name: str, table: str, path: str) -> list[float]:
    """Print Figure 10's bars for a dataset, and return ExeGPT's throughput over static batching's."""
    study = Study(*paper_machine(name))
    planned, true = _parts(read_workload(path).workload)
    timeline, seen = study.timeline(planned), study.timeline(true)
    static = StaticBatching(timeline, study.degree)
    latency, throughput = static.reach(BATCHES)
    gains = []
    for bound in (float(np.quantile(latency[np.isfinite(latency)], 0.3)), math.inf):
        base = best_within(latency, throughput, bound)
        assert base is not None
        rate = StaticBatching(seen, study.degree).reach(BATCHES)[1][base[2]]
        reached = {way: _rate(timeline, true, bound, strategies) for way, strategies in WAYS.items()}
        cells = ", ".join(f"{way} {got:.2f} ({got / rate:.2f} x)" for way, got in reached.items() if got)
        gains.append(max(reached.values()) / rate)
        print(f"{name:9s} {table:8s} bound {bound:7.1f} s: static {rate:.2f} requests/s, {cells}", flush=True)
    return gains


def _parts(workload: Workload) -> tuple[LengthPair, LengthPair]:
    fits = (workload.input_tokens > 0) & (workload.input_tokens + workload.output_tokens <= POSITIONS)
    order = np.random.default_rng(0).permutation(np.flatnonzero(fits))
    tenth = len(order) // 10
    first, rest = (workload.select(np.sort(part)) for part in (order[:tenth], order[tenth:]))
    return LengthPair.observed(first), LengthPair.observed(rest)


def _rate(timeline: Timeline, true: LengthPair, bound: float, strategies: list[Strategy]) -> float:
    """Return the requests a second that the best configuration reaches with other lengths; 0 for none."""
    found = search_all(timeline, bound, strategies=strategies)[0]
    return simulate_phases(timeline, found.config, lengths=true).throughput if found.config else 0.0


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", nargs="+", choices=sorted(MACHINES), help="default: the figures' own")
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=TABLE", help="lengths observed")
    args = parser.parse_args()
    print("Figure 9: bytes of a device | published: WAA's model memory +18 % (OPT), +29 % (GPT-3), less keys")
    for name in args.machine or ("opt-13b", "gpt3-101b"):
        for task in ("T", "G"):
            memory(name, task)
    print("Figure 10: requests a second | published: ExeGPT over static 4.4 x on average, 8.7 at most")
    azure = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data")) / "azure2023"
    usual = [f"{kind}={azure / f'AzureLLMInferenceTrace_{kind}.csv'}" for kind in ("conv", "code")]
    gains = [
        gain
        for name in args.machine or ("opt-13b", "gpt3-39b")
        for each in args.trace or usual
        for gain in served(name, *each.split("=", 1))
    ]
    print(f"ExeGPT over static: {np.mean(gains):.1f} x on average, {max(gains):.1f} at most")


if __name__ == "__main__":
    main()
