"""An independent check of what growing keys and values cost: every state change is valued again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from ...data.problem import Problem
from .claims import RefutedError, Work, entries, unreadable, whole
from .reads import tokens_read

RULE = "rounds"
"""What is refuted."""


def proven_by_growth(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> int:
    """
    Return the decode steps that a claim's values of states prove.

    A schedule walks over states: how many requests are under way, and the tokens they read in the next step.
    It begins and ends with none, so what all its changes add to the value of the state is nothing. What each
    step can add, with a price for each token it reads, is bounded by its greatest over all states, and so is
    what each start and each end can add; all tokens read, and the starts and ends, are known.

    Parameters
    ----------
    problem
        A problem with a KV capacity.
    slots
        Requests that are ever under way together, as checked.
    claim
        ``token``, the price of a token read; ``values``, a row for each number of requests from 0 on, of the
        values of states at every ``gap`` tokens, straight lines between them.
    work
        What is left of the steps of the check.

    Raises
    ------
    RefutedError
        If the claim cannot be read, or does not value every state.
    """
    if problem.kv_capacity is None:
        raise RefutedError(RULE, "nothing grows over a KV capacity where there is none")
    walk = _Walk(problem, slots, problem.kv_capacity, claim, work)
    token = whole(claim, "token", RULE)
    step = max(walk.steps(token), default=0)
    worth = token * sum(tokens_read(last - first, first) for first, last in walk.requests)
    worth -= sum(number * max(walk.starts(first)) for first, number in Counter(walk.first).items())
    worth -= sum(number * max(walk.ends(last)) for last, number in Counter(walk.last).items())
    return max(0, -(-worth // step)) if step > 0 else 0


class _Walk:
    """The states of a problem, and what a claim says they are worth."""

    def __init__(
        self, problem: Problem, slots: int, capacity: int, claim: Mapping[str, Any], work: Work
    ) -> None:
        emitted, lengths = int(problem.prefill_emits_first_token), problem.rounds.tolist()
        prompts = zip(problem.prompt_tokens.tolist(), lengths, strict=True)
        self.requests = [(prompt + emitted, prompt + emitted + steps) for prompt, steps in prompts if steps]
        self.first = sorted(first for first, _ in self.requests)
        self.last = sorted((last for _, last in self.requests), reverse=True)
        self._slots, self._capacity, self._work = min(slots, len(self.requests)), capacity, work
        self._least = [0, *accumulate(self.first)]
        self._most = [0, *accumulate(self.last)]
        self._gap = whole(claim, "gap", RULE, least=1)
        self._values = [self._row(row) for row in entries(claim, "values")]
        if len(self._values) <= self._slots:
            raise RefutedError(
                RULE, f"{len(self._values)} rows of values for {self._slots} requests and none"
            )

    def _row(self, row: object) -> list[int]:
        if not isinstance(row, list) or any(type(value) is not int for value in row):
            raise unreadable("values", row, "rows of whole numbers")
        if (len(row) - 1) * self._gap < self._capacity + self._slots:
            raise RefutedError(RULE, f"{len(row)} values {self._gap} tokens apart leave states without one")
        return row

    def _value(self, active: int, held: int) -> int:
        point, beyond = divmod(held, self._gap)
        row = self._values[active]
        return row[point] * (self._gap - beyond) + (row[point + 1] * beyond if beyond else 0)

    def _changes(self, active: int, least: int, most: int, then: int, more: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens and what is added, wherever that can be greatest among so many tokens."""
        if least > most:
            return
        turns = range(least - least % self._gap, most + 1, self._gap)
        shifted = range(least + more - (least + more) % self._gap, most + more + 1, self._gap)
        self._work.spend(3 * (len(turns) + len(shifted) + 2))
        for held in (least, most, *turns, *(turn - more for turn in shifted)):
            if least <= held <= most:
                yield held, self._value(then, held + more) - self._value(active, held)

    def steps(self, token: int) -> Iterator[int]:
        """Yield what a step can add, each token read priced."""
        for active in range(1, self._slots + 1):
            most = min(self._capacity, self._most[active] - active)
            for held, added in self._changes(active, self._least[active], most, active, active):
                yield token * held + added

    def starts(self, first: int) -> Iterator[int]:
        """Yield what the start of a request can add that reads so many tokens first."""
        for active in range(self._slots):
            most = min(self._capacity - first, self._most[active])
            for _, added in self._changes(active, self._least[active], most, active + 1, first):
                yield added

    def ends(self, last: int) -> Iterator[int]:
        """Yield what the end of a request can add that holds so many tokens then."""
        for active in range(1, self._slots + 1):
            most = min(self._capacity + active, last + self._most[active - 1])
            for _, added in self._changes(active, last + self._least[active - 1], most, active - 1, -last):
                yield added
