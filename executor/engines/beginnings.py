"""Beginnings that the prompts of a job share, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ...data.arrays import IntArray
from ...data.kept_beginnings import path_of
from ...data.prefix_tree import PrefixTree
from ..kv.store import Path


class SharedBeginnings:
    """Nodes of the tree of prompts, each held while requests wait for it."""

    def __init__(self, prompts: Sequence[Sequence[int]], tree: PrefixTree | None = None) -> None:
        tree = PrefixTree.of_prompts(prompts).worth_keeping() if tree is None else tree
        self._tree = tree
        self._parent, self._leaf = tree.parent.tolist(), tree.leaf.tolist()
        self._through = tree.through.tolist()
        self._awaited = tree.requests_below
        self._begun = np.zeros(len(tree), dtype=np.bool_)
        self.tokens = int(tree.tokens.sum())
        """Tokens of all shared beginnings."""
        self.distinct_tokens = tree.distinct_tokens
        """Tokens of all prompts, each shared beginning counted once."""

    @property
    def order(self) -> IntArray:
        """Requests in the order of the tree, depth first."""
        order: IntArray = np.argsort(self._tree.depth_first_key(), kind="stable")
        return order

    def path(self, request: int) -> Path:
        """Return the shared beginnings of a request's prompt."""
        return [(node, self._through[node]) for node in path_of(self._parent, self._leaf[request])]

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
        self._awaited[path_of(self._parent, self._leaf[request])] += change


@dataclass(slots=True, eq=False)
class _Run:
    """Run of tokens in the tree of beginnings, with a name that stays when others branch off."""

    name: int
    tokens: tuple[int, ...]
    after: dict[int, _Run] = field(default_factory=dict)


class ReusedBeginnings:
    """Tree of all that prompts began with, which grows as they come (a radix tree, as in SGLang).

    split: Called with the name of a run, its tokens that others share, and their name from now on.
    """

    def __init__(self, split: Callable[[int, int, int], None]) -> None:
        self._split, self._names = split, count()
        self._root = _Run(next(self._names), ())

    def add(self, tokens: tuple[int, ...]) -> Path:
        """Add a beginning; return its runs."""
        path: list[tuple[int, int]] = []
        above, at = self._root, 0
        while at < len(tokens):
            run = above.after.get(tokens[at])
            if run is None:
                run = above.after[tokens[at]] = _Run(next(self._names), tokens[at:])
            elif (common := _common(run.tokens, tokens[at:])) < len(run.tokens):
                head = _Run(next(self._names), run.tokens[:common], {run.tokens[common]: run})
                run.tokens = run.tokens[common:]
                self._split(run.name, common, head.name)
                run = above.after[tokens[at]] = head
            above, at = run, at + len(run.tokens)
            path.append((run.name, at))
        return path

    def forget(self) -> None:
        """Forget all; names of before do not come again."""
        self._root.after.clear()


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    if one == other[: len(one)]:
        return len(one)
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
