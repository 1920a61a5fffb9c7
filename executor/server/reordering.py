"""Orders of a batch that adapt to its completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ...data.arrays import IntArray
from ...data.lengths.group_lengths import GroupLengths
from ...data.readers.server_batch import ServerBatch, prompt_groups
from ...heuristics.unknown_lengths.kinds import LearntKinds, Progress


class Reordering(Protocol):
    """Order of the requests by completions seen so far.

    given: Order to begin with, shape (requests,).
    """

    given: IntArray

    def note(self, request: int, tokens: int, seconds: float) -> None:
        """Note a request's outcome.

        tokens: Generated tokens of all its completions, zero if unknown.
        seconds: Seconds from sending to the reply, zero if unknown.
        """
        ...

    def due(self, left: int) -> bool:
        """Return whether enough completions arrived for a new order."""
        ...

    def order(self, running: Mapping[int, float]) -> IntArray | None:
        """Return the order of the unsent requests; None to leave it.

        running: Seconds that each running request has run.
        """
        ...


class ByPrompts:
    """Longest first, by the completions of the same prompts.

    planned: Planned tokens of each completion, shape (requests,).
    share: Completions that trigger a new order, as a share of the requests left.
    """

    def __init__(
        self, batch: ServerBatch, order: Sequence[int] | IntArray, planned: IntArray, share: float
    ) -> None:
        self._choices, self._share, group = batch.choices, share, prompt_groups(batch)
        self._repair = GroupLengths(group, planned)
        self.given = np.asarray(order, dtype=np.int64)
        self._rank = np.empty(len(order), dtype=np.int64)
        self._rank[self.given] = np.arange(len(order))
        first = np.unique(group[self.given], return_index=True)[1]
        # One request of each prompt goes first: its length predicts the others.
        self._first_of_prompt = np.isin(self._rank, first) & (np.bincount(group)[group] > 1)
        self._since = 0

    def note(self, request: int, tokens: int, seconds: float) -> None:
        """Note the tokens of a request's completions."""
        if tokens:
            self._repair.seen(request, tokens / int(self._choices[request]))
            self._since += 1

    def due(self, left: int) -> bool:
        """Return whether enough completions arrived for a new order."""
        return self._since >= self._share * left

    def order(self, running: Mapping[int, float]) -> IntArray:
        """Return the order by the lengths seen so far."""
        self._since = 0
        expected = self._repair.expected()
        return np.lexsort((self._rank, -expected, ~self._first_of_prompt))


class ByKinds:
    """Longer kinds first, where simulation says that it saves iterations.

    kind: Kind of each request, counted from zero, shape (requests,).
    slots: Completions that all servers decode at a time.
    """

    def __init__(
        self, batch: ServerBatch, order: Sequence[int] | IntArray, kind: IntArray, slots: int, seed: int
    ) -> None:
        order_given = np.asarray(order, dtype=np.int64)
        self._kinds = LearntKinds(order_given, kind, batch.caps, slots, seed=seed)
        self.given, self._caps = self._kinds.given, batch.caps
        self._gone, self._ended = np.zeros(len(kind), dtype=np.bool_), np.zeros(len(kind), dtype=np.bool_)
        self._reached = np.zeros(len(kind), dtype=np.int64)
        self._tokens, self._seconds = 0, 0.0

    def note(self, request: int, tokens: int, seconds: float) -> None:
        """Note the tokens of a request's completion, and its pace."""
        self._gone[request] = True
        if tokens:
            self._ended[request], self._reached[request] = True, tokens
        if tokens and seconds:
            self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds

    def due(self, left: int) -> bool:
        """Return whether enough completions arrived for a new order."""
        return self._kinds.due(int(np.count_nonzero(self._ended)))

    def order(self, running: Mapping[int, float]) -> IntArray | None:
        """Return the order of the waiting requests; None to leave it."""
        runs, reached = np.zeros(len(self._gone), dtype=np.bool_), self._reached.copy()
        pace = self._tokens / self._seconds if self._seconds else 0.0
        for request, seconds in running.items():
            runs[request] = True
            tokens = int(pace * seconds)
            reached[request] = min(tokens, self._caps[request] - 1) if self._caps[request] else tokens
        return self._kinds.order(Progress(~self._gone & ~runs, runs, self._ended, reached))
