"""
The literal bin packing model (26)-(30) on every backend, beside the library's own exact solver.

Two instances: the hybrid paper's (Table III: 1,319 requests on 200 slots), and 400 items on 160 machines of
Lawrinenko's class 3. Every backend gets the model as printed, one thread and the same seconds; once cold,
and once from the assignment of LPT where it takes a start. Values are what we computed ourselves from the
solutions handed back; a backend that overruns its limit is ended from outside.

Run: ``python benchmarks/backends.py --seconds 60`` (about 18 minutes)
"""

from __future__ import annotations

import argparse

from lawrinenko import instance

from batchbound.data.readers.generators import generate
from batchbound.models.bounds.packing.heuristics import IntArray, longest_processing_time
from batchbound.models.bounds.packing.partition import solve_partition
from batchbound.models.formulations.partition_model import PartitionModel, partition_model, write_partition
from batchbound.solvers.backends.backend import BACKENDS
from batchbound.solvers.backends.linear import LinearResult, solve_linear
from batchbound.solvers.result import Limits


def instances(share: float) -> dict[str, tuple[IntArray, int]]:
    """Return weights and number of machines by name, of both instances or of smaller ones like them."""
    requests, machines = round(1319 * share), round(200 * share)
    items, bins = instance("U(50,100)", 2.5, 0, round(400 * share))
    return {
        f"Table III, {requests} x {machines}": (generate("table3", 0, requests).output_tokens, machines),
        f"class 3, {len(items)} x {bins}": (items, bins),
    }


def row(name: str, solver: str, start: str, found: LinearResult) -> str:
    """Return a line of the table."""
    value = "none" if found.objective is None else f"{found.objective:.0f}"
    bound = "none" if found.bound is None else f"{found.bound:.1f}"
    gap = ""
    if found.objective is not None and found.bound is not None:
        gap = f"{1 - found.bound / found.objective:.2%}"
    status = f"{found.status}, {found.stopped_by}"
    return f"| {name} | {solver} | {start} | {status} | {value} | {bound} | {gap} | {found.seconds:.1f} |"


def main() -> None:
    """Print the table, a row as soon as it is measured."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each solve (default 60)")
    installed = [name for name, backend in BACKENDS.items() if backend.installed]
    parser.add_argument("--backends", nargs="+", default=installed, choices=sorted(BACKENDS))
    parser.add_argument("--share", type=float, default=1.0, help="of both instances' sizes (default 1)")
    options = parser.parse_args()
    print(
        "| instance | solver | start | status, stopped by | makespan (decode steps) | bound | gap | seconds |"
    )
    print("|---|---|---|---|---:|---:|---:|---:|")
    for name, (weights, machines) in instances(options.share).items():
        ours = solve_partition(weights, machines, options.seconds)
        status = "optimal, proof" if ours.optimal else "feasible, time"
        print(
            f"| {name} | **batchbound** ({ours.source}) | none | {status} | {ours.makespan} | {ours.bound} |"
            f" {ours.gap:.2%} | {ours.seconds:.2f} |",
            flush=True,
        )
        model = partition_model(weights, machines)
        for backend in options.backends:
            measure(name, backend, model, weights, options.seconds)


def measure(name: str, backend: str, model: PartitionModel, weights: IntArray, seconds: float) -> None:
    """Print what a backend does, cold and from LPT's assignment."""
    limits = Limits(seconds=seconds, threads=1)
    version = f"{backend} ({BACKENDS[backend].version})"
    print(row(name, version, "none", solve_linear(model.model, backend, limits)), flush=True)
    assignment = longest_processing_time(weights, len(model.loads))
    start = write_partition(model, weights, assignment)
    lightest = f"LPT, {start[model.largest]:.0f}"
    print(row(name, version, lightest, solve_linear(model.model, backend, limits, start)), flush=True)


if __name__ == "__main__":
    main()
