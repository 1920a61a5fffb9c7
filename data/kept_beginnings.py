"""Shared beginnings in an engine's KV cache, from stage to stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .arrays import IntArray
from .prefix_tree import PrefixTree

if TYPE_CHECKING:
    from .problem import Problem
    from .workload import Workload


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens of a node in the cache, and its readers."""

    name: int
    tokens: int
    readers: int = 0
    kept: bool = True


class _Row(NamedTuple):
    """A running request: its nodes, its own tokens at the start, room for one more, and the steps before."""

    path: list[_Node]
    own: int
    coming: int
    since: int


class KeptBeginnings:
    """Nodes of a tree in KV cache during a job.

    A stage takes its requests in turn. Each computes the nodes of its path that are not in the cache, whole,
    then its own tokens. Below a missing node it computes all. A node stays while a request below it runs, and
    while one waits and memory allows: what running requests lack is taken from nodes that none of them reads,
    the least recently used first, the ends of a path before its root. A node that no request waits for goes
    with the last one that reads it.

    Running requests hold their own tokens and one more, for the coming token.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.tree is not None
        tree = problem.tree
        self._parent, self._tokens = tree.parent.tolist(), tree.tokens.tolist()
        self._leaf, self._own, self._prompt = (
            tree.leaf.tolist(),
            tree.own.tolist(),
            tree.prompt_tokens.tolist(),
        )
        self._awaited: list[int] = tree.requests_below.tolist()
        self._begun = [False] * len(tree)
        # The least recently used node is first.
        self._nodes: dict[int, _Node] = {}
        self._rows: dict[int, _Row] = {}
        # Nodes that each request read when it ended.
        self._read: dict[int, list[_Node]] = {}
        self._coming = self._steps = 0
        self._free = problem.pages
        self._bounded = not problem.keeps_every_prefix

    def begin(self, requests: Sequence[int], drawn: Sequence[int] = ()) -> int:
        """Begin requests in one stage; return the tokens that it computes.

        drawn: Tokens of each request beyond its prompt that are computed again.
        """
        computed = lacking = 0
        for request, more in zip(requests, drawn or [0] * len(requests), strict=True):
            path, missing = list[_Node](), False
            names = self._path(request)
            for name in names:
                missing = missing or name not in self._nodes
                if name not in self._nodes:
                    self._take(self._tokens[name])
                    self._nodes[name] = _Node(name, self._tokens[name])
                node = self._nodes[name]
                node.readers += 1
                path.append(node)
                computed += node.tokens if missing else 0
            for name in reversed(names):
                self._nodes[name] = self._nodes.pop(name)
            own = self._own[request] + more
            self._rows[request] = _Row(path, own, 1, self._steps)
            computed += own
            lacking += own + 1
        self._take(lacking)
        self._coming += len(requests)
        for request in requests:
            self._await(request, -1)
        for name in {name for request in requests for name in self._path(request)}:
            if not self._awaited[name]:
                self._forget(name)
        return computed

    def resume(self, requests: Sequence[int], drawn: Sequence[int]) -> None:
        """Let requests come back with all their tokens; they read the nodes that stayed in the cache."""
        for request, more in zip(requests, drawn, strict=True):
            path, own = list[_Node](), self._prompt[request] + more
            for node in self._read[request]:
                if self._nodes.get(node.name) is not node:
                    break
                node.readers += 1
                path.append(node)
                own -= node.tokens
            self._rows[request] = _Row(path, own, 0, self._steps)
            self._take(own)

    def decode(self, decode_steps: int) -> None:
        """Count decode steps of all running requests, none of which ends before the last."""
        if decode_steps:
            self._take(len(self._rows) * decode_steps - self._coming)
            self._steps += decode_steps
            self._coming = 0

    def end(self, requests: Sequence[int]) -> None:
        """End running requests, for now or for good."""
        for request in requests:
            row = self._rows.pop(request)
            done = self._steps - row.since
            self._coming -= 0 if done else row.coming
            self._free += row.own + (done or row.coming)
            self._read[request] = row.path
            for node in row.path:
                node.readers -= 1
                if not (node.readers or node.kept):
                    self._free += node.tokens

    def begin_again(self, requests: Sequence[int]) -> None:
        """Treat begun requests as waiting again."""
        for request in requests:
            self._await(request, 1)

    def clear(self) -> None:
        """Let no further request reuse a node that is there now."""
        for name in list(self._nodes):
            self._forget(name)

    def _path(self, request: int) -> list[int]:
        return path_of(self._parent, self._leaf[request])

    def _await(self, request: int, change: int) -> None:
        if self._begun[request] == (change < 0):
            return
        self._begun[request] = change < 0
        for node in self._path(request):
            self._awaited[node] += change

    def _forget(self, name: int) -> None:
        node = self._nodes.pop(name)
        node.kept = False
        if not node.readers:
            self._free += node.tokens

    def _take(self, tokens: int) -> None:
        while self._bounded and self._free < tokens:
            unread = next((name for name, node in self._nodes.items() if not node.readers), None)
            if unread is None:
                # Completions that outgrow the plan take more memory.
                break
            self._forget(unread)
        self._free -= tokens


class HeldBeginnings:
    """Nodes that running requests hold, each once."""

    def __init__(self, problem: Problem) -> None:
        tree = problem.tree
        self._leaf: list[int] = [] if tree is None else tree.leaf.tolist()
        self._parent: list[int] = [] if tree is None else tree.parent.tolist()
        self._tokens: list[int] = [] if tree is None else tree.tokens.tolist()
        self._readers = [0] * len(self._parent)
        self.tokens = 0
        """Tokens of the nodes."""

    def count(self, requests: Iterable[int], change: int) -> None:
        """Count requests that begin (1) or end (-1)."""
        for request in requests if self._leaf else ():
            for node in path_of(self._parent, self._leaf[request]):
                before = self._readers[node]
                self._readers[node] = before + change
                if not before or not before + change:
                    self.tokens += change * self._tokens[node]


class CountedAhead:
    """Prompt tokens of coming stages, at most.

    Nodes count as computed again if the engine may have dropped them.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.tree is not None
        tree = problem.tree
        self._parent, self._tokens = tree.parent.tolist(), tree.tokens.tolist()
        self._leaf, self._own = tree.leaf.tolist(), tree.own.tolist()
        self._kept, self._there = problem.keeps_every_prefix, set[int]()

    def tokens(self, requests: Iterable[int], running: Iterable[int] = ()) -> list[int]:
        """Return the tokens that each request of a stage adds to it.

        running: Requests that run while the stage begins.
        """
        taken = {name for request in running for name in path_of(self._parent, self._leaf[request])}
        return [self.more(request, taken) for request in requests]

    def more(self, request: int, taken: set[int]) -> int:
        """Return the tokens that a request adds to nodes that are there, and add its nodes to them."""
        missing = set(path_of(self._parent, self._leaf[request])) - self._there - taken
        taken |= missing
        more: int = self._own[request] + sum(self._tokens[name] for name in missing)
        return more

    def begin(self, requests: Iterable[int]) -> None:
        """Note that some requests have begun."""
        if self._kept:
            for request in requests:
                self._there.update(path_of(self._parent, self._leaf[request]))


