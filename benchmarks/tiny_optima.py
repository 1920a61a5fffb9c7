"""Tiny problems with shared prompts and tiny engine runs, and their optima by trying everything."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import combinations, product

import numpy as np

from batchbound.data.costs.cost import CostModel
from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload

State = tuple[tuple[int, int], ...]
"""Prompt and generated tokens computed, and tokens drawn, of each request of an engine run."""


def grouped_problem(seed: int) -> Problem:
    """Up to six requests in groups, with every kind of limit and cost."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 6))
    group = rng.integers(-1, 2, count)
    header = rng.integers(0, 8, 2)
    shared = np.where(group >= 0, header[group], 0)
    prompts = shared + np.where(rng.random(count) < 0.5, 1, rng.integers(1, 9, count))
    outputs = rng.integers(1, 6, count)
    cost = CostModel(
        prefill_base=float(rng.choice([0.5, 1.0, 2.0])),
        prefill_per_token=float(rng.choice([0.0, 0.1, 0.5])),
        decode_base=float(rng.choice([0.5, 1.0])),
        decode_per_slot=float(rng.choice([0.0, 0.1])),
        prefill_floor=float(rng.choice([0.0, 0.0, 3.0])),
        decode_per_kv_token=float(rng.choice([0.0, 0.01])),
        prefill_bend=float(rng.choice([0.0, 6.0])),
        prefill_per_token_beyond=float(rng.choice([0.0, 0.0, 0.3])),
    )
    ids = np.array([str(i) for i in range(count)])
    largest = int((prompts + outputs).max())
    return Problem(
        Workload(ids, prompts, outputs, group=group).sharing(shared),
        cost,
        slots=int(rng.integers(1, 4)),
        kv_capacity=int(largest + rng.integers(0, 12)) if rng.random() < 0.5 else None,
        prefill_token_cap=int(prompts.max() + rng.integers(0, 6)) if rng.random() < 0.5 else None,
        prefill_emits_first_token=bool(rng.random() < 0.5),
        prefix_cache=int(rng.choice([0, 5, 10**6])),
    )


def optimum(problem: Problem) -> float:
    """Return the least makespan, by Dijkstra over what waits and (steps left, tokens held) under way."""
    decode_steps, prompts = problem.decode_steps.tolist(), problem.prompt_tokens.tolist()
    first, cost = int(problem.prefill_emits_first_token), problem.cost
    capacity, cap = problem.kv_capacity or 10**9, problem.prefill_token_cap or 10**9
    frontier: list[tuple[float, tuple[int, ...], tuple[tuple[int, int], ...]]] = [
        (0.0, tuple(range(len(decode_steps))), ())
    ]
    settled = set()
    while True:
        seconds, waiting, busy = heapq.heappop(frontier)
        if (waiting, busy) in settled:
            continue
        settled.add((waiting, busy))
        if not waiting and not busy:
            return seconds
        held = sum(tokens for _, tokens in busy)
        if busy and held <= capacity:
            after = tuple((left - 1, tokens + 1) for left, tokens in busy if left > 1)
            heapq.heappush(frontier, (seconds + cost.decode_seconds(len(busy), held), waiting, after))
        for size in range(1, min(len(waiting), problem.slots - len(busy)) + 1):
            for chosen in combinations(waiting, size):
                tokens = sum(prompts[i] for i in chosen)
                if tokens <= cap and held + tokens <= capacity:
                    new = ((decode_steps[i], prompts[i] + first) for i in chosen if decode_steps[i] > 0)
                    rest = tuple(i for i in waiting if i not in chosen)
                    then = seconds + cost.prefill_seconds(tokens)
                    heapq.heappush(frontier, (then, rest, tuple(sorted((*busy, *new)))))


