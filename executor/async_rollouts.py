"""Rollouts of TRL's asynchronous trainer, on a running engine of the same process."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import queue
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from multiprocessing import Value
from threading import Event, Thread
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    TurnRecord,
    _AsyncRolloutLoop,
    _chain_to_sequences,
)

from .completion import Completion
from .gathering import Gathering
from .llm import LLM
from .models.source import position_limit
from .models.tokenizers import end_tokens
from .models.wrapped import unwrapped
from .partial import Partial
from .rollout import dictionary, trainers_settings
from .rollout_files import RolloutFiles

_OF_CONFIG = (
    *("num_generations", "max_tool_calling_iterations", "fork_threshold_tokens"),
    *("log_completions", "num_completions_to_print"),
)
"""Settings with equal names in TRL's configuration and its loop."""


class _Buffer(queue.Queue[Any]):
    """Samples for the trainer; notes which groups it has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: set[int] = set()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        sample = super().get(block, timeout)
        self.taken.add(sample.group_id)
        return sample


class _Loop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's loop of tools, environments and rewards, with an engine in place of its server.

    gathering: Engine of the completions.
    sampling: Fields of ``Sampling``.
    ahead: Most prompts that run or wait for the trainer.
    """

    def __init__(self, gathering: Gathering, sampling: Mapping[str, Any], ahead: int, **how: Any) -> None:
        super().__init__(**how)
        self._gathering, self._sampling, self._ahead = gathering, sampling, ahead
        self._positions = position_limit(unwrapped(gathering.engine.model).config) or math.inf
        self._begun: dict[int, int] = {}
        self.drawn: list[Completion | Partial] = []

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        loops = [
            asyncio.create_task(run(stop_event=stop_event)) for run in (self._generate_loop, self._score_loop)
        ]
        stopped = asyncio.create_task(stop_event.wait())
        await asyncio.wait([*loops, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in (*loops, stopped):
            task.cancel()
        outcomes = await asyncio.gather(*loops, return_exceptions=True)
        self.drawn += await self._gathering.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _generate_one(
        self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0
    ) -> tuple[Any, list[int], list[Any], int, int, None]:
        while group_id >= len(self.rollout_buffer.taken) + self._ahead:
            await asyncio.sleep(0.01)
        self._begun.setdefault(group_id, self.model_version)
        if tools:
            return await super()._generate_one(prompt, tool_dict, tools, group_id)  # type: ignore[no-any-return]
        # TRL's loop takes chats only, and parses replies of known chat templates only.
        begun = time.monotonic()
        (ids,) = self._gathering.engine.encoded([prompt], self.chat_template_kwargs)
        answer, values = await self._generate_one_turn(ids)
        rows, tally = _chain_to_sequences([TurnRecord(list(ids), answer, values)], str(group_id), 0)
        counts = {"turns": 1, "sequences": len(rows), "completion_ids": answer, "tally": tally}
        self._push_rollout_metrics(**counts, loop_exhausted=False, duration_s=time.monotonic() - begun)
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        return completion, answer, rows, 0, 0, None

    async def _generate_one_turn(self, prompt_ids: Sequence[int]) -> tuple[list[int], list[float]]:
        most = int(min(self.max_tokens, self._positions - len(prompt_ids)))
        completion = await self._gathering.complete(prompt_ids, most, **self._sampling)
        self.drawn.append(completion)
        return list(completion.completion_ids), list(completion.log_probabilities or ())

    async def _score_group(self, group: Any) -> list[Any]:
        samples: list[Any] = await super()._score_group(group)
        # TRL labels a prompt before it waits for its turn.
        version = self._begun.pop(group.group_id)
        for sample in samples:
            sample.model_version = version
        if not samples:
            self.rollout_buffer.taken.add(group.group_id)
        return samples


class AsyncRollouts(AsyncRolloutWorker):  # type: ignore[misc]
    """Rollout worker and weight transfer of TRL's ``AsyncGRPOTrainer``, in place of its vLLM server.

    Give it to the trainer as ``rollout_worker`` and as ``weight_transfer``. TRL's own loop runs tools,
    environments and rewards, in a thread. New weights take over in flight. A group is labelled with the
    weights that began it, and the trainer drops it beyond its ``max_staleness``.

    Parameters
    ----------
    engine
        Engine with a model of its own, equal to the trainer's.
    rows
        Rows of the data set: ``prompt``, and columns for the rewards. They are read again and again.
    rewards
        Reward functions, whose rewards are added.
    config
        The trainer's ``AsyncGRPOConfig``: sampling, lengths, generations of a prompt, staleness, seed. Its
        ``max_inflight_tasks`` decode or wait for the trainer; more keep slots full, and get older.
    tools, environment_factory
        As for the trainer, which does not hand them on.
    log
        Table of the lengths, as of :func:`rollout_function`; a step is the time between two weights.
    """

    def __init__(
        self,
        engine: LLM,
        rows: Iterable[Mapping[str, Any]],
        rewards: Callable[..., Any] | Sequence[Callable[..., Any]],
        config: Any,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        sampling, longest = trainers_settings(config)
        size = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
        most = config.max_inflight_tasks
        # The trainer's own default.
        most = max(config.max_staleness, 1) * size if most < 0 else most
        ahead = math.ceil(most / config.num_generations)
        self.rollout_buffer, self.metrics_queue = _Buffer(), queue.Queue[Any]()
        self._model_version_value, self._heartbeat_value = Value("i", 0), Value("d", math.inf)
        self._failed_event, self._exception_info_queue = Event(), queue.Queue[Any]()
        self._gathering, self._rows = Gathering(engine), list(rows)
        tokenizer: Any = copy.copy(getattr(engine.tokenizer, "transformers", engine.tokenizer))
        if not (tools or environment_factory):
            # Nothing is parsed then, and TRL refuses most chat templates.
            tokenizer.response_template = ""
        self._rollouts = _Loop(
            self._gathering,
            {**sampling, "logprobs": 0, "logprobs_mode": "temperature"},
            ahead,
            model_name="",
            dataset=self._rows,
            reward_funcs=[rewards] if callable(rewards) else list(rewards),
            processing_class=tokenizer,
            eos_token_ids=sorted(end_tokens(engine.model, engine.tokenizer)),
            rollout_buffer=self.rollout_buffer,
            model_version_value=self._model_version_value,
            heartbeat_value=self._heartbeat_value,
            failed_event=self._failed_event,
            exception_info_queue=self._exception_info_queue,
            metrics_queue=self.metrics_queue,
            tools=list(tools or ()),
            environment_factory=environment_factory,
            max_inflight_tasks=ahead * config.num_generations,
            max_tokens=longest,
            chat_template_kwargs=dictionary(config.chat_template_kwargs),
            **{name: getattr(config, name) for name in _OF_CONFIG},
        )
        self._files, self._logged, self._decoded = RolloutFiles(None, log), time.perf_counter(), 0.0
        # The trainer keeps the row that a resumed training begins with here.
        self._loop_kwargs: dict[str, Any] = {"dataset_start_index": 0}
        self._thread: Thread | None = None

    def init_weight_transfer(self) -> None:
        """Do nothing: the weights stay in this process."""

    def pause(self) -> None:
        """Stop decoding until :meth:`resume`."""
        self._wait_for(self._gathering.pause())

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Copy the trainer's weights."""
        self._wait_for(self._gathering.load(iterator))

    def resume(self) -> None:
        """Draw further tokens by the new weights."""
        self._write_step()
        self._gathering.resume()

    def destroy(self) -> None:
        """Do nothing: :meth:`stop` ends the engine."""

    def start(self) -> None:
        """Begin to decode, in a thread."""
        first = self._loop_kwargs["dataset_start_index"] % len(self._rows)
        self._rollouts.dataset = self._rows[first:] + self._rows[:first]
        self._rollouts._dataset_iter = iter(self._rollouts.dataset)
        self._heartbeat_value.value = time.time()
        self._thread = Thread(target=self._rollouts.run, daemon=True, name="batchbound-rollouts")
        self._thread.start()

    def stop(self) -> None:
        """End all completions; :attr:`LLM.unfinished` holds them."""
        if self._thread is not None:
            loop = self._rollouts._loop
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._rollouts._stop_event.set)
            self._thread.join()
            self._thread = None
            self._write_step()

    def _wait_for(self, task: Coroutine[Any, Any, None]) -> None:
        if self._thread is None:
            asyncio.run(task)
            return
        future = asyncio.run_coroutine_threadsafe(task, self._rollouts._loop)
        while not wait([future], timeout=1.0).done:
            self.check_health(math.inf)
        future.result()

    def _write_step(self) -> None:
        """Add the completions that ended by the weights so far to the log."""
        drawn, self._rollouts.drawn = self._rollouts.drawn, []
        if drawn:
            now, decoded = time.perf_counter(), self._gathering.seconds
            seconds = decoded - self._decoded
            self._files.write_step(drawn, seconds, now - self._logged - seconds)
            self._logged, self._decoded = now, decoded
