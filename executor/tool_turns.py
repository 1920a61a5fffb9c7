"""Tool calls of TRL's trainer, as turns within one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any

from .completion import Completion

_NEEDED = ("_tokenize_prompts", "_get_tool_suffix_ids", "_tool_call_loop", "_sync_tool_dicts")
"""Private members of the trainer that this module uses."""


@dataclass(slots=True, eq=False)
class _Conversation:
    """Messages after the prompt, earlier tokens, and number of calls."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    before: int = 0
    first: int = 0
    rounds: int = 0


class ToolTurns:
    """Tool calls of one rollout, as TRL makes and masks them.

    prompts: Prompts in the trainer's form.
    seconds: Time limit of a call in seconds; larger tolerates slower tools.

    Raises ValueError if this version of TRL runs tools in another way, or a prompt has images.
    """

    def __init__(self, trainer: Any, prompts: Sequence[Any], seconds: float) -> None:
        missing = [name for name in _NEEDED if not hasattr(trainer, name)]
        if missing:
            import trl

            raise ValueError(
                f"TRL {trl.__version__} runs tools in an unsupported way (no {missing[0]}): train without"
                " rollout_func, or with TRL 1.16"
            )
        self._trainer, self._seconds, self._lock = trainer, seconds, Lock()
        ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ValueError("prompts with images cannot be served: train without rollout_func")
        self.prompts: list[list[int]] = [list(tokens) for tokens in ids]
        self._found = [_Conversation() for _ in self.prompts]
        self.calls = self.failures = 0

    def next_turn(self, position: int, tokens: tuple[int, ...]) -> Future[Sequence[int]] | None:
        """Return the future tokens of tool results, or None."""
        conversation = self._found[position]
        turn = list(tokens[conversation.before :])
        conversation.first = conversation.first or len(turn)
        message = self._parsed(position, tokens[: conversation.before], turn)
        if message:
            conversation.messages.append(message)
        called = message.get("tool_calls")
        if not called or conversation.rounds >= self._trainer.max_tool_calling_iterations:
            return None
        conversation.rounds += 1
        return _in_thread(lambda: self._answers(position, len(tokens), called))

    def take_over(self, completions: Sequence[Completion]) -> tuple[list[list[int]], list[list[float]]]:
        """Replace the trainer's tool loop; return the first turns."""
        masks, ids, values = list[list[int]](), list[list[int]](), list[list[float]]()
        for completion in completions:
            mask = [1] * len(completion.completion_ids)
            for part in completion.given:
                mask[part.start : part.stop] = [0] * len(part)
            masks.append(mask)
            ids.append(list(completion.completion_ids))
            values.append(list(completion.log_probabilities or ()))
        messages = [conversation.messages for conversation in self._found]
        images: list[list[Any]] = [[] for _ in ids]
        columns = masks, messages, ids, values, self.calls, self.failures, images
        # TRL's own loop would draw the turns with its own generation.
        self._trainer._tool_call_loop = lambda *_: columns
        firsts = [conversation.first for conversation in self._found]
        return (
            [tokens[:first] for tokens, first in zip(ids, firsts, strict=True)],
            [tokens[:first] for tokens, first in zip(values, firsts, strict=True)],
        )

    def _parsed(self, position: int, before: Sequence[int], turn: list[int]) -> dict[str, Any]:
        from trl.chat_template_utils import parse_response

        trainer = self._trainer
        tools = trainer.tools
        if trainer.environment_factories is not None:
            tools = trainer._env_tools[trainer._batch_environments[position]]
        with self._lock:
            prefix = [*self.prompts[position], *before]
            return dict(parse_response(trainer._tokenizer, turn, prefix=prefix, tools=tools))

    def _answers(self, position: int, written: int, called: Sequence[dict[str, Any]]) -> list[int]:
        """Call tools in sequence; return their results as tokens.

        No tokens are returned if they are too long.
        """
        trainer, conversation = self._trainer, self._found[position]
        with self._lock:
            self.calls += len(called)
        at_once = trainer._async_tool_dicts[position]
        names = [self._name(call) for call in called]
        # TRL awaits coroutines together, and puts their results last.
        later = [
            (name, self._begun(at_once[name], call["function"]["arguments"]))
            for name, call in zip(names, called, strict=True)
            if name in at_once
        ]
        results = [
            (name, self._result(position, call))
            for name, call in zip(names, called, strict=True)
            if name not in at_once
        ]
        results += [(name, self._outcome(future)) for name, future in later]
        messages = [
            {"role": "tool", "name": name, "content": result if isinstance(result, list) else str(result)}
            for name, result in results
        ]
        with self._lock:
            suffix = list(trainer._get_tool_suffix_ids(messages))
        total = written + len(suffix)
        positions = trainer.model.config.max_position_embeddings
        if total > trainer.max_completion_length or len(self.prompts[position]) + total >= positions:
            return []
        conversation.messages += messages
        conversation.before = total
        return suffix

    @staticmethod
    def _name(call: dict[str, Any]) -> str:
        function = call["function"] if call["type"] == "function" else call
        return str(function.get("name", "unknown"))

    def _begun(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> Future[Any]:
        """Run a coroutine on the trainer's event loop."""
        try:
            return asyncio.run_coroutine_threadsafe(tool(**arguments), self._trainer.async_loop)
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _result(self, position: int, call: dict[str, Any]) -> Any:
        if call["type"] != "function":
            return self._failed(f"Unsupported tool call type: {call['type']}")
        name, tool = self._name(call), self._trainer._sync_tool_dicts[position].get(self._name(call))
        if tool is None:
            return self._failed(f"Tool {name} not found.")
        return self._outcome(_in_thread(lambda: tool(**call["function"]["arguments"])))

    def _outcome(self, future: Future[Any]) -> Any:
        try:
            return future.result(self._seconds)
        except Exception as error:
            if not future.done():
                # This stops a coroutine; a thread cannot be stopped.
                future.cancel()
                return self._failed(f"no answer within {self._seconds:g} seconds")
            return self._failed(str(error))

    def _failed(self, why: str) -> dict[str, str]:
        with self._lock:
            self.failures += 1
        return {"error": why}


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
