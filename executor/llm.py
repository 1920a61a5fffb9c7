"""The engine as a library: prompts in, finished completions out, as a sampling loop wants them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import index as as_integer
from typing import Any, Literal, Self, cast

import numpy as np

from ..data.arrays import IntArray
from ..data.costs.cost import CostModel
from ..data.files.disk import InputError, shown
from ..data.prefix_cache import usual_prefix_cache
from ..data.problem import Problem, limit_of
from ..data.readers.sampling import LogprobsMode, Sampling, refuse_unused
from ..data.report import Report
from ..data.trace import Trace
from ..data.workload import Turns, Workload, numbered
from ..heuristics.loop import Execution
from ..heuristics.queues.queue_policy import QueuedPolicy
from ..heuristics.registry import policy_named
from ..heuristics.unknown_lengths.lengths import Known, Observed
from ..heuristics.unknown_lengths.registry import CHOSEN, WITHOUT_LENGTHS, hidden_policy, without_lengths
from ..models.bounds.makespan import best_bound, turns_bound
from .engines.huggingface import NO_EOS, DecodeOptions, HuggingFaceEngine, vocabulary_of
from .engines.tiers import Tier, choose_tier
from .models.endings import Ending
from .models.mixed_sampling import MixedSampler
from .models.recording import Recorder, TokenLogprob
from .models.request_rules import declared_sampling, ended_by_tokens, rules_of
from .models.source import LoadFormat, load_model, position_limit
from .models.tokenizers import end_tokens, load_tokenizer, tokenizer_like
from .models.wrapped import unwrapped
from .partial import Partial, Until
from .reports.report import report
from .step_report import one_batch_seconds
from .turns import Conversations, NextTurn, most_steps

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Partial
"""Text, token ids, the messages of a chat, or an unfinished completion of an earlier call."""

MOST_REMEMBERED = 4096
"""Largest number of lengths kept from earlier calls."""

DEFAULT_MAX_TOKENS = 256
"""Tokens after which a completion ends if the caller does not say."""


@dataclass(frozen=True, slots=True)
class Completion:
    """
    A finished completion.

    index: Position of its prompt.
    prompt_ids, completion_ids: Tokens read and written; an end-of-sequence token that ended the completion is
        its last.
    text: The completion's text, without special tokens.
    finish_reason: ``stop`` for an end-of-sequence token, ``length`` for the most tokens allowed.
    log_probabilities: Of each token, None unless asked for.
    likeliest: Beside each token, the likeliest ones with their log-probabilities; None unless asked for.
    sample: Which of its prompt's completions it is, from 0.
    versions: In which calls how many of its tokens were drawn, in their order: the weights are those of the
        call.
    given: Ranges of indices of tokens that were not drawn: a tool gave them, their log-probabilities are 0.
    """

    index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    log_probabilities: tuple[float, ...] | None = None
    likeliest: tuple[tuple[tuple[int, float], ...], ...] | None = None
    sample: int = 0
    versions: tuple[tuple[int, int], ...] = ()
    given: tuple[range, ...] = ()


class LLM:
    """
    A model with a running batch of slots, which completions many prompts a call.

    The weights are read where they are: a training loop that changes them in place changes the next call.
    While the model runs it is in evaluation mode, without dropout and gradient checkpointing; whenever the
    caller has its turn, between two completions too, the model is as the caller left it. Calls of several
    threads take turns, on one model or on several.

    Parameters
    ----------
    model
        A transformers causal language model, in any mode; ``torch.compile``, ``DistributedDataParallel`` and
        PEFT's wrappers of adapters within the layers are looked through.
    tokenizer
        Turns text into tokens and back: transformers' own, or another of :class:`~.tokenizers.Tokenizer`.
    slots
        The most requests that decode together.
    tier
        Layout of the KV cache: ``auto``, ``window`` or ``ragged``.
    kv_tokens
        Most tokens of KV cache on the device; None for as many as the slots need.
    share_prompts
        Whether a prompt that comes several times, or is to be completed several times, is computed once.
        What of it is kept for later takes as much memory again as the slots at most; on a GPU or with
        ``kv_tokens`` a quarter of that, or what of ``kv_tokens`` the slots leave, where that is more.
    cost
        Costs the scheduling and the report count with; the hybrid paper's by default.
    policy
        Serves calls whose lengths are not stated: a key of
        :data:`~batchbound.heuristics.unknown_lengths.registry.WITHOUT_LENGTHS`. The default, ``learned``,
        serves them in the order given. The last ones go by what completions of their prompt have shown of
        lengths, in this call and in earlier ones of equal ``max_tokens``, as far as prompts differ.

    Raises
    ------
    UnsupportedModelError
        If the model's completions would be wrong, or its weights are not here as a whole.
    ValueError
        If there are no slots, or there is no such policy.
    TypeError
        If the model or the tokenizer is none.
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
                f"model is {shown(model)}, no model of transformers; a name is for LLM.from_pretrained"
            )
        if not isinstance(cost, CostModel | None):
            raise TypeError(f"cost is {shown(cost)}: give a CostModel")
        if policy not in WITHOUT_LENGTHS:
            raise ValueError(f"no policy {policy!r} needs no lengths; there are {', '.join(WITHOUT_LENGTHS)}")
        self.model, self.tokenizer = model, tokenizer_like(tokenizer)
        self._slots, self._share = limit_of("slots", slots, 1), share_prompts
        self._kv_tokens = None if kv_tokens is None else limit_of("kv_tokens", kv_tokens, 1)
        self._wanted_tier, self._tier = tier, choose_tier(model, tier)
        self._forward = vars(unwrapped(model)).get("forward")
        self._cost = CostModel.paper() if cost is None else cost
        self._ran: tuple[Problem, Trace, Turns | None] | None = None
        self._calls = 0
        self._unfinished: tuple[Partial, ...] = ()
        self._hidden_policy = policy
        self._past: tuple[int, Observed] | None = None

    @property
    def slots(self) -> int:
        """The most requests that decode together."""
        return self._slots

    @property
    def tier(self) -> Tier:
        """The layout of the KV cache, chosen again after a change of the model's forward."""
        self._look_again()
        return self._tier

    @property
    def kv_tokens(self) -> int | None:
        """Most tokens of KV cache on the device; None for as many as the slots need."""
        return self._kv_tokens

    @property
    def unfinished(self) -> tuple[Partial, ...]:
        """
        What the last call that ended early left undone, by position and sample.

        Given among the prompts of a later call, each is gone on with.
        """
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
        """
        Return an engine for a model named as ``batchbound run --model`` names it.

        Parameters
        ----------
        name
            Hub name, directory written by ``save_pretrained``, or ``tiny:FAMILY[:SEED]``.
        tokenizer
            The same for the tokenizer; the model's own by default.
        load_format, dtype, device, seed
            As :func:`~.model_source.load_model` takes them.
        **options
            As :class:`LLM` takes them.

        Raises
        ------
        ModelLoadError
            If there is no such model or tokenizer, or it cannot be read or reached.
        """
        spec = os.fspath(name)
        model = load_model(spec, load_format=load_format, dtype=dtype, device=str(device), seed=seed)
        return cls(model, load_tokenizer(os.fspath(tokenizer or name)), **options)

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_tokens: int | Sequence[int] = DEFAULT_MAX_TOKENS,
        expected_tokens: Sequence[int] | None = None,
        log_probabilities: bool | LogprobsMode = False,
        chat_options: Mapping[str, Any] | None = None,
        on_token: Callable[[int, int], None] | None = None,
        until: Until | None = None,
        **fields: Any,
    ) -> Iterator[Completion]:
        """
        Yield each completion as it finishes, in no particular order.

        Parameters
        ----------
        prompts
            What to complete. The same prompt may come many times; each completion is drawn on its own. A
            completion that an earlier call left in :attr:`unfinished` is gone on with as it was asked for.
        sampling
            How tokens are chosen and when a completion ends: one for all prompts, or one for each. Without
            it, what ``fields`` do not say is as the model's ``generation_config`` asks, as transformers'
            ``generate`` takes it.
        max_tokens
            Tokens after which a completion ends: one number, or one for each prompt.
        expected_tokens
            How long each completion is expected to be, at most its ``max_tokens``: the longest are then
            served first. Without it the engine's ``policy`` decides.
        log_probabilities
            Whether completions carry the log-probability of each token: ``raw`` (or True) for the model's
            own, ``processed`` for those after penalties, temperature and truncation. By default as
            ``sampling`` asks.
        chat_options
            What the chat template is told besides the messages, such as ``enable_thinking``.
        on_token
            Called with the position of the prompt and the token as soon as it is chosen.
        until
            When to end early; what is left is in :attr:`unfinished` then.
        **fields
            Those of :class:`~.sampling.Sampling` in place of ``sampling``:
            ``temperature=0.7, stop=("END",)``.

        Raises
        ------
        InputError
            If a prompt is none, is empty or not of this model's vocabulary, or may outgrow its positions.
        RunStoppedError
            If memory does not hold one request, or the model's logits are not finite.
        ValueError
            If a parameter is out of its range, or a field has no effect: ``top_p`` where no token is drawn.
        TypeError
            If there is no such field.
        """
        if until is not None and not isinstance(until, Until):
            raise TypeError(f"until is {shown(until)}: give Until")
        stated = expected_tokens is not None
        asked = sampling, fields, log_probabilities
        call = self._call(prompts, asked, max_tokens, expected_tokens, chat_options or {})
        return self._generate(call, stated, on_token, until, None)

    def converse(
        self,
        next_turn: NextTurn,
        prompts: Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_tokens: int | Sequence[int] = DEFAULT_MAX_TOKENS,
        expected_tokens: Sequence[int] | None = None,
        log_probabilities: bool | LogprobsMode = False,
        chat_options: Mapping[str, Any] | None = None,
    ) -> Iterator[Completion]:
        """
        Yield completions that may consist of turns, with answers of tools between.

        The slot of a completion that waits for a tool serves others. Its KV cache is computed again when it
        continues.

        Parameters
        ----------
        next_turn
            Called with the position of the prompt and the tokens of a completion that ended, before it is
            yielded. It returns None, or a future of the tokens to come after these, such as a tool's answer
            in the chat template; without any, the completion is over. It must leave room for a token drawn.
        prompts, sampling, expected_tokens, log_probabilities, chat_options
            As for :meth:`generate`; prompts are whole, not left over from an earlier call.
        max_tokens
            Most tokens of all turns and answers together.

        Raises
        ------
        ValueError
            As for :meth:`generate`; or tools gave more tokens than ``max_tokens`` leaves room for.
        """
        asked = sampling, dict[str, Any](), log_probabilities
        call = self._call(prompts, asked, max_tokens, expected_tokens, chat_options or {})
        if any(call.partial):
            raise ValueError("an unfinished completion of an earlier call has no turns: give it to generate")
        return self._generate(call, expected_tokens is not None, None, None, next_turn)

    def _call(
        self,
        prompts: Iterable[Prompt],
        how: tuple[Sampling | Sequence[Sampling] | None, Mapping[str, Any], bool | LogprobsMode],
        max_tokens: int | Sequence[int],
        expected_tokens: Sequence[int] | None,
        chat_options: Mapping[str, Any],
    ) -> _Call:
        """Return the completions that a call asks for."""
        self._look_again()
        self._calls += 1
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            raise InputError(f"prompts is {shown(prompts)}", hint="Give a list of prompts, also of one.")
        prompts = list(prompts)
        sampling, fields, told = how
        declared = declared_sampling(self.model) if sampling is None else {}
        asked = sampling_per_prompt(sampling, fields, declared, len(prompts), told)
        begun = [prompt if isinstance(prompt, Partial) else None for prompt in prompts]
        asked = [one.sampling if one else each for one, each in zip(begun, asked, strict=True)]
        vocabulary = vocabulary_of(self.model)
        asked = ended_by_tokens(asked, self.tokenizer, vocabulary)
        tokens = self.encoded(prompts, chat_options)
        _check_prompts(tokens, vocabulary)
        most = _most_tokens(max_tokens, len(tokens))
        for index, left in enumerate(begun):
            most[index] = left.max_tokens if left else most[index]
        expected = most if expected_tokens is None else _expected(expected_tokens)
        self._check_lengths(tokens, most, expected)
        at = np.repeat(np.arange(len(tokens)), [one.n for one in asked])
        return _Call(
            prompts=[tokens[i] for i in at],
            asked=[asked[i] for i in at],
            most=most[at],
            expected=expected[at].astype(np.int64),
            position=at,
            partial=[begun[i] for i in at],
            version=self._calls,
        )

    def report(self) -> Report:
        """
        Return how far the last call was from the proven bound for the lengths that came out.

        Raises
        ------
        RuntimeError
            If the last call was not finished, or there was none.
        """
        if self._ran is None:
            raise RuntimeError("the last call of generate has not been exhausted: there is nothing to report")
        problem, trace, turns = self._ran
        served = replace(problem, workload=problem.workload.with_output_tokens(trace.tokens))
        bound = best_bound(served) if turns is None else turns_bound(served, turns)
        return report(problem, trace, None, None, run_bound=bound, turns=turns)

    def one_batch_seconds(self) -> float | None:
        """
        Return the seconds of the last call's completions as one padded batch, by the call's own stages.

        All rows decode until the longest completion ends, as in a batch without slots. None if its decode
        steps had too few different numbers of rows to tell.
        """
        if self._ran is None:
            return None
        problem, trace, _ = self._ran
        return one_batch_seconds(problem, trace)

    def _look_again(self) -> None:
        """Refuse a model sharded since; repeat the self-check if its forward changed."""
        forward = vars(unwrapped(self.model)).get("forward")
        if forward is not self._forward:
            self._tier = choose_tier(self.model, self._wanted_tier)
            self._forward = forward

    def _generate(
        self,
        call: _Call,
        stated: bool,
        on_token: Callable[[int, int], None] | None,
        until: Until | None,
        next_turn: NextTurn | None,
    ) -> Iterator[Completion]:
        self._unfinished, self._ran = (), None
        if not call.prompts:
            return
        problem = self._problem(call)
        names = [str(name) for name in problem.workload.ids]
        eos = end_tokens(self.model, self.tokenizer)
        begun = {i: tokens for i, one in enumerate(call.partial) if one and (tokens := one.completion_ids)}
        rule = rules_of(
            dict(zip(names, call.asked, strict=True)),
            call.prompts,
            call.most.tolist(),
            self.tokenizer,
            eos,
            begun={names[i]: tokens for i, tokens in begun.items()},
        )
        engine = HuggingFaceEngine(
            problem,
            self.model,
            call.prompts,
            call.most,
            decoding=DecodeOptions(NO_EOS if rule.ends else eos, rule, self._kv_tokens, begun),
            tier=self._tier,
            on_token=None if on_token is None else call.of_prompts(on_token),
        )
        policy = (
            cast("QueuedPolicy", policy_named("lpt-ski", problem))
            if stated
            else self._learning(call, problem)
        )
        execution = Execution(problem, policy, engine)
        turns = Conversations(
            execution, engine, policy.queue, next_turn, call.position.tolist(), call.most.tolist()
        )
        recorder = rule.recorder if isinstance(rule, MixedSampler) else None
        done, group = [False] * len(names), numbered(call.prompts).tolist()
        while not all(done) and not (until and until.reached(done, group, engine.time)):
            for index in chain(turns.answered(wait=execution.idle), turns.ended(most_steps(until, turns))):
                done[index] = True
                tokens, given = tuple(engine.answers[index]), turns.given.get(index, ())
                told = call.told(index, tokens, recorder, rule.stream(names[index]), given)
                text, reason = Ending.of(call.asked[index], eos).text(tokens, self.tokenizer.decode)
                yield call.completion(index, tokens, text, reason, told, given)
        left = [index for index, over in enumerate(done) if not over]
        trace = None if left else execution.trace(np.arange(len(problem)))
        self._ran = None if trace is None else turns.of_turns(problem, trace)
        self._remember(call, trace)
        self._unfinished = tuple(
            call.unfinished(
                index, tuple(engine.answers[index]), recorder, rule.stream(names[index]), names[index]
            )
            for index in left
        )

    def _learning(self, call: _Call, problem: Problem) -> QueuedPolicy:
        """Return the policy of a call without stated lengths."""
        longest = max(1, int(call.most.max()) - 1)
        past = self._past[1] if self._past is not None and self._past[0] == longest else None
        workload = replace(
            problem.workload, group=call.groups(), shared_tokens=np.zeros(len(problem), dtype=np.int64)
        )
        seen = without_lengths(replace(problem, workload=workload, prefix_cache=0))
        return hidden_policy(self._hidden_policy, seen, Known(longest, past=past))

    def _remember(self, call: _Call, trace: Trace | None) -> None:
        """Keep the lengths of a finished call for those to come."""
        if trace is None or any(call.partial):
            return
        group, steps = call.groups(), trace.tokens - 1
        longest = max(1, int(call.most.max()) - 1)
        if self._past is not None and self._past[0] == longest:
            before = self._past[1]
            group = np.concatenate((before.group, group + int(before.group.max()) + 1))
            steps = np.concatenate((before.tokens, steps))
        group, steps = group[-MOST_REMEMBERED:], steps[-MOST_REMEMBERED:]
        self._past = longest, Observed(group, steps, np.ones(len(group), dtype=np.bool_))

    def _problem(self, call: _Call) -> Problem:
        """Return what a call's completions need: of one that was begun, its tokens count as prompt."""
        lengths = [len(prompt) for prompt in call.prompts]
        begun = np.array([len(one.completion_ids) if one else 0 for one in call.partial])
        workload = Workload.from_lengths(lengths + begun, np.maximum(1, call.expected - begun))
        workload = replace(workload, ids=call.names(workload.ids.tolist()))
        if self._share:
            # A continued completion shares no prompt with others.
            group = np.where(begun > 0, -1, numbered(call.prompts))
            workload = replace(workload, group=group).with_shared_prompts()
        slots = min(self._slots, len(call.prompts))
        longest = int((workload.input_tokens + workload.output_tokens).max())
        fitting = slots if self._kv_tokens is None else min(slots, self._kv_tokens // longest)
        # The host's memory is not what slots run short of: as much again as they can hold.
        roomy = self._kv_tokens is None and self.model.device.type == "cpu"
        kept = usual_prefix_cache(workload, fitting, 1.0 if roomy else 0.25)
        if kept and self._kv_tokens is not None:
            kept = max(kept, self._kv_tokens - slots * longest)
        return Problem(workload, self._cost, slots, prefill_emits_first_token=True, prefix_cache=kept)

    def encoded(self, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """
        Return the token ids of each prompt, where the chat template is told what ``options`` say.

        Raises
        ------
        InputError
            If a prompt is none, or the chat template refuses it.
        """
        found = []
        for index, prompt in enumerate(prompts):
            try:
                found.append(self._encoded(prompt, options))
            except (TypeError, ValueError) as error:
                raise InputError(f"prompt {index} is {shown(prompt)}: {error}", hint=_PROMPT) from error
        return found

    def _encoded(self, prompt: Prompt, options: Mapping[str, Any]) -> tuple[int, ...]:
        if isinstance(prompt, Partial):
            return prompt.prompt_ids
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if isinstance(prompt, bytes | Mapping):
            raise TypeError("no list")
        parts = tuple(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
        kinds = set(map(type, parts))
        if kinds <= {int}:
            return parts
        if all(issubclass(kind, Mapping) for kind in kinds):
            return tuple(self.tokenizer.encode_chat(parts, **options))
        if bool in kinds:
            raise TypeError("true and false are no tokens")
        return tuple(map(as_integer, parts))

    def _check_lengths(
        self,
        prompts: list[tuple[int, ...]],
        most: IntArray,
        expected: np.ndarray[Any, np.dtype[Any]],
    ) -> None:
        limit = position_limit(unwrapped(self.model).config)
        if len(expected) != len(prompts):
            raise ValueError(f"{len(expected)} expected lengths were given for {len(prompts)} prompts")
        for index, (prompt, tokens, likely) in enumerate(
            zip(prompts, most.tolist(), expected.tolist(), strict=True)
        ):
            if not 1 <= likely <= tokens:
                raise ValueError(
                    f"prompt {index}: expected {likely:g} tokens of at most {tokens}; both must be positive,"
                    " and the first no larger"
                )
            if limit is not None and len(prompt) + tokens > limit:
                raise InputError(
                    f"prompt {index} may take {len(prompt) + tokens} tokens, the model has {limit} positions",
                    hint="Lower max_tokens or shorten the prompt.",
                )


_PROMPT = "Give a text, a list of token ids or a list of messages."


def _most_tokens(given: int | Sequence[int], prompts: int) -> IntArray:
    """Return the most tokens of each prompt's completion."""
    most = np.asarray(given)
    whole = most.dtype.kind == "i" or (most.dtype.kind == "u" and bool((most < 2**63).all()))
    if most.dtype.kind == "f":
        # A column of a table may have its whole numbers as floats.
        whole = bool((np.isfinite(most) & (most == np.floor(most))).all())
    if not whole or most.shape not in ((), (prompts,)):
        raise ValueError(
            f"max_tokens is {shown(given)}; it must be a whole number, or one for each of {prompts} prompts"
        )
    return np.full(prompts, most, dtype=np.int64)


def _expected(given: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return how long completions are expected to be."""
    try:
        found = np.atleast_1d(np.asarray(given, dtype=np.float64))
    except (TypeError, ValueError):
        found = np.empty((0, 0))
    if found.ndim != 1:
        raise ValueError(f"expected_tokens is {shown(given)}; it must hold a number for each prompt")
    return found


def _check_prompts(prompts: Sequence[tuple[int, ...]], vocabulary: int) -> None:
    """Refuse prompts that are empty or hold a token that the model does not know."""
    for index, tokens in enumerate(prompts):
        if not tokens:
            raise InputError(f"prompt {index} is empty", hint="Give it at least one token.")
        if not (min(tokens) >= 0 and max(tokens) < vocabulary):
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise InputError(
                f"prompt {index} holds token {wrong}, the model knows {vocabulary}",
                hint="Encode the prompts with the model's own tokenizer.",
            )


def sampling_per_prompt(
    sampling: Sampling | Sequence[Sampling] | None,
    fields: Mapping[str, Any],
    declared: Mapping[str, Any],
    prompts: int,
    told: bool | LogprobsMode,
) -> list[Sampling]:
    """Return what each prompt asks."""
    if fields and sampling is not None:
        raise ValueError(f"{', '.join(sorted(fields))} would have no effect beside sampling: put it in there")
    if sampling is None:
        sampling = Sampling(**{**declared, **fields})
        refuse_unused(fields, [sampling])
    several = list(sampling) if isinstance(sampling, Iterable) else [sampling]
    if not all(isinstance(each, Sampling) for each in several):
        raise TypeError(f"sampling is {shown(sampling)}: give Sampling, one for all or one for each")
    asked = several * prompts if isinstance(sampling, Sampling) else several
    if len(asked) != prompts:
        raise ValueError(f"sampling was given for {len(asked)} of {prompts} prompts")
    if told is False:
        return asked
    mode: LogprobsMode = "raw" if told is True else told
    return [replace(each, logprobs=each.logprobs or 0, logprobs_mode=mode) for each in asked]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """
    The completions of one call, several of a prompt each on its own.

    prompts, asked, most, expected: Of each completion: its prompt, how it is drawn, the most and the expected
        tokens in all.
    position: Of its prompt.
    partial: What an earlier call left of it, or None.
    version: Number of the call, which says of which weights its tokens are drawn.
    """

    prompts: list[tuple[int, ...]]
    asked: list[Sampling]
    most: IntArray
    expected: IntArray
    position: IntArray
    partial: list[Partial | None]
    version: int

    def of_prompts(self, on_token: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return what is told of a completion's token, where it is told of the prompt's position."""
        position = self.position.tolist()
        return lambda index, token: on_token(position[index], token)

    def groups(self) -> IntArray:
        """Return a number for each completion, equal for equal prompts; a continued one is alone."""
        group = numbered(self.prompts)
        begun = np.array([one is not None for one in self.partial])
        alone: IntArray = np.where(begun, len(group) + np.arange(len(group)), group)
        return alone

    def names(self, usual: Sequence[str]) -> np.ndarray[Any, np.dtype[np.object_]]:
        """Return the name of each completion's random stream: what is gone on with keeps its own."""
        kept = {one.name for one in self.partial if one}
        if len(kept) < sum(one is not None for one in self.partial):
            raise ValueError("the same unfinished completion is given twice")
        found = []
        for one, name in zip(self.partial, usual, strict=True):
            while one is None and name in kept:
                name += "'"
            found.append(name if one is None else one.name)
        return np.array(found, dtype=np.object_)

    def sample(self, index: int) -> int:
        """Return which of its prompt's completions one is."""
        one = self.partial[index]
        return (
            index - int(np.searchsorted(self.position, self.position[index])) if one is None else one.sample
        )

    def completion(
        self,
        index: int,
        tokens: tuple[int, ...],
        text: str,
        reason: Literal["stop", "length"],
        told: tuple[TokenLogprob, ...] | None,
        given: tuple[range, ...],
    ) -> Completion:
        """Return a completion that is over."""
        most = self.asked[index].logprobs
        return Completion(
            int(self.position[index]),
            self.prompts[index],
            tokens,
            text,
            reason,
            None if told is None else tuple(each.value for each in told),
            tuple(each.likeliest[:most] for each in told) if told and most else None,
            self.sample(index),
            self.versions(index, tokens),
            given,
        )

    def told(
        self,
        index: int,
        tokens: tuple[int, ...],
        recorder: Recorder | None,
        stream: int,
        given: Sequence[range] = (),
    ) -> tuple[TokenLogprob, ...] | None:
        """Return the log-probabilities of a completion's tokens, those of earlier calls as they were."""
        if recorder is None or self.asked[index].logprobs is None:
            return None
        one = self.partial[index]
        before = one.told or () if one else ()
        return before + recorder.read(stream, len(tokens), len(before), given)

    def versions(self, index: int, tokens: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return of which weights how many of a completion's tokens were drawn."""
        one = self.partial[index]
        before = one.versions if one else ()
        new = len(tokens) - sum(count for _, count in before)
        if not new:
            return before
        if before and before[-1][0] == self.version:
            return (*before[:-1], (self.version, before[-1][1] + new))
        return (*before, (self.version, new))

    def unfinished(
        self, index: int, tokens: tuple[int, ...], recorder: Recorder | None, stream: int, name: str
    ) -> Partial:
        """Return what is left to do of a completion."""
        return Partial(
            int(self.position[index]),
            self.sample(index),
            self.prompts[index],
            tokens,
            self.told(index, tokens, recorder, stream),
            self.versions(index, tokens),
            replace(self.asked[index], n=1),
            int(self.most[index]),
            name,
        )
