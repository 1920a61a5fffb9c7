"""
The arena: published orders and the search against proven bounds, for each objective.

    python benchmarks/arena.py                                    # all jobs, docs/arena.json, page and plots
    python benchmarks/arena.py --policy mine.py:rule              # with an order of your own
    python benchmarks/arena.py --page                             # page and plots again
    python benchmarks/arena.py --submit plan.json                 # a better plan of an instance

The sources need BATCHBOUND_DATA. `--submit` takes a plan of `plan --for`, or a replay, of one of the
instances under data/instances/arena; it keeps the better one if `verify` finds no fault in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from arena_jobs import PUBLISHED as LICENSED
from arena_jobs import REGIMES, SOURCES, arena_job

import batchbound
from batchbound.data.files.kinds import is_of_kind
from batchbound.data.iteration_plan import IterationPlan
from batchbound.data.iterations import EngineLimits
from batchbound.data.objective import Goal, Objective
from batchbound.data.plan import Provenance
from batchbound.data.readers.replayed import KIND as REPLAY
from batchbound.data.readers.replayed import Replayed
from batchbound.heuristics.serving.published import PUBLISHED, Queue, Rule
from batchbound.heuristics.serving.release import predict
from batchbound.planning.iterations import Engines, make_iteration_plan
from batchbound.planning.mixed_job import MixedJob
from batchbound.solvers.result import Limits

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "arena.json", ROOT / "docs" / "arena.md"
LIBRARY = ROOT / "data" / "instances" / "arena"
OBJECTIVES = ("makespan", "total", "first")
FIRST_SHARE = 0.8
"""Share of the requests that `first` waits for."""
PUBLIC = ("azure-conv", "azure-code", "gsm8k", "math", "rollouts")


def objective_of(name: str, count: int) -> Objective | None:
    """Return an objective for a job of some requests."""
    return Objective("first", round(FIRST_SHARE * count)) if name == "first" else Objective.of(name)


def measured(
    key: Mapping[str, Any], job: MixedJob, limits: EngineLimits, rules: Mapping[str, Rule], search: Limits
) -> dict[str, Any]:
    """Return the gap of each order and of the search, in one job."""
    objective = objective_of(key["objective"], len(job.workload))
    plan = make_iteration_plan(
        job, Engines((limits,), blocks_stated=True), limits=search, objective=objective
    )
    if (wrong := batchbound.verify(plan)) is not None:
        raise SystemExit(f"{key}: the search's plan does not hold: {wrong}")
    least = plan.bound.iterations if plan.aim is None else plan.aim.bound.value
    goal = Goal(Objective("first", len(job.workload))) if plan.aim is None else plan.aim.goal
    rows, values = job.rows(), dict[str, int]()
    queue = Queue(rows.prompt, rows.output, limits.sequences, limits.kv_tokens, rows.tree)
    for name, rule in rules.items():
        run = predict(rows, limits, rule(queue), lag=1, goal=goal)
        assert run is not None
        assert run.value is not None
        values[name] = run.value
    found = plan.iterations if plan.aim is None else plan.value
    assert found is not None
    largest = int((rows.prompt + rows.output).max())
    share = None if limits.kv_tokens is None else largest / limits.kv_tokens
    source = plan.bound.source if plan.aim is None else plan.aim.bound.source
    return {**key, "requests": len(rows), "least": least, "by": source, "largest_share": share} | {
        "values": values | {"search": found}
    }


def gaps(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean gap of each order over some jobs."""
    names = rows[0]["values"]
    return {name: float(np.mean([row["values"][name] / row["least"] - 1 for row in rows])) for name in names}


