"""
Where a proven gap comes from: the bound, the schedule, or the argument behind the bound.

On the hybrid paper's Table III, or a variant of it, at a given size, for each seed, as percentages above the
proven bound:

- ``search``: what the schedule search finds in ``--seconds``;
- ``optimum``: what enumeration proves to be best (``--exact`` seconds, only for small sizes): what is left
  between it and the bound is the bound's fault, what is left between it and the search the search's;
- ``differences``: the cost at which stage times exist whose differences, each used by any number of
  requests, host all requests, whatever the slots do. The bound counts differences as if they were free of
  each other; no argument about differences alone, however much better, can prove more than this. It is found
  by descent, so the true limit may be lower still;
- ``planted``, ``found``: with ``--planted W``, each request is lengthened by all but a share W of the time
  for which its slot waits after it in the schedule found, which is then one of the new problem and wastes a
  share W of what it did: how far that is above the new bound, and what the same search finds there, which
  does not know it. Where that is farther above, there are better schedules than those it finds.

    python benchmarks/bound_or_schedule.py --requests 24 --slots 5 --exact 120
    python benchmarks/bound_or_schedule.py --requests 100 --slots 20 --seconds 60 --descents 4
    python benchmarks/bound_or_schedule.py --workload table3-censored --requests 1319 --slots 200 \
        --seconds 60 --descents 1 --planted 0.5 --seeds 3
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from batchbound.data.arrays import IntArray
from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import GENERATORS, generate
from batchbound.data.schedule import Schedule
from batchbound.models.bounds.least_counts import cost_terms, least_counts
from batchbound.models.bounds.prove import proven_bound
from batchbound.solvers.result import Limits, Status
from batchbound.solvers.search.schedule_search import search_schedule
from batchbound.solvers.solve import solve

MOST_CANDIDATES = 1000
"""Places tried for a stage time in one descent; beyond it a random part of all of them."""
MORE_STAGES = 5
"""So many more stages than the bound's are tried."""


def rounded_up(differences: IntArray, lengths: IntArray) -> IntArray:
    """Return the least difference that holds each length, the longest one being there for free."""
    values = np.unique(np.append(differences, lengths[-1]))
    least: IntArray = values[np.searchsorted(values, lengths)]
    return least


def descend(times: IntArray, lengths: IntArray, numbers: IntArray, rng: np.random.Generator) -> int:
    """Move one stage time at a time to where lengths are rounded up least; return the waste that is left."""
    longest, end = int(lengths[-1]), int(times[-1])
    candidates = np.arange(1, end)
    if end > MOST_CANDIDATES:
        candidates = np.unique(rng.choice(candidates, MOST_CANDIDATES))
    waste = int(numbers @ (rounded_up(pair_differences(times), lengths) - lengths))
    improved = True
    while improved:
        improved = False
        for moved in rng.permutation(np.arange(1, len(times) - 1)):
            others = np.delete(times, moved)
            fixed = rounded_up(pair_differences(others), lengths)
            new = np.sort(np.abs(candidates[:, None] - others[None, :]), axis=1)
            held = np.broadcast_to(fixed, (len(candidates), len(lengths))).copy()
            for column in new.T:
                usable = (column[:, None] >= lengths) & (column[:, None] < np.minimum(held, longest))
                held = np.where(usable, column[:, None], held)
            wastes = (held - lengths) @ numbers
            at = int(wastes.argmin())
            if int(wastes[at]) < waste:
                waste, improved = int(wastes[at]), True
                times[moved] = candidates[at]
    return waste


def pair_differences(times: IntArray) -> IntArray:
    """Return the differences of all pairs of points."""
    first, last = np.triu_indices(len(times), 1)
    differences: IntArray = np.abs(times[last] - times[first])
    return differences


