"""Bounds of an engine that computes a common beginning once.

A path is the prompt of a turn with those of its tokens that decode steps feed to the model: all but the last.
The engine may keep the KV cache of every path, between turns and requests, in whole or in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.bound import Bound
from ...data.problem import Problem
from ...data.workload import Turns, Workload
from .makespan import best_bound
from .prove import evicting_bound

Path = Sequence[int]


def turns_bound(problem: Problem, paths: Sequence[Path], turns: Turns | None = None) -> Bound:
    """Bound a job by counts, and by its longest conversation.

    problem: Turns at their actual lengths. Its limits of memory and of stages are not used.
    paths: Path of each turn.
    turns: Order of turns within conversations, or None without conversations.
    """
    ordered = _Ordered(problem.prompt_tokens, paths)
    apart = counted_bound(problem, ordered.least_tokens())
    if turns is None:
        return apart
    alone = longest_conversation(problem, turns, ordered.own_tokens(turns))
    return max(apart, alone, key=lambda bound: bound.seconds)


def longest_conversation(problem: Problem, turns: Turns, own_tokens: IntArray) -> Bound:
    """Return the seconds of the longest conversation on its own engine.

    Each turn has a prefill stage of at least its own tokens. Its decode steps follow one another, with at
    least its own KV cache. Between turns lie the pauses.
    """
    cost, steps = problem.cost, problem.decode_steps
    held = steps * problem.kv_at_start + steps * (steps - 1) // 2
    alone: FloatArray = cost.prefill_seconds(own_tokens)
    alone = alone + steps * cost.decode_seconds(1) + cost.decode_per_kv_token * held
    end = np.zeros(len(problem))
    arrival = problem.workload.arrival
    for turn, before in enumerate(turns.after.tolist()):
        begin = arrival[turn] if before < 0 else max(arrival[turn], end[before]) + turns.pause[turn]
        end[turn] = begin + alone[turn]
    last = int(end.argmax())
    chain = [last]
    while turns.after[chain[-1]] >= 0:
        chain.append(int(turns.after[chain[-1]]))
    waited = float(turns.pause[chain].sum())
    terms = {"turns": float(end[last]) - waited, "tools": waited}
    certificate = {"kind": "longest conversation", "turns": chain[::-1]}
    return Bound(float(end[last]), "longest conversation", terms, certificate)


def counted_bound(problem: Problem, tokens: int, *, evictions: bool = False) -> Bound:
    """Return the bound of counts if all prefill stages compute some tokens.

    evictions: Bound schedules that evict requests as well; their stages compute more.
    The tokens are spread evenly over the requests, as no other stages of so many tokens cost less. Reads of
    KV cache count whole prompts.
    """
    share, rest = divmod(tokens, len(problem))
    even = share + (np.arange(len(problem)) < rest)
    spread = replace(
        problem,
        workload=Workload(problem.workload.ids, even, problem.workload.output_tokens),
        kv_capacity=None,
        prefill_token_cap=None,
        max_position=None,
        prefix_cache=0,
    )
    bound = evicting_bound(spread) if evictions else best_bound(spread)
    reads = problem.cost.decode_per_kv_token * problem.kv_token_steps
    terms = {**bound.terms, "KV reads": reads}
    certificate = {"kind": "common beginnings", "prompt_tokens": tokens, "counts": bound.certificate}
    return Bound(sum(terms.values()), f"{bound.source}, common beginnings once", terms, certificate)


class _Ordered:
    """Paths in lexical order, with the common beginning of neighbours.

    Shapes: prompt, length, common (requests,); common[0] is 0.
    """

    def __init__(self, prompt_tokens: IntArray, paths: Sequence[Path]) -> None:
        rows = [np.asarray(path, dtype=np.int64) for path in paths]
        # With the most significant byte first, bytes sort as their numbers.
        keys = [row.astype(">i8").tobytes() for row in rows]
        self.order = sorted(range(len(rows)), key=keys.__getitem__)
        self.prompt = np.asarray(prompt_tokens)[self.order].tolist()
        self.length = [len(rows[i]) for i in self.order]
        self.common = [0, *(_common(rows[a], rows[b]) for a, b in pairwise(self.order))]

    def least_tokens(self) -> int:
        """Return the fewest prompt tokens of all stages together.

        Each request computes its last prompt token. Of the other beginnings, stages compute those that lie
        within every prompt whose path has them; decode steps may have computed the rest.
        """
        total, count = len(self.order), len(self.order)
        for first, (begin, end) in enumerate(zip(self.common, self.length, strict=True)):
            # The path adds the beginnings of lengths from begin + 1 to end; long ones are in fewer paths.
            after, shortest = first, np.inf
            while end > begin:
                shortest = min(shortest, self.prompt[after])
                after += 1
                within = max(begin, self.common[after]) if after < count else begin
                if within < end:
                    total += max(0, int(min(end, shortest - 1)) - within)
                    end = within
        return total

    def own_tokens(self, turns: Turns) -> IntArray:
        """Return the least tokens of each turn's stage, by turn.

        These are in no path of another conversation, nor of an earlier turn; at least the last one.
        """
        conversation = np.arange(len(self.order))
        length = np.empty(len(self.order), dtype=np.int64)
        length[self.order] = self.length
        for turn, before in enumerate(turns.after.tolist()):
            conversation[turn] = turn if before < 0 else conversation[before]
        known = np.where(turns.first, 0, length[turns.after])
        label = conversation[self.order].tolist()
        for order, labels, common in (
            (self.order, label, self.common),
            (self.order[::-1], label[::-1], [0, *self.common[:0:-1]]),
        ):
            shared = 0
            for at, turn in enumerate(order):
                same = at > 0 and labels[at - 1] == labels[at]
                shared = min(shared, common[at]) if same else common[at]
                known[turn] = max(known[turn], shared)
        prompt = np.empty(len(self.order), dtype=np.int64)
        prompt[self.order] = self.prompt
        own: IntArray = np.maximum(1, prompt - known)
        return own


def _common(one: IntArray, other: IntArray) -> int:
    least = min(len(one), len(other))
    differ = np.flatnonzero(one[:least] != other[:least])
    return int(differ[0]) if differ.size else least
