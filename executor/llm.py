"""The engine as a library: prompts in, finished answers out, as a sampling loop wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from ..data.costs.cost import CostModel
from ..data.files.disk import InputError
from ..data.problem import Problem
from ..data.report import Report
from ..data.trace import Trace
from ..data.workload import Workload
from ..heuristics.loop import iterate
from ..heuristics.registry import policy_named
from ..models.bounds.makespan import best_bound
from .engines.huggingface import NO_EOS, HuggingFaceEngine, vocabulary_of
from .engines.tiers import choose_tier
from .models.sampling import RecordingSampler, Sampler
from .models.source import LoadFormat, load_model, position_limit
from .models.tokenizers import Tokenizer, load_tokenizer
from .models.wrapped import unwrapped
from .reports.report import report

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or the messages of a chat."""

DEFAULT_MAX_TOKENS = 256
"""Tokens after which an answer ends if the caller does not say."""


@dataclass(frozen=True, slots=True)
class Completion:
    """
    A finished answer.

    Parameters
    ----------
    index
        Position of its prompt.
    prompt_ids, completion_ids
        Tokens read and written; an end-of-sequence token that ended the answer is its last.
    text
        The answer's text, without special tokens.
    finish_reason
        ``stop`` for an end-of-sequence token, ``length`` for the most tokens allowed.
    log_probabilities
        The model's own log-probability of each token; None unless asked for.
    """

    index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    log_probabilities: tuple[float, ...] | None = None


