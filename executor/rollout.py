"""Rollouts for a reinforcement learning loop, in the form that TRL's trainers ask for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, TypedDict

import numpy as np

from ..data.files.outputs import refuse_outputs
from ..data.lengths.history import LengthHistory
from ..data.readers.sampling import LogprobsMode, Sampling, refuse_unused
from .llm import DEFAULT_MAX_TOKENS, LLM, Completion, Prompt
from .models.wrapped import unwrapped
from .step_report import report_step
from .tool_turns import ToolTurns


class Rollout(TypedDict):
    """Token ids and log-probabilities of completions, a list entry for each prompt, in the prompts' order."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]


_OF_TRAINER = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings that TRL's configurations have under the names of :class:`~.sampling.Sampling`."""

_OTHER_NAMES = {"stop_strings": "stop", "max_new_tokens": None, "min_new_tokens": "min_tokens"}
"""Names of transformers' generation settings that differ here."""


def rollout_function(
    engine: LLM,
    *,
    max_tokens: int | None = None,
    logprobs: LogprobsMode = "processed",
    expected_tokens: Callable[[Sequence[Prompt]], Sequence[int]] | None = None,
    on_completion: Callable[[Completion], None] | None = None,
    history: str | os.PathLike[str] | None = None,
    tool_seconds: float = 60.0,
    **sampling: Any,
) -> Callable[[Sequence[Prompt], object], Rollout]:
    """
    Return a function for ``GRPOTrainer(rollout_func=...)``, or for a loop of one's own.

    The function takes the prompts, each as often as it is to be completed, and the trainer or None. The
    engine holds the model that is trained. Each call draws new completions.

    Parameters
    ----------
    engine
        Made with the model that is trained, before or after the trainer wraps it.
    max_tokens
        Tokens after which a completion ends; the trainer's ``max_completion_length`` by default.
    logprobs
        ``processed``, after temperature and truncation, is what TRL compares with its own; ``raw`` are the
        model's.
    expected_tokens
        Predicts the length of each completion, from those of the step before for example; longest first
        saves time then. Without it the engine's ``policy`` decides, by what it has seen of lengths.
    on_completion
        Called with each completion as it finishes: rewards can be computed while others still decode.
    history
        File that keeps the lengths of each prompt's completions: those expected to be longest are served
        first, and it is written after each call. It need not be there yet; each process of several keeps one
        of its own (``FILE.1`` and on). ``plan --lengths history:FILE`` reads it, too.
    tool_seconds
        Seconds after which a call of one of the trainer's ``tools``, or of a method of its environments, has
        failed, which the model reads as an error. Calls of several completions run at a time, each on a
        thread, while others decode.
    **sampling
        Fields of :class:`~.sampling.Sampling`; by default the trainer's, else a temperature of
        1. ``seed`` is of the first call, and every call and process draws from streams of its own.

    Returns
    -------
    callable
        Raises ValueError where a setting given here contradicts the trainer's, the trainer has one that
        cannot be served, or it trains another model than the engine's.

    Raises
    ------
    InputError
        If the history cannot be written.
    """
    Sampling(**sampling)
    if sampling.get("n", 1) != 1:
        raise ValueError("n has no effect here: each prompt comes as often as it is to be completed")
    if history is not None and expected_tokens is not None:
        raise ValueError("expected_tokens would have no effect beside history: give one of them")
    if history is not None:
        # Before the call: after it, its completions would be lost.
        refuse_outputs([history], True)
    calls = count()

    def rollout(prompts: Sequence[Prompt], trainer: object = None) -> Rollout:
        settings = RolloutSettings.of(trainer, max_tokens, sampling)
        refuse_other_model(trainer, engine)
        seed = seed_of_call(settings.sampling.seed, settings.process, settings.step, next(calls))
        kept = (
            None
            if history is None
            else f"{os.fspath(history)}.{settings.process}"
            if settings.process
            else history
        )
        known = None if kept is None else LengthHistory.at(kept)
        expected: Sequence[int] | None = None
        if expected_tokens is not None:
            expected = expected_tokens(prompts)
        elif known is not None and len(known):
            expected = np.minimum(known.expected(prompts), settings.max_tokens).tolist()
        tools = ToolTurns(trainer, prompts, tool_seconds) if getattr(trainer, "tools", None) else None
        how: dict[str, Any] = {
            "sampling": settings.with_seed(seed),
            "max_tokens": settings.max_tokens,
            "expected_tokens": expected,
            "log_probabilities": logprobs,
        }
        if tools is None:
            found = engine.generate(prompts, chat_options=settings.chat_options, **how)
        else:
            # Templates, tools and environments are the trainer's, so that its prompts are.
            found = engine.converse(tools.next_turn, tools.prompts, **how)
        done: list[Completion | None] = [None] * len(prompts)
        for completion in found:
            done[completion.index] = completion
            if on_completion is not None:
                on_completion(completion)
        answers = [completion for completion in done if completion is not None]
        if known is not None and kept is not None:
            known.saw((prompts[one.index], len(one.completion_ids)) for one in answers)
            known.save(kept)
        report_step(trainer, engine, len(answers))
        ids = [list(answer.completion_ids) for answer in answers]
        values = [list(answer.log_probabilities or ()) for answer in answers]
        if tools is not None:
            ids, values = tools.take_over(answers)
        return Rollout(
            prompt_ids=[list(answer.prompt_ids) for answer in answers], completion_ids=ids, logprobs=values
        )

    return rollout


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """
    What a call of the rollout function goes by.

    sampling, max_tokens: How completions are drawn, and after how many tokens they end.
    chat_options: Arguments of the chat template.
    process, step: Which of the trainer's processes this is, and at which step it is.
    """

    sampling: Sampling
    max_tokens: int
    chat_options: Mapping[str, Any]
    process: int = 0
    step: int = 0

    @classmethod
    def of(cls, trainer: object, max_tokens: int | None, given: Mapping[str, Any]) -> RolloutSettings:
        """Return the trainer's settings, which what was given may repeat but not contradict."""
        args = getattr(trainer, "args", None)
        if args is None:
            sampling = Sampling(**{"temperature": 1.0, **given})
            refuse_unused(given, [sampling])
            return cls(sampling, DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens, {})
        theirs = _trainers_settings(args)
        longest = theirs.pop("max_tokens")
        for name, value in given.items():
            if (
                name in theirs
                and name != "seed"
                and Sampling(**{name: theirs[name]}) != Sampling(**{name: value})
            ):
                raise ValueError(
                    f"{name} is {value} here and {theirs[name]} in the trainer: say it once, there"
                )
        if max_tokens is not None and longest is not None and max_tokens != longest:
            raise ValueError(
                f"max_tokens is {max_tokens} here and max_completion_length {longest} in the trainer"
            )
        most = max_tokens if longest is None else longest
        sampling = Sampling(**{**theirs, **given})
        refuse_unused(given, [sampling])
        return cls(
            sampling,
            DEFAULT_MAX_TOKENS if most is None else most,
            _dictionary(getattr(args, "chat_template_kwargs", None)),
            int(getattr(args, "process_index", 0)),
            int(getattr(getattr(trainer, "state", None), "global_step", 0)),
        )

    def with_seed(self, seed: int) -> Sampling:
        """Return the sampling with the seed of one call."""
        values = {each.name: getattr(self.sampling, each.name) for each in fields(Sampling)}
        return Sampling(**{**values, "seed": seed})


