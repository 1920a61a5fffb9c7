"""Check of a batch against a model's own greedy completions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..models.families import UnsupportedModelError
from ..models.faults import out_of_memory

if TYPE_CHECKING:
    from ..kv.batch import RunningBatch

_LOGIT_TIE = 1e-3
"""Logit difference that rounding may explain, in standard deviations."""
_MEND = "use another tier or another model, and report this one"


def greedy_shortfall(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.float64]:
    """Return each token's distance from the likeliest one.

    One plain forward call over prompt and completion, alone and without a cache, is the reference. The
    shortfall of a greedy completion is zero, or so small that rounding decides: then another computation may
    rightly differ.
    """
    scores, largest, deviation = _alone(model, prompt, answer)
    shortfall: NDArray[np.float64] = (largest - scores) / deviation
    return shortfall


def _alone(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.float64]:
    """Return each token's logit, the largest, and their deviation."""
    import torch

    with torch.inference_mode():
        logits = _logits(model, [*prompt, *answer])[len(prompt) - 1 : -1].double()
        scores = logits[range(len(answer)), list(answer)]
        figures: NDArray[np.float64] = torch.stack([scores, logits.amax(1), logits.std(1)]).cpu().numpy()
    return figures


def _logits(model: Any, ids: list[int]) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]


def near_tie(model: Any) -> float:
    """Return the shortfall up to which rounding may decide."""
    import torch

    return float(4.0 * max(torch.finfo(dtype).eps for dtype in (model.dtype, _computed_in(model))) ** 0.5)


def _computed_in(model: Any) -> Any:
    """Return the number format of the logits."""
    head = model.get_output_embeddings()
    if head is None:
        return model.dtype
    formats: list[Any] = []
    handle = head.register_forward_hook(lambda _, __, output: formats.append(output.dtype))
    try:
        _logits(model, [0])
    finally:
        handle.remove()
    # Some forward calls compute the logits without calling the module.
    return formats[0] if formats else model.dtype


def check_tier(model: Any, tier: type[RunningBatch], *, alone: Any = None, seed: int = 0) -> None:
    """Compare a few short requests in a batch with the model alone.

    Static rules cover known families; this check covers the others.
    """
    rng = random.Random(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length in (9, 3, 17, 6)]
    try:
        served = _serve(tier(model, 3, 24), prompts)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a model raises that is called in ways it was not made for
        if out_of_memory(error):
            raise
        what = (str(error).splitlines() or [""])[0]
        reason = f"it fails on the {tier.tier} tier ({type(error).__name__}: {what})"
        raise UnsupportedModelError(model.config.model_type, reason, _MEND) from error
    tie, errors = near_tie(model), []
    for request, (answer, completion_of) in served.items():
        scores, largest, deviation = _alone(model if alone is None else alone, prompts[request], answer)
        # Logits are compared as well: a tiny model may choose the right token for the wrong reasons. Some
        # models compute parts in float32 whatever their format, so they agree to its precision at best.
        errors += [
            (largest - scores) / deviation / tie,
            np.abs(scores - completion_of) / deviation / max(tie, _LOGIT_TIE),
        ]
    worst = float(np.concatenate(errors).max())
    # Written so that NaN is refused as well.
    if not worst <= 1.0:
        raise UnsupportedModelError(
            model.config.model_type,
            f"its completions in a padded batch differ from its own on the {tier.tier} tier"
            f" ({worst:.2g} times as far as rounding explains)",
            _MEND,
        )


def _serve(batch: RunningBatch, prompts: list[list[int]]) -> dict[int, tuple[list[int], list[float]]]:
    """Return each request's completion, and the logits of its tokens."""
    served: dict[int, tuple[list[int], list[float]]] = {request: ([], []) for request in range(len(prompts))}

    def note(tokens: NDArray[np.int64], requests: dict[int, int]) -> None:
        for slot, request in requests.items():
            answer, scores = served[request]
            answer += tokens[:, slot].tolist()
            scores += batch.scores[:, slot].tolist()

    def join(requests: dict[int, int]) -> None:
        first = batch.prefill(list(requests), [prompts[request] for request in requests.values()])
        tokens = np.zeros((1, batch.slots), dtype=np.int64)
        tokens[0, list(requests)] = first
        note(tokens, requests)

    # The third joins a running batch, the last one a freed row, the second leaves and returns: insertion,
    # padding and packing all occur.
    join({0: 0, 1: 1})
    note(batch.decode(4), {0: 0, 1: 1})
    join({2: 2})
    note(batch.decode(3), {0: 0, 1: 1, 2: 2})
    batch.release(0)
    suspended = batch.take(1)
    join({0: 3})
    note(batch.decode(2), {0: 3, 2: 2})
    batch.insert(1, suspended)
    note(batch.decode(5), {0: 3, 1: 1, 2: 2})
    return served
