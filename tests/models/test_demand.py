"""The least that devices need for jobs with deadlines: against every schedule of small jobs, and checked."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.demand import Demand, Machine
from batchbound.data.iterations import Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.models.certificates.demand import check_excess, check_work
from batchbound.models.exegpt.roofline import ROOFLINE_DEVICES
from batchbound.models.sizing.demand import demands, excess, fastest, least_seconds, machine_of
from batchbound.solvers.windows import keep_most

Token = tuple[object, ...]
"""A token of the KV cache: all tokens up to it, or the request that generated it."""

LLAMA = ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256)


@dataclass(frozen=True)
class Small:
    """A set of jobs small enough for every schedule: prompts, output tokens, job and window."""

    prompts: list[tuple[int, ...]]
    output: list[int]
    job: list[int]
    windows: list[float]
    machine: Machine

    @property
    def rows(self) -> Sequences:
        tree = PrefixTree.of_prompts(self.prompts)
        return Sequences(np.array([len(p) for p in self.prompts]), np.array(self.output), tree=tree)

    @property
    def demands(self) -> list[Demand]:
        jobs = [np.flatnonzero(np.array(self.job) == k) for k in range(len(self.windows))]
        return demands(self.rows, jobs, self.windows)


def small(rng: np.random.Generator) -> Small:
    """Draw jobs whose windows are near the least that they need."""
    count = int(rng.integers(2, 4))
    prompts = [tuple(rng.integers(0, 2, rng.integers(1, 4)).tolist()) for _ in range(count)]
    job = rng.permutation([0, *rng.integers(0, 2, count - 1).tolist()])
    job = np.unique(job, return_inverse=True)[1]
    rates, sizes = rng.choice([1.0, 2.0, 4.0], 2).tolist(), rng.choice([0.5, 1.0, 3.0], 4).tolist()
    machine = Machine(rates[0], rates[1], 40.0, 30.0, sizes[0], sizes[1], sizes[2], sizes[3])
    made = Small(prompts, rng.integers(1, 4, count).tolist(), job.tolist(), [1.0] * (job.max() + 1), machine)
    least = [least_seconds(due.work, machine)[0] for due in made.demands] * 2
    return replace(
        made, windows=[least[0] * float(rng.choice([0.6, 0.9, 1.02, 1.3, 2.0])) for _ in made.windows]
    )


def steps(small: Small, state: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield each state after an iteration, and its seconds.

    A beginning is computed and read once for all, even by requests of the same iteration. Requests that wait
    hold no memory. A prompt that continues another may find what that one generated, whatever that is.
    """
    machine, prompts = small.machine, small.prompts
    choices = []

    def begins(other: int, at: int) -> bool:
        return other != at and prompts[at][: len(prompts[other])] == prompts[other]

    def generated(at: int, k: int) -> Token:
        longer = (prompts[j][: k + 1] for j in range(len(prompts)) if begins(at, j) and len(prompts[j]) > k)
        return next(longer, ("generated", at, k))

    for at, (prompt, output) in enumerate(zip(prompts, small.output, strict=True)):
        size, now = len(prompt), state[at]
        last = size + output - 1
        choices.append([now] if now == last else [*range(now, size + 1)] if now < size else [now, now + 1])
    cached = {prompt[:k] for prompt, now in zip(prompts, state, strict=True) for k in range(1, now + 1)}
    for after in itertools.product(*choices):
        if after == state:
            continue
        new, read, alone, drawn = set[Token](), set[Token](), 0, 0
        for at, (before, now) in enumerate(zip(state, after, strict=True)):
            size = len(prompts[at])
            if now == before:
                continue
            if before < size:
                held = max(
                    (k for j, k in enumerate(state) if begins(j, at) and k >= len(prompts[j])), default=0
                )
                new |= {prompts[at][: k + 1] for k in range(max(before, held), min(now, size - 1))} - cached
                alone, drawn = alone + (now == size), drawn + (now == size)
            else:
                alone, drawn = alone + 1, drawn + 1
                read |= {prompts[at][: k + 1] for k in range(size)} | {
                    generated(at, k) for k in range(size, now)
                }
        cache = machine.kv_token * len(read)
        if cache + machine.weights <= machine.memory:
            tokens = len(new) + alone
            arithmetic = (machine.flops_token * tokens + machine.flops_drawn * drawn) / machine.flops
            yield after, max(arithmetic, (machine.read + cache) / machine.bandwidth)


