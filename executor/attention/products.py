"""What this machine computes fastest, found by trying.

Some processors multiply bfloat16 several times as fast as float32, and torch's attention of prompts falls
behind blocks of products. On others float32 products that read bfloat16 weights are faster.

This module needs torch when it is imported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch

from .functions import ATTENTION
from .host_kernels import built

_Way = TypeVar("_Way", float, str)

_USUAL = next(iter(ATTENTION))

_GAIN = 1.1
"""Speed-up that justifies another way than torch's; larger chooses it less often."""

_ROWS, _MANY_ROWS, _WEIGHTS = 16, 512, 16
"""Rows of a decode step and of a prompt, and weights of a trial."""

_FEW_ROWS = 64
"""Rows up to which reading weights binds."""

_REPEATS = 3

_ROWS_HINT = 64
"""Rows for which oneDNN chooses the order of packed weights."""


@dataclass(frozen=True, slots=True)
class Products:
    """The ways that were fastest in a number format.

    halves: Most rows of products of our own on packed bfloat16 weights, whose sums are float32; see
        :meth:`HostKernels.pack`. Torch multiplies more rows.
    attention: Function for long prompts, of :data:`~.functions.ATTENTION`.
    """

    halves: float = 0.0
    attention: str = _USUAL

    def __str__(self) -> str:
        products = "by oneDNN"
        if self.halves:
            rest = "" if self.halves == math.inf else f" up to {self.halves:.0f} rows, of more by torch"
            products = f"with float32 sums on packed bfloat16 weights{rest}"
        return f"products {products}; attention of long prompts by {self.attention}"


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

    kernels = built()
    inputs, many, weight = random(_ROWS, 1024), random(_MANY_ROWS, 1024), random(1024, 1024)
    halves = None if kernels is None else kernels.pack(weight)
    if kernels is None or halves is None:
        return Products()
    # More weights than the second cache holds, as a model has.
    ours, own = ([packed.clone() for _ in range(_WEIGHTS)] for packed in (halves, pack(weight)))
    few = {
        0.0: lambda: [product(inputs, packed) for packed in own],
        math.inf: lambda: [kernels.times_halves(inputs, packed, None, 1024) for packed in ours],
    }
    prompts = {
        math.inf: lambda: kernels.times_halves(many, halves, None, 1024),
        float(_FEW_ROWS): lambda: torch.nn.functional.linear(many, weight),
    }
    query, (keys, values) = random(1, 8, 512, 64), random(2, 1, 2, 512, 64)
    ways = ATTENTION if dtype is torch.bfloat16 else [_USUAL]
    attention = {
        name: partial(ATTENTION[name], query, keys, values, window=None, scale=None) for name in ways
    }
    return Products(_fastest(few, clock) and _fastest(prompts, clock), _fastest(attention, clock))


def _fastest(ways: Mapping[_Way, Callable[[], object]], clock: Callable[[], float]) -> _Way:
    """Return the fastest way, or the first if none is clearly faster."""
    seconds = {way: least(call, clock) for way, call in ways.items()}
    usual, best = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return best if _GAIN * seconds[best] < seconds[usual] else usual


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
