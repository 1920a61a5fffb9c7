"""
Ablations of the schedule search: the mean gap of each regime for each parameter file of a folder.

    python benchmarks/ablation.py --folder params --seconds 1.2 --cells 3 --seed 7

A file that switches a phase off is enough for an ablation:

    [search]
    off = ["spans"]

All files plan the same jobs of the grid of `plan_grid.py`, in turns; limits are CPU seconds. The first row
is the default.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from cpu_clock import limit_cpu_seconds
from plan_grid import REGIMES

from batchbound.solvers import Limits, solve
from batchbound.solvers.search.params import SearchParams

DEFAULT = "default"
FOLDER = Path(__file__).resolve().parent / "params"


def main() -> None:
    """Plan a sample of the grid with each parameter file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of parameter files, *.toml")
    parser.add_argument("--seconds", type=float, default=1.2, help="CPU seconds for each plan")
    parser.add_argument("--cells", type=int, default=4, help="sizes drawn for each regime")
    parser.add_argument("--requests", type=int, nargs="+", default=[30, 100, 300, 1300])
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample, the jobs and the searches")
    options = parser.parse_args()
    files = {file.stem: SearchParams.from_file(file) for file in sorted(options.folder.glob("*.toml"))}
    if not files:
        sys.exit(f"{options.folder} holds no *.toml file")
    limit_cpu_seconds()
    gaps = measured({DEFAULT: SearchParams(), **files}, options)
    print_table(gaps, options.regimes)


def measured(
    files: dict[str, SearchParams], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Return the gaps of each file and regime, in percent."""
    rng = np.random.default_rng(options.seed)
    sizes = [(count, slots) for count in options.requests for slots in options.slots]
    gaps: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in files}
    for regime in options.regimes:
        draw, pose = REGIMES[regime]
        for at in rng.permutation(len(sizes))[: options.cells].tolist():
            count, slots = sizes[at]
            problem = pose(draw(np.random.default_rng(options.seed), count), slots)
            for name, params in files.items():
                limits = Limits(seconds=options.seconds, seed=options.seed)
                found = solve(problem, limits=limits, params=params)
                assert found.schedule is not None
                assert found.schedule.check(problem) is None, name
                assert found.gap is not None
                gaps[name][regime].append(100 * found.gap)
                print(f"{regime}:{count}x{slots} {name} {gaps[name][regime][-1]:.3f}", file=sys.stderr)
    return gaps


def print_table(gaps: dict[str, dict[str, list[float]]], regimes: list[str]) -> None:
    """Print the mean gap in percent, a row for each file and a column for each regime."""
    width = max(map(len, gaps))
    print(f"{'mean gap, %':{width}}", *(f"{regime:>13}" for regime in regimes), f"{'all':>7}")
    for name, by_regime in gaps.items():
        means = [float(np.mean(by_regime[regime])) for regime in regimes]
        every = float(np.mean([gap for regime in regimes for gap in by_regime[regime]]))
        print(f"{name:{width}}", *(f"{mean:13.3f}" for mean in means), f"{every:7.3f}")


if __name__ == "__main__":
    main()
