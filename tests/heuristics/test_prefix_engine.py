"""The event engine with vLLM's prefix cache, against a simulator that goes block by block."""

from __future__ import annotations

import random

import numpy as np
import pytest
from block_simulator import BlockSimulator

from batchbound.data.iterations import EngineLimits
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.prefixes.engine import CachedRun, TreeEngine
from batchbound.heuristics.prefixes.vllm_cache import BlockTree


def _run(
    prompts: list[list[int]], output: list[int], limits: EngineLimits, order: list[int] | None = None
) -> CachedRun:
    tree = BlockTree.of(PrefixTree.of_prompts(prompts, unit=limits.block_tokens), limits.block_tokens)
    return TreeEngine(tree, output, limits, range(len(prompts)) if order is None else order).run()


def _question(document: int, question: int) -> list[int]:
    """Return a prompt of 8 shared tokens and 2 of its own."""
    return [*range(100 * document, 100 * document + 8), 5000 + question, 6000 + 10 * document + question]


def test_a_shared_beginning_is_computed_once_even_within_one_iteration() -> None:
    run = _run([_question(0, k) for k in range(3)], [1, 1, 1], EngineLimits(4, 64, 64, 4))
    assert (run.iterations, run.prompt_tokens) == (1, 8 + 3 * 2)


def test_the_last_token_of_equal_prompts_is_computed_by_each() -> None:
    # Eight tokens in blocks of four: only the first block may be reused.
    run = _run([list(range(8))] * 2, [1, 1], EngineLimits(1, 64, 64, 4))
    assert run.prompt_tokens == 8 + 4


def test_a_document_is_computed_again_once_others_evicted_it() -> None:
    # Five blocks hold two documents of two blocks each, and the end of one question.
    limits = EngineLimits(1, 64, 20, 4)
    prompts = [_question(document, 0) for document in range(3)] + [_question(0, 1)]
    kept = _run(prompts, [1] * 4, limits, [0, 3, 1, 2])
    evicted = _run(prompts, [1] * 4, limits)
    assert kept.prompt_tokens == 3 * 10 + 2
    assert evicted.prompt_tokens == 4 * 10


def test_a_partly_evicted_document_keeps_its_first_blocks() -> None:
    # Four blocks: the other prompt takes two of the free ones and the document's last one.
    document = list(range(8))
    prompts = [[*document, 50], [*range(900, 909)], [*document, 51]]
    run = _run(prompts, [1, 1, 1], EngineLimits(1, 64, 16, 4))
    assert run.prompt_tokens == 9 + 9 + 5


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    # Two requests of four tokens grow to eight in three blocks of four: one is preempted.
    limits = EngineLimits(2, 64, 12, 4)
    run = _run([[1, 2, 3, 4], [5, 6, 7, 8]], [4, 4], limits)
    judge = BlockSimulator([[1, 2, 3, 4], [5, 6, 7, 8]], [4, 4], 2, 64, 3, 4).run(range(2))
    assert run.preemptions == judge.preemptions == 1
    assert run.prompt_tokens == judge.prompt_tokens


def test_a_request_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the KV cache"):
        _run([list(range(20))], [1], EngineLimits(1, 64, 16, 4))


def _drawn(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Draw up to nine prompts on a tree of up to six nodes, with completion lengths."""
    nodes: list[list[int]] = [[]]
    for node in range(rng.randint(1, 6)):
        above = rng.choice(nodes)
        nodes.append([*above, *(1000 * (node + 1) + k for k in range(rng.randint(1, 9)))])
    count = rng.randint(1, 9)
    prompts = [
        [*rng.choice(nodes), *(100_000 + 100 * i + k for k in range(rng.randint(1, 6)))] for i in range(count)
    ]
    return prompts, [rng.randint(1, 8) for _ in range(count)]


@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_drawn_jobs_take_what_the_block_simulator_counts(first: int) -> None:
    preempted = 0
    for seed in range(first, first + 500):
        rng = random.Random(seed)
        prompts, output = _drawn(rng)
        block = rng.choice([1, 2, 3, 4])
        need = max(-(-(len(p) + o) // block) for p, o in zip(prompts, output, strict=True))
        blocks, slots = need + rng.choice([0, 1, 2, 5, 20]), rng.randint(1, 5)
        budget = slots + rng.choice([0, 1, 3, 10, 100])
        order = rng.sample(range(len(prompts)), len(prompts))
        run = _run(prompts, output, EngineLimits(slots, budget, blocks * block, block), order)
        judge = BlockSimulator(prompts, output, slots, budget, blocks, block).run(order)
        preempted += judge.preemptions > 0
        assert run == CachedRun(
            judge.iterations,
            judge.prompt_tokens,
            judge.decodes,
            judge.kv_tokens,
            sum(output),
            judge.preemptions,
        ), f"seed {seed}"
    assert preempted > 50


def test_blocks_that_cross_a_border_belong_to_the_lower_node() -> None:
    # Nodes of 6 and 6 tokens in blocks of 4: one whole block, then two.
    tree = PrefixTree(np.array([-1, 0]), np.array([6, 6]), np.array([0, 1, 1]), np.array([1, 1, 1]))
    assert BlockTree.of(tree, 4).blocks.tolist() == [1, 2]


def test_a_leap_over_many_chunks_counts_them_all() -> None:
    run = _run([list(range(1000)), [5]], [3, 30], EngineLimits(2, 10, 2000, 4), [1, 0])
    judge = BlockSimulator([list(range(1000)), [5]], [3, 30], 2, 10, 500, 4).run([1, 0])
    assert (run.iterations, run.kv_tokens) == (judge.iterations, judge.kv_tokens)
