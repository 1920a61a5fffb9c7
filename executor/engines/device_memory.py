"""How much memory a device has, and how many tokens of keys and values fit beside the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..models.faults import available_bytes

if TYPE_CHECKING:
    from .tiers import Tier

_MEASURED_TOKENS = 16
_USABLE = 0.9
"""Share of free memory for keys and values: the rest is for activations."""


def memory_of(model: Any, tier: Tier) -> tuple[float, int]:
    """
    Return a device's bytes, and how many tokens of keys and values fit on it beside the weights.

    Parameters
    ----------
    model
        Loaded, on the device. On the CPU the device is what memory the host has available now, with what
        the weights take already; a packed copy of them is counted as taken.
    tier
        Its layout: what a token takes is measured on a batch of it.
    """
    import torch

    from ..attention.packed_weights import packed_bytes

    weights = sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))
    if model.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    else:
        free = available_bytes()
        whole = free + weights
        free -= packed_bytes(model)
    return float(whole), int(_USABLE * free / token_bytes_of(model, tier))


def token_bytes_of(model: Any, tier: Tier) -> float:
    """
    Return the bytes that a token's keys and values take in all layers, measured on a batch.

    Parameters
    ----------
    model, tier
        As of :func:`memory_of`.
    """
    batch = tier.batch(model, 1, _MEASURED_TOKENS)
    batch.prefill([0], [[0]])
    held = batch.take(0)
    return sum(part.nbytes for part in (*held.keys, *held.values)) / held.tokens