class LLM:
    """
    A model with a running batch of slots, which answers many prompts a call.

    The weights are read where they are: a training loop that changes them in place changes the next call.
    While the model runs it is in evaluation mode, without dropout and gradient checkpointing; whenever the
    caller has its turn, between two answers too, the model is as the caller left it.

    Parameters
    ----------
    model
        A transformers causal language model, in any mode; ``torch.compile``, ``DistributedDataParallel`` and
        PEFT's wrappers of adapters within the layers are looked through.
    tokenizer
        Turns text into tokens and back.
    slots
        The most requests that decode together.
    tier
        Layout of keys and values: ``auto``, ``window`` or ``ragged``.
    kv_tokens
        The most tokens of keys and values on the device; None for as many as the slots need.
    cost
        Costs the scheduling and the report count with; the hybrid paper's by default.

    Raises
    ------
    UnsupportedModelError
        If the model's answers would be wrong, or its weights are not here as a whole.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        slots: int = 64,
        tier: str = "auto",
        kv_tokens: int | None = None,
        cost: CostModel | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be positive, got {slots}")
        self.model, self.tokenizer = model, tokenizer
        self._slots, self._kv_tokens = slots, kv_tokens
        self._tier = choose_tier(model, tier)
        self._cost = CostModel.paper() if cost is None else cost
        self._ran: tuple[Problem, Trace] | None = None

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        tokenizer: str | None = None,
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
        model = load_model(name, load_format=load_format, dtype=dtype, device=device, seed=seed)
        return cls(model, load_tokenizer(tokenizer or name), **options)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | Sequence[int] = DEFAULT_MAX_TOKENS,
        expected_tokens: Sequence[int] | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        ignore_eos: bool = False,
        log_probabilities: bool = False,
        on_token: Callable[[int, int], None] | None = None,
    ) -> Iterator[Completion]:
        """
        Yield each answer as it finishes, in no particular order.

        Parameters
        ----------
        prompts
            What to answer. The same prompt may come many times; each answer is drawn on its own.
        max_tokens
            Tokens after which an answer ends: one number, or one for each prompt.
        expected_tokens
            How long each answer is expected to be, at most its ``max_tokens``: the longest are then served
            first. Without it prompts are served in the order given.
        temperature, top_k, top_p, seed
            How tokens are chosen, see :class:`~.sampling.Sampler`; a temperature of 0 is greedy.
        ignore_eos
            Decode every answer to ``max_tokens``.
        log_probabilities
            Whether completions carry the log-probability of each token.
        on_token
            Called with the position of the prompt and the token as soon as it is chosen.

        Raises
        ------
        InputError
            If a prompt is empty or not of this model's vocabulary, or may outgrow its positions.
        RunStoppedError
            If memory does not hold one request, or the model's logits are not finite.
        ValueError
            If a parameter is out of its range.
        """
        unwrapped(self.model)  # It may have been sharded since.
        choice = RecordingSampler if log_probabilities else Sampler
        sampler = choice(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        tokens = [self._encoded(prompt, index) for index, prompt in enumerate(prompts)]
        most = np.broadcast_to(np.asarray(max_tokens, dtype=np.int64), len(tokens))
        expected = most if expected_tokens is None else np.asarray(expected_tokens, dtype=np.int64)
        self._check_lengths(tokens, most, expected)
        order = "fcfs-ski" if expected_tokens is None else "lpt-ski"
        return self._generate(tokens, most, expected, order, sampler, ignore_eos, on_token)

    def report(self) -> Report:
        """
        Return how far the last call was from the proven bound for the lengths that came out.

        Raises
        ------
        RuntimeError
            If no call has been finished.
        """
        if self._ran is None:
            raise RuntimeError("no call of generate has been exhausted, so there is nothing to report")
        problem, trace = self._ran
        served = replace(problem, workload=problem.workload.with_output_tokens(trace.tokens))
        return report(problem, trace, None, None, run_bound=best_bound(served))

    def _generate(
        self,
        prompts: list[tuple[int, ...]],
        most: np.ndarray[Any, np.dtype[np.int64]],
        expected: np.ndarray[Any, np.dtype[np.int64]],
        order: str,
        sampler: Sampler,
        ignore_eos: bool,
        on_token: Callable[[int, int], None] | None,
    ) -> Iterator[Completion]:
        if not prompts:
            return
        eos = NO_EOS if ignore_eos else frozenset(self.tokenizer.eos_ids)
        workload = Workload.from_lengths([len(prompt) for prompt in prompts], expected)
        slots = min(self._slots, len(prompts))
        problem = Problem(workload, self._cost, slots, prefill_emits_first_token=True)
        engine = HuggingFaceEngine(
            problem,
            self.model,
            prompts,
            most,
            eos_ids=eos,
            sampler=sampler,
            tier=self._tier,
            kv_tokens=self._kv_tokens,
            on_token=on_token,
        )
        serving = iterate(problem, policy_named(order, problem), engine)
        while True:
            try:
                index = next(serving)
            except StopIteration as done:
                self._ran = problem, done.value
                return
            tokens = tuple(engine.answers[index])
            ended = tokens[-1] in eos
            name = str(workload.ids[index])
            yield Completion(
                index,
                prompts[index],
                tokens,
                self.tokenizer.decode(tokens[:-1] if ended else tokens),
                "stop" if ended else "length",
                sampler.log_probabilities(name, len(tokens))
                if isinstance(sampler, RecordingSampler)
                else None,
            )

    def _encoded(self, prompt: Prompt, index: int) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokens = tuple(self.tokenizer.encode(prompt))
        elif messages := [each for each in prompt if isinstance(each, Mapping)]:
            tokens = tuple(self.tokenizer.encode_chat(messages))
        else:
            tokens = tuple(each for each in prompt if not isinstance(each, Mapping))
        vocabulary = vocabulary_of(self.model)
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise InputError(
                f"prompt {index} holds token {wrong}, the model knows {vocabulary}",
                hint="Encode the prompts with the model's own tokenizer.",
            )
        if not tokens:
            raise InputError(f"prompt {index} is empty", hint="Give it at least one token.")
        return tokens

    def _check_lengths(
        self,
        prompts: list[tuple[int, ...]],
        most: np.ndarray[Any, np.dtype[np.int64]],
        expected: np.ndarray[Any, np.dtype[np.int64]],
    ) -> None:
        limit = position_limit(unwrapped(self.model).config)
        if len(expected) != len(prompts):
            raise ValueError(f"{len(expected)} expected lengths were given for {len(prompts)} prompts")
        for index, (prompt, tokens, likely) in enumerate(
            zip(prompts, most.tolist(), expected.tolist(), strict=True)
        ):
            if not 1 <= likely <= tokens:
                raise ValueError(
                    f"prompt {index}: expected {likely} tokens of at most {tokens}; both must be positive,"
                    " and the first no larger"
                )
            if limit is not None and len(prompt) + tokens > limit:
                raise InputError(
                    f"prompt {index} may take {len(prompt) + tokens} tokens, the model has {limit} positions",
                    hint="Lower max_tokens or shorten the prompt.",
                )
