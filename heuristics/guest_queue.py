"""Requests that wait, by what they need of a running request's unused memory."""

from __future__ import annotations

from .task_queue import LengthIndex


class GuestQueue:
    """
    Finds the request that fits an unused part best: as a whole, or its answer alone.

    A part of so many tokens is filled by its host at one an iteration. A guest at its end may stay until the
    host comes, so it needs room for what it holds, and an iteration for each token of its answer.
    """

    def __init__(self) -> None:
        self._whole, self._answers = LengthIndex(), LengthIndex()

    def push(self, request: int, prompt: int, answer: int, prompt_iterations: int) -> None:
        """
        Add a request.

        Parameters
        ----------
        request
            Not in the queue.
        prompt, answer
            Tokens; the answer's as predicted.
        prompt_iterations
            Iterations beyond the first that a prompt may take which lies elsewhere.
        """
        self._whole.push(request, prompt + 2 * answer)
        self._answers.push(request, 2 * answer + prompt_iterations)

    def remove(self, request: int) -> None:
        """Take a request out."""
        self._whole.remove(request)
        self._answers.remove(request)

    def closest(self, tokens: int, *, whole: bool) -> tuple[int, int] | None:
        """
        Return the request that needs the most of what there is, and what it needs, or None if none fits.

        Parameters
        ----------
        tokens
            Of the unused part.
        whole
            Whether the prompt goes there as well, computed in one iteration.
        """
        return (self._whole if whole else self._answers).closest(tokens)
