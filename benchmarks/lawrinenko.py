"""
Makespan bin packing on the classes of Lawrinenko, the literature's hard instances.

Seven distributions of weights and five ratios of items to machines, generated here by recipe: for each,
the makespan, the proven bound and the CPU seconds of the library's own solver.

Run: ``python benchmarks/lawrinenko.py --seconds 30 --seeds 1``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import numpy as np

from batchbound.models.bounds.packing.heuristics import IntArray
from batchbound.models.bounds.packing.partition import solve_partition

RATIOS = (2.0, 2.25, 2.5, 2.75, 3.0)

CLASSES: dict[str, Callable[[np.random.Generator, int], IntArray]] = {
    "U(1,100)": lambda rng, n: rng.integers(1, 101, n),
    "U(20,100)": lambda rng, n: rng.integers(20, 101, n),
    "U(50,100)": lambda rng, n: rng.integers(50, 101, n),
    "N(100,20)": lambda rng, n: normal(rng, 100, 20, n),
    "N(100,50)": lambda rng, n: normal(rng, 100, 50, n),
    "U(n,4n)": lambda rng, n: rng.integers(n, 4 * n + 1, n),
    "N(4n,n)": lambda rng, n: normal(rng, 4 * n, n, n),
}


def normal(rng: np.random.Generator, mean: float, deviation: float, count: int) -> IntArray:
    """Return rounded normal weights of at least 1."""
    return np.maximum(1, np.round(rng.normal(mean, deviation, count))).astype(np.int64)


def instance(name: str, ratio: float, seed: int, items: int = 400) -> tuple[IntArray, int]:
    """Return the weights of about that many items, ``ratio`` per machine, and the number of machines."""
    machines = round(items / ratio)
    rng = np.random.default_rng([list(CLASSES).index(name) + 1, round(100 * ratio), seed])
    return CLASSES[name](rng, round(machines * ratio)), machines


def main() -> None:
    """Print one row per instance, as Markdown or as JSON lines."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=float, default=30.0, help="CPU seconds per instance (default 30)")
    parser.add_argument("--seeds", type=int, default=1, help="instances per class and ratio (default 1)")
    parser.add_argument("--items", type=int, default=400, help="items, about (default 400)")
    parser.add_argument("--classes", nargs="+", default=list(CLASSES), choices=list(CLASSES), metavar="CLASS")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    if not options.json:
        print("| class | n/m | machines | seed | makespan | bound | gap | proven by | CPU s |")
        print("|---|---|---|---|---|---|---|---|---|")
    for name in options.classes:
        for ratio in RATIOS:
            for seed in range(options.seeds):
                weights, machines = instance(name, ratio, seed, options.items)
                result = solve_partition(weights, machines, options.seconds, seed)
                row = {
                    "class": name,
                    "ratio": ratio,
                    "machines": machines,
                    "seed": seed,
                    "makespan": result.makespan,
                    "bound": result.bound,
                    "gap": result.gap,
                    "source": result.source,
                    "seconds": round(result.seconds, 2),
                }
                if options.json:
                    print(json.dumps(row), flush=True)
                else:
                    row["gap"] = f"{100 * result.gap:.3f} %"
                    print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
