"""Requests that wait, by how long they would stay in others' unused memory."""

from __future__ import annotations

import math

from .task_queue import LengthIndex
from .unused_parts import UnusedParts

_TRIED = 8
"""Lengths looked at for one that fits, at most: a decision must not cost the whole queue."""


class GuestQueue:
    """
    Finds the request with the longest answer that unused parts have room for, prompt and answer.

    Parameters
    ----------
    buffer
        Share of its answer by which a guest may overstay.
    forward_size
        Tokens of an iteration, at least half of which are a prompt's that comes in chunks.
    """

    def __init__(self, buffer: float, forward_size: int) -> None:
        self._buffer, self._forward = buffer, forward_size
        self._answers = LengthIndex()
        self._prompt: dict[int, int] = {}

    def push(self, request: int, prompt: int, answer: int) -> None:
        """
        Add a request.

        Parameters
        ----------
        request
            Not in the queue.
        prompt, answer
            Tokens; the answer's as predicted.
        """
        self._answers.push(request, answer)
        self._prompt[request] = prompt

    def remove(self, request: int) -> None:
        """Take a request out."""
        self._answers.remove(request)
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
        Return the request with the longest answer of those there is room for, or None.

        Parameters
        ----------
        parts
            That it may borrow.
        spare
            Tokens of blocks of its own that it may have besides.
        budget
            Prompt tokens that the first iteration computes.
        """
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
