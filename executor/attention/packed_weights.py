"""Copies of linear layers' weights in oneDNN's order, or in bfloat16 for float32 products of our own.

Decode steps read all weights for few rows, so reading binds: float32 weights that bfloat16 holds exactly, as
those of a bfloat16 checkpoint, are read in half the bytes.

This module needs torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from ..models.faults import available_bytes
from ..models.wrapped import restoring
from .host_kernels import HostKernels, built
from .products import fastest_products, pack, packs, product

_LEAST_WEIGHTS = 1 << 14
"""Least weights of a layer; the call costs more in smaller ones."""

_MEMORY_SHARE = 0.25
"""Share of the free memory that the copies may take."""


@dataclass(slots=True)
class _Packed:
    """A layer and its packed weight.

    dtype: Number format that the weight stands for.
    halves: The functions that multiply it if it is in bfloat16 for float32 sums; None for oneDNN.
    most: Rows of inputs up to which they do.
    of: The copied contents' version.
    """

    module: torch.nn.Linear
    dtype: torch.dtype = field(init=False)
    weight: torch.Tensor = field(init=False)
    halves: HostKernels | None = field(init=False)
    most: float = field(init=False)
    of: tuple[int, int] = field(init=False)

    def renew(self, dtype: torch.dtype) -> _Packed:
        """Copy the layer's weight, in a number format."""
        self.dtype, self.of, weight = dtype, _contents(self.module), self.module.weight.detach().to(dtype)
        self.most = fastest_products(weight.device, dtype).halves
        kernels = built() if self.most else None
        halves = None if kernels is None else kernels.pack(weight)
        self.halves, self.weight = (None, pack(weight)) if halves is None else (kernels, halves)
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the layer, under autocast in autocast's number format."""
        bias: torch.Tensor | None = self.module.bias
        own = dtype = self.module.weight.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            if not _taken(dtype):
                return torch.nn.functional.linear(inputs, self.module.weight, bias)
            inputs, bias = inputs.to(dtype), None if bias is None else bias.to(dtype)
        if self.dtype != dtype:
            self.renew(dtype)
        if self.halves is None:
            return product(inputs, self.weight, bias)
        if inputs.dtype == own and inputs.numel() > self.most * inputs.shape[-1]:
            return torch.nn.functional.linear(inputs, self.module.weight, bias)
        return self.halves.times_halves(inputs, self.weight, bias, self.module.out_features)


class PackedWeights:
    """Linear layers of a model that run on packed weights."""

    def __init__(self, model: torch.nn.Module, *, available: Callable[[], int] = available_bytes) -> None:
        modules = _worth_packing(model, available)
        self._packed = [_Packed(module).renew(module.weight.dtype) for module in modules]

    def repack(self) -> None:
        """Copy every weight again, as some changes are not counted."""
        for packed in self._packed:
            packed.renew(packed.dtype)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the layers run on packed weights within a context.

        Changed weights are packed again first.
        """
        with restoring(self._restore):
            for packed in self._packed:
                if _contents(packed.module) != packed.of:
                    packed.renew(packed.dtype)
                # Past Module.__setattr__, which would look for parameters in every decode step.
                packed.module.__dict__["forward"] = packed.forward
            yield

    def _restore(self) -> None:
        for packed in self._packed:
            packed.module.__dict__.pop("forward", None)


def packed_bytes(model: torch.nn.Module, *, available: Callable[[], int] = available_bytes) -> int:
    """Return the most bytes of packed copies; 0 if memory is short."""
    return sum(module.weight.nbytes for module in _worth_packing(model, available))


def _worth_packing(model: torch.nn.Module, available: Callable[[], int]) -> list[torch.nn.Linear]:
    modules = [module for module in model.modules() if _packable(module)]
    size = sum(module.weight.nbytes for module in modules)
    return modules if size <= _MEMORY_SHARE * available() else []


def _packable(module: Any) -> TypeGuard[torch.nn.Linear]:
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return False
    weight: Any = module.weight
    if type(weight) not in (torch.nn.Parameter, torch.Tensor) or weight.layout != torch.strided:
        return False
    if weight.device.type != "cpu" or weight.is_inference() or weight.numel() < _LEAST_WEIGHTS:
        return False
    return _taken(weight.dtype)


def _taken(dtype: torch.dtype) -> bool:
    return packs(dtype) or fastest_products(torch.device("cpu"), dtype).halves > 0


def _contents(module: torch.nn.Linear) -> tuple[int, int]:
    """Return a key that changes with the weight."""
    weight = module.weight
    return weight.data_ptr(), weight._version