def iteration_problem(seed: int) -> tuple[Sequences, EngineLimits]:
    """Up to four requests for an engine that mixes prompts and generated tokens; memory runs short or not."""
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 5))
    work = Sequences(rng.integers(1, 4, requests), rng.integers(1, 4, requests))
    slots, budget, size = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 4))
    largest = int((-(-(work.prompt + work.output - 1) // size)).max())
    tokens = size * (largest + int(rng.integers(0, 4))) if rng.random() < 0.6 else None
    return work, EngineLimits(slots, budget, tokens, size)


def successors(state: State, work: Sequences, limits: EngineLimits) -> Iterator[State]:
    """Each (computed, drawn) state one iteration may lead to; what fits is never put back."""
    prompt, output = work.prompt.tolist(), work.output.tolist()
    blocks, size = limits.blocks, limits.block_tokens
    peaks = [-(-(p + a - 1) // size) for p, a in zip(prompt, output, strict=True)]
    needed = sum(peak for peak, (computed, _) in zip(peaks, state, strict=True) if computed)
    put_back = blocks is not None and needed > blocks
    choices = []
    for i, (computed, drawn) in enumerate(state):
        if drawn == output[i]:
            choices.append([(0, computed, drawn)])
            continue
        lacking = prompt[i] + drawn - computed
        options = [(0, computed, drawn)]
        if put_back and computed:
            options.append((0, 0, drawn))
        for start in {0, computed} if put_back else {computed}:
            lacking = prompt[i] + drawn - start
            for new in range(1, min(lacking, limits.batched_tokens) + 1):
                options.append((new, start + new, drawn + (new == lacking)))
        choices.append(options)
    for chosen in product(*choices):
        if not any(new for new, _, _ in chosen) or sum(new for new, _, _ in chosen) > limits.batched_tokens:
            continue
        held = [computed for (new, computed, _), (_, before) in zip(chosen, state, strict=True) if computed]
        live = [computed for i, (_, computed, _) in enumerate(chosen) if computed and state[i][1] < output[i]]
        assert len(live) <= len(held)
        if len(live) > limits.sequences:
            continue
        if blocks is not None and sum(-(-tokens // size) for tokens in live) > blocks:
            continue
        yield tuple(
            (0, drawn) if drawn == output[i] else (computed, drawn)
            for i, (_, computed, drawn) in enumerate(chosen)
        )


def least_iterations(work: Sequences, limits: EngineLimits) -> int:
    """Return the optimum, by breadth-first search over all states: it shares nothing with the bounds."""
    start: State = tuple((0, 0) for _ in range(len(work)))
    goal = tuple((0, output) for output in work.output.tolist())
    level, seen, count = {start}, {start}, 0
    while goal not in level:
        level = {after for state in level for after in successors(state, work, limits)} - seen
        assert level, "no schedule exists"
        seen |= level
        count += 1
    return count


Prompt = tuple[int, ...]

Cached = frozenset[Prompt]
"""Beginnings of prompts whose keys and values an engine has kept."""


def sharing_problem(seed: int) -> tuple[tuple[Prompt, ...], Sequences, EngineLimits]:
    """Up to three requests, whose prompts may begin alike, for an engine that keeps prompts."""
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(2, 4))
    prompts = tuple(
        tuple(rng.integers(0, 2, rng.integers(1, 5)).tolist()) if rng.random() < 0.7 else (0, 0, 0, 1)
        for _ in range(requests)
    )
    output = rng.integers(1, 4, requests)
    work = Sequences(
        np.array([len(prompt) for prompt in prompts]), output, tree=PrefixTree.of_prompts(prompts)
    )
    slots, budget, size = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 4))
    largest = int((-(-(work.prompt + work.output - 1) // size)).max())
    tokens = size * (largest + int(rng.integers(0, 4))) if rng.random() < 0.6 else None
    return prompts, work, EngineLimits(slots, budget, tokens, size)


def least_shared_iterations(prompts: tuple[Prompt, ...], work: Sequences, limits: EngineLimits) -> int:
    """
    Return the optimum of an engine that keeps prompts better than any could.

    Whatever was computed of a prompt is kept for good and takes no room of its own; a request may go on from
    there in the very iteration that computes it. Running requests hold the full blocks of equal beginnings
    once.
    """
    goal = tuple((0, output) for output in work.output.tolist())
    start: tuple[State, Cached] = (tuple((0, 0) for _ in prompts), frozenset())
    level, seen, count = {start}, {start}, 0
    while not any(state == goal for state, _ in level):
        after = {found for state in level for found in shared_successors(state, prompts, work, limits)}
        level = after - seen
        assert level, "no schedule exists"
        seen |= level
        count += 1
    return count


def shared_successors(
    state: tuple[State, Cached], prompts: tuple[Prompt, ...], work: Sequences, limits: EngineLimits
) -> Iterator[tuple[State, Cached]]:
    (requests, kept), output = state, work.output.tolist()
    peaks = (-(-(work.prompt + work.output - 1) // limits.block_tokens)).tolist()
    needed = sum(peak for peak, (computed, _) in zip(peaks, requests, strict=True) if computed)
    # What fits is never put back, were it to share nothing.
    short = limits.blocks is not None and needed > limits.blocks
    choices = []
    for i, (computed, drawn) in enumerate(requests):
        if drawn == output[i]:
            choices.append([(0, 0, 0, drawn)])
            continue
        known = len(prompts[i]) + drawn
        options = [(0, computed, computed, drawn)]
        if short and computed:
            options.append((0, 0, 0, drawn))
        for begin in (
            {*range(len(prompts[i])), *range(drawn and known)} if short or not computed else {computed}
        ):
            options += [
                (new, begin, begin + new, drawn + (begin + new == known))
                for new in range(1, min(known - begin, limits.batched_tokens) + 1)
            ]
        if computed:
            options += [
                (new, computed, computed + new, drawn + (computed + new == known))
                for new in range(1, min(known - computed, limits.batched_tokens) + 1)
            ]
        choices.append(list(dict.fromkeys(options)))
    for chosen in product(*choices):
        tokens = sum(new for new, *_ in chosen)
        if not 0 < tokens <= limits.batched_tokens:
            continue
        after = _kept(chosen, requests, kept, prompts)
        live = [(i, end) for i, (_, _, end, _) in enumerate(chosen) if end and requests[i][1] < output[i]]
        if after is None or len(live) > limits.sequences or not _held(live, prompts, limits):
            continue
        found = tuple(
            (0, drawn) if drawn == output[i] else (end, drawn) for i, (_, _, end, drawn) in enumerate(chosen)
        )
        yield found, after


def _kept(
    chosen: tuple[tuple[int, int, int, int], ...], before: State, kept: Cached, prompts: tuple[Prompt, ...]
) -> Cached | None:
    """Return the beginnings that are kept after an iteration; None if one goes on from what is not there."""
    there = set(kept)
    for i in sorted(range(len(chosen)), key=lambda i: chosen[i][1]):
        new, begin, end, _ = chosen[i]
        if not new:
            continue
        if begin not in (0, before[i][0]) and (begin >= len(prompts[i]) or prompts[i][:begin] not in there):
            return None
        there |= {prompts[i][:length] for length in range(begin + 1, min(end, len(prompts[i])) + 1)}
    return frozenset(there)


def _held(live: list[tuple[int, int]], prompts: tuple[Prompt, ...], limits: EngineLimits) -> bool:
    """Return whether the blocks that requests hold are there, full ones of equal beginnings counted once."""
    if limits.blocks is None:
        return True
    size, shared, own = limits.block_tokens, set[Prompt](), 0
    for i, held in live:
        full = min(held, len(prompts[i])) // size
        shared |= {prompts[i][: (k + 1) * size] for k in range(full)}
        own += -(-held // size) - full
    return len(shared) + own <= limits.blocks
