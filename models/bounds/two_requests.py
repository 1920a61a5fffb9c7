"""Argument that two requests overlap while the KV capacity holds both."""

from __future__ import annotations

import numpy as np

from ...data.problem import Problem

LONGEST = 200
"""Longest requests to compare in pairs."""


def two_requests(problem: Problem, capacity: int) -> tuple[int, list[int]]:
    r"""Return the pair of requests that need most decode steps together.

    Let request i end first. In its last step it holds :math:`a_i + n_i - 1` tokens, where :math:`a_i` are the
    tokens that it reads in its first of :math:`n_i` steps. At most :math:`C - (a_i + n_i - 1)` are left for
    j, which began with :math:`a_j` and grows by one a step. So the two share at most
    :math:`C - a_j - (a_i + n_i - 1) + 1` steps, whichever of them ends first.
    """
    longest = np.argsort(-problem.decode_steps, kind="stable")[:LONGEST]
    longest = longest[problem.decode_steps[longest] > 0]
    if len(longest) < 2:
        return 0, []
    decode_steps, first = problem.decode_steps[longest], problem.kv_at_start[longest]
    # Steps that each pair shares if the first request ends first.
    shared = np.maximum(0, capacity - (first + decode_steps - 1)[:, None] - first + 1)
    needed = decode_steps[:, None] + decode_steps - np.maximum(shared, shared.T)
    np.fill_diagonal(needed, 0)
    one, other = (int(place) for place in np.unravel_index(needed.argmax(), needed.shape))
    return int(needed[one, other]), [int(longest[one]), int(longest[other])]
