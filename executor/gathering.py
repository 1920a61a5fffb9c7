"""Single requests of many tasks, gathered into calls of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..data.readers.sampling import Sampling
from .completion import Completion
from .llm import LLM
from .models.wrapped import unwrapped
from .rollout import seed_of_call

QUIET_SECONDS = 0.05
"""Seconds without a new request before a call begins."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request, and the future of its completion."""

    prompt: tuple[int, ...]
    max_tokens: int
    fields: dict[str, Any]
    answer: asyncio.Future[Completion]


class Gathering:
    """Engine for single requests, as verl's and OpenRLHF's servers send them.

    Requests that arrive during a call wait for its end. Requests with the same prompt share its computation.

    engine: Engine that serves the calls in turn, in its own thread.
    seed: Seed of the first call; every call draws from its own streams.
    quiet_seconds: Seconds without a new request before a call begins.
    """

    def __init__(self, engine: LLM, *, seed: int = 0, quiet_seconds: float = QUIET_SECONDS) -> None:
        self.engine = engine
        self._seed, self._quiet, self._calls = seed, quiet_seconds, count()
        self._waiting: list[_Waiting] = []
        self._unfinished = 0
        self._serving: asyncio.Task[None] | None = None
        self._one_at_a_time, self._open = asyncio.Lock(), asyncio.Event()
        self._open.set()

    @property
    def unfinished(self) -> int:
        """Number of requests that wait or run."""
        return self._unfinished

    async def complete(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Completion:
        """Return a completion of a prompt."""
        if Sampling(**sampling).n != 1:
            raise ValueError("n is more than 1: send a request for each completion")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(tuple(prompt), max_tokens, sampling, loop.create_future())
        self._waiting.append(waiting)
        self._unfinished += 1
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve())
        try:
            return await waiting.answer
        finally:
            self._unfinished -= 1

    async def pause(self) -> None:
        """Wait for the running call; start no other before :meth:`resume`."""
        self._open.clear()
        async with self._one_at_a_time:
            pass

    def resume(self) -> None:
        """Resume after :meth:`pause`."""
        self._open.set()

    async def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load weights once no call runs."""
        async with self._one_at_a_time:
            own = unwrapped(self.engine.model).state_dict()
            for name, weight in weights:
                if name not in own or own[name].shape != weight.shape:
                    raise ValueError(f"the model has no weight {name!r} of the shape {tuple(weight.shape)}")
                own[name].copy_(weight)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            came = 0
            while came < len(self._waiting):
                came = len(self._waiting)
                await asyncio.sleep(self._quiet)
            await self._open.wait()
            async with self._one_at_a_time:
                if not self._open.is_set():
                    continue
                called, self._waiting = self._waiting, []
                first: dict[tuple[int, ...], int] = {}
                for at, one in enumerate(called):
                    first.setdefault(one.prompt, at)
                called.sort(key=lambda one: first[one.prompt])
                await asyncio.to_thread(self._call, called, loop)

    def _call(self, called: Sequence[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        seed = seed_of_call(self._seed, 0, 0, next(self._calls))
        try:
            for completion in self.engine.generate(
                [one.prompt for one in called],
                [Sampling(**{"seed": seed, **one.fields}) for one in called],
                max_tokens=[one.max_tokens for one in called],
            ):
                loop.call_soon_threadsafe(_settle, called[completion.index].answer, completion)
        except Exception as error:
            for one in called:
                loop.call_soon_threadsafe(_settle, one.answer, error)


def _settle(answer: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    """Set a future's result unless it is done or cancelled."""
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