def told_apart(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the orders without those that equal the first one in every job."""
    first, *names = rows[0]["values"]
    return [
        first,
        *(name for name in names if any(row["values"][name] != row["values"][first] for row in rows)),
    ]


def grouped(rows: Sequence[Mapping[str, Any]], *keys: str) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Return rows by some of their fields."""
    groups = defaultdict[tuple[str, ...], list[Mapping[str, Any]]](list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return groups


def page(results: Mapping[str, Any]) -> str:
    """Return the page's tables: orders by mean gap, for each objective and regime."""
    rows, parts = results["rows"], list[str]()
    for (objective,), of_objective in grouped(rows, "objective").items():
        by_regime = {regime: gaps(found) for (regime,), found in grouped(of_objective, "regime").items()}
        names = sorted(told_apart(of_objective), key=lambda name: gaps(of_objective)[name])
        lines = [
            f"| {TITLES[objective]} | " + " | ".join(by_regime) + " |",
            "|---" * (1 + len(by_regime)) + "|",
        ]
        for name in names:
            cells = (f"{100 * found[name]:.1f} %" for found in by_regime.values())
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    jobs = len(grouped(rows, "source", "regime", "seed"))
    caption = f"Mean gaps of {jobs} jobs; the search has {results['seconds']:g} s ({results['command']})."
    return "\n\n".join([*parts, caption])


TITLES = {"makespan": "Makespan", "total": "Total completion time", "first": "First 80 % of the requests"}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the gap of each order by regime, a panel an objective."""
    from matplotlib.figure import Figure

    of = grouped(results["rows"], "objective")
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, len(of), squeeze=False)[0]
    for panel, ((objective,), rows) in zip(panels, of.items(), strict=True):
        names = sorted(told_apart(rows), key=lambda name: -gaps(rows)[name])
        regimes = grouped(rows, "regime")
        for k, ((regime,), found) in enumerate(regimes.items()):
            place = np.arange(len(names)) + 0.26 * (len(regimes) / 2 - k - 0.5)
            panel.barh(place, [100 * gaps(found)[name] for name in names], 0.26, label=regime)
        panel.set_yticks(np.arange(len(names)), names, fontsize=8)
        panel.set_xscale("symlog", linthresh=1)
        panel.set_xlim(0)
        panel.set_title(TITLES[objective], fontsize=10)
        panel.set_xlabel("mean gap to the proven bound, %", fontsize=8)
    panels[0].legend(title="limited by", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def rule_of(text: str) -> tuple[str, Rule]:
    """Return the rule FILE.py:FUNCTION, and its name."""
    file, _, name = text.partition(":")
    spec = importlib.util.spec_from_file_location("own_policy", file)
    if spec is None or spec.loader is None or not name:
        raise SystemExit(f"--policy {text}: give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return name, getattr(module, name)


def library(seconds: float, regimes: Sequence[str] = ("slots", "KV")) -> None:
    """Write the instances of the library, each as its best plan."""
    LIBRARY.mkdir(parents=True, exist_ok=True)
    for source in LICENSED:
        for regime in regimes:
            job, limits = arena_job(source, regime, 0, 120)
            for name in OBJECTIVES:
                provenance = Provenance({"kind": "known", "source": LICENSED[source]})
                plan = make_iteration_plan(
                    job,
                    Engines((limits,)),
                    limits=Limits(seconds=seconds),
                    objective=objective_of(name, len(job.workload)),
                    provenance=provenance,
                )
                keep(plan, LIBRARY / f"{source}-{regime.lower()}-{name}.json")


def keep(plan: IterationPlan, path: Path) -> bool:
    """Write a plan if there is none of its instance, or a worse one."""
    if path.exists():
        known = IterationPlan.load(path)
        if _value(known) <= _value(plan):
            return False
    plan.save(path)
    return True


def _value(plan: IterationPlan) -> int:
    value = plan.iterations if plan.aim is None else plan.value
    assert value is not None
    return value


def submit(path: Path) -> str:
    """Take a plan or a replay of an instance into the library; return what came of it."""
    plan = Replayed.load(path).plan if is_of_kind(path, REPLAY) else IterationPlan.load(path)
    if (wrong := batchbound.verify(plan)) is not None:
        return f"{path}: refused: {wrong}"
    for file in sorted(LIBRARY.glob("*.json")):
        known = IterationPlan.load(file)
        same = known.workload.ids.tolist() == plan.workload.ids.tolist() and all(
            np.array_equal(getattr(known.workload, name), getattr(plan.workload, name))
            for name in ("input_tokens", "output_tokens")
        )
        aims = [None if one.aim is None else one.aim.goal.objective for one in (known, plan)]
        if same and aims[0] == aims[1] and known.shares[0].limits == plan.shares[0].limits:
            kept = keep(plan, file)
            return f"{file.name}: {_value(known):,} {'is now' if kept else 'stays, for'} {_value(plan):,}"
    return f"{path}: refused: of no instance under {LIBRARY}"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all jobs; return the results."""
    rules, rows = dict(PUBLISHED), list[dict[str, Any]]()
    if options.policy is not None:
        name, rule = rule_of(options.policy)
        rules[name] = rule
    for source in options.sources:
        for regime in options.regimes:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                job, limits = arena_job(source, regime, seed)
                for objective in options.objectives:
                    key = {"source": source, "regime": regime, "seed": seed, "objective": objective}
                    rows.append(measured(key, job, limits, rules, Limits(seconds=options.seconds)))
                    found = {name: f"{share:.2%}" for name, share in gaps(rows[-1:]).items()}
                    print(json.dumps(key | {"by": rows[-1]["by"], **found}), file=sys.stderr, flush=True)
    command = "`python benchmarks/arena.py`"
    return {"command": command, "seconds": options.seconds, "rows": rows}


def main() -> None:
    """Run what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each search (default: 2)")
    parser.add_argument("--seeds", type=int, default=1, help="jobs of each source and regime (default: 1)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=PUBLIC)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--policy", metavar="FILE.py:FUNCTION", help="an order of your own")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--page", action="store_true", help="write page and plots of these results only")
    parser.add_argument("--instances", action="store_true", help="write the instances of the library")
    parser.add_argument("--submit", type=Path, metavar="FILE", help="a plan or replay of an instance")
    options = parser.parse_args()
    if options.submit is not None:
        print(submit(options.submit))
        return
    if options.instances:
        library(options.seconds)
        return
    if not options.page:
        options.results.write_text(json.dumps(run(options), indent=1) + "\n")
    results = json.loads(options.results.read_text())
    draw(results, options.results.with_suffix(".svg"))
    tables = page(results)
    if options.results == RESULTS:
        head, mark, rest = PAGE.read_text().partition(MARK)
        PAGE.write_text(f"{head}{mark}\n\n{tables}\n\n{MARK_END}{rest.partition(MARK_END)[2]}")
    else:
        print(tables)


MARK, MARK_END = "<!-- tables of arena.json -->", "<!-- end -->"


if __name__ == "__main__":
    main()
