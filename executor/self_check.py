"""Whether a running batch gives a model's own greedy answers, up to near-ties of the number format."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .families import UnsupportedModelError
from .faults import out_of_memory

if TYPE_CHECKING:
    from .running import RunningBatch

_MEND = "use another tier or another model, and report this one"


def greedy_shortfall(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.float64]:
    """
    Measure how far each token of an answer is from being the likeliest one after the tokens before it.

    One plain forward call over prompt and answer, alone and without a cache, is the reference. A greedy
    answer falls short by nothing, or by so little that rounding decides: then another way to compute it may
    rightly differ.

    Parameters
    ----------
    model
        A transformers causal language model.
    prompt
        Token ids of the prompt.
    answer
        Token ids of the answer.

    Returns
    -------
    numpy.ndarray
        For each token of the answer the largest logit less its own, in standard deviations of the logits
        there.
    """
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *answer]], device=model.device)
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        own = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        shortfall: NDArray[np.float64] = ((logits.amax(-1) - own) / logits.std(-1)).cpu().numpy()
    return shortfall


def near_tie(model: Any) -> float:
    """
    Return the shortfall up to which rounding may decide between two tokens.

    Parameters
    ----------
    model
        A transformers causal language model.

    Returns
    -------
    float
        In standard deviations of the logits: about 1e-3 for float32, 0.3 for bfloat16.
    """
    import torch

    return float(4.0 * torch.finfo(model.dtype).eps ** 0.5)


def check_tier(model: Any, tier: type[RunningBatch], *, seed: int = 0) -> None:
    """
    Run a few short requests through a running batch and compare each with the model alone.

    Static rules know the families that they were written for; this catches the ones they were not.

    Parameters
    ----------
    model
        A transformers causal language model in evaluation mode.
    tier
        The kind of batch.
    seed
        Seed of the prompts.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be run so, or an answer differs by more than a near-tie.
    """
    rng = random.Random(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length in (9, 3, 17, 6)]
    try:
        answers = _serve(tier(model, 3, 24), prompts)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a model raises that is called in ways it was not made for
        if out_of_memory(error):
            raise
        what = (str(error).splitlines() or [""])[0]
        reason = f"it fails on the {tier.tier} tier ({type(error).__name__}: {what})"
        raise UnsupportedModelError(model.config.model_type, reason, _MEND) from error
    worst = max(
        greedy_shortfall(model, prompt, answer).max() for prompt, answer in zip(prompts, answers, strict=True)
    )
    # Written so that NaN is refused as well.
    if not worst <= near_tie(model):
        raise UnsupportedModelError(
            model.config.model_type,
            f"its answers in a padded batch differ from its own on the {tier.tier} tier"
            f" (a token falls {worst:.2g} deviations short)",
            _MEND,
        )


def _serve(batch: RunningBatch, prompts: list[list[int]]) -> list[list[int]]:
    answers = [[token] for token in batch.prefill([0, 1], prompts[:2])]
    # The third joins a running batch, the last one a row that was freed, the second leaves and comes back:
    # insertion, padding and packing all occur.
    _extend(answers, batch.decode(4), {0: 0, 1: 1})
    answers.append(batch.prefill([2], prompts[2:3]))
    _extend(answers, batch.decode(3), {0: 0, 1: 1, 2: 2})
    batch.release(0)
    suspended = batch.take(1)
    answers.append(batch.prefill([0], prompts[3:]))
    _extend(answers, batch.decode(2), {0: 3, 2: 2})
    batch.insert(1, suspended)
    _extend(answers, batch.decode(5), {0: 3, 1: 1, 2: 2})
    return answers


def _extend(answers: list[list[int]], tokens: NDArray[np.int64], requests: dict[int, int]) -> None:
    for slot, request in requests.items():
        answers[request] += tokens[:, slot].tolist()
