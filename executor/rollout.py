"""Rollouts for reinforcement learning, in TRL's form."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from numbers import Real
from typing import Any, TypedDict

from ..data.lengths.history import prompt_key
from ..data.readers.sampling import LogprobsMode, Sampling, refuse_unused
from ..data.report import TAIL, TOOLS
from .completion import Completion
from .llm import DEFAULT_MAX_TOKENS, LLM, Prompt
from .models.wrapped import unwrapped
from .rollout_files import RolloutFiles
from .tool_turns import ToolTurns


class Rollout(TypedDict):
    """Completions in prompt order; TRL hands the fields after ``logprobs`` to reward functions.

    prompt_ids, completion_ids: Token ids.
    logprobs: Log-probability of each token; of the first turn only if tools were called.
    log_probabilities: The same of all turns.
    finish_reason, versions: As in :class:`~.completion.Completion`.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    log_probabilities: list[list[float]]
    finish_reason: list[str]
    versions: list[tuple[tuple[int, int], ...]]


_OF_TRAINER = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings with equal names in TRL and :class:`~.sampling.Sampling`."""

_OTHER_NAMES = {"stop_strings": "stop", "max_new_tokens": None, "min_new_tokens": "min_tokens"}
"""transformers' generation settings with other names here."""


def rollout_function(
    engine: LLM,
    *,
    max_tokens: int | None = None,
    logprobs: LogprobsMode = "temperature",
    expected_tokens: Callable[[Sequence[Prompt]], Sequence[int]] | None = None,
    on_completion: Callable[[Completion], None] | None = None,
    history: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    tool_seconds: float = 60.0,
    **sampling: Any,
) -> Callable[[Sequence[Prompt], object], Rollout]:
    """Return a function for ``GRPOTrainer(rollout_func=...)`` or your own loop.

    The function takes a list of prompts, with one entry for each completion, and the trainer or None.
    Each call draws new completions from the current weights.

    Parameters
    ----------
    engine
        Engine with the trained model, made before or after the trainer wraps it.
    max_tokens
        Most tokens of a completion; the trainer's ``max_completion_length`` by default.
    logprobs
        ``temperature``, over the whole vocabulary after temperature, as TRL compares with; ``processed``, of
        the truncated distribution that tokens are drawn from; or ``raw``, the model's own.
    expected_tokens
        Function that predicts the length of each completion, for example from the previous step; the longest
        are served first. Without it the engine's ``policy`` decides by the lengths seen.
    on_completion
        Called with each completion as it finishes, so that rewards can be computed while others decode.
    history
        File with the lengths of each prompt's completions, created if missing and written after each call.
        Prompts with the longest expected completions are served first. Further processes write ``FILE.1`` and
        so on; all read each other's. ``plan --lengths history:FILE`` reads it, too.
    log
        Table of each call's lengths, for example ``steps.csv``, to which calls are added. Further processes
        write ``steps.1.csv`` and so on. ``simulate steps.csv --steps step --hidden-lengths`` reads it.
    tool_seconds
        Time limit of a tool call in seconds; the model reads an error after it. Tools are the trainer's
        ``tools`` and the methods of its environments. Their calls run on threads while other completions
        decode.
    **sampling
        Fields of :class:`~.sampling.Sampling`; by default the trainer's, else a temperature of 1. ``seed``
        is the seed of the first call; every call and process draws from its own streams. ``oversample=1.25``
        draws a quarter more samples of each prompt, and keeps those that end first. The step then waits for
        no straggler, and training is biased towards short completions.

    Returns
    -------
    callable
        Raises ValueError if a setting contradicts the trainer's, if the trainer has an unsupported setting,
        or if it trains another model.

    Raises
    ------
    InputError
        If the history cannot be written.
    """
    oversample = sampling.pop("oversample", 1.0)
    if isinstance(oversample, bool) or not isinstance(oversample, Real) or oversample < 1:
        raise ValueError(f"oversample must be a number of at least 1, got {oversample!r}")
    Sampling(**sampling)
    if sampling.get("n", 1) != 1:
        raise ValueError("n has no effect here: repeat a prompt for each of its completions")
    if history is not None and expected_tokens is not None:
        raise ValueError("expected_tokens has no effect with history: give one of them")
    files = RolloutFiles(history, log)
    calls = count()

    def rollout(prompts: Sequence[Prompt], trainer: object = None) -> Rollout:
        settings = RolloutSettings.of(trainer, max_tokens, sampling)
        refuse_other_model(trainer, engine)
        seed = seed_of_call(settings.sampling.seed or 0, settings.process, settings.step, next(calls))
        if expected_tokens is not None:
            expected: Sequence[int] | None = expected_tokens(prompts)
        else:
            expected = files.expected(prompts, settings.max_tokens)
        tools = ToolTurns(trainer, prompts, tool_seconds) if getattr(trainer, "tools", None) else None
        more = _further(prompts, float(oversample))
        if more and tools is not None:
            raise ValueError("oversample has no effect with tools: leave it out")
        how: dict[str, Any] = {
            "sampling": settings.with_seed(seed),
            "max_tokens": settings.max_tokens,
            "expected_tokens": None if expected is None else [*expected, *(expected[at] for at in more)],
            "log_probabilities": logprobs,
        }
        if tools is None:
            drawn = [*prompts, *(prompts[at] for at in more)]
            found = engine.generate(drawn, chat_options=settings.chat_options, **how)
        else:
            # The trainer owns templates, tools and environments, so it also makes the prompts.
            found = engine.converse(tools.next_turn, tools.prompts, **how)
        answers = _first_of_each(prompts, found, more, on_completion)
        files.saw(prompts, answers, settings.process)
        _report_step(trainer, engine, len(answers))
        ids = [list(answer.completion_ids) for answer in answers]
        values = [list(answer.log_probabilities or ()) for answer in answers]
        if tools is not None:
            ids, values = tools.take_over(answers)
        return Rollout(
            prompt_ids=[list(answer.prompt_ids) for answer in answers],
            completion_ids=ids,
            logprobs=values,
            log_probabilities=[list(answer.log_probabilities or ()) for answer in answers],
            finish_reason=[answer.finish_reason for answer in answers],
            versions=[answer.versions for answer in answers],
        )

    return rollout


