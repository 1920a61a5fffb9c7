"""Beginnings that the prompts of a job share, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.arrays import IntArray
from ...data.prefix_tree import PrefixTree
from ..kv.store import Path

_LEAST = 16
"""Tokens through a shared beginning, and tokens saved by it, at least; fewer cost more than they save."""


class SharedBeginnings:
    """Nodes of the tree of prompts, each held while requests wait for it."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._tree = tree = PrefixTree.of_prompts(prompts)
        self._parent, self._leaf = tree.parent.tolist(), tree.leaf.tolist()
        self._through = tree.through.tolist()
        self._awaited = tree.requests_below
        worth = (tree.tokens * (self._awaited - 1) >= _LEAST) & (tree.through >= _LEAST)
        # Prompts that differ by their last token at most are worth it at any length.
        alike = tree.leaf[(tree.own == 1) & (tree.leaf >= 0)]
        worth |= np.bincount(alike, minlength=len(worth)) > 1
        self._worth = worth.tolist()
        self._begun = np.zeros(len(tree), dtype=np.bool_)
        # Tokens from each node's parent, with those of parents that are not worth it.
        known = [0] * (len(worth) + 1)
        tokens = np.zeros(len(worth), dtype=np.int64)
        for node, parent in enumerate(self._parent):
            known[node] = self._through[node] if worth[node] else known[parent]
            tokens[node] = known[node] - known[parent]
        self.tokens = int(tokens.sum())
        """Tokens of all shared beginnings."""
        saved = int((tokens * (self._awaited - 1)).sum())
        self.distinct_tokens = int(tree.prompt_tokens.sum()) - saved
        """Tokens of all prompts, each shared beginning counted once."""

    @property
    def order(self) -> IntArray:
        """Requests in the order of the tree, depth first."""
        order: IntArray = np.argsort(self._tree.depth_first_key(), kind="stable")
        return order

    def path(self, request: int) -> Path:
        """Return the shared beginnings of a request's prompt."""
        path = []
        node = self._leaf[request]
        while node >= 0:
            if self._worth[node]:
                path.append((node, self._through[node]))
            node = self._parent[node]
        return path[::-1]

    def begin(self, requests: Sequence[int]) -> list[int]:
        """Count requests as begun; return the nodes that no further one waits for."""
        for request in requests:
            self._count(request, -1)
        ended = {node for request in requests for node, _ in self.path(request)}
        return sorted(node for node in ended if not self._awaited[node])

    def begin_again(self, requests: Sequence[int]) -> None:
        """Count begun requests as waiting."""
        for request in requests:
            self._count(request, 1)

    def _count(self, request: int, change: int) -> None:
        if self._begun[request] == (change < 0):
            return
        self._begun[request] = change < 0
        node = self._leaf[request]
        while node >= 0:
            self._awaited[node] += change
            node = self._parent[node]
