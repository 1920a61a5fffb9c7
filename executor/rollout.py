"""Rollouts for reinforcement learning, in TRL's form."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from numbers import Real
from typing import Any, NotRequired, TypedDict

from ..data.files.errors import check_type
from ..data.lengths.history import prompt_key
from ..data.readers.sampling import LogprobsMode, Sampling, refuse_unknown, refuse_unused
from ..data.report import TAIL, TOOLS, Report
from .completion import Completion
from .llm import DEFAULT_MAX_TOKENS, LLM, Prompt
from .models.source import position_limit
from .models.wrapped import unwrapped
from .partial import Partial, Until
from .rollout_files import RolloutFiles
from .tool_turns import ToolTurns

_LOG = logging.getLogger(__name__)


class Rollout(TypedDict):
    """Completions in prompt order; TRL hands the fields after ``logprobs`` to reward functions.

    prompt_ids, completion_ids: Token ids.
    logprobs: Log-probability of each token; of the first turn only if tools were called.
    log_probabilities: The same of all turns.
    finish_reason, versions: As in :class:`~.completion.Completion`; ``cut`` for a completion that ``until``
        left unfinished.
    env_mask: With ``until``, 1 for each token of a group that ended as a whole, else 0, which is no loss.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    log_probabilities: list[list[float]]
    finish_reason: list[str]
    versions: list[tuple[tuple[int, int], ...]]
    env_mask: NotRequired[list[list[int]]]


_OF_TRAINER = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings with equal names in TRL and :class:`~.sampling.Sampling`."""

_OTHER_NAMES = {"stop_strings": "stop", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""transformers' generation settings with other names here."""


