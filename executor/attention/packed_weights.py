"""Copies of linear layers' weights in oneDNN's order.

Products of few rows on packed weights take 0.6 to 0.9 of the time; from some four rows on arithmetic binds.
Where bfloat16 is slow the copies are float32, and products are rounded.

This module needs torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..models.faults import available_bytes
from ..models.wrapped import restoring
from .products import fastest_products, pack, packs, product

_LEAST_WEIGHTS = 1 << 14
"""Least weights of a layer; the call costs more in smaller ones."""

_MEMORY_SHARE = 0.25
"""Share of the free memory that the copies may take."""


@dataclass(slots=True)
class _Packed:
    """A layer, its packed weight, the number format that it stands for, and the copied contents' version."""

    module: torch.nn.Linear
    weight: torch.Tensor
    dtype: torch.dtype
    widened: bool
    of: tuple[int, int]

    @classmethod
    def copy(cls, module: torch.nn.Linear, dtype: torch.dtype) -> _Packed:
        """Copy a layer's weight, in a number format."""
        widened = fastest_products(module.weight.device, dtype).widened
        return cls(module, pack(module.weight.detach().to(dtype), widened), dtype, widened, _contents(module))

    def renew(self, dtype: torch.dtype) -> None:
        """Copy the layer's weight again."""
        fresh = _Packed.copy(self.module, dtype)
        self.weight, self.dtype, self.widened, self.of = fresh.weight, dtype, fresh.widened, fresh.of

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the layer, under autocast in autocast's number format."""
        bias: torch.Tensor | None = self.module.bias
        dtype = self.module.weight.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            if not _taken(dtype):
                return torch.nn.functional.linear(inputs, self.module.weight, bias)
            inputs, bias = inputs.to(dtype), None if bias is None else bias.to(dtype)
        if self.dtype != dtype:
            self.renew(dtype)
        return product(inputs, self.weight, bias, self.widened)


class PackedWeights:
    """Linear layers of a model that run on packed weights."""

    def __init__(self, model: torch.nn.Module, *, available: Callable[[], int] = available_bytes) -> None:
        modules = _worth_packing(model, available)
        self._packed = [_Packed.copy(module, module.weight.dtype) for module in modules]

    @property
    def layers(self) -> int:
        """Number of layers that run on packed weights."""
        return len(self._packed)

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
    """Return the bytes of packed copies; 0 if memory is short."""
    return sum(map(_bytes, _worth_packing(model, available)))


def _worth_packing(model: torch.nn.Module, available: Callable[[], int]) -> list[torch.nn.Linear]:
    modules = [module for module in model.modules() if _packable(module)]
    size = sum(map(_bytes, modules))
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
    return packs(dtype) or fastest_products(torch.device("cpu"), dtype).widened


def _bytes(module: torch.nn.Linear) -> int:
    weight = module.weight
    return weight.nbytes * (2 if fastest_products(weight.device, weight.dtype).widened else 1)


def _contents(module: torch.nn.Linear) -> tuple[int, int]:
    """Return a key that changes with the weight."""
    weight = module.weight
    return weight.data_ptr(), weight._version
