"""What this machine computes fastest, found by trying.

Some processors multiply bfloat16 several times as fast as float32, and torch's attention of prompts falls
behind blocks of products. On others float32 products that read bfloat16 weights are faster.

This module needs torch when it is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from .functions import attend_by_blocks, attend_from_latest
from .host_kernels import built

_GAIN = 1.1
"""Speed-up that justifies another way than torch's; larger chooses it less often."""

_ROWS, _WEIGHTS = 16, 16
"""Rows of a decode step, and weights of a trial."""

_REPEATS = 3

_ROWS_HINT = 64
"""Rows for which oneDNN chooses the order of packed weights."""


@dataclass(frozen=True, slots=True)
class Products:
    """The ways that were fastest in a number format.

    halves: True for float32 products of our own on packed bfloat16 weights; see :meth:`HostKernels.pack`.
    blocks: True for attention of long prompts by blocks of products.
    """

    halves: bool = False
    blocks: bool = False

    def __str__(self) -> str:
        products = "in float32 on packed bfloat16 weights" if self.halves else "by oneDNN"
        attention = "blocks of products" if self.blocks else "torch's own function"
        return f"products {products}; attention of long prompts by {attention}"


def fastest_products(device: torch.device, dtype: torch.dtype) -> Products:
    """Return the fastest ways for a model, after a trial the first time."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return Products()
    # Other processes do not count.
    return _tried(dtype, torch.get_num_threads(), time.process_time)


@cache
@torch.inference_mode()
def _tried(dtype: torch.dtype, threads: int, clock: Callable[[], float]) -> Products:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16().to(dtype)

    def faster(way: Callable[[], object], than: Callable[[], object]) -> bool:
        return _GAIN * least(way, clock) < least(than, clock)

    kernels = built()
    inputs, weight = random(_ROWS, 1024), random(1024, 1024)
    halves = None if kernels is None else kernels.pack(weight)
    if kernels is None or halves is None:
        return Products()
    # More weights than the second cache holds, as a model has.
    ours, own = ([packed.clone() for _ in range(_WEIGHTS)] for packed in (halves, pack(weight)))
    by_halves = faster(
        lambda: [kernels.times_halves(inputs, packed, None, 1024) for packed in ours],
        lambda: [product(inputs, packed) for packed in own],
    )
    if dtype is torch.float32:
        return Products(by_halves)
    query, (keys, values) = random(1, 8, 512, 64), random(2, 1, 2, 512, 64)
    by_blocks = faster(
        lambda: attend_by_blocks(query, keys, values, window=None, scale=None),
        lambda: attend_from_latest(query, keys, values, window=None, scale=None),
    )
    return Products(by_halves, by_blocks)


def least(call: Callable[[], object], clock: Callable[[], float], repeats: int = _REPEATS) -> float:
    """Return the shortest seconds of some calls, after one that does not count."""
    call()
    timings = []
    for _ in range(repeats):
        start = clock()
        call()
        timings.append(clock() - start)
    return min(timings)


def product(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return inputs times a weight of :func:`pack`, plus a bias."""
    if not packs(packed.dtype):
        return torch.nn.functional.linear(inputs, packed, bias)
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return output


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's copy in oneDNN's order, where it has one for the number format."""
    if not packs(weight.dtype):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


@cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of a number format."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
