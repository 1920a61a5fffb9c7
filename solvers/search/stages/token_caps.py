"""Which requests start at which stage so that no prefill stage exceeds its token cap."""

from __future__ import annotations

import numpy as np

from ....data.costs.cost import IntArray
from ....data.problem import Problem
from .slot_flow import LengthProfile, Spans, whole_slots

TRIED = 8
"""
Heaviest stages tried for a swap: one that nothing can leave now may once lighter ones are more even.

More, or random swaps where none helps, take ten times as long as another flow and lead to nothing better.
"""

REPAIRS = 12
"""Flows tried, each with fewer starts at the stages that were too heavy in the one before."""


def stages_within_cap(
    problem: Problem, times: IntArray, profile: LengthProfile, seconds: float
) -> IntArray | None:
    """
    Return the stage of each request with every stage under the cap, or None if none was found.

    A stage whose tokens stay above the cap however requests swap places starts fewer in the next flow tried.

    Parameters
    ----------
    problem
        The problem, with a token cap.
    times
        The rounds of the stages and the end, shape (stages + 1,).
    profile
        The requests' lengths, and how many starts of a stage to try first.
    seconds
        Time allowed for a flow.
    """
    cap, prompt = problem.prefill_token_cap, problem.prompt_tokens
    assert cap is not None
    assert profile.starts_per_stage is not None
    stages = len(times) - 1
    most = np.full(stages, int(profile.starts_per_stage))
    for _ in range(REPAIRS):
        flow = whole_slots(times, profile, problem.slots, seconds, most)
        if flow is None:
            return None
        stage = evened_out(problem, times, *flow)
        excess = np.bincount(stage, weights=prompt, minlength=stages) - cap
        heavy = excess > 0
        if not heavy.any():
            return stage
        fewer = np.maximum(1, np.rint(excess / prompt.mean())).astype(np.int64)
        most = np.where(heavy, np.maximum(0, np.bincount(stage, minlength=stages) - fewer), most)
    return None


def evened_out(problem: Problem, times: IntArray, spans: Spans, used: IntArray) -> IntArray:
    """
    Return the stage of each request, with no stage above the token cap if swaps get there.

    The longest requests take the longest spans; then requests that fit into each other's spans swap places
    as long as that makes the stages' tokens more even, from the heaviest stage on.

    Parameters
    ----------
    problem
        The problem, with a token cap.
    times
        The rounds of the stages and the end, shape (stages + 1,).
    used
        Slots in each span, shape (spans,).
    """
    cap = problem.prefill_token_cap
    assert cap is not None
    prompt, rounds = problem.prompt_tokens, problem.rounds
    span = spans.of_requests(used, rounds)
    room, stage = spans.rounds[span], spans.first[span]
    tokens = np.bincount(stage, weights=prompt, minlength=len(times) - 1).astype(np.int64)
    for _ in range(4 * len(problem)):
        heaviest_first = np.argsort(-tokens, kind="stable")[: np.count_nonzero(tokens)]
        if tokens[heaviest_first[0]] <= cap:
            return stage
        for heavy in heaviest_first[:TRIED]:
            own = np.flatnonzero(stage == heavy)
            fits = (rounds[own][:, None] <= room) & (rounds <= room[own][:, None])
            moved = prompt[own][:, None] - prompt
            # Half of what the swap takes off the sum of the squared tokens.
            gain = np.where(fits, moved * (tokens[heavy] - tokens[stage] - moved), 0)
            best = int(np.argmax(gain))
            if gain.flat[best] > 0:
                break
        else:
            return stage
        i, j = int(own[best // len(problem)]), best % len(problem)
        change = int(prompt[i] - prompt[j])
        tokens[stage[i]] -= change
        tokens[stage[j]] += change
        stage[i], stage[j] = stage[j], stage[i]
        room[i], room[j] = room[j], room[i]
    return stage