def rollout_function(
    engine: LLM,
    *,
    max_tokens: int | None = None,
    logprobs: LogprobsMode = "temperature",
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
    on_completion
        Called with each completion as it finishes, so that rewards can be computed while others decode.
    history
        File with the lengths of each prompt's completions, created if missing and written after each call.
        Prompts with the longest expected completions are served first; without it the engine's ``policy``
        decides by the lengths seen. Further processes write ``FILE.1`` and so on; all read each other's.
        ``plan --lengths history:FILE`` reads it, too.
    log
        Table of each call's lengths, for example ``steps.csv``; an existing one gets further steps. Further
        processes write ``steps.1.csv`` and so on. ``simulate steps.csv --steps step`` reads it.
    tool_seconds
        Time limit of a tool call in seconds; the model reads an error after it. Tools are the trainer's
        ``tools`` and the methods of its environments. Their calls run on threads while other completions
        decode.
    **sampling
        Fields of :class:`~.sampling.Sampling`; by default the trainer's, else a temperature of 1. ``seed``
        is the seed of the first call; every call and process draws from its own streams. ``oversample=1.25``
        draws a quarter more samples of each prompt, and keeps those that end first. ``until=Until(groups=6)``
        ends the step with six whole groups; the others are masked and give no loss. The step then waits
        for no straggler, and training is biased towards short completions.

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
    oversample, until = sampling.pop("oversample", 1.0), sampling.pop("until", None)
    if isinstance(oversample, bool) or not isinstance(oversample, Real) or oversample < 1:
        raise ValueError(f"oversample must be a number of at least 1, got {oversample!r}")
    if until is not None and oversample != 1:
        raise ValueError("oversample has no effect with until: give one of them")
    check_type("engine", engine, LLM, hint="an LLM")
    arguments = ("max_tokens", "logprobs", "history", "log", "tool_seconds", "oversample")
    refuse_unknown("rollout_function", sampling, (*arguments, "until"))
    Sampling(**sampling)
    if sampling.get("n", 1) != 1:
        raise ValueError("n has no effect here: repeat a prompt for each of its completions")
    return _Rollouts(
        engine,
        max_tokens,
        {"log_probabilities": logprobs, "until": until},
        on_completion,
        RolloutFiles(history, log),
        tool_seconds,
        float(oversample),
        sampling,
    )


def replace_generation(trainer: Any, engine: LLM, **options: Any) -> None:
    """Let TRL's trainer draw each turn with an engine; templates, tools, images and masks stay its own.

    It replaces the trainer's ``_generate_single_turn``, which takes token ids and returns token ids and
    log-probabilities. Turns of different completions then wait for each other, as in TRL.

    Parameters
    ----------
    trainer
        A ``GRPOTrainer`` without ``rollout_func``.
    engine
        Engine with the trained model.
    **options
        As for :func:`rollout_function`, without ``until``.

    Raises
    ------
    ValueError
        If the trainer has no such method, a ``rollout_func``, or an option has no effect.
    """
    if not hasattr(trainer, "_generate_single_turn") or trainer.rollout_func is not None:
        raise ValueError("a GRPOTrainer of TRL 1.16 without rollout_func is needed")
    if options.get("until") is not None:
        raise ValueError("until has no effect here, as TRL cannot leave completions out: use rollout_func")
    rollouts = rollout_function(engine, **options)
    assert isinstance(rollouts, _Rollouts)

    def turn(prompt_ids: Sequence[Sequence[int]], images: Any, *_: Any, **__: Any) -> Any:
        if images is not None:
            raise ValueError("prompts with images cannot be served: leave the trainer's generation")
        # A conversation may leave less than the trainer's cap, which it applies to all turns itself.
        most, positions = trainer.max_completion_length, position_limit(unwrapped(engine.model).config)
        room = [min(most, (positions or len(ids) + most) - len(ids)) for ids in prompt_ids]
        rollout = rollouts.turn(prompt_ids, trainer, room)
        return rollout["completion_ids"], rollout["logprobs"]

    trainer._generate_single_turn = turn


@dataclass(frozen=True, slots=True, eq=False)
class _Rollouts:
    """Rollout function; its fields are the arguments of :func:`rollout_function`.

    how: Arguments of :meth:`LLM.generate` that no trainer has.
    """

    engine: LLM
    max_tokens: int | None
    how: Mapping[str, Any]
    on_completion: Callable[[Completion], None] | None
    files: RolloutFiles
    tool_seconds: float
    oversample: float
    sampling: Mapping[str, Any]
    calls: count[int] = field(default_factory=count)

    def __call__(self, prompts: Sequence[Prompt], trainer: object = None) -> Rollout:
        """Return a completion for each prompt."""
        if not getattr(trainer, "tools", None):
            return self.turn(prompts, trainer)
        self.files.begin()
        if self.oversample > 1 or self.how["until"] is not None:
            raise ValueError("oversample and until have no effect with tools: leave them out")
        tools = ToolTurns(trainer, prompts, self.tool_seconds)
        settings, how = self._settings(prompts, trainer)
        del how["until"]
        # The trainer owns templates, tools and environments, so it also makes the prompts.
        drawn = self.engine.converse(tools.next_turn, tools.prompts, max_tokens=settings.max_tokens, **how)
        completions = self._taken(prompts, drawn, range(len(prompts)))
        self._saw(prompts, completions, settings, trainer)
        ids, values = tools.take_over([completions[at] for at in range(len(prompts))])
        return Rollout(**{**_columns(completions), "completion_ids": ids, "logprobs": values})

    def turn(self, prompts: Sequence[Prompt], trainer: object, room: Sequence[int] | None = None) -> Rollout:
        """Return a completion of a single turn for each prompt, also where the trainer has tools.

        room: Most tokens of each; by default those of the settings.
        """
        self.files.begin()
        settings, how = self._settings(prompts, trainer)
        places = [*range(len(prompts)), *_further(prompts, self.oversample)]
        if how["expected_tokens"] is not None:
            how["expected_tokens"] = [how["expected_tokens"][at] for at in places]
        how["max_tokens"] = settings.max_tokens if room is None else [room[at] for at in places]
        drawn = [prompts[at] for at in places]
        calls = self.engine.generate(drawn, chat_options=settings.chat_options, **how)
        completions = self._taken(prompts, calls, places)
        self._saw(prompts, completions, settings, trainer)
        if self.how["until"] is None:
            return _columns(completions)
        return _with_cut(completions, self.engine.unfinished)

    def _settings(self, prompts: Sequence[Prompt], trainer: object) -> tuple[RolloutSettings, dict[str, Any]]:
        settings = RolloutSettings.of(trainer, self.max_tokens, self.sampling)
        refuse_other_model(trainer, self.engine)
        call = next(self.calls)
        if not call:
            _warn(prompts, settings.sampling, self.how["until"])
        seed = seed_of_call(settings.sampling.seed or 0, settings.process, settings.step, call)
        expected = self.files.expected(prompts, settings.max_tokens)
        how = {"sampling": replace(settings.sampling, seed=seed), "expected_tokens": expected}
        return settings, {**self.how, **how}

    def _saw(
        self,
        prompts: Sequence[Prompt],
        completions: Mapping[int, Completion],
        settings: RolloutSettings,
        trainer: object,
    ) -> None:
        in_order = [completions[at] for at in sorted(completions)]
        logged = bool(in_order) and hasattr(trainer, "_metrics")
        # Made before the clock is read, as the bound takes a user's time, too.
        report, batch = (self.engine.report(), self.engine.one_batch_seconds()) if logged else (None, None)
        seconds = self.files.saw(prompts, in_order, settings.process, self.engine.unfinished)
        if report is not None:
            _log_step(trainer, report, batch, seconds)

    def _taken(
        self, prompts: Sequence[Prompt], drawn: Iterator[Completion], places: Sequence[int]
    ) -> dict[int, Completion]:
        """Return the completions of each prompt by position, as many as were asked for.

        With further samples these are the first to end; the call then ends early.
        """
        keys = [prompt_key(prompt) for prompt in prompts] if len(places) > len(prompts) else []
        free: defaultdict[str, list[int]] = defaultdict(list)
        for at in reversed(range(len(keys))):
            free[keys[at]].append(at)
        done: dict[int, Completion] = {}
        for completion in drawn:
            at = places[completion.index]
            if keys:
                if not free[keys[at]]:
                    continue
                at = free[keys[at]].pop()
            done[at] = replace(completion, index=at)
            if self.on_completion is not None:
                self.on_completion(done[at])
            if keys and len(done) == len(prompts):
                break
        drawn.close()  # type: ignore[attr-defined]
        return done


def _warn(prompts: Sequence[Prompt], sampling: Sampling, until: Until | None) -> None:
    """Warn of settings that serve a first call, but are hardly meant."""
    groups = len({prompt_key(prompt) for prompt in prompts})
    if sampling.greedy and groups < len(prompts):
        _LOG.warning(
            "temperature 0: all completions of a group are the same, and their rewards teach nothing"
        )
    if until is not None and until.groups is not None and until.groups > groups:
        _LOG.warning("a step has %d groups, fewer than groups=%d: it waits for all", groups, until.groups)


def _columns(completions: Mapping[int, Completion]) -> Rollout:
    in_order = [completions[at] for at in sorted(completions)]
    values = [list(completion.log_probabilities or ()) for completion in in_order]
    return Rollout(
        prompt_ids=[list(completion.prompt_ids) for completion in in_order],
        completion_ids=[list(completion.completion_ids) for completion in in_order],
        logprobs=values,
        log_probabilities=values,
        finish_reason=[completion.finish_reason for completion in in_order],
        versions=[completion.versions for completion in in_order],
    )


def _with_cut(completions: Mapping[int, Completion], unfinished: Sequence[Partial]) -> Rollout:
    """Return a rollout with unfinished completions, whose groups are masked as a whole."""
    cut = {}
    for left in unfinished:
        # TRL needs a token.
        ids = left.completion_ids or left.prompt_ids[-1:]
        values = tuple(one.value for one in left.told or ()) or (0.0,)
        cut[left.index] = Completion(
            left.index, left.prompt_ids, ids, "", "length", values, versions=left.versions
        )
    rollout = _columns({**completions, **cut})
    broken = {left.prompt_ids for left in unfinished}
    for at in cut:
        rollout["finish_reason"][at] = "cut"
    rollout["env_mask"] = [
        [int(tuple(prompt) not in broken)] * len(ids)
        for prompt, ids in zip(rollout["prompt_ids"], rollout["completion_ids"], strict=True)
    ]
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
    def of(cls, trainer: object, max_tokens: int | None, stated: Mapping[str, Any]) -> RolloutSettings:
        """Read a trainer's settings; refuse values that contradict them."""
        args = getattr(trainer, "args", None)
        theirs, longest = ({}, None) if args is None else trainers_settings(args)
        for name, value in stated.items():
            own = theirs.get(name, value)
            if name != "seed" and Sampling(**{name: own}) != Sampling(**{name: value}):
                raise ValueError(f"{name} is {value} here and {own} in the trainer: set it there only")
        if max_tokens is not None and longest is not None and max_tokens != longest:
            raise ValueError(
                f"max_tokens is {max_tokens} here and max_completion_length {longest} in the trainer"
            )
        sampling = Sampling(**{**({"temperature": 1.0} if args is None else {}), **theirs, **stated})
        refuse_unused(stated, [sampling])
        most = max_tokens if longest is None else longest
        return cls(
            sampling,
            DEFAULT_MAX_TOKENS if most is None else most,
            dictionary(getattr(args, "chat_template_kwargs", None)),
            int(getattr(args, "process_index", 0)),
            int(getattr(getattr(trainer, "state", None), "global_step", 0)),
        )


def trainers_settings(args: Any) -> tuple[dict[str, Any], int | None]:
    """Return a trainer's sampling, and its most tokens."""
    settings = {name: getattr(args, name, None) for name in (*_OF_TRAINER, "seed")}
    settings["max_tokens"] = getattr(args, "max_completion_length", None)
    known = {field.name for field in fields(Sampling)} - {"n", "logprobs", "logprobs_mode"}
    for name, value in dictionary(getattr(args, "generation_kwargs", None)).items():
        ours = _OTHER_NAMES.get(name, name)
        if name == "do_sample" and value is True:
            continue
        if ours not in {*known, "max_tokens"} or name == "max_tokens":
            why = "; samples are drawn at the trainer's temperature" if name == "do_sample" else ""
            raise ValueError(
                f"the trainer's generation_kwargs ask for {name}={value!r}, which cannot be served: leave it"
                f" out{why}"
            )
        settings[ours] = value
    most = settings.pop("max_tokens")
    return {name: value for name, value in settings.items() if value is not None}, most


def dictionary(given: Any) -> dict[str, Any]:
    """Return a trainer's option that may be None or JSON."""
    return dict(json.loads(given) if isinstance(given, str) else given or {})


def refuse_other_model(trainer: Any, engine: LLM) -> None:
    """Raise ValueError if a trainer has another model than the engine."""
    if trainer is not None and unwrapped(trainer.model) is not unwrapped(engine.model):
        raise ValueError("the trainer trains another model than the engine's: make LLM with trainer.model")


def seed_of_call(seed: int, process: int, step: int, call: int) -> int:
    """Return a call's seed, which shares no stream with others."""
    digest = hashlib.blake2b(f"{seed}:{process}:{step}:{call}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _log_step(trainer: Any, report: Report, batch: float | None, seconds: float) -> None:
    """Add a step's figures to the log of TRL's trainer.

    batch: Seconds of one padded batch, or None.
    seconds: Seconds of the rollout function's call.
    """
    mode = "train" if trainer.model.training else "eval"
    figures = {"seconds": seconds, "tail": report.share(TAIL), "above_bound": report.run_gap}
    if TOOLS in report.slot_seconds:
        figures["waiting_for_tools"] = report.share(TOOLS)
    elif batch is not None:
        figures["times_one_batch"] = batch / seconds
    for name, value in figures.items():
        if value is not None:
            trainer._metrics[mode][f"rollout/{name}"].append(value)
