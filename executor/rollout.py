"""Rollouts for a reinforcement learning loop, in the form that TRL's trainers ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TypedDict

from .llm import DEFAULT_MAX_TOKENS, LLM, Completion, Prompt


class Rollout(TypedDict):
    """Token ids and log-probabilities of the answers, a list entry for each prompt, in the prompts' order."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]


def rollout_function(
    engine: LLM,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    expected_tokens: Callable[[Sequence[Prompt]], Sequence[int]] | None = None,
    on_completion: Callable[[Completion], None] | None = None,
) -> Callable[[Sequence[Prompt], object], Rollout]:
    """
    Return a function for ``GRPOTrainer(rollout_func=...)``, or for a loop of one's own.

    The function takes the prompts, each as often as it is to be answered, and the trainer, at which it does
    not look: the engine holds the model that the trainer changes. Each call draws new answers.

    Parameters
    ----------
    engine
        Made with the model that is trained.
    max_tokens, temperature, top_k, top_p
        As :meth:`~.generation.LLM.generate` takes them.
    seed
        Of the first call; the next call takes the next one.
    expected_tokens
        Predicts the length of each answer, from those of the step before for example; longest first saves
        time then. Without it prompts are served in the order given.
    on_completion
        Called with each answer as it finishes: rewards can be computed while others still decode.

    Returns
    -------
    callable
        Its logprobs are the model's own, before temperature, top-k and top-p.
    """
    seeds = count(seed)

    def rollout(prompts: Sequence[Prompt], trainer: object = None) -> Rollout:
        del trainer
        done: list[Completion | None] = [None] * len(prompts)
        for completion in engine.generate(
            prompts,
            max_tokens=max_tokens,
            expected_tokens=None if expected_tokens is None else expected_tokens(prompts),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=next(seeds),
            log_probabilities=True,
        ):
            done[completion.index] = completion
            if on_completion is not None:
                on_completion(completion)
        answers = [completion for completion in done if completion is not None]
        return Rollout(
            prompt_ids=[list(answer.prompt_ids) for answer in answers],
            completion_ids=[list(answer.completion_ids) for answer in answers],
            logprobs=[list(answer.log_probabilities or ()) for answer in answers],
        )

    return rollout
