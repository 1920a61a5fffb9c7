"""Shared prompts in the KV cache: computed once, kept while needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrays import IntArray

if TYPE_CHECKING:
    from .problem import Problem
    from .workload import Workload


class PrefixCache:
    """Shared prompts in KV cache during a job.

    A stage computes each request's own tokens, and each shared prompt once unless it is in the cache. A
    computed prompt stays for later requests of its group if it fits (the workload's first group first). It is
    dropped when the last of them begins. A prompt that did not fit is computed again in the next stage that
    needs it.
    """

    def __init__(self, problem: Problem) -> None:
        self._prefix_of, self._tokens = problem.prefix_of, problem.prefix_tokens
        self._own, self._most = problem.own_tokens, problem.prefix_cache
        self._to_begin = np.bincount(self._prefix_of[self._prefix_of >= 0], minlength=len(self._tokens))
        self._kept: set[int] = set()
        self.held = 0
        """Tokens of shared prompts in the cache."""

    def begin(self, requests: IntArray) -> int:
        """Return the tokens that a stage computes, and update the cache."""
        tokens = int(self._own[requests].sum())
        if not len(self._tokens):
            return tokens
        prefix = self._prefix_of[requests]
        return tokens + self.begin_prefixes(*np.unique(prefix[prefix >= 0], return_counts=True))

    def begin_prefixes(self, prefixes: IntArray, counts: IntArray) -> int:
        """Return the shared tokens that a stage computes, and update."""
        self._to_begin[prefixes] -= counts
        new = [prefix for prefix in prefixes.tolist() if prefix not in self._kept]
        for prefix in self._kept.intersection(prefixes.tolist()):
            if not self._to_begin[prefix]:
                self._kept.remove(prefix)
                self.held -= int(self._tokens[prefix])
        for prefix in new:
            tokens = int(self._tokens[prefix])
            if self._to_begin[prefix] and self.held + tokens <= self._most:
                self._kept.add(prefix)
                self.held += tokens
        return int(self._tokens[new].sum())

    def begin_again(self, requests: IntArray) -> None:
        """Treat begun requests as waiting again."""
        prefix = self._prefix_of[requests]
        np.add.at(self._to_begin, prefix[prefix >= 0], 1)

    def clear(self) -> None:
        """Empty the cache."""
        self._kept.clear()
        self.held = 0

    def keeps(self, request: int) -> bool:
        """Return whether a request's shared prompt is in the cache."""
        return int(self._prefix_of[request]) in self._kept

    def computed(self, requests: IntArray) -> IntArray:
        """Return the tokens of a stage for each number of requests."""
        tokens = self._own[requests]
        if len(self._tokens):
            prefix = self._prefix_of[requests]
            first = np.zeros(len(requests), dtype=np.bool_)
            first[np.unique(prefix, return_index=True)[1]] = True
            first &= (prefix >= 0) & ~np.isin(prefix, list(self._kept))
            tokens = tokens + np.where(first, self._tokens[prefix], 0)
        return np.cumsum(tokens)


def usual_prefix_cache(workload: Workload, slots: int, share: float = 0.25) -> int:
    """Return the default size of the prefix cache, in tokens."""
    if not workload.shared_tokens.any() and workload.tree is None:
        return 0
    usual = int(share * slots * int((workload.input_tokens + workload.output_tokens).max()))
    return usual if workload.tree is None else min(usual, int(workload.tree.tokens.sum()))


def computed_tokens(problem: Problem, bin_of: IntArray, bins: int) -> IntArray:
    """Return the prompt tokens that each bin computes, shape (bins,)."""
    tokens = np.bincount(bin_of, weights=problem.own_tokens, minlength=bins).astype(np.int64)
    prefix = problem.prefix_of
    shared = np.flatnonzero(prefix >= 0)
    if not shared.size:
        return tokens
    count = len(problem.prefix_tokens)
    keys, members = np.unique(bin_of[shared] * count + prefix[shared], return_counts=True)
    stages, prefixes = np.divmod(keys, count)
    if problem.keeps_every_prefix:
        first = np.unique(prefixes, return_index=True)[1]
        np.add.at(tokens, stages[first], problem.prefix_tokens[prefixes[first]])
        return tokens
    if not problem.prefix_cache:
        np.add.at(tokens, stages, problem.prefix_tokens[prefixes])
        return tokens
    cache = PrefixCache(problem)
    begins = np.flatnonzero(np.diff(stages, prepend=-1))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(stages)], strict=True):
        tokens[stages[begin]] += cache.begin_prefixes(prefixes[begin:end], members[begin:end])
    return tokens
