"""Cost of an iteration that mixes prefill and decode."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..files.disk import InputError, read_json_object
from ..files.record import is_number
from .cost import refuse_impossible_costs

_MILLISECOND = 1e-3


@dataclass(frozen=True, slots=True)
class MixedCost:
    """Seconds of an iteration by three linear functions.

    Few decoding requests are bound by reading the weights, many by computing. Prompts and generated tokens
    share the linear layers, so in an iteration with prompts both kinds of token cost the same. (The function
    of prompts is fitted to large ones. Alone it would jump at the first prompt token, where reading the
    weights binds.)

    prefill_base, prefill_per_token: Seconds of an iteration with prompts, and per token in it.
    prefill_per_pair: Seconds per pair of prompt tokens that attend to each other, counted as tokens squared.
    few_base, few_per_request, few_per_kv_token: Seconds of an iteration of few decoding requests, per
    request, and per KV token.
    many_base, many_per_request, many_per_kv_token: The same for many requests.
    swap_per_token: Seconds to move one KV token to the host's memory, or back.
    transfer_per_token: Seconds to move one KV token to another device.
    """

    prefill_base: float
    prefill_per_token: float
    prefill_per_pair: float
    few_base: float
    few_per_request: float
    few_per_kv_token: float
    many_base: float
    many_per_request: float
    many_per_kv_token: float
    swap_per_token: float = 0.0
    transfer_per_token: float = 0.0

    def __post_init__(self) -> None:
        refuse_impossible_costs(self)

    def seconds(self, decodes: int, kv_tokens: int, prompt_tokens: int = 0, pairs: int = 0) -> float:
        """Return the seconds of one iteration without swaps.

        pairs: Sum over the chunks of prompts of ``new * (new + 2 * held)`` tokens.
        """
        decoding = self._decoding(decodes, kv_tokens) if decodes else 0.0
        if not prompt_tokens:
            return decoding
        tokens = decodes + prompt_tokens
        mixed = self.prefill_base + self.prefill_per_token * tokens + self.few_per_kv_token * kv_tokens
        mixed = min(max(decoding, mixed), self._decoding(tokens, kv_tokens))
        return mixed + self.prefill_per_pair * pairs

    def _decoding(self, tokens: int, kv_tokens: int) -> float:
        few = self.few_base + self.few_per_request * tokens + self.few_per_kv_token * kv_tokens
        many = self.many_base + self.many_per_request * tokens + self.many_per_kv_token * kv_tokens
        return max(few, many)


def read_distserve_cost(
    file: str | os.PathLike[str],
    model: str,
    tensor_parallel: int,
    *,
    swap_per_token: float = 0.0,
    transfer_per_token: float = 0.0,
) -> MixedCost:
    """Return DistServe's fitted coefficients of a model."""
    models = read_json_object(Path(file))
    entry = models.get(model)
    if not isinstance(entry, dict):
        known = f"Known are {', '.join(models)}."
        raise InputError("the model is missing", file=file, where=f"field '{model}'", hint=known)
    degree = entry.get(str(tensor_parallel))
    if not isinstance(degree, dict):
        known = f"Known degrees are {', '.join(entry)}."
        where = f"field '{model}.{tensor_parallel}'"
        raise InputError("the tensor parallel degree is missing", file=file, where=where, hint=known)

    def three(name: str) -> list[float]:
        values = degree.get(name)
        if not isinstance(values, list) or len(values) != 3 or not all(map(is_number, values)):
            where = f"field '{model}.{tensor_parallel}.{name}'"
            raise InputError("is not three numbers", file=file, where=where, hint="Give three milliseconds.")
        # A fit may be slightly below zero if the term hardly matters.
        return [max(0.0, float(value)) * _MILLISECOND for value in values]

    base, token, pair = three("prefill")
    few, many = three("decoding_smallbs"), three("decoding_largebs")
    return MixedCost(
        prefill_base=base,
        prefill_per_token=token,
        prefill_per_pair=pair,
        few_base=few[0],
        few_per_request=few[2],
        few_per_kv_token=few[1],
        many_base=many[0],
        many_per_request=many[2],
        many_per_kv_token=many[1],
        swap_per_token=swap_per_token,
        transfer_per_token=transfer_per_token,
    )
