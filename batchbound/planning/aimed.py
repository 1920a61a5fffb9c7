"""Orders of release for objectives beside the makespan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from ..data.arrays import FloatArray, IntArray
from ..data.iterations import EngineLimits, Predicted
from ..data.objective import Goal, last_of, sums_of
from ..heuristics.prefixes.engine import TreeEngine
from ..heuristics.prefixes.orders import tree_orders
from ..heuristics.prefixes.vllm_cache import BlockTree
from ..heuristics.serving.published import PUBLISHED, Queue
from .release import Releasable

_POWERS = ((1.0, 0.25), (1.0, 0.5), (1.0, 0.75), (0.75, 1.0), (0.5, 1.0), (0.25, 1.0), (0.0, 1.0))
"""Powers of completion and of mean KV tokens in a key by which requests are sorted."""

_SEGMENT = 12
"""Most neighbours that one move shuffles."""


def published_orders(work: Releasable, limits: EngineLimits) -> dict[str, IntArray]:
    """Return the orders of :data:`PUBLISHED` by name."""
    tree = work.sequences().tree
    if tree is not None:
        tree = tree.select(work.expanded(np.arange(len(work)))[np.cumsum(work.choices) - work.choices])
    queue = Queue(work.prompt, work.output, limits.sequences, limits.kv_tokens, tree)
    return {name: rule(queue) for name, rule in PUBLISHED.items()}


def aimed_orders(work: Releasable, limits: EngineLimits, goal: Goal) -> Iterator[tuple[str, IntArray]]:
    """Yield orders that lead to a goal, by name.

    *Total*: smallest requests first, by powers of their completions and their KV tokens. *First K*: the K
    smallest by several measures, each in several orders, then the rest.
    """
    rows = work.sequences()
    if rows.tree is not None and len(rows.tree.parent):
        first = np.cumsum(work.choices) - work.choices
        tree = rows.tree.select(first)
        yield from tree_orders(tree, work.output, limits.kv_tokens).items()
    item = _items(work, goal)
    held = work.prompt + work.output / 2
    keys = {(a, b): sums_of(work.output**a * held**b * work.choices, item) for a, b in _POWERS}
    keys[1.0, 0.0] = sums_of(work.output * work.choices, item)
    of = np.arange(len(work)) if item is None else item
    if goal.objective.count is None:
        for (a, b), key in keys.items():
            yield f"least output^{a:g} x KV^{b:g} first", np.lexsort((-work.output, of, key[of]))
        return
    chosen: dict[str, FloatArray] = {
        "outputs": keys[1.0, 0.0],
        "longest outputs": last_of(work.output, item).astype(float),
        "areas": sums_of(work.output * held * work.choices, item),
    }
    within = {
        "longest": -work.output,
        "most tokens": -(work.prompt + work.output),
        "shortest": work.output,
        "smallest areas": work.output * held,
    }
    for (which, key), (how, order) in product(chosen.items(), within.items()):
        rank = np.argsort(np.argsort(key, kind="stable"))[of]
        late = rank >= goal.objective.count
        yield f"least {which}, {how} first", np.lexsort((np.where(late, rank, order), late))


def _items(work: Releasable, goal: Goal) -> IntArray | None:
    """Return the item of each request, shape (requests,); None if each is one."""
    if goal.item is None:
        return None
    item = goal.item[np.cumsum(work.choices) - work.choices]
    return None if len(np.unique(item)) == len(work) else item


def on_prefix_cache(
    tree: BlockTree, output: IntArray, limits: EngineLimits, order: IntArray, goal: Goal
) -> Predicted | None:
    """Predict a goal's value on an engine with a prefix cache; None if a request alone exceeds the memory."""
    engine = TreeEngine(tree, output, limits, order.tolist())
    try:
        run = engine.run()
    except ValueError:
        return None
    ended = np.zeros(len(output), dtype=np.int64)
    for request, iterations, *_ in engine.ends:
        ended[request] = iterations
    return Predicted(
        run.iterations, run.preemptions, run.prompt_tokens + run.decodes, value=int(goal.value(ended))
    )


def near_neighbour(order: IntArray, rng: np.random.Generator) -> IntArray:
    """Return an order after a small random move, most often over a short distance."""
    moved, count = order.copy(), len(order)
    at, kind = int(rng.integers(count)), int(rng.integers(4))
    if kind == 3:
        end = min(count, at + int(rng.integers(2, _SEGMENT + 1)))
        moved[at:end] = rng.permutation(moved[at:end])
        return moved
    # Distances over all magnitudes.
    far = int(count ** rng.random()) * (1 if rng.random() < 0.5 else -1)
    to = min(count - 1, max(0, at + far))
    if kind == 0:
        moved[[at, to]] = moved[[to, at]]
        return moved
    return np.insert(np.delete(moved, at), to, order[at])
