"""Seconds that iterations take at least, against the cost of every kind of iteration and against optima."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.readers.measured_run import read_vllm_run
from batchbound.data.readers.profile_readers import read_layer_profiles
from batchbound.heuristics.iterations.seconds_audit import audit_seconds, needed_work
from batchbound.models.iterations.iteration_minorant import Minorant, Work, best_minorant
from batchbound.models.iterations.layer_cost import LayerCost

SHAPE = ModelShape("toy", 2, 8, 16, 2, 1, 4, 32, 2)


def grid(*axes: list[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array(list(product(*axes)), dtype=np.float64)


def toy_cost(seed: int, *, mixed: bool = True) -> LayerCost:
    """Return a table of random costs, rising with what is computed, and noisy."""
    rng = np.random.default_rng(seed)

    def operation(name: str, phase: str, axes: tuple[str, ...], points: object) -> Operation:
        at = np.asarray(points, dtype=np.float64)
        slope = rng.random(at.shape[1]) * 0.1
        return Operation(name, phase, axes, at, 0.2 + at @ slope + 0.02 * rng.random(len(at)))

    tokens, few = grid([1, 2, 5, 9]), grid([1, 3])
    operations = [
        operation("dense", "both", ("tokens",), tokens),
        replace(operation("head", "both", ("sequences",), few), per_layer=False),
        operation("encode_attention", "encode", ("length", "past"), grid([1, 4, 9], [0, 3, 9])),
        operation("decode_attention", "decode", ("decodes", "context"), grid([1, 2, 4], [1, 6, 12])),
    ]
    if mixed:
        axes = ("length", "past", "decodes", "context")
        operations.append(operation("mixed_attention", "mixed", axes, grid([1, 9], [0, 9], [1, 4], [1, 12])))
    return LayerCost(LayerProfile(SHAPE, "toy", 0.0, 1, tuple(operations), "made up"))


Chunks = list[tuple[int, int]]


def work_of(contexts: list[int], chunks: Chunks, drawn: int) -> Work:
    pairs = sum(new * (held + new / 2) for new, held in chunks)
    return Work(1, len(contexts), sum(new for new, _ in chunks), drawn, sum(contexts), pairs)


def seconds_of(
    cost: LayerCost, contexts: list[int], chunks: Chunks, drawn: int, graphs: tuple[int, ...] = ()
) -> float:
    tokens = len(contexts) + sum(new for new, _ in chunks)
    padded = next((size for size in graphs if size >= tokens), tokens)
    mean = float(np.mean(contexts)) if contexts else 0.0
    return cost.iteration(len(contexts), mean, chunks, sampled=drawn, padded_tokens=padded)


def check_random_iterations(
    cost: LayerCost,
    minorant: Minorant,
    limits: EngineLimits,
    longest: int,
    rng: np.random.Generator,
    *,
    number: int,
    graphs: tuple[int, ...] = (),
    put_back: bool = False,
) -> float:
    """Check feasible iterations of every kind; return the least share of one's cost that is not proven."""
    nearest = np.inf
    for _ in range(number):
        decodes = int(rng.integers(0, limits.sequences + 1))
        contexts = rng.integers(1, longest + 1, decodes).tolist()
        if limits.kv_tokens is not None:
            while sum(contexts) > limits.kv_tokens:
                contexts.pop()
        budget, chunks = limits.batched_tokens - len(contexts), list[tuple[int, int]]()
        while budget > 0 and len(contexts) + len(chunks) < limits.sequences and rng.random() < 0.6:
            new = int(rng.integers(1, min(budget, longest) + 1))
            new = max(1, int(new * rng.random() ** 3))
            chunks.append((new, int(rng.integers(0, longest - new + 1))))
            budget -= new
        if not contexts and not chunks:
            continue
        drawn = len(contexts) + int(rng.integers(0, len(chunks) + 1))
        seconds = seconds_of(cost, contexts, chunks, drawn, graphs)
        works = [work_of(contexts, chunks, drawn)]
        if put_back and chunks:
            # The same iteration, its chunks those of requests that resume: charged as the decodes they are.
            resumed = [new + held for new, held in chunks]
            works.append(replace(work_of(contexts + resumed, [], drawn)))
        for work in works:
            least = minorant.seconds(work)
            assert least <= seconds * (1 + 1e-12)
            nearest = min(nearest, 1 - least / seconds)
    return float(nearest)


