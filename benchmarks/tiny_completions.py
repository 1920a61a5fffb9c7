"""Tiny jobs against the optima of other objectives than the makespan: total completion time and first K.

python benchmarks/tiny_completions.py --jobs 3000
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TypeVar

import numpy as np
from tiny_optima import (
    iteration_problem,
    shared_successors,
    sharing_problem,
    successors,
)
from tiny_trees import draws_together, tiny_job

from batchbound.data.arrays import IntArray
from batchbound.data.iterations import UNLIMITED, EngineLimits, Sequences
from batchbound.data.objective import Aim, Goal, Objective
from batchbound.models.bounds.completions import completion_bound, resources_of
from batchbound.models.certificates.completions import verify_completions

KINDS = ("total", "first", "groups")

State = TypeVar("State", bound=Hashable)


def least_value(
    start: State,
    after: Callable[[State], Iterable[State]],
    complete: Callable[[State], int],
    goal: Goal,
    items: int,
) -> int:
    """Return the optimum by a search over all states; it shares nothing with the bounds.

    complete: Requests or groups that are complete in a state.
    """
    numbers = count()
    queue: list[tuple[int, int, State]] = [(0, next(numbers), start)]
    best, enough = {start: 0}, goal.objective.count or items
    while queue:
        value, _, state = heapq.heappop(queue)
        if complete(state) >= enough:
            return value
        if value > best[state]:
            continue
        # Each iteration adds one to the completion time of all that are not complete.
        price = items - complete(state) if goal.objective.count is None else 1
        for following in after(state):
            if value + price < best.get(following, 1 << 60):
                best[following] = value + price
                heapq.heappush(queue, (value + price, next(numbers), following))
    raise AssertionError("no schedule exists")


def goal_of(kind: str, count: int, rng: np.random.Generator) -> tuple[Goal, int]:
    """Draw a goal of a kind of objective; also return the requests or groups."""
    item = None
    if kind == "groups" or rng.random() < 0.2:
        _, item = np.unique(rng.integers(0, max(1, count - 1), count), return_inverse=True)
    items = count if item is None else int(item.max()) + 1
    wanted = None if kind == "total" else int(rng.integers(1, items + 1))
    return Goal(Objective(kind, wanted), item), items  # type: ignore[arg-type]


def _complete(drawn: Iterable[int], output: list[int], item: IntArray | None) -> int:
    lacking = [some < most for some, most in zip(drawn, output, strict=True)]
    if item is None:
        return lacking.count(False)
    of: list[int] = item.tolist()
    return max(of) + 1 - len({name for name, lacks in zip(of, lacking, strict=True) if lacks})


def optimum(seed: int, kind: str) -> tuple[Sequences, EngineLimits, Goal, int]:
    """Draw a job and a goal, and find its optimum.

    In two of three jobs, prompts share beginnings, take no time, and evictions are free. In the others,
    prompts are computed in chunks within a token budget; in one of fifteen they share beginnings as well.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    if seed % 3 < 2:
        job = tiny_job(seed)
        rows, limits = job.rows(), replace(job.limits, batched_tokens=UNLIMITED)
        whole = tuple(len(text) for text in job.completions)
        goal, items = goal_of(kind, len(rows), rng)
        value = least_value(
            (0,) * len(rows),
            lambda state: draws_together(job, state, whole),
            lambda state: _complete(state, list(whole), goal.item),
            goal,
            items,
        )
        return rows, limits, goal, value
    if seed % 5:
        work, limits = iteration_problem(seed)
        goal, items = goal_of(kind, len(work), rng)
        output = work.output.tolist()
        value = least_value(
            ((0, 0),) * len(work),
            lambda state: successors(state, work, limits),
            lambda state: _complete((drawn for _, drawn in state), output, goal.item),
            goal,
            items,
        )
        return work, limits, goal, value
    prompts, work, limits = sharing_problem(seed)
    goal, items = goal_of(kind, len(work), rng)
    output = work.output.tolist()
    value = least_value(
        (((0, 0),) * len(work), frozenset[tuple[int, ...]]()),
        lambda state: shared_successors(state, prompts, work, limits),
        lambda state: _complete((drawn for _, drawn in state[0]), output, goal.item),
        goal,
        items,
    )
    return work, limits, goal, value


def single_bounds(rows: Sequences, limits: EngineLimits, goal: Goal) -> Iterator[Aim]:
    """Yield the best bound, and the one by each resource and by an even mixture."""
    best = Aim(goal, completion_bound(rows, limits, goal))
    yield best
    names = list(resources_of(rows, limits))
    mixtures = [{name: 1.0} for name in names] + [{name: 1 / len(names) for name in names}]
    for claim in [{"kind": "longest"}] + [{"kind": "use", "weights": weights} for weights in mixtures]:
        aim = Aim(goal, replace(best.bound, certificate=claim))
        # The most that the checker lets the certificate prove.
        while verify_completions(rows, limits, aim) is not None:
            assert aim.bound.value > 0
            aim = Aim(goal, replace(aim.bound, value=aim.bound.value - 1))
        yield aim


def wrong_claims(seed: int, kind: str) -> tuple[list[str], float, int]:
    """Return what is false of one job, the best bound over the optimum, and the claims refused."""
    rows, limits, goal, value = optimum(seed, kind)
    wrong, refused, bounds = list[str](), 0, list[int]()
    for aim in single_bounds(rows, limits, goal):
        claim = aim.bound
        bounds.append(claim.value)
        if claim.value > value:
            wrong.append(f"{goal.objective} by {claim.certificate}: {claim.value} of {value}")
        if verify_completions(rows, limits, aim) is not None:
            wrong.append(f"{claim.certificate} is refused")
        raised = Aim(goal, replace(claim, value=claim.value + 1))
        if verify_completions(rows, limits, raised) is None:
            wrong.append(f"{claim.certificate} is not refused above what it proves")
        else:
            refused += 1
    if max(bounds) > bounds[0]:
        wrong.append(f"{goal.objective}: the best bound of {bounds} is not the first")
    return wrong, bounds[0] / value, refused


def main() -> None:
    """Go through tiny jobs of each objective, and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300, help="of each objective (default: 300)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: 0)")
    options = parser.parse_args()
    results = {}
    for kind in options.kinds:
        found = [wrong_claims(seed, kind) for seed in range(options.first, options.first + options.jobs)]
        results[kind] = {
            "jobs": len(found),
            "wrong": [claim for wrong, _, _ in found for claim in wrong],
            "mean_bound_over_optimum": float(np.mean([share for _, share, _ in found])),
            "raised_claims_refused": sum(refused for _, _, refused in found),
        }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
