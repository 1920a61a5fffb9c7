"""Single requests of many tasks, on one running engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from ..data.readers.sampling import Sampling
from .completion import Completion
from .llm import LLM
from .models.wrapped import copy_weights
from .partial import Partial
from .rollout import seed_of_call


class Gathering:
    """Engine for single requests, as verl's and OpenRLHF's servers send them.

    A request joins those that run as soon as a slot is free. Waiting requests with equal beginnings share
    their computation.

    engine: Engine that serves the requests, in a thread.
    seed: Seed of the first request; every request draws from its own stream.
    seconds: Seconds of decoding so far.
    """

    def __init__(self, engine: LLM, *, seed: int = 0) -> None:
        self.engine = engine
        self._seed, self._requests = seed, count()
        self._rollouts = engine.start()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._one_at_a_time, self._open = asyncio.Lock(), asyncio.Event()
        self._open.set()
        self.seconds = 0.0

    @property
    def unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._waiting)

    async def complete(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Completion:
        """Return a completion of a prompt; a cancelled task ends its request."""
        seed = seed_of_call(sampling.get("seed") or self._seed, 0, 0, next(self._requests))
        asked = Sampling(**{**sampling, "seed": seed})
        if asked.n != 1:
            raise ValueError("n is more than 1: send a request for each completion")
        loop = asyncio.get_running_loop()
        (number,) = self._rollouts.submit([tuple(prompt)], asked, max_tokens=max_tokens)
        waiting: asyncio.Future[Completion] = loop.create_future()
        self._waiting[number] = waiting
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve())
        try:
            return await waiting
        except asyncio.CancelledError:
            self._rollouts.cancel(number)
            raise
        finally:
            if self._waiting.get(number) is waiting:
                del self._waiting[number]

    async def pause(self) -> None:
        """Stop decoding until :meth:`resume`; running requests continue then."""
        self._open.clear()
        async with self._one_at_a_time:
            pass

    def resume(self) -> None:
        """Resume after :meth:`pause`."""
        self._open.set()

    async def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load weights; running requests continue with these, and a new KV cache."""
        async with self._one_at_a_time:
            copy_weights(self.engine.model, weights)

    async def close(self) -> tuple[Partial, ...]:
        """End all requests; return those that had not ended."""
        async with self._one_at_a_time:
            if self._serving is not None:
                self._serving.cancel()
                await asyncio.gather(self._serving, return_exceptions=True)
            self._rollouts.close()
        return self._rollouts.unfinished

    async def _serve(self) -> None:
        while self._waiting:
            await self._open.wait()
            async with self._one_at_a_time:
                begun = time.perf_counter()
                try:
                    done = await asyncio.to_thread(self._rollouts.step)
                except Exception as error:
                    self._rollouts = self.engine.start()
                    for failed in self._waiting.values():
                        if not failed.done():
                            failed.set_exception(error)
                    return
                self.seconds += time.perf_counter() - begun
            for completion in done:
                waiting = self._waiting.get(completion.index)
                if waiting is not None and not waiting.done():
                    waiting.set_result(completion)
            # Let the tasks of completed requests send their next ones.
            await asyncio.sleep(0)