@pytest.mark.parametrize(("seed", "put_back"), [*product(range(5), (False, True)), (5, False)])
def test_no_iteration_takes_less(seed: int, put_back: bool) -> None:
    rng = np.random.default_rng(seed)
    cost, limits = toy_cost(seed, mixed=seed % 3 > 0), EngineLimits(4, 9, 30 if seed % 2 else None, 1)
    work = needed_work(Sequences(np.array([5, 3, 8]), np.array([7, 2, 4])), limits)
    graphs = (2, 4, 8) if seed > 2 else ()
    found = best_minorant(cost, limits, 12, work, graph_tokens=graphs, put_back=put_back)
    check_random_iterations(cost, found, limits, 12, rng, number=1500, graphs=graphs, put_back=put_back)


def test_a_table_in_which_resuming_is_cheaper_than_going_on_proves_nothing() -> None:
    work = needed_work(Sequences(np.array([5]), np.array([7])), EngineLimits(4, 9))
    with pytest.raises(ValueError, match="no function lies under the costs"):
        best_minorant(toy_cost(5), EngineLimits(4, 9, 30, 1), 12, work, put_back=True)


def least_seconds(cost: LayerCost, work: Sequences, limits: EngineLimits) -> float:
    """The optimum by Dijkstra over (computed, drawn) of each request; nobody is put back."""
    prompt, output = work.prompt.tolist(), work.output.tolist()
    start = tuple((0, 0) for _ in prompt)
    frontier, settled = [(0.0, start)], set()
    while frontier:
        seconds, state = heapq.heappop(frontier)
        if state in settled:
            continue
        settled.add(state)
        if all(drawn == output[i] for i, (_, drawn) in enumerate(state)):
            return seconds
        most = [
            0 if drawn == output[i] else min(limits.batched_tokens, prompt[i] + drawn - computed)
            for i, (computed, drawn) in enumerate(state)
        ]
        for chosen in product(*(range(least + 1) for least in most)):
            begun = [new or (computed and drawn < output[i]) for i, (new, (computed, drawn)) in
                     enumerate(zip(chosen, state, strict=True))]  # fmt: skip
            if (
                not any(chosen)
                or sum(chosen) > limits.batched_tokens
                or sum(map(bool, begun)) > limits.sequences
            ):
                continue
            contexts, chunks, after, draws = [], [], [], 0
            for i, (new, (computed, drawn)) in enumerate(zip(chosen, state, strict=True)):
                complete = new > 0 and computed + new == prompt[i] + drawn
                draws += complete
                if new == 1 and computed >= prompt[i]:
                    contexts.append(computed + 1)
                elif new:
                    chunks.append((new, computed))
                after.append((computed + new, drawn + complete))
            added = seconds_of(cost, contexts, chunks, draws)
            heapq.heappush(frontier, (seconds + added, tuple(after)))
    raise AssertionError("no schedule exists")


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_in_seconds_is_never_above_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = Sequences(rng.integers(1, 4, 3), rng.integers(1, 4, 3))
    cost, limits = toy_cost(seed + 100), EngineLimits(int(rng.integers(1, 4)), int(rng.integers(3, 6)))
    needed = needed_work(work, limits)
    longest = int((work.prompt + work.output).max())
    bound = best_minorant(cost, limits, longest, needed).seconds(needed)
    optimum = least_seconds(cost, work, limits)
    assert 0.3 * optimum < bound <= optimum * (1 + 1e-12)


def test_attention_of_several_prompts_at_once_is_refused() -> None:
    joint = Operation("joint", "encode", ("sequences", "length"), grid([1, 2], [1, 4]), np.ones(4))
    cost = LayerCost(LayerProfile(SHAPE, "toy", 0.0, 1, (joint,), "made up"))
    with pytest.raises(ValueError, match="'joint' depends on several prompts"):
        best_minorant(cost, EngineLimits(2, 4), 4, Work(1, 1, 1, 1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "share"), [("RTX4090", 0.81), ("RTXPRO6000", 0.74)])
def test_the_losses_of_the_public_runs_add_up(public_data: Path, device: str, share: float) -> None:
    run = read_vllm_run(public_data / "vllm_runs" / f"{device}-Llama-3.1-8B")
    cost = LayerCost(read_layer_profiles(public_data / "layer_profiles" / f"{device}-Llama-3.1-8B-tp1"))
    audit = audit_seconds(run, cost)
    assert sum(audit.losses.values()) == pytest.approx(audit.measured - audit.bound, abs=1e-6)
    assert share < audit.bound / audit.measured < 1
    assert audit.bound < audit.simulated
    limits = EngineLimits(run.sequences, run.batched_tokens, run.kv_capacity, run.block_tokens)
    longest = int((run.workload.input_tokens + run.workload.output_tokens).max())
    check_random_iterations(
        cost,
        audit.minorant,
        limits,
        longest,
        np.random.default_rng(0),
        number=1000,
        graphs=run.graph_tokens,
        put_back=run.kv_capacity is not None,
    )
