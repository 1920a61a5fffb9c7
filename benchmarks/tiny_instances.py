"""
Bounds and exact search against brute force on random tiny problems over all options.

Each problem has one to seven requests on one to four slots; a KV capacity, a token cap, a floor and a bend
of prefill stages, first tokens from the prefill and costs of nothing are there or not. For each: no bound is
above the optimum, the exact search finds and proves it, the independent checker accepts every certificate,
and refuses the exact one with a millionth more claimed. The optimum is Dijkstra's over what waits and what is
under way, decode step by decode step, and shares nothing with solver or checker. With `--kind mixed` it is
engines that mix prompts and generated tokens: their bounds and certificates, and the plan that the search of
orders makes of each, which is no better than the optimum and no worse than a simple rule; with
`mixed-groups` such engines keep prompts. With `--kind fleets` it is two or three replicas, alike or not, and
every way to share requests out is tried. With `--kind trees` prompts share beginnings; `tiny_trees.py` tries
engines that mix and fleets of such prompts, too. Counts are written as JSON; whatever is wrong is listed by
its seed.

    python benchmarks/tiny_instances.py --instances 10000 [--kind fleets] --json tiny.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from tiny_optima import (
    iteration_problem,
    least_iterations,
    least_shared_iterations,
    optimum,
    sharing_problem,
)
from tiny_trees import least_seconds, stage_job, wrong_plans, wrong_stage_claims

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet, Replica
from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.heuristics.serving.release import fits, predict
from batchbound.models.bounds.fleet import fleet_bound, one_after_another
from batchbound.models.bounds.iterations import iteration_bound
from batchbound.models.bounds.makespan import best_bound, trivial_bound
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.certificates.fleet import verify_fleet_bound
from batchbound.models.certificates.iterations import verify_iterations
from batchbound.planning.release import Releasable, named_orders
from batchbound.planning.release_search import search_release
from batchbound.solvers.exact.compiled_search import can_list_orders, search_exactly
from batchbound.solvers.fleet import plan_fleet
from batchbound.solvers.result import Limits, StoppedBy

SECONDS = 0.5
"""Of the bound that takes a search."""
ROUNDING = 1e-9


def random_problem(seed: int) -> Problem:
    """Return a tiny problem; each option is there or not."""
    rng = np.random.default_rng(seed)
    requests, longest = int(rng.integers(1, 8)), int(rng.choice([3, 5, 8]))
    prompts, outputs = rng.integers(1, longest + 1, requests), rng.integers(1, longest + 1, requests)
    cost = CostModel(
        prefill_base=float(rng.choice([0.0, 0.3, 1.0, 4.0])),
        prefill_per_token=float(rng.choice([0.0, 0.1])),
        decode_base=float(rng.choice([0.0, 1.0, 1.0, 1.0])),
        decode_per_slot=float(rng.choice([0.0, 0.2])),
        prefill_floor=float(rng.choice([0.0, 0.0, 1.0, 4.0])),
        decode_per_kv_token=float(rng.choice([0.0, 0.01])),
        prefill_bend=float(rng.choice([0.0, 4.0, 9.5])),
        prefill_per_token_beyond=float(rng.choice([0.0, 0.0, 0.1, 0.5])),
    )
    largest = int((prompts + outputs).max())
    return Problem(
        Workload.from_lengths(prompts, outputs),
        cost,
        slots=int(rng.integers(1, 5)),
        kv_capacity=int(largest + rng.integers(0, 2 * longest)) if rng.random() < 0.5 else None,
        prefill_token_cap=int(prompts.max() + rng.integers(0, longest)) if rng.random() < 0.4 else None,
        prefill_emits_first_token=bool(rng.random() < 0.5),
    )


def faults(problem: Problem, least: float) -> list[str]:
    """Return what is wrong with the bounds and the exact search of a problem, nothing if all is well."""
    wrong = []
    one_by_one = Schedule.from_bins(problem, np.arange(len(problem)), problem.decode_steps)
    exact = search_exactly(problem, "states", Limits(), one_by_one)
    makespan, proven = exact.schedule.makespan(problem), exact.bound(problem)
    if exact.schedule.check(problem) is not None:
        wrong.append("the exact search breaks a rule")
    if proven is None or abs(makespan - least) > ROUNDING * max(1.0, least):
        wrong.append("the exact search misses the optimum")
    if can_list_orders(problem):
        ended = search_exactly(problem, "orders", Limits(), one_by_one)
        missed = ended.schedule.makespan(problem) - least > ROUNDING * max(1.0, least)
        if ended.schedule.check(problem) is not None or (missed and ended.stopped_by is StoppedBy.PROOF):
            wrong.append("the search from the end is wrong")
    bounds = [trivial_bound(problem), best_bound(problem), proven_bound(problem, SECONDS)]
    for bound in [*bounds, *([] if proven is None else [proven])]:
        if bound.seconds > least * (1 + ROUNDING) + ROUNDING:
            wrong.append(f"{bound.source}: above the optimum")
        if verify_bound(problem, bound) is not None:
            wrong.append(f"{bound.source}: its certificate is refused")
    if proven is not None and proven.seconds > 0 and verify_bound(problem, raised(proven)) is None:
        wrong.append("a bound above the optimum is accepted")
    return wrong


def faults_of_iterations(work: Sequences, limits: EngineLimits, least: int) -> list[str]:
    """Return what is wrong with the bound on the iterations of an engine."""
    wrong, bound = [], iteration_bound(work, limits)
    if bound.iterations > least:
        wrong.append(f"{bound.source}: above the optimum")
    if verify_iterations(work, limits, bound) is not None:
        wrong.append(f"{bound.source}: its certificate is refused")
    if verify_iterations(work, limits, replace(bound, iterations=least + 1)) is None:
        wrong.append(f"{bound.source}: more is accepted")
    return wrong


def faults_of_plan(work: Sequences, limits: EngineLimits, least: int) -> list[str]:
    """Return what is wrong with the order that the search finds for an engine."""
    if limits.batched_tokens < limits.sequences or not fits(work, limits):
        return []  # vLLM takes no such limits, or not this job.
    released = Releasable.of_rows(work, np.arange(len(work)), exact=True)
    found = search_release(released, limits, budget=Limits(work=20)).release.predicted
    rules = [predict(work, limits, order) for order in named_orders(released, None).values()]
    assert found is not None
    wrong = ["the plan is better than the optimum"] if found.iterations < least else []
    if any(rule is None or found.iterations > rule.iterations for rule in rules):
        wrong.append("the plan is worse than a simple rule")
    return wrong


def raised(bound: Bound) -> Bound:
    """Return a bound with a millionth more claimed."""
    more = 1e-6 * bound.seconds
    terms = {**bound.terms, "decode steps": bound.terms["decode steps"] + more}
    return replace(bound, seconds=bound.seconds + more, terms=terms)


def options(problem: Problem) -> list[str]:
    """Return the names of what a problem has."""
    present: dict[str, Callable[[Problem], object]] = {
        "KV capacity": lambda each: each.kv_capacity,
        "token cap": lambda each: each.prefill_token_cap,
        "floor": lambda each: each.cost.prefill_floor,
        "bend": lambda each: each.reaches_bend,
        "first token from the prefill": lambda each: each.prefill_emits_first_token,
        "decode steps of no cost": lambda each: each.cost.decode_base == 0,
    }
    return [name for name, has in present.items() if has(problem)]


def alone(seed: int) -> tuple[list[str], bool, list[str]]:
    """Return the options of a problem, whether the bound is its optimum, and what is wrong."""
    problem = random_problem(seed)
    least = optimum(problem)
    tight = best_bound(problem).seconds >= least * (1 - ROUNDING)
    return options(problem), tight, faults(problem, least)


def mixed(seed: int) -> tuple[list[str], bool, list[str]]:
    """Return the same of an engine that mixes prompts and generated tokens."""
    work, limits = iteration_problem(seed)
    least = least_iterations(work, limits)
    present = ["KV capacity"] if limits.blocks is not None else []
    tight = iteration_bound(work, limits).iterations == least
    wrong = faults_of_iterations(work, limits, least) + faults_of_plan(work, limits, least)
    return present, tight, wrong


def mixed_groups(seed: int) -> tuple[list[str], bool, list[str]]:
    """Return the same of such an engine that keeps prompts, some of which begin alike."""
    prompts, work, limits = sharing_problem(seed)
    least = least_shared_iterations(prompts, work, limits)
    present = ["KV capacity"] if limits.blocks is not None else []
    present += ["prompts that begin alike"] if work.shared.any() else []
    tight = iteration_bound(work, limits).iterations == least
    return present, tight, faults_of_iterations(work, limits, least)


def random_fleet(seed: int) -> Fleet:
    """Return two or three replicas and up to five requests, one of them mostly long."""
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(2, 6))
    prompts, outputs = rng.integers(1, 5, requests), rng.integers(1, 4, requests)
    outputs[0] = rng.integers(3, 9)
    replicas = [random_replica(rng) for _ in range(int(rng.integers(2, 4 if requests < 5 else 3)))]
    if rng.random() < 0.6:
        replicas = [replicas[0]] * len(replicas)
    return Fleet(Workload.from_lengths(prompts, outputs), tuple(replicas), bool(rng.random() < 0.3))


def random_replica(rng: np.random.Generator) -> Replica:
    """Return a replica that has each option or not."""
    cost = CostModel(
        prefill_base=float(rng.choice([0.0, 0.1, 0.5])),
        prefill_per_token=float(rng.choice([0.0, 0.05])),
        decode_base=1.0,
        decode_per_slot=float(rng.choice([0.0, 0.1, 0.4])),
        prefill_floor=float(rng.choice([0.0, 0.7])),
        decode_per_kv_token=float(rng.choice([0.0, 0.02])),
    )
    return Replica(
        cost,
        int(rng.integers(1, 4)),
        kv_capacity=int(rng.integers(13, 20)) if rng.random() < 0.3 else None,
        prefill_token_cap=int(rng.integers(4, 9)) if rng.random() < 0.3 else None,
        busy=float(rng.choice([0.0, 0.0, 1.5])),
    )


def optimum_of_fleet(fleet: Fleet, of_one: Callable[[Problem], float] = optimum) -> float:
    """Return the least seconds of all ways to share the requests out."""
    met: dict[tuple[Replica, tuple[int, ...]], float] = {}
    best = np.inf
    for way in product(range(len(fleet.replicas)), repeat=len(fleet)):
        ends = [replica.busy for replica in fleet.replicas]
        for k in set(way):
            mine = np.flatnonzero(np.array(way) == k)
            key = fleet.replicas[k], tuple(mine.tolist())
            if key not in met:
                met[key] = of_one(fleet.problem_of(k, mine))
            ends[k] += met[key]
        best = min(best, max(ends))
    return best


def fleets(seed: int) -> tuple[list[str], bool, list[str]]:
    """Return the same of a fleet, with what its bound is by."""
    fleet = random_fleet(seed)
    least, bound = optimum_of_fleet(fleet), fleet_bound(fleet, SECONDS)
    wrong = []
    for each in (bound, *one_after_another(fleet, SECONDS)):
        if each.seconds > least * (1 + ROUNDING):
            wrong.append(f"{each.source}: above the optimum")
        if verify_fleet_bound(fleet, each) is not None:
            wrong.append(f"{each.source}: its certificate is refused")
    planned = plan_fleet(fleet, limits=Limits(work=1))
    if planned.schedule.check(fleet) is not None or planned.makespan < least * (1 - ROUNDING):
        wrong.append("the plan is better than the optimum")
    alike = ["replicas alike"] if len(set(fleet.replicas)) == 1 else []
    return [bound.source, *alike], bound.seconds >= least * (1 - ROUNDING), wrong


def trees(seed: int) -> tuple[list[str], bool, list[str]]:
    """Return the same of a job whose prompts share beginnings, with what its bound is by."""
    problem = stage_job(seed)
    bound = proven_bound(problem, repeatable=True)
    is_tight = bound.seconds >= least_seconds(problem, evictions=False) * (1 - ROUNDING)
    return [bound.source], is_tight, wrong_stage_claims(seed) + wrong_plans(seed)


KINDS = {
    "alone": alone,
    "trees": trees,
    "mixed": mixed,
    "mixed-groups": mixed_groups,
    "fleets": fleets,
}


def main() -> None:
    """Print counts as JSON, and write them where told to."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--kind", choices=KINDS, default="alone", help="of instances (default: alone)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first instance (default 0)")
    parser.add_argument("--json", type=Path, help="file to write the counts to")
    given = parser.parse_args()
    begun, wrong, having = time.process_time(), {}, Counter[str]()
    tight = 0
    for seed in range(given.first, given.first + given.instances):
        present, is_tight, found = KINDS[given.kind](seed)
        having.update(present)
        tight += is_tight
        if found:
            wrong[seed] = found
    counts = {
        "kind": given.kind,
        "instances": given.instances,
        "first_seed": given.first,
        "with": dict(having),
        "best_bound_is_the_optimum": tight,
        "wrong": wrong,
        "cpu_seconds": round(time.process_time() - begun, 1),
    }
    text = json.dumps(counts, indent=2)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
