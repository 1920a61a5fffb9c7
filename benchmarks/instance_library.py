"""
Make the instances of the library, or look for better schedules and bounds of those there are.

    python benchmarks/instance_library.py --seconds 60 --seed 1 [--suites memory bend]

An instance that the library has keeps its problem: the schedule known is where the search starts, and the
file is replaced where a shorter schedule or a higher bound was found. New ones come of the recipes below;
those of the suite `models` need BATCHBOUND_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from plan_grid import GPU, REGIMES

from batchbound.data.costs.cost import CostModel
from batchbound.data.kept_beginnings import usual_prefix_cache
from batchbound.data.plan import Maker, Plan, Provenance
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload, numbered_ids
from batchbound.solvers import Limits, solve

FOLDER = Path(__file__).resolve().parent.parent / "data" / "instances"


@dataclass(frozen=True)
class Recipe:
    """How an instance is made: the suite and name, where its lengths come from, and the problem."""

    suite: str
    name: str
    source: str
    problem: Callable[[], Problem]


def _regime(regime: str, count: int, slots: int) -> Problem:
    draw, pose = REGIMES[regime]
    return pose(draw(np.random.default_rng(0), count), slots)


def _paper(seed: int) -> Problem:
    return Problem(generate("table3", seed, 100), CostModel.paper(), 20)


def _groups(groups: int, samples: int, slots: int, share: float | None = None) -> Problem:
    """GRPO's: completions of a group vary around its own length; memory for a share of what slots hold."""
    rng = np.random.default_rng(0)
    typical = rng.lognormal(np.log(300), 0.5, groups)
    lengths = np.clip(np.repeat(typical, samples) * rng.lognormal(0, 0.6, groups * samples), 1, 2000)
    prompts = np.repeat(rng.integers(100, 400, groups), samples)
    workload = Workload(
        numbered_ids(groups * samples),
        prompts,
        lengths.astype(np.int64),
        group=np.repeat(np.arange(groups), samples),
    ).with_shared_prompts()
    kept = usual_prefix_cache(workload, slots)
    problem = Problem(workload, GPU, slots, prefill_emits_first_token=True, prefix_cache=kept)
    if share is None:
        return problem
    peak = int(np.sort(problem.held_at_start + problem.decode_steps - 1)[-slots:].sum())
    return replace(problem, kv_capacity=int(share * peak), prefix_cache=0)


def _models(file: str, model: str, slots: int) -> Problem:
    rows = pd.read_csv(Path(os.environ["BATCHBOUND_DATA"]) / "rollouts" / file).query(
        "model == @model and output_tokens > 0"
    )
    workload = Workload.from_lengths(rows.prompt_tokens, rows.output_tokens)
    return Problem(workload, GPU, slots, prefill_emits_first_token=True)


def recipes() -> Iterator[Recipe]:
    """Yield how every instance of the library is made."""
    for seed in range(5):
        yield Recipe("paper", f"table3-{seed}", f"table3:{seed}:100", partial(_paper, seed))
    sizes = ((30, 4), (100, 16), (300, 64), (1300, 64))
    more = {"scarce-memory": ((30, 16), (100, 4), (300, 16)), "gpu": ((100, 64), (1300, 256))}
    suites = {"gpu": "chat", "scarce-memory": "memory", "prefill-heavy": "prefill"}
    for regime in ("gpu", "prefill-heavy", "scarce-memory", "heavy-tail", "bend"):
        for count, slots in (*sizes, *more.get(regime, ())):
            source = f"regime {regime} of benchmarks/plan_grid.py, seed 0"
            suite = suites.get(regime, regime)
            yield Recipe(suite, f"{suite}-{count}x{slots}", source, partial(_regime, regime, count, slots))
    for groups, samples, slots in ((8, 8, 16), (64, 8, 64), (16, 64, 128)):
        for share, ending in ((None, ""), (0.8, "-kv")):
            name = f"groups-{groups}x{samples}-{slots}{ending}"
            problem = partial(_groups, groups, samples, slots, share)
            yield Recipe("groups", name, "drawn by benchmarks/instance_library.py, seed 0", problem)
    for job, file, model, slots in (
        ("gsm8k", "gsm8k_models.csv", "Meta-Llama-3.1-8B-Instruct", 64),
        ("gsm8k", "gsm8k_models.csv", "gpt-4o-mini-2024-07-18", 200),
        ("math", "math_level5_models.csv", "Qwen2.5-7B-Instruct", 64),
        ("math", "math_level5_models.csv", "o1-mini-2024-09-12", 200),
    ):
        source = f"the completions of {model} to {job} in WildEval/ZeroEval (Apache-2.0), tokens of GPT-2"
        yield Recipe("models", f"{job}-{model.lower()}-{slots}", source, partial(_models, file, model, slots))


def _improved(recipe: Recipe, known: Plan | None, limits: Limits) -> Plan:
    problem = known.problem if known is not None else recipe.problem()
    found = solve(problem, limits=limits, initial=None if known is None else known.schedule)
    assert found.schedule is not None
    assert found.makespan is not None
    assert found.bound is not None
    if known is not None and known.bound is not None and known.bound.seconds >= found.bound.seconds:
        bound = known.bound
    else:
        bound = found.bound
    schedule, maker = found.schedule, None
    if known is not None and found.makespan >= known.makespan:
        schedule, maker = known.schedule, known.maker
    if maker is None:
        maker = Maker(
            found.solver, found.version, "", str(found.stopped_by), round(found.seconds, 1), limits.seed
        )
    makespan = schedule.makespan(problem)
    maker = replace(maker, status="optimal" if bound.proves(makespan) else "feasible")
    provenance = Provenance({"source": recipe.source}, {"source": "benchmarks/instance_library.py"})
    return Plan.of(problem, schedule, bound, maker, provenance=provenance)


def main() -> None:
    """Go through the recipes, and write what is new or better."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each instance (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suites", nargs="+", help="only these (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the library (default: the package's)")
    options = parser.parse_args()
    limits = Limits(seconds=options.seconds, seed=options.seed)
    rows = []
    for recipe in recipes():
        if options.suites is not None and recipe.suite not in options.suites:
            continue
        path = options.folder / recipe.suite / f"{recipe.name}.json"
        known = Plan.load(path) if path.exists() else None
        plan = _improved(recipe, known, limits)
        gaps = [None if each is None else each.gap for each in (known, plan)]
        rows.append({"instance": f"{recipe.suite}/{recipe.name}", "gap_before": gaps[0], "gap": gaps[1]})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if known is None or plan.gap != known.gap:
            path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(path)
    print(json.dumps({"instances": rows}, indent=1))


if __name__ == "__main__":
    main()