def _further(prompts: Sequence[Prompt], oversample: float) -> list[int]:
    """Return positions of the prompts that further samples are drawn of."""
    if oversample == 1:
        return []
    of_prompt: defaultdict[str, list[int]] = defaultdict(list)
    for at, prompt in enumerate(prompts):
        of_prompt[prompt_key(prompt)].append(at)
    counts = {key: math.ceil((oversample - 1) * len(own) - 1e-9) for key, own in of_prompt.items()}
    return [own[0] for key, own in of_prompt.items() for _ in range(counts[key])]


def _first_of_each(
    prompts: Sequence[Prompt],
    found: Iterator[Completion],
    more: Sequence[int],
    on_completion: Callable[[Completion], None] | None,
) -> list[Completion]:
    """Return as many completions of each prompt as were asked for, in their order.

    With further samples these are the first to end; the call then ends early.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for at in reversed(range(len(prompts) if more else 0)):
        places[prompt_key(prompts[at])].append(at)
    done: dict[int, Completion] = {}
    for completion in found:
        at = completion.index
        if more:
            own = places[prompt_key(prompts[at] if at < len(prompts) else prompts[more[at - len(prompts)]])]
            if not own:
                continue
            at = own.pop()
        done[at] = replace(completion, index=at)
        if on_completion is not None:
            on_completion(done[at])
        if more and len(done) == len(prompts):
            break
    found.close()  # type: ignore[attr-defined]
    return [done[at] for at in range(len(prompts))]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of one call of the rollout function.

    chat_options: Variables of the chat template.
    process, step: Number of this process of the trainer, and its training step.
    """

    sampling: Sampling
    max_tokens: int
    chat_options: Mapping[str, Any]
    process: int = 0
    step: int = 0

    @classmethod
    def of(cls, trainer: object, max_tokens: int | None, given: Mapping[str, Any]) -> RolloutSettings:
        """Read a trainer's settings; refuse values that contradict them."""
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
                    f"{name} is {value} here and {theirs[name]} in the trainer: set it there only"
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
        """Return a copy of the sampling with another seed."""
        values = {each.name: getattr(self.sampling, each.name) for each in fields(Sampling)}
        return Sampling(**{**values, "seed": seed})


def _trainers_settings(args: Any) -> dict[str, Any]:
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
    """Raise ValueError if a trainer has another model than the engine."""
    if trainer is not None and unwrapped(trainer.model) is not unwrapped(engine.model):
        raise ValueError("the trainer trains another model than the engine's: make LLM with trainer.model")


def seed_of_call(seed: int, process: int, step: int, call: int) -> int:
    """Return a call's seed, which shares no stream with others."""
    digest = hashlib.blake2b(f"{seed}:{process}:{step}:{call}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _report_step(trainer: Any, engine: LLM, completions: int) -> None:
    """Add an engine's figures to the log of TRL's trainer."""
    metrics = getattr(trainer, "_metrics", None)
    if metrics is None or not completions:
        return
    report, batch = engine.report(), engine.one_batch_seconds()
    mode = "train" if trainer.model.training else "eval"
    found = {"seconds": report.makespan, "tail": report.share(TAIL), "above_bound": report.run_gap}
    if TOOLS in report.slot_seconds:
        found["waiting_for_tools"] = report.share(TOOLS)
    elif batch is not None and report.makespan:
        found["times_one_batch"] = batch / report.makespan
    for name, value in found.items():
        if value is not None:
            metrics[mode][f"rollout/{name}"].append(value)