def is_possible(small: Small) -> bool:
    """Return whether some schedule keeps every window; of two ways to a state the earlier one is better."""
    ends = tuple(len(prompt) + output - 1 for prompt, output in zip(small.prompts, small.output, strict=True))
    best = {(0,) * len(ends): 0.0}
    queue = [(0.0, (0,) * len(ends))]
    while queue:
        time, state = heapq.heappop(queue)
        if time > best[state]:
            continue
        if state == ends:
            return True
        for after, seconds in steps(small, state):
            end = time + seconds
            done = [now == last and now > was for now, last, was in zip(after, ends, state, strict=True)]
            late = any(
                end > small.windows[job] for job, is_done in zip(small.job, done, strict=True) if is_done
            )
            if not late and end < best.get(after, np.inf):
                best[after] = end
                heapq.heappush(queue, (end, after))
    return False


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_possible_is_called_impossible(count: int) -> None:
    rng, claimed, impossible = np.random.default_rng(count), 0, 0
    for _ in range(count):
        drawn = small(rng)
        claim = excess(drawn.demands, drawn.machine) is not None
        assert not any(check_work(due, drawn.rows, drawn.job) for due in drawn.demands)
        possible = is_possible(drawn)
        assert not (claim and possible), drawn
        claimed, impossible = claimed + claim, impossible + (not possible)
    # The bound must find some of what cannot be.
    assert 0.2 * count < claimed <= impossible < count


def test_no_order_keeps_more_jobs() -> None:
    rng = np.random.default_rng(4)
    for _ in range(1000):
        count = int(rng.integers(1, 6))
        seconds, windows = rng.integers(1, 9, count).tolist(), rng.integers(1, 20, count).tolist()
        kept, late = keep_most(seconds, windows)
        ends = np.cumsum([seconds[job] for job in kept])
        assert all(end <= windows[job] for job, end in zip(kept, ends, strict=True))
        assert sorted([*kept, *late]) == list(range(count))
        most = max(
            sum(
                end <= windows[job]
                for job, end in zip(order, itertools.accumulate(seconds[k] for k in order), strict=True)
            )
            for order in itertools.permutations(range(count))
        )
        assert len(kept) == most


def test_the_least_seconds_are_those_of_arithmetic_or_of_reading() -> None:
    # One prompt of 10 tokens and 3 drawn: 12 computed tokens, 3 iterations, decodes that read 11 and 12.
    rows = Sequences(np.array([10]), np.array([3]))
    (due,) = demands(rows, [np.array([0])], [1.0])
    assert (due.work.tokens, due.work.drawn, due.work.reads, due.work.longest) == (12, 3, 23, 3)
    machine = Machine(100.0, 10.0, 1000.0, 100.0, 50.0, 1.0, 5.0, 10.0)
    for changed, seconds, limit in (
        (machine, (3 * 50 + 23) / 10, "reading"),
        (replace(machine, flops=1.0), 12 * 5 + 3 * 10, "arithmetic"),
        # Room for 5 tokens: 23 tokens are read in 4.6 iterations at least.
        (replace(machine, memory=105.0), (4.6 * 50 + 23) / 10, "reading"),
    ):
        least, by = least_seconds(due.work, changed)
        assert (least, by) == (pytest.approx(seconds), limit)  # type: ignore[comparison-overlap]
    assert least_seconds(due.work, replace(machine, memory=90.0)) == (np.inf, "memory")


SHAPES = (
    LLAMA,
    replace(LLAMA, window=128, window_layers=16, tied_embedding=True),
    replace(
        LLAMA,
        experts=64,
        active_experts=4,
        expert_intermediate=512,
        dense_layers=3,
        feed_forward_bytes=0.5625,
    ),
    replace(LLAMA, latent=512, rope_dim=64, value_dim=128, attention_bytes=1.0, multiply_bits=8),
)


@pytest.mark.parametrize("shape", SHAPES, ids=["dense", "window", "experts", "latent"])
def test_a_demand_is_derived_again_and_a_larger_one_refused(shape: ModelShape) -> None:
    prompts = [(1,) * 40 + (k,) * 7 for k in range(6)] + [(1,) * 40 + (0,) * 9]
    rows = Sequences(
        np.array([len(p) for p in prompts]), np.arange(7) + 5, tree=PrefixTree.of_prompts(prompts)
    )
    device, job_of = ROOFLINE_DEVICES["h100-80gb"], [0, 0, 1, 1, 1, 0, 1]
    jobs = [np.flatnonzero(np.array(job_of) == k) for k in (0, 1)]
    claim = excess(demands(rows, jobs, [1e-3, 2e-3]), machine_of(shape, device, 2))
    assert claim is not None
    rates = [2 * rate for rate in (fastest(device, shape), device.bandwidth, device.memory)]
    assert check_work(claim.demand, rows, job_of) is None
    assert check_excess(claim, shape, rates) is None
    longer = replace(claim, seconds=claim.seconds * 1.001)
    assert "follow" in str(check_excess(longer, shape, rates))
    wide = replace(claim, demand=replace(claim.demand, window=1e9))
    assert check_excess(wide, shape, rates) == "the work fits into the window"
    assert check_work(claim.demand, rows, [5] * 7) == "no completion is due"
    for name in ("tokens", "drawn", "reads", "longest"):
        more = replace(claim.demand.work, **{name: getattr(claim.demand.work, name) + 1})
        assert "is claimed" in str(check_work(replace(claim.demand, work=more), rows, job_of))
    tiny = replace(claim, limit="memory")
    assert check_excess(claim, shape, [1.0, 1.0, 1.0]) == "the weights do not fit"
    assert check_excess(tiny, shape, [1.0, 1.0, 1.0]) is None
