"""Copies of linear layers' weights in oneDNN's order.

Products of few rows on packed weights take 0.6 to 0.9 of the time; from some four rows on arithmetic binds.

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

_LEAST_WEIGHTS = 1 << 14
"""Least weights of a layer; the call costs more in smaller ones."""

_ROWS_HINT = 64
"""Rows for which oneDNN chooses its order."""

_MEMORY_SHARE = 0.25
"""Share of the free memory that the copies may take."""


@dataclass(slots=True)
class _Packed:
    """A layer, its packed weight, and the copied contents' version."""

    module: torch.nn.Linear
    weight: torch.Tensor
    of: tuple[int, int]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the layer, under autocast in autocast's number format."""
        bias: torch.Tensor | None = self.module.bias
        dtype = self.module.weight.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            if not _taken(dtype):
                return torch.nn.functional.linear(inputs, self.module.weight, bias)
            inputs, bias = inputs.to(dtype), None if bias is None else bias.to(dtype)
        if self.weight.dtype != dtype:
            self.weight = _pack(self.module, dtype)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, bias, "none", [], "")
        return output


class PackedWeights:
    """Linear layers of a model that run on packed weights."""

    def __init__(self, model: torch.nn.Module, *, available: Callable[[], int] = available_bytes) -> None:
        modules = _worth_packing(model, available)
        self._packed = [
            _Packed(module, _pack(module, module.weight.dtype), _contents(module)) for module in modules
        ]

    @property
    def layers(self) -> int:
        """Number of layers that run on packed weights."""
        return len(self._packed)

    def repack(self) -> None:
        """Copy every weight again, as some changes are not counted."""
        for packed in self._packed:
            packed.weight, packed.of = _pack(packed.module, packed.weight.dtype), _contents(packed.module)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the layers run on packed weights within a context.

        Changed weights are packed again first.
        """
        with restoring(self._restore):
            for packed in self._packed:
                contents = _contents(packed.module)
                if contents != packed.of:
                    packed.weight, packed.of = _pack(packed.module, packed.weight.dtype), contents
                # Past Module.__setattr__, which would look for parameters in every decode step.
                packed.module.__dict__["forward"] = packed.forward
            yield

    def _restore(self) -> None:
        for packed in self._packed:
            packed.module.__dict__.pop("forward", None)


def packed_bytes(model: torch.nn.Module, *, available: Callable[[], int] = available_bytes) -> int:
    """Return the bytes of packed copies; 0 if memory is short."""
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
    return bool(torch.backends.mkldnn.is_available()) and _taken(weight.dtype)  # type: ignore[no-untyped-call]


def _taken(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _contents(module: torch.nn.Linear) -> tuple[int, int]:
    """Return a key that changes with the weight."""
    weight = module.weight
    return weight.data_ptr(), weight._version


def _pack(module: torch.nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    weight = module.weight.detach().to(dtype)
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed
