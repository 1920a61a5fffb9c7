"""Independent check of memory growth, transition by transition."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ...data.problem import Problem
from .claims import RefutedError, Work, entries, unreadable, whole
from .reads import tokens_read

RULE = "growth"
"""Name of the rule in a refusal."""

FINEST = 10**12
"""Most parts of a token between points."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Inequality that the steps and stages of every schedule fulfil.

    worth, step, stage: ``step`` times the steps and ``stage`` times the stages are at least ``worth``.
    """

    worth: int
    step: int
    stage: int

    def steps(self, stages: int) -> int:
        """Return the least decode steps of a number of stages."""
        missing = self.worth - self.stage * stages
        return -(-missing // self.step) if self.step > 0 and missing > 0 else 0


def proven_by_growth(problem: Problem, slots: int, claim: Mapping[str, Any], work: Work) -> Growth:
    """Return the proof of a claim's values of states.

    A schedule walks over states: how many requests run, the tokens they read in the next step, and whether it
    is in a prefill stage. It begins and ends with none, so the sum of all changes of the state's value is
    known. Each step (with a price for each token it reads), stage, start and end adds at most its greatest
    value over all states. All tokens read, and the starts and ends, are known.
    """
    if problem.kv_capacity is None:
        raise RefutedError(RULE, "nothing grows over a KV capacity where there is none")
    walk = _Walk(problem, slots, problem.kv_capacity, claim, work)
    token = whole(claim, "token", RULE)
    step = max(walk.steps(token), default=0)
    stage = max(walk.stages(), default=0)
    worth = token * sum(tokens_read(last - first, first) for first, last in walk.requests)
    worth += walk.end - walk.start
    worth -= sum(number * max(walk.starts(first)) for first, number in Counter(walk.first).items())
    worth -= sum(number * max(walk.ends(last)) for last, number in Counter(walk.last).items())
    return Growth(worth, max(0, step), max(0, stage))


class _Walk:
    """States of a problem, and their claimed values."""

    def __init__(
        self, problem: Problem, slots: int, capacity: int, claim: Mapping[str, Any], work: Work
    ) -> None:
        emitted, lengths = int(problem.prefill_emits_first_token), problem.decode_steps.tolist()
        prompts = zip(problem.prompt_tokens.tolist(), lengths, strict=True)
        self.requests = [(prompt + emitted, prompt + emitted + steps) for prompt, steps in prompts if steps]
        self.first = sorted(first for first, _ in self.requests)
        self.last = sorted((last for _, last in self.requests), reverse=True)
        self._slots, self._capacity, self._work = min(slots, len(self.requests)), capacity, work
        self._least = [0, *accumulate(self.first)]
        self._most = [0, *accumulate(self.last)]
        self._points = self._read_points(claim)
        self._parts = math.lcm(*(after - before for before, after in pairwise(self._points)))
        if self._parts > FINEST:
            raise RefutedError(RULE, f"points at distances that make {self._parts} parts of a token")
        self._active = self._read_active(claim)
        self._closed, self._open = self._rows(claim, "closed"), self._rows(claim, "open")
        self.start = self._value(self._closed, 0, 0)
        # A state with no running request may be met before the end as well.
        end = max(self.start, self._parts * _number(claim.get("end"), "end"))
        self.end = end if self.requests else self.start

    def _read_points(self, claim: Mapping[str, Any]) -> list[int]:
        points = [_number(point, "points") for point in entries(claim, "points")]
        if len(points) < 2 or any(before >= after for before, after in pairwise(points)):
            raise RefutedError(RULE, "points do not ascend")
        if points[0] > 0 or points[-1] < self._capacity + self._slots:
            raise RefutedError(RULE, f"points from {points[0]} to {points[-1]} leave states without a value")
        return points

    def _read_active(self, claim: Mapping[str, Any]) -> list[int]:
        if "active" not in claim:
            # Plans made before rows could be left out have one for each number of requests.
            return self._ascending(list(range(len(entries(claim, "closed")))))
        return self._ascending([_number(number, "active") for number in entries(claim, "active")])

    def _ascending(self, active: list[int]) -> list[int]:
        if active[:2] != [0, 1] or any(before >= after for before, after in pairwise(active)):
            raise RefutedError(RULE, "numbers of active requests do not ascend from 0 and 1")
        if active[-1] < self._slots:
            raise RefutedError(RULE, f"rows of up to {active[-1]} requests for {self._slots}")
        return active

    def _rows(self, claim: Mapping[str, Any], name: str) -> list[list[int]]:
        listed = entries(claim, name)
        if len(listed) != len(self._active):
            raise RefutedError(RULE, f"{len(listed)} rows of {name} values for {len(self._active)} numbers")
        rows: list[list[int]] = []
        for row in listed:
            if not isinstance(row, list) or len(row) != len(self._points):
                raise unreadable(name, row, f"{len(self._points)} whole numbers")
            rows.append([_number(value, name) for value in row])
        self._work.spend(len(self._points) * (self._slots + 1))
        full = [rows[0]]
        for (low, high), (row, after) in zip(pairwise(self._active), pairwise(rows), strict=True):
            apart = high - low
            slopes = [(to - value) // apart for value, to in zip(row, after, strict=True)]
            if [value + apart * more for value, more in zip(row, slopes, strict=True)] != after:
                raise RefutedError(RULE, f"{name} values between {low} and {high} requests are not whole")
            for number in range(1, min(high, self._slots) - low + 1):
                full.append([value + number * more for value, more in zip(row, slopes, strict=True)])
        return full

    def _between(self) -> Iterator[tuple[int, int]]:
        """Yield the least and most other requests between two rows.

        The added value is linear in the number of requests between them, so it is greatest at either.
        """
        for low, high in pairwise(self._active):
            if low < self._slots:
                yield low, min(high, self._slots) - 1

    def _value(self, rows: list[list[int]], active: int, held: int) -> int:
        place = min(bisect_right(self._points, held), len(self._points) - 1)
        lower, right = self._points[place - 1], self._points[place]
        row = rows[active]
        whole_line = row[place - 1] * (right - held) + row[place] * (held - lower)
        return whole_line * (self._parts // (right - lower))

    def _held(self, least: int, most: int, more: int) -> Iterator[int]:
        """Yield the held tokens at which a change can be worth most."""
        if least > most:
            return
        self._work.spend(6 * (len(self._points) + 1))
        yield least
        yield most
        for point in self._points:
            if least <= point <= most:
                yield point
            if least <= point - more <= most:
                yield point - more

    def steps(self, token: int) -> Iterator[int]:
        """Yield the values that a step can add, with its tokens priced."""
        for active in range(1, self._slots + 1):
            for tokens in self._held(
                self._least[active], min(self._capacity, self._most[active] - active), active
            ):
                after = token * tokens + self._value(self._closed, active, tokens + active)
                yield after - self._value(self._closed, active, tokens)
                yield after - self._value(self._open, active, tokens)

    def stages(self) -> Iterator[int]:
        """Yield the values that a stage with a start can add."""
        for low, high in self._between():
            largest = min(self._capacity - self.first[0], self._most[high])
            for active in {low, high}:
                for tokens in self._held(self._least[low], largest, 0):
                    yield self._value(self._open, active, tokens) - self._value(self._closed, active, tokens)

    def starts(self, first: int) -> Iterator[int]:
        for low, high in self._between():
            largest = min(self._capacity - first, self._most[high])
            for active in {low, high}:
                for tokens in self._held(self._least[low], largest, first):
                    after = self._value(self._open, active + 1, tokens + first)
                    yield after - self._value(self._open, active, tokens)

    def ends(self, last: int) -> Iterator[int]:
        for low, high in self._between():
            largest = min(self._capacity + high + 1, last + self._most[high])
            for active_after in {low, high}:
                for tokens in self._held(last + self._least[low], largest, -last):
                    after = (
                        self._value(self._closed, active_after, tokens - last) if active_after else self.end
                    )
                    yield after - self._value(self._closed, active_after + 1, tokens)


def _number(value: object, name: str) -> int:
    """Return a whole number of any sign."""
    if type(value) is not int:
        raise unreadable(name, value, "a whole number")
    return value