def differences_limit(problem: Problem, bound: Bound, descents: int, seed: int) -> float:
    """Return the least cost found at which the differences of some stage times could host all requests."""
    rng = np.random.default_rng(seed)
    counts = least_counts(problem)
    lengths, numbers = np.unique(problem.decode_steps, return_counts=True)
    work, best = int(problem.decode_steps.sum()), np.inf
    fewest = round(bound.terms["prefill stages"] / problem.cost.prefill_base)
    for stages in range(fewest, fewest + MORE_STAGES + 1):
        for _ in range(descents):
            # Late stages are close together in good schedules: half the descents start from there.
            low = 0 if rng.random() < 0.5 else max(0, counts.decode_steps - 2 * int(lengths[-1]))
            inner = np.sort(rng.integers(low + 1, counts.decode_steps, stages - 1))
            times = np.concatenate(([0], inner, [counts.decode_steps]))
            waste = descend(times, lengths, numbers, rng)
            decode_steps = max(counts.decode_steps, -(-(work + waste) // counts.slots))
            best = min(best, sum(cost_terms(problem, stages, decode_steps).values()))
    return best


def planted(problem: Problem, schedule: Schedule, share: float) -> Problem:
    """Return the problem with requests so much longer that the schedule wastes a share of what it did."""
    times = np.concatenate(([0], np.cumsum(schedule.decode_steps)))
    order = np.lexsort((schedule.bin_of, schedule.slot_of))
    begin, slot = times[schedule.bin_of[order]], schedule.slot_of[order]
    end = np.append(begin[1:], times[-1])
    end[np.append(slot[1:] != slot[:-1], True)] = times[-1]
    held = np.empty_like(begin)
    held[order] = np.minimum(end - begin, problem.decode_steps.max())
    longer = np.rint((1.0 - share) * (held - problem.decode_steps)).astype(np.int64)
    workload = problem.workload.with_output_tokens(problem.workload.output_tokens + longer)
    return Problem(workload, problem.cost, problem.slots)


def main() -> None:
    """Print one row per seed as Markdown, and the means."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--workload", default="table3", choices=[n for n in GENERATORS if "table3" in n])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the schedule search (default 10)")
    parser.add_argument("--exact", type=float, default=0.0, help="seconds of the enumeration (default none)")
    parser.add_argument("--descents", type=int, default=0, help="per number of stages (default none)")
    parser.add_argument("--planted", type=float, help="share of the waste left there (default not tried)")
    options = parser.parse_args()
    columns: dict[str, list[float]] = {
        name: [] for name in ("search", "optimum", "differences", "planted", "found")
    }
    print("| seed | bound (s) | " + " | ".join(columns) + " | S, R | CPU s of the proof |")
    print("|---" * (len(columns) + 4) + "|")
    for seed in range(options.seeds):
        workload = generate(options.workload, seed, options.requests)
        problem = Problem(workload, CostModel.paper(), options.slots)
        bound = proven_bound(problem)
        found = search_schedule(problem, seconds=options.seconds, seed=seed, enough=bound.seconds)
        row = {"search": found.makespan}
        begun = time.process_time()
        if options.exact > 0:
            exact = solve(problem, "exact", limits=Limits(seconds=options.exact), initial=found.schedule)
            if exact.status is Status.OPTIMAL and exact.makespan is not None:
                row["optimum"] = exact.makespan
        proof = time.process_time() - begun
        stages, decode_steps = found.schedule.prefill_stages(), int(found.schedule.decode_steps.sum())
        if options.descents > 0:
            row["differences"] = differences_limit(problem, bound, options.descents, seed)
        gaps = {name: bound.gap(seconds) for name, seconds in row.items()}
        if options.planted is not None:
            longer = planted(problem, found.schedule, options.planted)
            above = proven_bound(longer)
            again = search_schedule(longer, seconds=options.seconds, seed=seed + 1, enough=above.seconds)
            gaps["planted"] = above.gap(found.schedule.makespan(longer))
            gaps["found"] = above.gap(again.makespan)
        cells = []
        for name, values in columns.items():
            if name in gaps:
                values.append(100 * gaps[name])
            cells.append(f"{values[-1]:.3f} %" if name in gaps else "")
        row_cells = [seed, f"{bound.seconds:.3f}", *cells, f"{stages}, {decode_steps}", f"{proof:.1f}"]
        print("| " + " | ".join(map(str, row_cells)) + " |", flush=True)
    means = [f"{np.mean(values):.3f} %" if values else "" for values in columns.values()]
    print("| mean | | " + " | ".join(means) + " | | |")


if __name__ == "__main__":
    main()
