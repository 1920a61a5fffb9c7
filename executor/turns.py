"""Conversations of a call, with tools between turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import cast

import numpy as np

from ..data.problem import Problem
from ..data.trace import DISTINCT, Trace
from ..data.workload import Turns, Workload
from ..heuristics.loop import Execution
from ..heuristics.queues.queue_policy import QueuedPolicy
from .call import Call
from .engines.huggingface import HuggingFaceEngine

NextTurn = Callable[[int, tuple[int, ...]], "Future[Sequence[int]] | None"]
"""Function of a prompt's position and an ended turn.

It returns the tokens to append, or None.
"""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Finished turn: its stage, its tokens, and those before."""

    request: int
    stage_of: int
    slot_of: int
    queued: float
    prefilled: float
    first_token: float
    finished: float
    before: int
    tokens: int


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


class Conversations:
    """Turns of the completions of one call.

    next_turn: Function that continues a completion; None if there are no tools.
    call: Prompts, and most tokens of each completion, tool results included.
    """

    def __init__(
        self, execution: Execution, engine: HuggingFaceEngine, next_turn: NextTurn | None, call: Call
    ) -> None:
        self._execution, self._engine = execution, engine
        self._next_turn, self._call = next_turn, call
        self._asked: dict[int, tuple[Future[Sequence[int]], float]] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._ended: list[_Turn] = []
        # Time and tokens at the begin of each completion's turn.
        self._begins: list[tuple[float, int]] = []
        self._over: list[int] = []
        self.extend()
        self.given: dict[int, tuple[range, ...]] = {}
        """Index ranges of the tool results in each completion."""

    def waits(self, request: int) -> bool:
        """Return whether a completion waits for its tool."""
        return request in self._asked

    @property
    def pending(self) -> bool:
        """True while a completion waits for its tool."""
        return bool(self._asked)

    def ended(self, most: int) -> Iterator[int]:
        """Run some decode steps; yield finished completions."""
        if not self._execution.idle:
            yield from (request for request in self._execution.step(most) if not self._continues(request))

    def extend(self) -> None:
        """Note the completions that were added to the engine."""
        new = range(len(self._begins), len(self._engine.answers))
        time = self._engine.time if new.start else 0.0
        self._begins += [(time, len(self._engine.answers[at])) for at in new]
        for request in new:
            left = self._call.partial[request]
            if left is not None and left.waiting:
                self._ask_again(request)

    def _ask_again(self, request: int) -> None:
        """Call the tool of a continued completion, which waits meanwhile."""
        run = self._execution
        run.admit()
        run.state.waiting[request] = False
        cast("QueuedPolicy", run.policy).queue.take([request])
        if not self._asks(request, run.engine.time):
            run.end(request, run.engine.time)
            self._over.append(request)

    def stop(self, requests: Sequence[int]) -> None:
        """End completions that run, wait, or wait for a tool."""
        for request in self._execution.stop(requests):
            self._keep(request)
            self._engine.drop(request)
        for request in requests:
            self._asked.pop(request, None)

    def restart(self) -> None:
        """Let running completions continue by changed weights, with a new KV cache."""
        running = self._execution.stop(self._execution.state.running.tolist())
        self._engine.reload_weights()
        self._engine.recompute()
        for request in running:
            self._keep(request)
            self._resume(request, [])

    def _continues(self, request: int) -> bool:
        self._keep(request)
        if self._next_turn is None:
            return False
        if not self._asks(request, float(self._execution.finished[request])):
            self._engine.end_turns(request)
            return False
        self._execution.pause(request)
        return True

    def _asks(self, request: int, since: float) -> bool:
        """Call the tool of an ended turn; return False if there is none."""
        if self._next_turn is None:
            raise ValueError("an unfinished completion waits for its tool: continue it with next_turn")
        position, tokens = int(self._call.position[request]), tuple(self._engine.answers[request])
        future = self._next_turn(position, tokens)
        if future is not None:
            self._asked[request] = future, since
            future.add_done_callback(lambda _: self._answered.put(request))
        return future is not None

    def _resume(self, request: int, tokens: list[int]) -> None:
        """Let a completion continue after some more tokens."""
        self._begins[request] = self._engine.time, len(self._engine.answers[request]) + len(tokens)
        self._engine.give(request, tokens)
        cast("QueuedPolicy", self._execution.policy).queue.put_back([request])
        # The turn before drew its last token without a decode step.
        before = self._execution.stage_of[request] >= 0
        self._execution.resume(request, len(tokens) + int(before))

    def answered(self, *, wait: bool) -> list[int]:
        """Continue completions with finished tool calls; return ended ones."""
        over, self._over, run = self._over, [], self._execution
        while self._asked:
            try:
                request = self._answered.get(block=wait)
            except Empty:
                break
            wait = False
            if request not in self._asked:
                continue
            future, since = self._asked.pop(request)
            tokens = list(future.result())
            written = len(self._engine.answers[request])
            most = int(self._call.most[request])
            left = most - written - len(tokens)
            if left < 0:
                raise ValueError(
                    f"completion {request} has {written} of {most} tokens, and a tool returned"
                    f" {len(tokens)} more: return at most {most - written}"
                )
            if not tokens:
                over.append(request)
                run.end(request, since)
                self._engine.end_turns(request)
                continue
            self.given[request] = (*self.given.get(request, ()), range(written, written + len(tokens)))
            if left:
                self._resume(request, tokens)
                continue
            self._engine.give(request, tokens)
            over.append(request)
            run.end(request, since)
            self._engine.end_turns(request)
        return over

    def served(self, problem: Problem, prompts: Sequence[tuple[int, ...]]) -> Served | None:
        """Return what has run of the call, with a request for each turn; None if nothing has.

        Running turns count as ended now.
        """
        run = self._execution
        for request in run.state.running.tolist():
            if np.isfinite(run.prefilled[request]):
                run.finished[request] = self._engine.time
                self._keep(request)
        rows = sorted(self._ended, key=lambda turn: turn.request)
        if not rows:
            return None
        request = np.array([turn.request for turn in rows])
        first = np.append(True, request[1:] != request[:-1])
        after = np.where(first, -1, np.arange(len(rows)) - 1)
        workload, usual = problem.workload, problem.workload.ids[request].tolist()
        names = [
            name if begins else f"{name}@{row}"
            for row, (name, begins) in enumerate(zip(usual, first, strict=True))
        ]
        tokens = np.array([turn.tokens for turn in rows])
        several = not first.all()
        queued = np.array([turn.queued for turn in rows])
        finished = np.array([turn.finished for turn in rows])
        planned = tokens if several or len(rows) < len(problem) else workload.output_tokens[request]
        turns = Workload(
            np.array(names, dtype=np.object_),
            np.array([len(prompts[turn.request]) + turn.before for turn in rows]),
            planned,
            group=np.where(first, workload.group[request], -1),
            shared_tokens=np.where(first, workload.shared_tokens[request], 0),
        )
        ran = run.trace(request)
        engine = dict(ran.engine)
        if DISTINCT in engine and (several or len(rows) < len(problem)):
            # The engine counts the prompts of all requests; a turn computes a token at least.
            engine[DISTINCT] = len(rows)
        told = replace(
            ran,
            engine=engine,
            ids=tuple(names),
            stage_of=np.array([turn.stage_of for turn in rows]),
            slot_of=np.array([turn.slot_of for turn in rows]),
            queued=queued,
            prefilled=np.array([turn.prefilled for turn in rows]),
            first_token=np.array([turn.first_token for turn in rows]),
            finished=finished,
            tokens=tokens,
        )
        pause = np.where(first, 0.0, np.maximum(0.0, queued - finished[after]))
        paths = [
            (*prompts[turn.request], *self._engine.answers[turn.request][: turn.before + turn.tokens - 1])
            for turn in rows
        ]
        order = Turns(after, pause) if several else None
        return Served(replace(problem, workload=turns), told, paths, order)

    def _keep(self, request: int) -> None:
        """Record the turn that has just ended."""
        run, (queued, before) = self._execution, self._begins[request]
        self._ended.append(
            _Turn(
                request,
                int(run.stage_of[request]),
                int(run.slot_of[request]),
                queued,
                float(run.prefilled[request]),
                float(run.first_token[request]),
                float(run.finished[request]),
                before,
                len(self._engine.answers[request]) - before,
            )
        )
