"""The bound of runs that share beginnings, against every schedule of tiny jobs."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from builders import mostly_slow

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.data.costs.cost import CostModel
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.engines.beginnings import SharedBeginnings
from batchbound.models.bounds.conversations import counted_bound


def least_seconds(problem: Problem, shared: SharedBeginnings) -> float:
    """Return the least seconds of all schedules in stages, by trying every one.

    The engine holds each beginning from its first stage to the end, and never computes one again.
    """
    cost, prompts, steps = problem.cost, problem.prompt_tokens.tolist(), problem.decode_steps.tolist()
    paths = [shared.path(request) for request in range(len(problem))]

    def stage(requests: tuple[int, ...], held: frozenset[int]) -> tuple[float, frozenset[int]]:
        tokens = 0
        for request in requests:
            begin = 0
            for node, end in paths[request]:
                tokens += 0 if node in held else end - begin
                held, begin = held | {node}, end
            tokens += prompts[request] - begin
        return float(cost.prefill_seconds(tokens)), held

    @cache
    def rest(waiting: frozenset[int], running: tuple[tuple[int, int], ...], held: frozenset[int]) -> float:
        best = 0.0 if not waiting and not running else float("inf")
        for count in range(1, min(len(waiting), problem.slots - len(running)) + 1):
            for requests in combinations(sorted(waiting), count):
                seconds, after = stage(requests, held)
                begun = (*running, *((request, 0) for request in requests if steps[request]))
                best = min(best, seconds + rest(waiting.difference(requests), tuple(sorted(begun)), after))
        if running:
            read = sum(prompts[request] + done + 1 for request, done in running)
            left = tuple((request, done + 1) for request, done in running if done + 1 < steps[request])
            seconds = cost.decode_seconds(len(running)) + cost.decode_per_kv_token * read
            best = min(best, float(seconds) + rest(waiting, left, held))
        return best

    return rest(frozenset(range(len(problem))), (), frozenset())


@pytest.mark.parametrize("part", mostly_slow(range(20), fast=[0]))
def test_no_schedule_that_shares_beginnings_takes_less_than_the_bound(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = PrefixTree.worth_keeping
    monkeypatch.setattr(PrefixTree, "worth_keeping", lambda tree: kept(tree, 1))
    tight = shared_any = 0
    for seed in range(100 * part, 100 * part + 100):
        rng = random.Random(seed)
        stems: list[list[int]] = [[]]
        for _ in range(3):
            stems.append(rng.choice(stems) + [rng.randrange(2) for _ in range(rng.randint(1, 3))])
        count = rng.randint(1, 4)
        prompts = [[*rng.choice(stems), rng.randrange(3)] for _ in range(count)]
        lengths = [rng.randint(1, 4) for _ in prompts]
        cost = CostModel(
            rng.choice([0.0, 1.0]),
            rng.choice([0.25, 1.0]),
            rng.choice([0.5, 1.0]),
            rng.choice([0.0, 0.25]),
            decode_per_kv_token=rng.choice([0.0, 0.125]),
            prefill_floor=rng.choice([0.0, 2.0]),
        )
        workload = Workload.from_lengths([len(prompt) for prompt in prompts], lengths)
        problem = Problem(workload, cost, rng.randint(1, 3), prefill_emits_first_token=True)
        shared = SharedBeginnings(prompts)
        best = least_seconds(problem, shared)
        for evictions in (False, True):
            bound = counted_bound(problem, shared.distinct_tokens, evictions=evictions)
            assert bound.seconds <= best + 1e-9, seed
        tight += best <= counted_bound(problem, shared.distinct_tokens).seconds + 1e-9
        shared_any += shared.distinct_tokens < int(np.sum(problem.prompt_tokens))
    assert tight > 20
    assert shared_any > 40
