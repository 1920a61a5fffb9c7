"""Attention functions that replace those of transformers.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

_QUERY_ROWS = 128
"""Rows of a block; more compute more scores that the causal mask hides."""


class AttentionCall(NamedTuple):
    """Arguments of a layer's attention function.

    query: Shape (rows, heads, tokens, head size).
    key, value: Shape (rows, key-value heads, columns, head size).
    mask: Added to the scores, broadcast to (rows, heads, tokens, columns).
    scaling: Multiplies the scores; one over the root of the head size if None.
    others: Further arguments that transformers passes.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float | None
    others: dict[str, Any]


def aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask that torch's attention can read."""
    if mask.device.type == "cpu":
        return mask
    begins = (mask.data_ptr(), *(step * mask.itemsize for step in mask.stride()[:-1]))
    return mask.clone(memory_format=torch.contiguous_format) if any(at % 16 for at in begins) else mask


def attend_from_latest(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attend from a sequence's latest tokens to all before them.

    Shapes: query (1, heads, tokens, head size), keys, values (1, key-value heads, held, head size), returned
        (1, tokens, heads, head size).
    """
    tokens, key_columns = query.shape[2], keys.shape[2]
    mask = None
    if (window is not None and key_columns > window) or 1 < tokens < key_columns:
        at = torch.arange(key_columns - tokens, key_columns, device=query.device)[:, None]
        columns = torch.arange(key_columns, device=query.device)[None, :]
        mask = columns <= at
        if window is not None:
            mask &= columns > at - window
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None and tokens > 1,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return output.transpose(1, 2)


def attend_by_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attend as :func:`attend_from_latest` does, by products of some query rows at a time."""
    heads, tokens, size = query.shape[1:]
    kv_heads, held = keys.shape[1:3]
    before = held - tokens
    output = query.new_empty(1, tokens, heads, values.shape[-1])
    query = (query[0] * (size**-0.5 if scale is None else scale)).view(kv_heads, -1, tokens, size)
    for first in range(0, tokens, _QUERY_ROWS):
        rows = min(_QUERY_ROWS, tokens - first)
        end = before + first + rows
        begin = 0 if window is None else max(0, before + first + 1 - window)
        asked = query[:, :, first : first + rows].reshape(kv_heads, -1, size)
        scores = (asked @ keys[0, :, begin:end].transpose(1, 2)).view(kv_heads, -1, rows, end - begin)
        at = torch.arange(end - rows, end, device=query.device)[:, None]
        # Only the latest columns are hidden from some rows, unless there is a window.
        hidden_from = max(begin, end - rows) if window is None else begin
        columns = torch.arange(hidden_from, end, device=query.device)[None, :]
        hidden = columns > at if window is None else (columns > at) | (columns <= at - window)
        scores[..., hidden_from - begin :].masked_fill_(hidden, -torch.inf)
        wide = torch.promote_types(values.dtype, torch.float32)
        shares = scores.softmax(dim=-1, dtype=wide).to(values.dtype)
        part = shares.view(kv_heads, -1, end - begin) @ values[0, :, begin:end]
        output[0, first : first + rows] = part.view(heads, rows, -1).transpose(0, 1)
    return output


def attend_in_float(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Attend as :func:`attend_from_latest` does, in float32; return the query's number format."""
    return attend_from_latest(query.float(), keys.float(), values.float(), **options).to(query.dtype)


ATTENTION: Mapping[str, Callable[..., torch.Tensor]] = {
    "torch's function": attend_from_latest,
    "torch's function in float32": attend_in_float,
    "blocks of products": attend_by_blocks,
}
"""Functions for prompts; the first is the usual one."""


@contextmanager
def attending(model: Any, name: str, function: Callable[[AttentionCall], torch.Tensor]) -> Iterator[None]:
    """Let a model's layers call an attention function within a context.

    No masks are built. The function returns (rows, tokens, heads, head size).
    """

    def attention(
        _: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        if value.dtype != query.dtype:
            # Under autocast rotary embeddings return float32, which the KV cache holds; transformers'
            # attention rounds queries and keys to the values' format.
            query, key = (states.to(value.dtype).to(query.dtype) for states in (query, key))
            value = value.to(query.dtype)
        return function(AttentionCall(query, key, value, attention_mask, scaling, others)), None

    AttentionInterface.register(name, attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
        # The registry outlives the batch: a function that knows its buffers would keep them allocated.
        AttentionInterface.register(name, _not_in_place)


def _not_in_place(*_: Any, **__: Any) -> None:
    raise RuntimeError("this attention function is in place only while its batch runs")
