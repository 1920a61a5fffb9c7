"""Which requests take which spans so that no prefill stage exceeds its token cap."""

from __future__ import annotations

import numpy as np

from ..data.cost import IntArray
from ..data.problem import Problem
from .slot_flow import Spans

TRIED = 64
"""Heaviest stages tried for a swap: one that nothing can leave now may once lighter ones are more even."""

KICKS = 60
"""Random swaps out of the heaviest stage, each once no swap makes the stages more even."""


def within_token_cap(problem: Problem, times: IntArray, spans: Spans, used: IntArray) -> IntArray | None:
    """
    Return the stage of each request with every stage under the cap, or None if swaps do not get there.

    The longest requests take the longest spans; then requests that fit into each other's spans swap places
    as long as that makes the stages' tokens more even, from the heaviest stage on. Where none does, a random
    swap out of the heaviest stage makes others possible.

    Parameters
    ----------
    problem
        The problem, with a token cap.
    times
        The rounds of the stages and the end, shape (stages + 1,).
    spans
        The spans.
    used
        Slots in each span, shape (spans,).
    """
    cap = problem.prefill_token_cap
    assert cap is not None
    prompt, rounds = problem.prompt_tokens, problem.rounds
    by_length = np.argsort(-spans.rounds, kind="stable")
    offered = np.repeat(by_length, used[by_length])[: len(problem)]
    span = np.empty(len(problem), dtype=np.int64)
    span[np.argsort(-rounds, kind="stable")] = offered
    room, stage = spans.rounds[span], spans.first[span]
    tokens = np.bincount(stage, weights=prompt, minlength=len(times) - 1).astype(np.int64)
    rng, kicks = np.random.default_rng(0), 0
    for _ in range(4 * len(problem)):
        heaviest_first = np.argsort(-tokens, kind="stable")
        if tokens[heaviest_first[0]] <= cap:
            return stage
        for heavy in heaviest_first[:TRIED]:
            own = np.flatnonzero(stage == heavy)
            if not len(own):
                return None
            fits = (rounds[own][:, None] <= room) & (rounds <= room[own][:, None])
            moved = prompt[own][:, None] - prompt
            # Half of what the swap takes off the sum of the squared tokens.
            gain = np.where(fits, moved * (tokens[heavy] - tokens[stage] - moved), 0)
            best = int(np.argmax(gain))
            if gain.flat[best] > 0:
                break
        else:
            own = np.flatnonzero(stage == heaviest_first[0])
            fits = (rounds[own][:, None] <= room) & (rounds <= room[own][:, None])
            others = np.flatnonzero(fits & (stage != heaviest_first[0]))
            kicks += 1
            if kicks > KICKS or not len(others):
                return None
            best = int(rng.choice(others))
        i, j = int(own[best // len(problem)]), best % len(problem)
        change = int(prompt[i] - prompt[j])
        tokens[stage[i]] -= change
        tokens[stage[j]] += change
        stage[i], stage[j] = stage[j], stage[i]
        room[i], room[j] = room[j], room[i]
    return None
