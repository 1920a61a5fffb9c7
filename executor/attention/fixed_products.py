"""Products of a fixed number of rows, for repeatable bits.

Libraries choose another order of sums for another number of rows. Here each product has the same shape,
padded with zeros, so a request's tokens and log-probabilities are those that it would have alone.

This module needs torch when it is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..models.wrapped import restoring
from .host_kernels import built

_ROWS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def fixed_rows_of(model: Any) -> int | None:
    """Return the rows of each product; None if they vary."""
    return _ROWS.get(model)


def fix_rows(model: Any, rows: int, tier: str) -> None:
    """Fix the number of rows in all products of a model.

    Raises ValueError if something else in the model's computation depends on the batch.
    """
    kernels = built() if model.device.type == "cpu" else None
    if tier != "ragged":
        raise ValueError(f"the {tier} tier pads rows to one another, and bits depend on the padding")
    if kernels is None or not kernels.takes(model.dtype):
        raise ValueError("it needs a CPU, a C++ compiler, and float32, float64 or bfloat16")
    read = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) or type(module) is torch.nn.Linear
    }
    unknown = [
        name for name, weight in model.named_parameters() if weight.dim() > 1 and id(weight) not in read
    ]
    if unknown:
        raise ValueError(f"the model's {unknown[0]} is no weight of a linear layer")
    wrong = _differing(model, rows)
    if wrong is not None:
        raise ValueError(
            f"on this machine a product with {wrong} depends on the place of a row among {rows}:"
            " try another product_rows"
        )
    _ROWS[model] = rows


class FixedProducts:
    """Linear layers of a model, with products of equal shape."""

    def __init__(self, model: torch.nn.Module, rows: int) -> None:
        self._modules = [module for module in model.modules() if type(module) is torch.nn.Linear]
        self._rows = rows

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use these products in the layers within a context."""
        with restoring(self._restore):
            for module in self._modules:
                module.__dict__["forward"] = _Forward(module, self._rows)
            yield

    def _restore(self) -> None:
        for module in self._modules:
            module.__dict__.pop("forward", None)


class _Forward:
    def __init__(self, module: torch.nn.Linear, rows: int) -> None:
        self._module, self._rows = module, rows

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        flat = inputs.reshape(-1, inputs.shape[-1])
        count = len(flat)
        # A copy lies aligned, whatever its rows were cut from.
        padded = flat.new_zeros(-(-count // self._rows) * self._rows, flat.shape[1])
        padded[:count] = flat
        parts = [
            torch.nn.functional.linear(part, weight, bias)
            for part in padded.view(-1, self._rows, flat.shape[1])
        ]
        return torch.cat(parts)[:count].reshape(*inputs.shape[:-1], -1)


@torch.inference_mode()
def _differing(model: Any, rows: int) -> tuple[int, ...] | None:
    """Return a weight's shape whose products differ by row, or None."""
    draw = torch.Generator().manual_seed(0)
    shapes = set()
    for module in model.modules():
        if type(module) is not torch.nn.Linear or tuple(module.weight.shape) in shapes:
            continue
        weight, bias = module.weight, module.bias
        shapes.add(tuple(weight.shape))
        row = torch.randn(1, weight.shape[1], generator=draw).to(weight.dtype)
        alike = torch.nn.functional.linear(row.repeat(rows, 1), weight, bias)
        inputs = torch.randn(rows, weight.shape[1], generator=draw).to(weight.dtype)
        inputs[0] = row
        among = torch.nn.functional.linear(inputs, weight, bias)
        if not (alike == alike[:1]).all() or not torch.equal(among[0], alike[0]):
            return tuple(weight.shape)
    return None
