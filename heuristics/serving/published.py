"""Orders of waiting requests that others have published, as rules of an engine's queue."""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ...data.arrays import IntArray
from ...data.prefix_tree import PrefixTree
from .chunked_prefill import ChunkedPrefill
from .policy import ServingState, ServingStep


@dataclass(frozen=True, slots=True, eq=False)
class Queue:
    """Waiting requests, in the order of their arrival.

    prompt, output: Tokens of each prompt and completion, shape (requests,).
    kv_tokens: Tokens of KV cache; None without a limit.
    slots: Most running requests.
    tree: Beginnings that the prompts share; None if unknown.
    """

    prompt: IntArray
    output: IntArray
    slots: int
    kv_tokens: int | None = None
    tree: PrefixTree | None = None

    def __len__(self) -> int:
        return len(self.prompt)


Rule = Callable[[Queue], IntArray]
"""Function from a queue to the positions of its requests, in the order of admission."""


def first_come(queue: Queue) -> IntArray:
    """Admit in the order of arrival (vLLM's and SGLang's ``fcfs``)."""
    return np.arange(len(queue))


def shortest_first(queue: Queue) -> IntArray:
    """Admit the shortest completion first, as MC-SF of Jaillet et al. (arXiv:2502.07115)."""
    return np.argsort(queue.output, kind="stable")


def longest_first(queue: Queue) -> IntArray:
    """Admit the longest completion first (Graham 1969; vllm-ascend #12240)."""
    return np.argsort(-queue.output, kind="stable")


def smallest_area_first(queue: Queue) -> IntArray:
    """Admit the smallest area first: KV tokens summed over the iterations (GSA and GBA, arXiv:2601.22996)."""
    return np.argsort(queue.prompt * queue.output + queue.output * (queue.output + 1) // 2, kind="stable")


def paired(queue: Queue) -> IntArray:
    """Admit the longest, the shortest, the next longest and so on (vLLM RFC #55265)."""
    longest, order = longest_first(queue), np.empty(len(queue), dtype=np.int64)
    half = -(-len(queue) // 2)
    order[::2], order[1::2] = longest[:half], longest[half:][::-1]
    return order


def sorted_f(queue: Queue) -> IntArray:
    """Admit batches of least F, the sum of outputs over the squared size (Sorted-F, arXiv:2508.06133v3).

    A batch fits if its prompts and completions do. The least F of all sizes is that of a prefix, once sorted
    by completions and once by all tokens, improved by swaps: the paper's heuristic for long queues.
    """
    room = int((queue.prompt + queue.output).sum()) if queue.kv_tokens is None else queue.kv_tokens
    left, order = np.arange(len(queue)), list[int]()
    while left.size:
        best, chosen = np.inf, left[:1]
        for key in (queue.output[left], (queue.prompt + queue.output)[left]):
            ranked = left[np.lexsort((left, key))][: queue.slots]
            fit = max(
                1, int(np.searchsorted(np.cumsum((queue.prompt + queue.output)[ranked]), room, "right"))
            )
            sizes = np.arange(1, fit + 1)
            f = np.cumsum(queue.output[ranked[:fit]]) / sizes**2
            if f.min() < best:
                best, chosen = float(f.min()), ranked[: int(f.argmin()) + 1]
        chosen = _swapped(queue, left, chosen, room)
        order += chosen[np.argsort(queue.output[chosen], kind="stable")].tolist()
        left = np.setdiff1d(left, chosen)
    return np.array(order, dtype=np.int64)


def _swapped(queue: Queue, left: IntArray, chosen: IntArray, room: int) -> IntArray:
    """Return a batch with its longest completions replaced by shorter ones that fit."""
    batch, size = set(chosen.tolist()), queue.prompt + queue.output
    free = room - int(size[chosen].sum())
    others = deque(i for i in left[np.argsort(queue.output[left], kind="stable")].tolist() if i not in batch)
    for worst in sorted(batch, key=lambda i: -int(queue.output[i])):
        shorter = [
            i for i in others if queue.output[i] < queue.output[worst] and size[i] - size[worst] <= free
        ]
        if shorter:
            free -= int(size[shorter[0]] - size[worst])
            batch.symmetric_difference_update((worst, shorter[0]))
            others.remove(shorter[0])
    return np.array(sorted(batch), dtype=np.int64)


def longest_prefix_first(queue: Queue) -> IntArray:
    """Admit the longest beginning that the cache holds first (SGLang's ``lpm``, arXiv:2312.07104)."""
    if queue.tree is None:
        return first_come(queue)
    parent, through, leaf = queue.tree.parent.tolist(), queue.tree.through, queue.tree.leaf.tolist()
    below: list[list[int]] = [[] for _ in parent]
    for request, node in enumerate(leaf):
        while node >= 0:
            below[node].append(request)
            node = parent[node]
    heap, cached, order = [(0, request) for request in range(len(queue))], set[int](), list[int]()
    admitted = set[int]()
    while heap:
        _, request = heapq.heappop(heap)
        if request in admitted:
            continue
        admitted.add(request)
        order.append(request)
        node = leaf[request]
        while node >= 0 and node not in cached:
            cached.add(node)
            for other in below[node]:
                heapq.heappush(heap, (-int(through[node]), other))
            node = parent[node]
    return np.array(order, dtype=np.int64)


def by_system_prompt(queue: Queue) -> IntArray:
    """Admit by a hash of the system prompt, then in file order (llm-d's batch gateway)."""
    if queue.tree is None:
        return first_come(queue)
    root = list[int]()
    for node, parent in enumerate(queue.tree.parent.tolist()):
        root.append(node if parent < 0 else root[parent])
    # Prompts that share nothing have a hash of their own.
    names = [
        f"{root[node]}" if node >= 0 else f"alone {i}" for i, node in enumerate(queue.tree.leaf.tolist())
    ]
    return np.argsort([hashlib.sha256(name.encode()).hexdigest() for name in names], kind="stable")


PUBLISHED: Mapping[str, Rule] = {
    "first-come": first_come,
    "shortest-first": shortest_first,
    "longest-first": longest_first,
    "smallest-area-first": smallest_area_first,
    "sorted-f": sorted_f,
    "paired": paired,
    "longest-prefix-first": longest_prefix_first,
    "system-prompt-hash": by_system_prompt,
}
"""Rules by name."""


class Queued(ChunkedPrefill):
    """vLLM's policy with a queue that a rule sorts when requests arrive.

    batched_tokens, sequences: As for :class:`~.chunked_prefill.ChunkedPrefill`.
    """

    def __init__(self, batched_tokens: int, sequences: int, rule: Rule) -> None:
        super().__init__(batched_tokens, sequences)
        self._rule = rule

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        if state.arrived:
            waiting = np.array([*self._waiting, *state.arrived], dtype=np.int64)
            room = state.ledger.blocks * state.ledger.block_tokens
            queue = Queue(state.prompt[waiting], state.predicted[waiting], self._sequences, room)
            self._waiting, state.arrived = deque(waiting[self._rule(queue)].tolist()), []
        return super().__call__(state)
