"""Requests that the client holds back until they fit into the KV cache."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
from block_simulator import BlockEngine

from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.iterations import EngineLimits
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.prefixes.choice import Scenario
from batchbound.heuristics.prefixes.engine import CachedRun, TreeEngine
from batchbound.heuristics.prefixes.holding import hold_back
from batchbound.heuristics.prefixes.vllm_cache import BlockTree
from batchbound.solvers.prefix_search import search_tree_order


def _drawn(seed: int) -> tuple[list[list[int]], list[int], EngineLimits]:
    """Draw samples of long completions on a few beginnings, and a cache that holds few of them."""
    rng = random.Random(seed)
    beginnings = [[100 * k + place for place in range(rng.randint(4, 20))] for k in range(4)]
    prompts = [
        [*rng.choice(beginnings), *(1000 + 10 * k + place for place in range(rng.randint(1, 4)))]
        for k in range(24)
    ]
    output = [rng.randint(1, 30) for _ in prompts]
    block = rng.choice([1, 2, 4])
    most = max(-(-(len(prompt) + drawn) // block) for prompt, drawn in zip(prompts, output, strict=True))
    return prompts, output, EngineLimits(6, 1000, block * (most + rng.randint(0, most)), block)


def _judged(
    prompts: list[list[int]], output: list[int], limits: EngineLimits, sent: list[int], after: list[int]
) -> BlockEngine:
    """Run a client that sends each request an iteration after the completions that it waits for."""
    assert limits.blocks is not None
    judge = BlockEngine(limits.sequences, limits.batched_tokens, limits.blocks, limits.block_tokens)
    waiting, ends, ended, seen = deque(zip(sent, after, strict=True)), deque[tuple[int, int]](), 0, 0
    while waiting or judge.running or judge.waiting:
        idle = not judge.running and not judge.waiting
        while ends and (idle or ends[0][0] < judge.iterations):
            (_, seen), idle = ends.popleft(), False
        while waiting and waiting[0][1] <= seen:
            request = waiting.popleft()[0]
            judge.add(request, prompts[request], output[request])
        if finished := judge.step():
            ended += len(finished)
            ends.append((judge.iterations, ended))
    return judge


def test_no_request_is_preempted_and_the_block_simulator_counts_the_same() -> None:
    greedy = 0
    for seed in range(100):
        prompts, output, limits = _drawn(seed)
        tree = BlockTree.of(PrefixTree.of_prompts(prompts, unit=limits.block_tokens), limits.block_tokens)
        order = range(len(prompts))
        sent, after = (column.tolist() for column in hold_back(tree, np.array(output), limits, list(order)))
        assert sorted(sent) == list(order), f"seed {seed}"
        run = TreeEngine(tree, output, limits, sent, after).run()
        judge = _judged(prompts, output, limits, sent, after)
        assert run == CachedRun(
            judge.iterations, judge.prompt_tokens, judge.decodes, judge.kv_tokens, sum(output), 0
        ), f"seed {seed}"
        greedy += TreeEngine(tree, output, limits, order).run().preemptions
    assert greedy > 100


def test_requests_are_held_back_where_computing_again_is_dear() -> None:
    prompts, output, limits = _drawn(3)
    tree = PrefixTree.of_prompts(prompts, unit=limits.block_tokens)
    dear, cheap = IterationRates(1.0, 0.0, 1.0), IterationRates(1.0, 0.0, 0.0)
    lengths = np.array(output)
    greedy = search_tree_order(tree, [Scenario(lengths, dear)], limits)
    held = search_tree_order(tree, [Scenario(lengths, dear)], limits, may_hold=True)
    assert greedy.outlook.after is None
    assert greedy.outlook.runs[0].preemptions > 0
    assert held.outlook.after is not None
    assert held.outlook.seconds < greedy.outlook.seconds
    least = search_tree_order(tree, [Scenario(lengths, cheap)], limits, may_hold=True)
    assert (
        least.outlook.seconds <= search_tree_order(tree, [Scenario(lengths, cheap)], limits).outlook.seconds
    )