def _trainers_settings(args: Any) -> dict[str, Any]:
    """Return what a trainer's arguments ask, by the names of Sampling, and ``max_tokens``."""
    found = {name: getattr(args, name, None) for name in _OF_TRAINER}
    found |= {"seed": getattr(args, "seed", None), "max_tokens": getattr(args, "max_completion_length", None)}
    known = {each.name for each in fields(Sampling)}
    for name, value in _dictionary(getattr(args, "generation_kwargs", None)).items():
        ours = _OTHER_NAMES.get(name, name)
        if ours is None:
            ours = "max_tokens"
        elif ours not in known or ours in ("n", "logprobs", "logprobs_mode"):
            raise ValueError(
                f"the trainer's generation_kwargs ask for {name}={value!r}, which cannot be served"
            )
        found[ours] = value
    most = found.pop("max_tokens")
    return {**{name: value for name, value in found.items() if value is not None}, "max_tokens": most}


def _dictionary(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    return dict(json.loads(given) if isinstance(given, str) else given)


def refuse_other_model(trainer: Any, engine: LLM) -> None:
    """Raise ValueError if a trainer trains another model than the engine's."""
    if trainer is not None and unwrapped(trainer.model) is not unwrapped(engine.model):
        raise ValueError("the trainer trains another model than the engine's: make LLM with trainer.model")


def seed_of_call(seed: int, process: int, step: int, call: int) -> int:
    """Return a seed of one call's own: neighbouring seeds, steps and processes share no streams."""
    digest = hashlib.blake2b(f"{seed}:{process}:{step}:{call}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
