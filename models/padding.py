"""Padding that an engine with equally long rows reads."""

from __future__ import annotations

import heapq
from itertools import pairwise

from ..data.problem import Problem
from ..data.schedule import Schedule


def padding_tokens(problem: Problem, schedule: Schedule) -> int:
    """Return the padding read over all decode steps, in tokens.

    Rows are as wide as the longest one running, as in BATON's batch after it releases the common padding. An
    engine that releases it less often reads more, one with ragged rows reads none.
    """
    starts = schedule.starts[schedule.bin_of]
    ends = starts + problem.decode_steps
    # A request grows by a token a decode step, so the longest stays the longest while it runs.
    offsets = (problem.kv_at_start - starts).tolist()
    coming = sorted(zip(starts.tolist(), ends.tolist(), offsets, strict=True), reverse=True)
    coming = [request for request in coming if request[1] > request[0]]
    changes = sorted({time for start, end, _ in coming for time in (start, end)})
    finishing: list[int] = []
    longest: list[tuple[int, int]] = []
    read = 0
    for begin, end in pairwise(changes):
        while coming and coming[-1][0] == begin:
            _, last, offset = coming.pop()
            heapq.heappush(finishing, last)
            heapq.heappush(longest, (-offset, last))
        while finishing and finishing[0] <= begin:
            heapq.heappop(finishing)
        while longest and longest[0][1] <= begin:
            heapq.heappop(longest)
        if finishing:
            widths = (end - begin) * -longest[0][0] + (begin + end - 1) * (end - begin) // 2
            read += len(finishing) * widths
    return read - problem.kv_token_steps
