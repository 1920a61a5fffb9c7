"""
Mooncake's conversation trace as one offline batch: orders on an engine with a prefix cache, and the bound.

12,031 requests of a chat service, prompts in blocks of 512 tokens (arXiv 2407.00079, FAST25 release). All
requests wait at the start; completions are as long as recorded, and nothing generated is reused. An iteration
costs 8 ms, 0.02 ms a decoding sequence and 0.03 ms a prompt token. ``run --server`` would choose the order of
the last row; its CPU seconds are those of the tree, of the rules and of all orders by subtrees.

Run: ``python benchmarks/mooncake_batch.py``, with BATCHBOUND_DATA set
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.prefixes.choice import Outlook, Scenario
from batchbound.models.bounds.iterations import iteration_bound
from batchbound.solvers.prefix_search import search_tree_order

BLOCK, SLOTS, BUDGET = 512, 256, 8192

RATES = IterationRates(iterations=8e-3, decodes=2e-5, prompt_tokens=3e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, help="the first so many (default all)")
    parser.add_argument("--kv-tokens", type=int, nargs="*", default=[400_000, 3_000_000])
    parser.add_argument("-o", "--output", type=Path, help="rows of the table, as JSON")
    options = parser.parse_args()
    begun = time.process_time()
    path = Path(os.environ["BATCHBOUND_DATA"]) / "mooncake" / "conversation_trace.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()][: options.requests]
    prompt = [entry["input_length"] for entry in entries]
    blocks = [ids["hash_ids"][: tokens // BLOCK] for ids, tokens in zip(entries, prompt, strict=True)]
    tree = PrefixTree.of_blocks(blocks, prompt, BLOCK)
    output = np.array([max(1, entry["output_length"]) for entry in entries])
    print(f"{len(tree):,} requests, {sum(prompt):,} prompt tokens, {tree.distinct_tokens:,} distinct")
    rows = []
    for kv in options.kv_tokens:
        limits = EngineLimits(SLOTS, BUDGET, kv // BLOCK * BLOCK, BLOCK)
        found = search_tree_order(tree, [Scenario(output, RATES)], limits)
        took = time.process_time() - begun
        # Nothing generated is reused, so prompts that continue others count as any.
        bound = iteration_bound(Sequences(np.array(prompt), output, tree=tree), limits)
        least = RATES.iterations * bound.iterations + RATES.prompt_tokens * tree.distinct_tokens
        least += RATES.decodes * int((output - 1).sum())
        file = found.baselines["file order"].seconds[0]

        def row(name: str, outlook: Outlook, file: float = file, kv: int = kv) -> list[str]:
            run, seconds = outlook.runs[0], outlook.seconds[0]
            again = run.prompt_tokens / tree.distinct_tokens
            return [
                f"{kv:,}",
                name,
                f"{seconds:,.0f}",
                f"{seconds / file:.3f}",
                f"{run.iterations:,}",
                f"{again:.3f}",
            ]

        rows += [row(name, outlook) for name, outlook in found.baselines.items()]
        rows.append(row(f"**{found.outlook.name}**", found.outlook))
        rows.append([f"{kv:,}", f"proven least ({bound.source})", f"{least:,.0f}", f"{least / file:.3f}"])
        rows[-1] += [f"{bound.iterations:,}", "1.000"]
        for line in rows[-len(found.baselines) - 2 :]:
            print(" | ".join(line))
        print(f"planned in {took:.1f} CPU s")
        begun = time.process_time()
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
