"""Rollouts of TRL's asynchronous trainer, on a running engine of the same process."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from threading import Event, Lock, Thread
from typing import Any

import numpy as np

from .completion import Completion
from .llm import LLM
from .models.wrapped import copy_weights
from .partial import Partial
from .rollout_files import RolloutFiles

Reward = Callable[..., Sequence[float | None]]
"""Reward function in TRL's form, of keyword arguments ``prompts``, ``completions`` and columns."""


class AsyncRollouts:
    """Rollout worker and weight transfer of TRL's ``AsyncGRPOTrainer``, in place of its vLLM server.

    Give it to the trainer as ``rollout_worker`` and as ``weight_transfer``. A thread decodes while another
    trains; new weights take over in flight. A group is labelled with the oldest weights that drew a token.

    Parameters
    ----------
    engine
        Engine with a model of its own, equal to the trainer's.
    rows
        Rows of the data set: ``prompt``, and columns for the rewards. They are read again and again.
    rewards
        Reward functions, whose rewards are added.
    num_generations
        Completions of a prompt.
    max_staleness
        The trainer's ``max_staleness``. A group with older tokens begins again.
    ahead
        Most prompts that decode or wait for the trainer. More keep slots full, and get older.
    log
        Table of the lengths, as of :func:`rollout_function`; a step is the time between two weights.
    max_tokens, chat_options, **sampling
        As for :meth:`LLM.generate`.

    Tools cannot be called. A resumed training begins with the first row.
    """

    def __init__(
        self,
        engine: LLM,
        rows: Iterable[Mapping[str, Any]],
        rewards: Reward | Sequence[Reward],
        *,
        num_generations: int = 8,
        max_staleness: int = 1,
        ahead: int = 8,
        log: str | os.PathLike[str] | None = None,
        chat_options: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._engine, self._rows = engine, cycle(list(rows))
        self._rewards = [rewards] if callable(rewards) else list(rewards)
        self._ahead, self._how = ahead, {"temperature": 1.0, **sampling, "n": num_generations}
        self._rollouts = engine.start(
            log_probabilities="temperature", chat_options=chat_options, max_staleness=max_staleness
        )
        self._row_of: dict[int, Mapping[str, Any]] = {}
        self._files = RolloutFiles(None, log)
        self._drawn: list[Completion | Partial] = []
        self._decoding, self._logged = 0.0, time.perf_counter()
        self._version_of: dict[int, int] = {}
        self._open, self._closed, self._stepping = Event(), Event(), Lock()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def init_weight_transfer(self) -> None:
        """Do nothing: the weights stay in this process."""

    def pause(self) -> None:
        """Stop decoding until the next version of the weights."""
        self._open.clear()
        with self._stepping:
            pass

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Copy the trainer's weights."""
        copy_weights(self._engine.model, iterator)

    def resume(self) -> None:
        """Wait for :meth:`update_model_version`, which tells the number of these weights."""

    def destroy(self) -> None:
        """Do nothing: :meth:`stop` ends the engine."""

    def update_model_version(self, model_version: int) -> None:
        """Draw further tokens by the present weights, the trainer's of this number."""
        self._write_step()
        self._rollouts.weights_changed()
        self._version_of[self._rollouts.version] = model_version
        self._open.set()

    def start(self) -> None:
        """Begin to decode, in a thread."""
        if not self._version_of:
            self.update_model_version(0)
        self._thread = Thread(target=self._run, daemon=True, name="batchbound-rollouts")
        self._thread.start()

    def stop(self) -> None:
        """End all completions; :attr:`LLM.unfinished` holds them."""
        self._closed.set()
        self._open.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._rollouts.close()
            self._drawn += [*self._rollouts.parts, *self._rollouts.unfinished]
            self._write_step()

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if decoding has failed."""
        if self._error is not None:
            raise RuntimeError(f"rollouts failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._open.wait()
                with self._stepping:
                    if self._open.is_set():
                        self._step()
                if self._rollouts.idle:
                    # The trainer has enough groups.
                    self._closed.wait(0.01)
        except Exception as error:
            self._error = error

    def _write_step(self) -> None:
        """Add the groups that ended by the weights so far to the log."""
        if self._drawn:
            now = time.perf_counter()
            self._files.write_step(self._drawn, self._decoding, now - self._logged - self._decoding)
            self._drawn, self._decoding, self._logged = [], 0.0, now

    def _step(self) -> None:
        begun = time.perf_counter()
        waiting = -(-self.rollout_buffer.qsize() // self._how["n"])
        while len(self._row_of) + waiting < self._ahead:
            row = next(self._rows)
            (number,) = self._rollouts.submit([row["prompt"]], **self._how)
            self._row_of[number] = row
        groups = self._rollouts.step_groups()
        self._decoding += time.perf_counter() - begun
        for group in groups:
            self._drawn += group
            for sample in self._samples(self._row_of.pop(group[0].index), group):
                self.rollout_buffer.put(sample)

    def _samples(self, row: Mapping[str, Any], group: Sequence[Completion]) -> list[Any]:
        """Return a group in the trainer's form, with rewards and advantages."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        prompt, chat = row["prompt"], not isinstance(row["prompt"], str)
        answers = [
            [{"role": "assistant", "content": completion.text}] if chat else completion.text
            for completion in group
        ]
        columns = {name: [value] * len(group) for name, value in row.items() if name != "prompt"}
        ids = [list(completion.completion_ids) for completion in group]
        told = [
            reward(prompts=[prompt] * len(group), completions=answers, completion_ids=ids, **columns)
            for reward in self._rewards
        ]
        rewards = np.nansum(np.array(told, dtype=np.float64), axis=0)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        oldest = min(version for completion in group for version, _ in completion.versions)
        before = [0] * len(group[0].prompt_ids)
        return [
            RolloutSample(
                prompt=prompt,
                completion=answer,
                input_ids=np.array(completion.prompt_ids + completion.completion_ids),
                completion_mask=np.array(before + [1] * len(completion.completion_ids)),
                old_log_probs=np.array([*before, *(completion.log_probabilities or ())], dtype=np.float32),
                advantage=float(advantage),
                model_version=self._version_of[oldest],
                group_id=completion.index,
                metrics={"reward": float(reward), "reward_std": float(rewards.std())},
            )
            for completion, answer, reward, advantage in zip(group, answers, rewards, advantages, strict=True)
        ]
