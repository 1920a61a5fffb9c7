"""What this machine computes fastest in bfloat16, found by trying.

Processors with bfloat16 instructions multiply it several times as fast as float32, and torch's attention of
prompts falls behind blocks of products. Others convert each number, and float32 is faster.

This module needs torch when it is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from .functions import attend_by_blocks, attend_from_latest

_GAIN = 1.2
"""Speed-up that justifies another way than torch's; larger chooses it less often."""

_REPEATS = 3

_ROWS_HINT = 64
"""Rows for which oneDNN chooses the order of packed weights."""


@dataclass(frozen=True, slots=True)
class Products:
    """The ways that were fastest in bfloat16.

    widened: True for float32 products on widened copies of the weights, rounded to bfloat16.
    blocks: True for attention of long prompts by blocks of products.
    """

    widened: bool = False
    blocks: bool = False

    def __str__(self) -> str:
        products = "in float32 on widened weights, rounded" if self.widened else "in bfloat16"
        attention = "blocks of products" if self.blocks else "torch's own function"
        return f"products {products}; attention of long prompts by {attention}"


def fastest_products(device: torch.device, dtype: torch.dtype) -> Products:
    """Return the fastest ways for a model, after a trial the first time."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return Products()
    return _tried(torch.get_num_threads(), time.perf_counter)


@cache
@torch.inference_mode()
def _tried(threads: int, clock: Callable[[], float]) -> Products:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    inputs, weight = random(32, 512), random(512, 512)
    own, wide = pack(weight), pack(weight, True)
    query, (keys, values) = random(1, 8, 512, 64), random(2, 1, 2, 512, 64)

    def faster(way: Callable[[], object], than: Callable[[], object]) -> bool:
        return _GAIN * least(way, clock) < least(than, clock)

    return Products(
        widened=packs(torch.float32)
        and faster(lambda: product(inputs, wide, None, True), lambda: product(inputs, own)),
        blocks=faster(
            lambda: attend_by_blocks(query, keys, values, window=None, scale=None),
            lambda: attend_from_latest(query, keys, values, window=None, scale=None),
        ),
    )


def least(call: Callable[[], object], clock: Callable[[], float], repeats: int = _REPEATS) -> float:
    """Return the shortest seconds of some calls, after one that does not count."""
    call()
    timings = []
    for _ in range(repeats):
        start = clock()
        call()
        timings.append(clock() - start)
    return min(timings)


def product(
    inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None, widened: bool = False
) -> torch.Tensor:
    """Return inputs times a weight of :func:`pack`, plus a bias, in the inputs' number format."""
    if widened:
        bias = None if bias is None else bias.float()
        return product(inputs.float(), packed, bias).to(inputs.dtype)
    if not packs(packed.dtype):
        return torch.nn.functional.linear(inputs, packed, bias)
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return output


def pack(weight: torch.Tensor, widened: bool = False) -> torch.Tensor:
    """Return a weight's copy in oneDNN's order, where it has one for the number format."""
    if widened:
        weight = weight.float()
    if not packs(weight.dtype):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of a number format."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
