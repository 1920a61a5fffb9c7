"""The engine as a library: takes prompts and yields finished completions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index as as_integer
from secrets import randbits
from typing import Any, Literal, Self

import numpy as np

from ..data.arrays import numbered
from ..data.costs.cost import CostModel
from ..data.files.disk import InputError, shown
from ..data.problem import limit_of
from ..data.readers.sampling import LogprobsMode, Sampling, refuse_unknown, refuse_unused
from ..data.report import Report
from ..heuristics.unknown_lengths.registry import CHOSEN, WITHOUT_LENGTHS
from ..models.bounds.conversations import turns_bound
from .completion import Completion
from .draft import Draft
from .engines.huggingface import vocabulary_of
from .engines.tiers import Tier, choose_tier
from .models.request_rules import declared_sampling, ended_by_tokens
from .models.source import LoadFormat, load_model, position_limit
from .models.tokenizers import load_tokenizer, tokenizer_like
from .models.wrapped import unwrapped
from .one_batch import one_batch_seconds
from .partial import Ends, Partial, Until
from .reports.report import report
from .rollout_engine import RolloutEngine
from .running import Running
from .setup import Setup
from .turns import NextTurn, Served

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Partial
"""Text, token ids, the messages of a chat, or an unfinished completion of an earlier call."""

DEFAULT_MAX_TOKENS = 256
"""Default number of tokens after which a completion ends."""


class LLM:
    """Engine for a model, which completes many prompts a call.

    The weights are not copied: a training loop that changes them in place changes the next call. The model
    runs in evaluation mode, without dropout and gradient checkpointing. Whenever the caller's code runs, also
    between two completions, the model is in the caller's mode. Calls of several threads run in turn.

    Parameters
    ----------
    model
        A transformers causal language model, in any mode. It may be wrapped by ``torch.compile``,
        ``DistributedDataParallel`` or PEFT.
    tokenizer
        Tokenizer of transformers, or another :class:`~.tokenizers.Tokenizer`.
    slots
        Most requests that decode together.
    tier
        Layout of the KV cache: ``auto``, ``window`` or ``ragged``.
    kv_tokens
        Most tokens of KV cache on the device; None for as many as the slots need.
    share_prompts
        Compute a beginning that several prompts share once, and hold its KV cache once. Beginnings that no
        running completion needs take at most as much memory again as the slots; on a GPU or with
        ``kv_tokens`` what the slots leave. The window tier shares equal prompts only.
    cost
        Costs for scheduling and for the report; the hybrid paper's by default.
    policy
        Policy for calls without expected lengths: a key of
        :data:`~batchbound.heuristics.unknown_lengths.registry.WITHOUT_LENGTHS`. The default, ``learned``,
        serves requests in the given order. It orders the last ones by the lengths of completions of their
        prompts, in this call and in earlier calls of equal ``max_tokens``.

    Raises
    ------
    UnsupportedModelError
        If the model's completions would be wrong, or this process holds only part of its weights.
    ValueError
        If there are no slots, or the policy is unknown.
    TypeError
        If the model or the tokenizer has another type.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        slots: int = 64,
        tier: str = "auto",
        kv_tokens: int | None = None,
        share_prompts: bool = True,
        cost: CostModel | None = None,
        policy: str = CHOSEN,
    ) -> None:
        if not (hasattr(model, "modules") and hasattr(unwrapped(model), "config")):
            raise TypeError(
                f"model is {shown(model)}, no model of transformers; LLM.from_pretrained loads one by name"
            )
        if not isinstance(cost, CostModel | None):
            raise TypeError(f"cost is {shown(cost)}: give a CostModel")
        if policy not in WITHOUT_LENGTHS:
            raise ValueError(f"no policy {policy!r} needs no lengths; there are {', '.join(WITHOUT_LENGTHS)}")
        self.model, self.tokenizer = model, tokenizer_like(tokenizer)
        self._wanted_tier, self._forward = tier, vars(unwrapped(model)).get("forward")
        self._setup = Setup(
            model,
            self.tokenizer,
            tier=choose_tier(model, tier),
            slots=limit_of("slots", slots, 1),
            kv_tokens=None if kv_tokens is None else limit_of("kv_tokens", kv_tokens, 1),
            share_prompts=share_prompts,
            cost=CostModel.paper() if cost is None else cost,
            policy=policy,
        )
        self._ran: Served | None = None
        self._unfinished: tuple[Partial, ...] = ()

    def __repr__(self) -> str:
        name = getattr(unwrapped(self.model).config, "_name_or_path", "") or type(self.model).__name__
        return f"LLM({name}, {self.slots:,} slots, {self._setup.tier.name} tier)"

    @property
    def slots(self) -> int:
        """Most requests that decode together."""
        return self._setup.slots

    @property
    def tier(self) -> Tier:
        """Layout of the KV cache."""
        self._check_again()
        return self._setup.tier

    @property
    def kv_tokens(self) -> int | None:
        """Most tokens of KV cache on the device, or None."""
        return self._setup.kv_tokens

    @property
    def unfinished(self) -> tuple[Partial, ...]:
        """Unfinished completions of the last call, as prompts of a later one."""
        return self._unfinished

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        load_format: LoadFormat = "auto",
        dtype: str = "auto",
        device: str = "auto",
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """Load a model and return an engine for it.

        Parameters
        ----------
        name
            Hub name, directory written by ``save_pretrained``, or ``tiny:FAMILY[:SEED]``.
        tokenizer
            Name or directory of the tokenizer; the model's own by default.
        load_format, dtype, device, seed
            Arguments of :func:`~.model_source.load_model`.
        **options
            Arguments of :class:`LLM`.

        Raises
        ------
        ModelLoadError
            If the model or the tokenizer does not exist, or cannot be read or downloaded.
        """
        spec = os.fspath(name)
        model = load_model(spec, load_format=load_format, dtype=dtype, device=str(device), seed=seed)
        return cls(model, load_tokenizer(os.fspath(tokenizer or name)), **options)

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_tokens: int | Sequence[int] | None = None,
        expected_tokens: Sequence[int] | None = None,
        log_probabilities: bool | LogprobsMode = False,
        chat_options: Mapping[str, Any] | None = None,
        on_token: Callable[[int, int], None] | None = None,
        until: Until | None = None,
        **fields: Any,
    ) -> Iterator[Completion]:
        """Yield each completion as it finishes, in no particular order.

        Parameters
        ----------
        prompts
            Prompts to complete; repeated ones get independent completions. An item of :attr:`unfinished`
            continues with its own sampling.
        sampling
            Choice of tokens and end of completions, for all prompts or for each. By default the model's
            ``generation_config``, as in transformers' ``generate``, with ``fields`` in place of its values.
            Without a seed each call draws one, which its completions name.
        max_tokens
            Most tokens of a completion, for all prompts or for each; by default 256, and for an unfinished
            completion its own.
        expected_tokens
            Expected tokens of each completion, at most its ``max_tokens``; the longest are served first.
            Without it the engine's ``policy`` decides.
        log_probabilities
            Return the log-probability of each token: ``raw`` (or True) for the model's own, ``temperature``
            for the same after temperature, ``processed`` after penalties, temperature and truncation. By
            default as in ``sampling``.
        chat_options
            Variables of the chat template, such as ``enable_thinking``.
        on_token
            Called with the position of the prompt and each token as soon as it is chosen.
        until
            Condition for an early end. :attr:`unfinished` then holds the other completions, as it does after
            ``close()`` or a loop that breaks.
        **fields
            Fields of :class:`~.sampling.Sampling` in place of ``sampling``:
            ``temperature=0.7, stop=("END",)``. ``n`` may hold a number for each prompt.
            With ``on_error="skip"``, an impossible prompt, for example one too long for the model, ends at
            once with its ``error``; others are completed.

        Raises
        ------
        InputError
            If a prompt is empty, has another type or unknown tokens, or may exceed the model's positions.
        RunStoppedError
            If memory does not hold one request, or the model's logits are not finite.
        ValueError
            If a parameter is out of range, or a field has no effect, such as ``top_p`` with greedy decoding.
        TypeError
            If a field is unknown.
        """
        if until is not None and not isinstance(until, Until):
            raise TypeError(f"until is {shown(until)}: give Until")
        on_error = fields.pop("on_error", "raise")
        refuse_unknown("generate", fields, ("max_tokens", "expected_tokens", "chat_options", "until"))
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {shown(on_error)}: give raise or skip")
        asked = sampling, fields, log_probabilities
        call = self._drafts(prompts, asked, max_tokens, expected_tokens, chat_options or {}, on_error)
        how: dict[str, Any] = {"stated": expected_tokens is not None, "on_token": on_token}
        return self._generate(call, self._setup.new_version(), until, **how)

    def converse(
        self,
        next_turn: NextTurn,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_tokens: int | Sequence[int] | None = None,
        expected_tokens: Sequence[int] | None = None,
        log_probabilities: bool | LogprobsMode = False,
        chat_options: Mapping[str, Any] | None = None,
    ) -> Iterator[Completion]:
        """Yield completions of several turns, with tool results between them.

        A completion that waits for a tool frees its slot. Its KV cache stays while memory allows; it is
        computed again otherwise, on the window tier, and with ``share_prompts=False``.

        Parameters
        ----------
        next_turn
            Called with the position of the prompt and the tokens of a completion at the end of each turn. It
            returns None to end the completion, or a future of the tokens to append, such as a tool's result
            in the chat template. No tokens end it, too. They must leave room for one drawn token.
        prompts, sampling, expected_tokens, log_probabilities, chat_options
            As for :meth:`generate`, with :attr:`unfinished` completions of conversations, too.
        max_tokens
            Most tokens of all turns and tool results together; by default 256.

        Raises
        ------
        ValueError
            As for :meth:`generate`, or if tools return more tokens than ``max_tokens`` allows.
        """
        asked = sampling, dict[str, Any](), log_probabilities
        call = self._drafts(prompts, asked, max_tokens, expected_tokens, chat_options or {})
        how: dict[str, Any] = {"stated": expected_tokens is not None, "next_turn": next_turn}
        return self._generate(call, self._setup.new_version(), None, **how)

    def _drafts(
        self,
        prompts: Iterable[Prompt],
        how: tuple[Sampling | Sequence[Sampling] | None, Mapping[str, Any], bool | LogprobsMode],
        max_tokens: int | Sequence[int] | None,
        expected_tokens: Sequence[int] | None,
        chat_options: Mapping[str, Any],
        on_error: Literal["raise", "skip"] = "raise",
    ) -> tuple[list[Draft], dict[int, str]]:
        """Return the completions to draw, and why prompts are left out, by position."""
        self._check_again()
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            raise InputError(f"prompts is {shown(prompts)}", hint="Give a list, also for a single prompt.")
        prompts = list(prompts)
        sampling, fields, log_probabilities = how
        declared = declared_sampling(self.model) if sampling is None else {}
        asked = sampling_per_prompt(sampling, fields, declared, len(prompts), log_probabilities)
        asked = [
            prompt.sampling if isinstance(prompt, Partial) else own
            for prompt, own in zip(prompts, asked, strict=True)
        ]
        vocabulary, positions = vocabulary_of(self.model), position_limit(unwrapped(self.model).config)
        asked = ended_by_tokens(_seeded(asked), self.tokenizer, vocabulary)
        most = _most_tokens(prompts, max_tokens)
        expected = most if expected_tokens is None else _expected(expected_tokens, most)
        drafts, faults = list[Draft](), dict[int, str]()
        for index, prompt in enumerate(prompts):
            try:
                tokens = self._named(index, prompt, chat_options)
                _refuse_impossible(index, tokens, most[index], vocabulary, positions)
            except InputError as error:
                if on_error == "raise":
                    raise
                faults[index] = str(error)
                continue
            left = prompt if isinstance(prompt, Partial) else None
            own = tokens, asked[index], most[index], int(expected[index]), index
            drafts += (
                [Draft(*own, left.sample, left, left.given)]
                if left
                else [Draft(*own, sample) for sample in range(asked[index].n)]
            )
        return drafts, faults

    def report(self) -> Report:
        """Return the report of the last call, with its bound.

        Its makespan begins with the first stage, after the weights are packed.

        Raises
        ------
        RuntimeError
            If there was no call, or the last one is unfinished.
        """
        if self._ran is None:
            raise RuntimeError("the last call of generate has not been exhausted: iterate to its end first")
        ran = self._ran
        served = replace(ran.problem, workload=ran.problem.workload.with_output_tokens(ran.trace.tokens))
        bound = turns_bound(served, ran.paths, ran.turns)
        return report(ran.problem, ran.trace, None, None, run_bound=bound, turns=ran.turns)

    def one_batch_seconds(self) -> float | None:
        """Estimate the last call's seconds as one padded batch.

        All rows of such a batch decode until the longest completion ends. It is None if the call's batch
        sizes varied too little for an estimate.
        """
        if self._ran is None:
            return None
        return one_batch_seconds(self._ran.problem, self._ran.trace)

    def _check_again(self) -> None:
        forward = vars(unwrapped(self.model)).get("forward")
        if forward is not self._forward:
            self._setup.tier = choose_tier(self.model, self._wanted_tier)
            self._forward = forward

    def _generate(
        self,
        call: tuple[list[Draft], dict[int, str]],
        version: int,
        until: Until | None,
        **how: Any,
    ) -> Iterator[Completion]:
        self._unfinished, self._ran = (), None
        drafts, faults = call
        for index, error in faults.items():
            yield Completion(index, (), (), "", "error", error=error)
        if not drafts:
            return
        running = Running(self._setup, drafts, version, **how)
        ends = Ends(until, numbered(draft.prompt for draft in drafts).tolist())
        try:
            while not ends.reached(running.time):
                for index, completion in running.step(None if until is None else until.most_steps):
                    ends.note(index, completion)
                    yield completion
        finally:
            self._ran, self._unfinished = running.end()
            self._setup.remember(drafts, None if self._unfinished or self._ran is None else self._ran.trace)

    def start(
        self,
        next_turn: NextTurn | None = None,
        *,
        log_probabilities: bool | LogprobsMode = False,
        chat_options: Mapping[str, Any] | None = None,
        max_staleness: int | None = None,
    ) -> RolloutEngine:
        """Return an engine that prompts can be added to while it decodes.

        Parameters
        ----------
        next_turn
            As for :meth:`converse`; None without tools.
        log_probabilities, chat_options
            As for :meth:`generate`, for all prompts.
        max_staleness
            Most versions between a token and the present weights. Prompts with older tokens begin again, with
            all their completions. None for no limit.

        Raises
        ------
        ValueError
            If the engine's ``kv_tokens`` are limited.
        """
        if self.kv_tokens is not None:
            raise ValueError("an engine that prompts are added to takes no kv_tokens: leave them out")

        def drafts_of(prompts: Iterable[Prompt], sampling: Any = None, **how: Any) -> list[Draft]:
            most = how.pop("max_tokens", None)
            refuse_unknown("submit", how, ("max_tokens", "sampling"))
            asked = sampling, how, log_probabilities
            return self._drafts(prompts, asked, most, None, chat_options or {})[0]

        def ended(served: Served | None, unfinished: tuple[Partial, ...]) -> None:
            self._ran, self._unfinished = served, unfinished

        return RolloutEngine(self._setup, drafts_of, ended, next_turn=next_turn, max_staleness=max_staleness)

    def encoded(self, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Return each prompt's token ids.

        Raises
        ------
        InputError
            If a prompt has another type, or the chat template refuses it.
        """
        return [self._named(index, prompt, options) for index, prompt in enumerate(prompts)]

    def _named(self, index: int, prompt: Prompt, options: Mapping[str, Any]) -> tuple[int, ...]:
        try:
            return self._encoded(prompt, options)
        except (TypeError, ValueError) as error:
            raise InputError(f"prompt {index} is {shown(prompt)}: {error}", hint=_PROMPT) from error

    def _encoded(self, prompt: Prompt, options: Mapping[str, Any]) -> tuple[int, ...]:
        if isinstance(prompt, Partial):
            return prompt.prompt_ids
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if isinstance(prompt, bytes | Mapping):
            raise TypeError("not a list")
        parts = tuple(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
        kinds = set(map(type, parts))
        if kinds <= {int}:
            return parts
        if all(issubclass(kind, Mapping) for kind in kinds):
            return tuple(self.tokenizer.encode_chat(parts, **options))
        if bool in kinds:
            raise TypeError("true and false are not token ids")
        return tuple(map(as_integer, parts))


def _refuse_impossible(
    index: int, tokens: Sequence[int], most: int, vocabulary: int, positions: int | None
) -> None:
    """Raise InputError if a prompt cannot be served."""
    if not tokens:
        raise InputError(f"prompt {index} is empty", hint="Give it at least one token.")
    if not (min(tokens) >= 0 and max(tokens) < vocabulary):
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise InputError(
            f"prompt {index} holds token {wrong}, the model knows {vocabulary}",
            hint="Encode the prompts with the model's own tokenizer.",
        )
    if positions is not None and len(tokens) + most > positions:
        raise InputError(
            f"prompt {index} may take {len(tokens) + most} tokens, the model has {positions} positions",
            hint="Lower max_tokens, shorten the prompt, or leave it out with on_error='skip'.",
        )


_PROMPT = "Give a text, a list of token ids or a list of messages."


def _most_tokens(prompts: Sequence[Prompt], stated: int | Sequence[int] | None) -> list[int]:
    if stated is None:
        return [
            prompt.max_tokens if isinstance(prompt, Partial) else DEFAULT_MAX_TOKENS for prompt in prompts
        ]
    most = np.asarray(stated)
    whole = most.dtype.kind == "i" or (most.dtype.kind == "u" and bool((most < 2**63).all()))
    if most.dtype.kind == "f":
        # A table's column may hold whole numbers as floats.
        whole = bool((np.isfinite(most) & (most == np.floor(most))).all())
    if not whole or most.shape not in ((), (len(prompts),)):
        raise ValueError(
            f"max_tokens is {shown(stated)}; it must be a whole number, or one for each of"
            f" {len(prompts)} prompts"
        )
    if most.size and most.min() < 1:
        raise ValueError(f"max_tokens is {shown(stated)}; it must be positive")
    caps: list[int] = np.full(len(prompts), most, dtype=np.int64).tolist()
    for index, (prompt, cap) in enumerate(zip(prompts, caps, strict=True)):
        if isinstance(prompt, Partial) and len(prompt.completion_ids) >= cap:
            raise ValueError(f"prompt {index} has {len(prompt.completion_ids)} of {cap} tokens already")
    return caps


def _expected(given: Sequence[int], most: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        found = np.atleast_1d(np.asarray(given, dtype=np.float64))
    except (TypeError, ValueError):
        found = np.empty((0, 0))
    if found.ndim != 1:
        raise ValueError(f"expected_tokens is {shown(given)}; it must hold a number for each prompt")
    if len(found) != len(most):
        raise ValueError(f"{len(found)} expected lengths were given for {len(most)} prompts")
    for index, (likely, tokens) in enumerate(zip(found.tolist(), most, strict=True)):
        if not 1 <= likely <= tokens:
            raise ValueError(
                f"prompt {index}: expected {likely:g} tokens of at most {tokens}; it must be positive, and no"
                " larger"
            )
    return found


def _seeded(asked: list[Sampling]) -> list[Sampling]:
    """Return sampling with a new seed where none is stated."""
    seed = randbits(53)
    seeded = {
        one: one if one.greedy or one.seed is not None else replace(one, seed=seed)
        for one in dict.fromkeys(asked)
    }
    return [seeded[one] for one in asked]


def sampling_per_prompt(
    sampling: Sampling | Sequence[Sampling] | None,
    fields: Mapping[str, Any],
    declared: Mapping[str, Any],
    prompts: int,
    log_probabilities: bool | LogprobsMode,
) -> list[Sampling]:
    """Return the sampling of each prompt."""
    if fields and sampling is not None:
        raise ValueError(f"{', '.join(sorted(fields))} has no effect with sampling: set it in sampling")
    if sampling is None:
        counts: Any = fields.get("n", 1)
        stated = {name: value for name, value in fields.items() if name != "n" or np.ndim(counts) == 0}
        sampling = Sampling(**{**declared, **stated})
        refuse_unused(fields, [sampling])
        if stated.keys() != fields.keys():
            sampling = [replace(sampling, n=count) for count in counts]
    several = list(sampling) if isinstance(sampling, Iterable) else [sampling]
    if not all(isinstance(each, Sampling) for each in several):
        raise TypeError(f"sampling is {shown(sampling)}: give Sampling, one for all or one for each")
    asked = several * prompts if isinstance(sampling, Sampling) else several
    if len(asked) != prompts:
        raise ValueError(f"sampling was given for {len(asked)} of {prompts} prompts")
    if log_probabilities is False:
        return asked
    mode: LogprobsMode = "raw" if log_probabilities is True else log_probabilities
    return [replace(each, logprobs=each.logprobs or 0, logprobs_mode=mode) for each in asked]
