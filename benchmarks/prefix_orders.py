"""
Orders of jobs with shared beginnings on a simulated prefix cache, against the proven bound.

Four kinds are drawn in turn: 40 documents below a system prompt, 8 system prompts, 20 few-shot subjects with
questions of four endings, and 24 prompts with 16 samples of heavy tails. Half of the files are tidy, half
shuffled; the KV cache holds 0.3, 1, 0.3 or 3 times the tree, 16 sequences run, an iteration has 2,048 tokens.
Seconds are by costs of a processor (35 ms, 4 ms a decode, 2.8 ms a prompt token) and of a GPU (8 ms, 0.02 and
0.03 ms) in turn. Prints the gap by what binds, and how often a simple rule is better.

Run: ``python benchmarks/prefix_orders.py [--work N]``
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from batchbound.data.arrays import IntArray
from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.prefixes.choice import Scenario
from batchbound.models.bounds.iterations import iteration_bound
from batchbound.solvers.prefix_search import search_tree_order
from batchbound.solvers.result import Limits

BLOCK, SLOTS, BUDGET = 16, 16, 2048

COSTS = (IterationRates(35e-3, 4e-3, 2.8e-3), IterationRates(8e-3, 2e-5, 3e-5))

KINDS = ("documents", "systems", "few-shot", "samples")


@dataclass
class _Drawn:
    """A job under way: its random numbers, its prompts as blocks and tokens, its lengths."""

    rng: random.Random
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))
    prompts: list[tuple[list[int], int]] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    def blocks(self, least: int, most: int) -> list[int]:
        return [next(self.numbers) for _ in range(self.rng.randint(least, most))]

    def add(self, beginning: list[int], own: tuple[int, int], mean: float) -> None:
        """Add a request; a mean of zero gives a completion of one token."""
        rest = self.rng.randint(*own)
        blocks = beginning + [next(self.numbers) for _ in range(rest // BLOCK)]
        self.prompts.append((blocks, len(beginning) * BLOCK + rest))
        drawn = int(self.rng.lognormvariate(0, 0.8) * mean)
        self.output.append(max(1, min(drawn, int(8 * mean))))

    def documents(self) -> None:
        system = self.blocks(6, 6)
        for _ in range(40):
            beginning = system + self.blocks(30, 90)
            for _ in range(8):
                self.add(beginning, (10, 40), 40)

    def systems(self) -> None:
        for _ in range(8):
            beginning = self.blocks(80, 160)
            for _ in range(40):
                self.add(beginning, (20, 120), 60)

    def few_shot(self) -> None:
        for _ in range(20):
            shots = self.blocks(40, 70)
            for _ in range(12):
                beginning = shots + self.blocks(3, 8)
                for _ in range(4):
                    self.add(beginning, (1, 6), 0)

    def samples(self) -> None:
        for _ in range(24):
            beginning = self.blocks(10, 40)
            for _ in range(16):
                self.add(beginning, (1, 15), 200)


def drawn(kind: str, seed: int) -> tuple[PrefixTree, IntArray]:
    """Return a job's tree and its completion lengths."""
    job = _Drawn(random.Random(seed))
    {"documents": job.documents, "systems": job.systems, "few-shot": job.few_shot, "samples": job.samples}[
        kind
    ]()
    at = list(range(len(job.prompts)))
    if seed % 2:
        job.rng.shuffle(at)
    blocks, tokens = zip(*(job.prompts[i] for i in at), strict=True)
    return PrefixTree.of_blocks(blocks, tokens, BLOCK), np.array([job.output[i] for i in at])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument(
        "--work", type=int, default=0, help="orders simulated by the search, beyond the simple ones"
    )
    options = parser.parse_args()
    gaps: dict[str, list[float]] = {}
    worse, begun = 0, time.process_time()
    for seed in range(options.jobs):
        tree, output = drawn(KINDS[seed % 4], seed)
        part, rates = (0.3, 1.0, 0.3, 3.0)[seed // 4 % 4], COSTS[seed // 8 % 2]
        longest = int((tree.prompt_tokens + output).max())
        kv = max(int(part * tree.distinct_tokens), 2 * longest) // BLOCK * BLOCK
        limits = EngineLimits(SLOTS, BUDGET, kv, BLOCK)
        bound = iteration_bound(Sequences(tree.prompt_tokens, output, tree=tree), limits)
        least = rates.iterations * bound.iterations + rates.decodes * int((output - 1).sum())
        least += rates.prompt_tokens * tree.distinct_tokens
        budget = Limits(work=options.work) if options.work else None
        enough = 1.0005 * least
        found = search_tree_order(
            tree, [Scenario(output, rates)], limits, budget, enough=enough, may_hold=True
        )
        seconds = found.outlook.seconds[0]
        gaps.setdefault(bound.source, []).append(seconds / least - 1)
        worse += any(seconds > rule.seconds[0] * (1 + 1e-9) for rule in found.baselines.values())
    for source, each in gaps.items():
        print(f"{source}: {len(each)} jobs, mean {np.mean(each):.2%}, worst {max(each):.2%} above the bound")
    print(f"slower than a simple rule: {worse}; {time.process_time() - begun:.0f} CPU s")


if __name__ == "__main__":
    main()
