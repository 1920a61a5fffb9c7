"""vLLM's prefix cache: blocks that requests share, and the order in which free ones are evicted.

Known of vLLM 0.24 and later (``vllm/v1/core/block_pool.py``):

* Only whole blocks from the beginning of a context are reused; the last token is always computed.
* A block can be hit as soon as its request is scheduled, by later requests of the same iteration.
* A finished or preempted request gives its blocks back last block first. Full blocks go to the end of the
  queue of free blocks, a partly filled one to its front.
* New blocks are taken from the front of that queue, which evicts what they held: least recently used first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...data.arrays import IntArray
from ...data.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True, eq=False)
class BlockTree:
    """Tree of prompts in whole blocks.

    parent: Node above each node, which stands before it; -1 at the top, shape (nodes,).
    blocks: Blocks of each node, shape (nodes,).
    depth: Blocks from the top through each node, shape (nodes,).
    leaf: Node of each request; -1 without one, shape (requests,).
    prompt: Tokens of each request's prompt, shape (requests,).
    """

    parent: IntArray
    blocks: IntArray
    depth: IntArray
    leaf: IntArray
    prompt: IntArray

    @classmethod
    def of(cls, tree: PrefixTree, block_tokens: int) -> BlockTree:
        """Return a tree of prompts in whole blocks.

        A block that crosses the border of two nodes belongs to the lower one, as all its tokens must agree.
        """
        depth = tree.through // block_tokens
        blocks = depth - np.append(depth, 0)[tree.parent]
        return cls(tree.parent, blocks, depth, tree.leaf, tree.prompt_tokens)


class VllmCache:
    """Blocks of KV cache: held by running requests, kept after them, or free.

    Nodes are runs of blocks: whole runs are held, kept and touched, and evicted from their end. What a
    request holds below its leaf is a run of its own.

    free: Blocks that no running request holds, with kept ones.
    """

    def __init__(self, tree: BlockTree, blocks: int, block_tokens: int) -> None:
        self._parent, self._size = tree.parent.tolist(), tree.blocks.tolist()
        self._depth, self._leaf = tree.depth.tolist(), tree.leaf.tolist()
        self._block = block_tokens
        nodes, requests = len(self._parent), len(self._leaf)
        self.free = self._empty = blocks
        # Runs are numbered: nodes first, then what each request holds alone.
        self._runs = nodes
        self._kept = [0] * (nodes + requests)
        self._holders = [0] * nodes
        # An entry of the queue is void unless it is the run's last one.
        self._serial = [0] * (nodes + requests)
        self._queue: deque[tuple[int, int]] = deque()

    @property
    def state(self) -> tuple[IntArray, IntArray]:
        """Blocks of each node in the cache, and running requests or nodes that hold it, shape (nodes,)."""
        return np.array(self._kept[: self._runs]), np.array(self._holders)

    def hit(self, request: int) -> tuple[int, int]:
        """Return the blocks that a request would reuse, and how many of them are free."""
        node, kept, parent = self._leaf[request], self._kept, self._parent
        above: list[int] = []
        while node >= 0 and not self._holders[node]:
            above.append(node)
            node = parent[node]
        hit = free = 0
        if node >= 0:
            hit = self._depth[node]
        for node in reversed(above):
            hit += kept[node]
            free += kept[node]
            if kept[node] < self._size[node]:
                return hit, free
        # A preempted request finds its own blocks again, unless they were evicted.
        own = kept[self._runs + request]
        return hit + own, free + own

    def hold(self, request: int, free: int) -> None:
        """Let a request hold what it reuses and its nodes.

        free: Reused blocks that were free, as :meth:`hit` returns them.
        """
        self.free -= free
        node = self._leaf[request]
        while node >= 0:
            self._holders[node] += 1
            if self._holders[node] > 1:
                break
            self._kept[node] = self._size[node]
            self._serial[node] += 1
            node = self._parent[node]
        run = self._runs + request
        self._kept[run] = 0
        self._serial[run] += 1

    def take(self, blocks: int) -> None:
        """Take free blocks, and evict what they held."""
        self.free -= blocks
        if blocks <= self._empty:
            self._empty -= blocks
            return
        blocks -= self._empty
        self._empty = 0
        queue, kept, serial = self._queue, self._kept, self._serial
        while blocks:
            run, entry = queue[0]
            if serial[run] != entry:
                queue.popleft()
                continue
            if kept[run] > blocks:
                kept[run] -= blocks
                return
            blocks -= kept[run]
            kept[run] = 0
            queue.popleft()

    def give_back(self, request: int, held: int) -> None:
        """Free a request's blocks, the last one first.

        held: Tokens that it holds.
        """
        full = held // self._block
        node = self._leaf[request]
        path = self._depth[node] if node >= 0 else 0
        partial = -(-held // self._block) - full
        self._empty += partial
        own = max(0, full - path)
        self.free += partial + own
        if own:
            self._keep(self._runs + request, own)
        while node >= 0:
            self._holders[node] -= 1
            if self._holders[node]:
                break
            self._keep(node, max(0, min(self._size[node], full - self._depth[node] + self._size[node])))
            self.free += self._kept[node]
            node = self._parent[node]

    def _keep(self, run: int, blocks: int) -> None:
        self._kept[run] = blocks
        self._serial[run] += 1
        if blocks:
            self._queue.append((run, self._serial[run]))
