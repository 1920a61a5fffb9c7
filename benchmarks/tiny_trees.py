"""Tiny jobs whose prompts share beginnings, and the optimum of the most permissive engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np

from batchbound.data.iterations import EngineLimits, IterationBound, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.models.bounds.iterations import KINDS, iteration_bound
from batchbound.models.certificates.beginnings import Beginnings
from batchbound.models.certificates.iterations import verify_iterations

Text = tuple[int, ...]


@dataclass(frozen=True)
class TinyJob:
    """Prompts and the completions that they draw, for an engine that reuses whole units."""

    prompts: tuple[Text, ...]
    completions: tuple[Text, ...]
    unit: int
    limits: EngineLimits

    def rows(self, unit: int | None = None) -> Sequences:
        """Return the job for a bound, with the engine's unit or another one."""
        tree = PrefixTree.of_prompts(self.prompts, unit=self.unit if unit is None else unit)
        return Sequences(tree.prompt_tokens, np.array([len(text) for text in self.completions]), tree=tree)


def tiny_job(seed: int) -> TinyJob:
    """Draw up to five requests; some prompts are equal, or go on from what another request generated."""
    rng = np.random.default_rng(seed)
    prompts, completions = list[Text](), list[Text]()
    for request in range(int(rng.integers(2, 6))):
        kind = rng.random()
        begin: Text = ()
        if request and kind < 0.7:
            other = int(rng.integers(request))
            whole = prompts[other] + (completions[other] if kind < 0.3 else ())
            begin = whole if kind < 0.2 or kind > 0.6 else whole[: int(rng.integers(len(whole) + 1))]
        own = int(rng.integers(0 if begin else 1, 4))
        prompts.append((*begin, *rng.integers(0, 2, own).tolist())[:9])
        # Generated tokens are no two the same but where a later prompt repeats them.
        completions.append(tuple(100 * request + 10 + k for k in range(int(rng.integers(1, 5)))))
    unit, size = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    largest = max(
        -(-(len(prompt) + len(text) - 1) // size) for prompt, text in zip(prompts, completions, strict=True)
    )
    room = size * (largest + int(rng.integers(0, 4)))
    limits = EngineLimits(int(rng.integers(1, 4)), int(rng.integers(1, 9)), room, size)
    return TinyJob(tuple(prompts), tuple(completions), unit, limits)


def least_computed(job: TinyJob, warm: tuple[Text, ...] = ()) -> int:
    """Return the fewest prompt tokens that any order computes, with a cache that forgets nothing."""
    return min(_computed(job, order, warm) for order in permutations(range(len(job.prompts))))


def _computed(job: TinyJob, order: tuple[int, ...], warm: tuple[Text, ...]) -> int:
    kept, computed = list(warm), 0
    for request in order:
        prompt = job.prompts[request]
        common = max([0, *(_common(prompt, text) for text in kept)])
        computed += len(prompt) - min(common, len(prompt) - 1) // job.unit * job.unit
        # The last drawn token is never computed.
        kept.append(prompt + job.completions[request][:-1])
    return computed


def _common(one: Text, other: Text) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def least_iterations(job: TinyJob) -> int:
    """
    Return the least iterations of an engine that draws a token of any requests that fit together.

    Prompts take no time, evictions and what is put back cost nothing. Requests hold each block of equal
    beginnings once, whoever filled it.
    """
    goal = tuple(len(text) for text in job.completions)
    level, seen, count = {(0,) * len(goal)}, {(0,) * len(goal)}, 0
    while goal not in level:
        level = {after for state in level for after in _successors(job, state, goal)} - seen
        assert level, "no schedule exists"
        seen |= level
        count += 1
    return count


def _successors(job: TinyJob, state: tuple[int, ...], goal: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    left = [request for request, drawn in enumerate(state) if drawn < goal[request]]
    for count in range(min(len(left), job.limits.sequences), 0, -1):
        for chosen in combinations(left, count):
            if held_together(job, state, chosen) <= (job.limits.blocks or sys.maxsize):
                yield tuple(drawn + (request in chosen) for request, drawn in enumerate(state))


def held_together(job: TinyJob, state: tuple[int, ...], chosen: tuple[int, ...]) -> int:
    """Return the blocks that some requests hold while each draws its next token."""
    size, unit = job.limits.block_tokens, job.unit
    texts = [job.prompts[request] + job.completions[request][: state[request]] for request in chosen]
    blocks = set[Text]()
    alone = 0
    for place, text in enumerate(texts):
        # What lies in whole units is held once with all who have the same units.
        shared = len(text) // unit * unit // size
        blocks |= {(*text[: -(-size * (k + 1) // unit) * unit], -k) for k in range(shared)}
        # The rest is held once with a text that goes on from it, or an equal one.
        others = texts[:place] + [other for other in texts[place + 1 :] if other != text]
        if not any(other[: len(text)] == text for other in others):
            alone += -(-len(text) // size) - shared
    return len(blocks) + alone


def wrong_claims(seed: int) -> list[str]:
    """Return what bounds and checkers say falsely of one job."""
    job = tiny_job(seed)
    rows, wrong = job.rows(), list[str]()
    computed = int((rows.prompt - rows.cached).sum())
    least = least_computed(job)
    if computed > least:
        wrong.append(f"{computed} prompt tokens of {least}")
    finer = [unit for unit in range(1, job.unit) if job.unit % unit == 0]
    for unit in finer:
        fewer = job.rows(unit)
        if int((fewer.prompt - fewer.cached).sum()) > least:
            wrong.append(f"unit {unit} in place of {job.unit}")
    # The whole cache may hold anything of the tree at the start.
    rng = np.random.default_rng(seed)
    warm = tuple(prompt[: int(rng.integers(len(prompt) + 1))] for prompt in job.prompts if rng.random() < 0.5)
    held = len({text[:end] for text in warm for end in range(1, len(text) + 1)})
    if computed - held > least_computed(job, warm):
        wrong.append("a warm cache")
    optimum = least_iterations(job)
    for kind in KINDS:
        bound = iteration_bound(rows, job.limits, kinds=(kind,))
        if kind in ("slots", "longest", "KV") and _rows_alone(rows, job.limits, kind) > optimum:
            wrong.append(f"{kind}: {bound.iterations} of {optimum} iterations")
        wrong += _checked(job, rows, bound)
    return wrong


def _rows_alone(rows: Sequences, limits: EngineLimits, kind: str) -> int:
    """Return a bound without the chunks of prompts, which take no time here."""
    return iteration_bound(rows, replace(limits, batched_tokens=1000), kinds=(kind,)).iterations


def _checked(job: TinyJob, rows: Sequences, bound: IterationBound) -> list[str]:
    kind = bound.certificate["kind"]
    wrong = []
    if verify_iterations(rows, job.limits, bound) is not None:
        wrong.append(f"{kind} is refused")
    if (
        kind != "none"
        and verify_iterations(rows, job.limits, replace(bound, iterations=bound.iterations + 1)) is None
    ):
        wrong.append(f"{kind} is not refused above what it proves")
    again = Beginnings.of_prompts(job.prompts, None, job.unit)
    reused, most = again.reused(rows.output.tolist())
    if (
        reused != rows.cached.tolist() and sum(reused) != int(rows.cached.sum())
    ) or most != rows.shared.tolist():
        wrong.append("the checker's tree of the prompts reuses other tokens")
    if kind == "KV" and again.least_iterations(rows.output.tolist(), job.limits) != bound.iterations:
        wrong.append("the checker's tree of the prompts has another area")
    return wrong


def main() -> None:
    """Print the false claims about some jobs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    wrong, shares = {}, []
    for seed in range(options.first, options.first + options.jobs):
        if claims := wrong_claims(seed):
            wrong[seed] = claims
        job = tiny_job(seed)
        rows = job.rows()
        area = _rows_alone(rows, job.limits, "KV")
        shares.append(
            (int((rows.prompt - rows.cached).sum()) / least_computed(job), area / least_iterations(job))
        )
    tokens, area = np.array(shares).T
    print(
        json.dumps(
            {
                "jobs": options.jobs,
                "false": wrong,
                "prompt tokens of the optimum": round(float(tokens.mean()), 4),
                "iterations of the optimum": round(float(area.mean()), 4),
                "optimal": int((tokens == 1).sum()),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