def usual_prefix_cache(workload: Workload, slots: int, share: float = 0.25) -> int:
    """Return the default memory for beginnings that no running request reads, in tokens."""
    longest = int((workload.input_tokens + workload.output_tokens).max())
    return min(int(share * slots * longest), workload.shared_once)


def path_of(parents: Sequence[int], leaf: int) -> list[int]:
    """Return the nodes from a root to a leaf; none for -1."""
    path = list[int]()
    while leaf >= 0:
        path.append(leaf)
        leaf = parents[leaf]
    return path[::-1]


def stage_tokens(problem: Problem, bin_of: IntArray, decode_steps: IntArray) -> IntArray:
    """Return the prompt tokens that each bin of a schedule computes, shape (bins,)."""
    tree = problem.tree
    assert tree is not None
    if not problem.keeps_every_prefix:
        return _stage_by_stage(problem, bin_of, decode_steps)
    tokens = np.bincount(bin_of, weights=tree.own, minlength=len(decode_steps)).astype(np.int64)
    np.add.at(tokens, _first_bin(tree, bin_of), tree.tokens)
    return tokens


def _first_bin(tree: PrefixTree, bin_of: IntArray) -> IntArray:
    """Return the first bin with a request below each node, shape (nodes,)."""
    first = np.full(len(tree.parent) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, tree.leaf, bin_of)
    least, parents = first.tolist(), tree.parent.tolist()
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0 and least[node] < least[parents[node]]:
            least[parents[node]] = least[node]
    return np.array(least[:-1], dtype=np.int64)


def _stage_by_stage(problem: Problem, bin_of: IntArray, decode_steps: IntArray) -> IntArray:
    kept, left = KeptBeginnings(problem), problem.decode_steps.tolist()
    tokens = np.zeros(len(decode_steps), dtype=np.int64)
    order = np.argsort(bin_of, kind="stable")
    first = np.searchsorted(bin_of[order], np.arange(len(decode_steps) + 1)).tolist()
    ends = list[tuple[int, int]]()
    now = start = 0
    for k, steps in enumerate(decode_steps.tolist()):
        while ends and ends[0][0] <= start:
            end, request = heappop(ends)
            kept.decode(end - now)
            kept.end([request])
            now = end
        kept.decode(start - now)
        now = start
        members = order[first[k] : first[k + 1]].tolist()
        tokens[k] = kept.begin(members)
        kept.end([request for request in members if not left[request]])
        for request in members:
            if left[request]:
                heappush(ends, (start + left[request], request))
        start += steps
    return tokens
