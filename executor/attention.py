"""
Attention functions in place of transformers' own, such as one that does not repeat grouped keys.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention

_NAME = "batchbound_grouped_sdpa"


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attend from one token per row, on the keys and values as they are cached.

    The query heads that share a key head are taken for queries of one sequence, which is right as long as a
    single token per row attends and the mask is the same for all heads. Anything else is left to
    transformers.

    Parameters
    ----------
    module
        The attention layer.
    query
        Shape (rows, heads, tokens, head size).
    key, value
        Shape (rows, key-value heads, columns, head size).
    attention_mask
        Added to the scores, broadcast to (rows, heads, tokens, columns).
    **arguments
        What transformers passes to its own attention functions.

    Returns
    -------
    tuple of torch.Tensor and None
        The output, shape (rows, tokens, heads, head size), and no weights.
    """
    rows, heads, tokens, size = query.shape
    if tokens != 1 or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention.sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], -1, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=arguments.get("scaling"),
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def repeats_keys(model: Any) -> bool:
    """
    Tell whether transformers would repeat keys and values in every decode round of this model.

    Parameters
    ----------
    model
        A transformers causal language model.

    Returns
    -------
    bool
        True for grouped-query attention by sdpa on releases that do not pack the query heads themselves.
    """
    if hasattr(sdpa_attention, "pack_gqa") or model.config._attn_implementation != "sdpa":
        return False
    return any(getattr(module, "num_key_value_groups", 1) > 1 for module in model.modules())


def grouped(model: Any) -> AbstractContextManager[None]:
    """
    Let a model's layers call :func:`grouped_attention` meanwhile.

    Parameters
    ----------
    model
        A transformers causal language model whose masks are built by the caller.

    Returns
    -------
    context manager
        The function is in place within it.
    """
    return attending(model, _NAME, grouped_attention)


@contextmanager
def attending(model: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """
    Let a model's layers call an attention function meanwhile, and build no masks.

    Parameters
    ----------
    model
        A transformers causal language model.
    name
        Under which to register the function.
    function
        Called as transformers' own attention functions are.

    Yields
    ------
    None
        While the function is in place.
    """
    AttentionInterface.register(name, function)
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
