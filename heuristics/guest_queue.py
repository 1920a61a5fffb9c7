"""Requests that wait, by how long they would stay in others' unused memory."""

from __future__ import annotations

import math

from .task_queue import LengthIndex
from .unused_parts import UnusedParts

_TRIED = 8
"""Lengths looked at for one that fits, at most: a decision must not cost the whole queue."""


class GuestQueue:
    """
    Finds a request that unused parts have room for, prompt and answer.

    Of those with a deadline the one that fits the largest part best, which leaves many waiting for a short
    time; where none fits a single part, and of those without, the one with the longest answer that fits into
    several, which fills most.

    Parameters
    ----------
    buffer
        Share of its answer by which a guest may overstay.
    forward_size
        Tokens of an iteration, at least half of which are a prompt's that comes in chunks.
    """

    def __init__(self, buffer: float, forward_size: int) -> None:
        self._buffer, self._forward = buffer, forward_size
        self._answers, self._needs = LengthIndex(), LengthIndex()
        self._prompt: dict[int, int] = {}

    def push(self, request: int, prompt: int, answer: int, *, due: bool = False) -> None:
        """
        Add a request.

        Parameters
        ----------
        request
            Not in the queue.
        prompt, answer
            Tokens; the answer's as predicted.
        due
            Whether it has a deadline.
        """
        self._answers.push(request, answer)
        if due:
            self._needs.push(request, prompt + answer + self.stay(answer))
        self._prompt[request] = prompt

    def remove(self, request: int) -> None:
        """Take a request out."""
        self._answers.remove(request)
        if request in self._needs:
            self._needs.remove(request)
        del self._prompt[request]

    def stay(self, answer: int, prompt: int = 0, budget: int = 0) -> int:
        """
        Return the iterations that a guest may stay.

        Parameters
        ----------
        answer, prompt
            Tokens yet to be generated and computed.
        budget
            Prompt tokens that the first iteration computes.
        """
        chunks = -(-2 * prompt // self._forward) if prompt > budget else 0
        return math.ceil(answer * (1 + self._buffer)) + chunks

    def fitting(self, parts: UnusedParts, spare: int, budget: int) -> int | None:
        """
        Return the request to host, or None if there is room for none.

        Parameters
        ----------
        parts
            That it may borrow.
        spare
            Tokens of blocks of its own that it may have besides.
        budget
            Prompt tokens that the first iteration computes.
        """
        if (found := self._needs.closest(parts.largest())) is not None and self._prompt[found[0]] <= budget:
            return found[0]
        most = self._answers.longest()
        for tried in range(_TRIED):
            if (found := self._answers.closest(most)) is None:
                return None
            request, length = found
            prompt = self._prompt[request]
            lacks = max(0, prompt + length - spare)
            if parts.room(lacks, self.stay(length, prompt, budget)) == lacks:
                return request
            most = length - 1
            if not tried:
                most = parts.longest(most, lambda length: (max(0, length + 1 - spare), self.stay(length)))
        return None
