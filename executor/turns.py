"""Finished turns of completions, as requests of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.arrays import IntArray
from ..data.prefix_tree import PrefixTree
from ..data.problem import Problem
from ..data.trace import DISTINCT, Trace
from ..data.workload import Turns, Workload
from ..heuristics.loop import Execution

NextTurn = Callable[[int, tuple[int, ...]], "Future[Sequence[int]] | None"]
"""Function of a prompt's position and an ended turn.

It returns the tokens to append, or None.
"""

_OF_TRACE = ("stage_of", "slot_of", "queued", "prefilled", "first_token", "finished", "tokens")


@dataclass(frozen=True, slots=True)
class Turn:
    """Finished turn: its stage, its tokens, and those before."""

    request: int
    before: int
    tokens: int
    queued: float
    stage_of: int
    slot_of: int
    prefilled: float
    first_token: float
    finished: float


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Finished turns of a call.

    paths: Tokens of each turn that the model was fed: its prompt and its completion without the last token.
    turns: Order of the turns; None if no tool returned.
    """

    problem: Problem
    trace: Trace
    paths: list[tuple[int, ...]]
    turns: Turns | None = None


def served_turns(
    ended: Sequence[Turn],
    problem: Problem,
    run: Execution,
    prompts: Sequence[tuple[int, ...]],
    answers: Sequence[Sequence[int]],
) -> Served | None:
    """Return what has run, with a request for each turn; None if nothing has."""
    rows = sorted(ended, key=lambda turn: turn.request)
    if not rows:
        return None
    request = np.array([turn.request for turn in rows])
    first = np.append(True, request[1:] != request[:-1])
    after = np.where(first, -1, np.arange(len(rows)) - 1)
    columns: dict[str, Any] = {name: np.array([getattr(turn, name) for turn in rows]) for name in _OF_TRACE}
    workload, several = problem.workload, not first.all()
    names = [
        name if begins else f"{name}@{row}"
        for row, (name, begins) in enumerate(zip(workload.ids[request].tolist(), first, strict=True))
    ]
    partly = several or len(rows) < len(problem)
    turns = Workload(
        np.array(names, dtype=np.object_),
        np.array([len(prompts[turn.request]) + turn.before for turn in rows]),
        columns["tokens"] if partly else workload.output_tokens[request],
        group=np.where(first, workload.group[request], -1),
    )
    if workload.tree is not None:
        turns = turns.with_tree(_of_first_turns(workload.tree, request, first, turns.input_tokens))
    ran = run.trace(request)
    engine = dict(ran.engine)
    if DISTINCT in engine and partly:
        # The engine counts the prompts of all requests; a turn computes a token at least.
        engine[DISTINCT] = len(rows)
    pause = np.where(first, 0.0, np.maximum(0.0, columns["queued"] - columns["finished"][after]))
    paths = [
        (*prompts[turn.request], *answers[turn.request][: turn.before + turn.tokens - 1]) for turn in rows
    ]
    return Served(
        replace(problem, workload=turns),
        replace(ran, engine=engine, ids=tuple(names), **columns),
        paths,
        Turns(after, pause) if several else None,
    )


def _of_first_turns(
    tree: PrefixTree, request: IntArray, first: npt.NDArray[np.bool_], prompt: IntArray
) -> PrefixTree:
    """Return what the prompts of first turns share; later ones continue conversations.

    Shapes: request, first and prompt (turns,).
    """
    leaf = np.where(first, tree.leaf[request], -1)
    own = np.where(first, tree.own[request], prompt)
    return PrefixTree(tree.parent, tree.tokens, leaf, own).select(np.arange(len(request)))
