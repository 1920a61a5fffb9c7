"""Memory of a device, and memory that a process keeps."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from ..models.faults import available_bytes

if TYPE_CHECKING:
    from .tiers import Tier

_MEASURED_TOKENS = 16
_USABLE = 0.9
"""Share of free memory for KV cache; activations take the rest."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of malloc.h."""
_MOST_KEPT, _LARGEST_KEPT = 1 << 30, 128 << 20
"""Most free bytes, and bytes of a block, that a process keeps."""
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def memory_of(model: Any, tier: Tier) -> tuple[float, int]:
    """Return a device's bytes, and its KV tokens next to the weights."""
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
    """Return the bytes of a token's KV cache, measured on a batch."""
    batch = tier.batch(model, 1, _MEASURED_TOKENS)
    batch.prefill([0], [[0]])
    state = batch.take(0)
    return sum(part.nbytes for part in (*state.keys, *state.values)) / state.tokens


@functools.cache
def keep_freed_memory() -> None:
    """Keep memory that a forward call on the CPU freed.

    By default glibc returns large blocks to the system at once, until it has seen larger ones. Each layer's
    activations are then allocated and zeroed again, page by page. User settings take precedence.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _OF_THE_USER):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
