"""Norms and rotary embeddings of a model in one call each, and gates in place.

This module needs torch when it is imported.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ..models.wrapped import restoring
from .host_kernels import NORM_KINDS
from .kernels import agree

_ROTARY = "apply_rotary_pos_emb"
_MOST_NUMBERS = 1 << 16
"""Largest input of our norm on a CPU, in numbers."""

_GATED = ("gate_proj", "up_proj", "down_proj")
"""Projections of a gated layer."""

Forward = Callable[[torch.Tensor], torch.Tensor]


class LayerKernels(Protocol):
    """Functions for norms and rotary embeddings on a device."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether there are functions for a number format."""

    def norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: int) -> torch.Tensor:
        """Return root mean square norms; ``kind`` is of ``NORM_KINDS``."""

    def rotate(self, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Rotate states (rows, heads, 1, size) by angles (rows, 1, size)."""


class FusedLayers:
    """Norms and rotary embedding of a model in one call each, and SiLU gates in place.

    Each is compared with the model's own computation, on random numbers, before it replaces it. In double
    precision transformers computes norms in single, and they stay its own.
    """

    def __init__(self, model: Any, kernels: LayerKernels, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or model.dtype
        self._norms: list[tuple[Any, Forward]] = []
        kinds: dict[tuple[Any, ...], int | None] = {}
        module: Any
        for module in model.modules():
            if not _is_norm(module, kernels):
                continue
            like = (type(module), module.weight.dtype, len(module.weight), _epsilon(module))
            if like not in kinds:
                kinds[like] = _kind_of(module, kernels, dtype)
            kind = kinds[like]
            if kind is not None:
                self._norms.append((module, _norm(module, kernels, kind, dtype)))
        self._rotary = _rotary_of(model, kernels, dtype)
        self._gates = _gates_of(model, dtype) if model.device.type == "cpu" else []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the fused functions within a context."""
        with restoring(self._restore):
            for module, forward in (*self._norms, *self._gates):
                module.__dict__["forward"] = forward
            if self._rotary is not None:
                place, _, turned = self._rotary
                setattr(place, _ROTARY, turned)
            yield

    def _restore(self) -> None:
        for module, _ in (*self._norms, *self._gates):
            module.__dict__.pop("forward", None)
        if self._rotary is not None:
            place, before, _ = self._rotary
            setattr(place, _ROTARY, before)


def _is_norm(module: Any, kernels: LayerKernels) -> bool:
    if not type(module).__name__.endswith("RMSNorm") or "forward" in vars(module):
        return False
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return False
    weight: Any = module.weight
    plain = (
        type(weight) in (torch.nn.Parameter, torch.Tensor) and weight.dim() == 1 and weight.is_contiguous()
    )
    return plain and kernels.takes(weight.dtype) and _epsilon(module) is not None


def _epsilon(module: Any) -> float | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _kind_of(module: Any, kernels: LayerKernels, dtype: torch.dtype) -> int | None:
    """Return the kind of norm that a module computes, found by trying."""
    probe, draw = copy.deepcopy(module), torch.Generator().manual_seed(0)
    weight = module.weight
    with torch.no_grad():
        random = torch.randn(len(weight), generator=draw).to(weight).to(dtype)
        probe.weight = torch.nn.Parameter(random, False)
        inputs = torch.randn(3, 1, len(weight), generator=draw).to(random)
        # Small numbers too, on which only the epsilon is seen.
        inputs[1] *= 1e-3
        for kind in NORM_KINDS:
            got = kernels.norm(inputs, probe.weight, float(_epsilon(module) or 0.0), kind)
            if all(agree(mine, output) for mine, output in zip(got, probe(inputs), strict=True)):
                return kind
    return None


def _norm(module: Any, kernels: LayerKernels, kind: int, dtype: torch.dtype) -> Forward:
    module_forward, epsilon = type(module).forward, _epsilon(module)
    assert epsilon is not None

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        # Many tokens keep torch's threads busy, which these functions do not use.
        wide = not inputs.is_cuda and inputs.numel() > _MOST_NUMBERS and torch.get_num_threads() > 1
        if wide or inputs.dtype != dtype or not weight.is_contiguous():
            answer: torch.Tensor = module_forward(module, inputs)
            return answer
        # A norm's weights are few against the rows that they scale.
        return kernels.norm(inputs, weight.to(dtype), epsilon, kind)

    return forward


def _gates_of(model: Any, dtype: torch.dtype) -> list[tuple[Any, Forward]]:
    """Return the layers of two projections and a SiLU gate, each with its replacement in place."""
    kinds: dict[tuple[type, type], bool] = {}
    gates: list[tuple[Any, Forward]] = []
    for module in model.modules():
        parts = vars(module).get("_modules", {})
        if not {*_GATED, "act_fn"} <= parts.keys() or "forward" in vars(module):
            continue
        kind = type(module), type(parts["act_fn"])
        if kind not in kinds:
            kinds[kind] = _is_gated(module, dtype)
        if kinds[kind]:
            gates.append((module, _gated(module)))
    return gates


@torch.no_grad()
def _is_gated(module: Any, dtype: torch.dtype) -> bool:
    """Return whether a layer computes a SiLU gate, found by trying it on small projections."""
    draw = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    probe._modules = dict(module._modules)
    for name in _GATED:
        linear = torch.nn.Linear(8, 8, bias=False, dtype=dtype)
        linear.weight.copy_(torch.randn(8, 8, generator=draw))
        probe._modules[name] = linear
    inputs = (4 * torch.randn(1, 5, 8, generator=draw)).to(dtype)
    try:
        expected = type(module).forward(probe, inputs)
    except Exception:  # whatever another family's layer raises at another size: it stays
        return False
    return isinstance(expected, torch.Tensor) and agree(_gated(probe)(inputs), expected)


def _gated(module: Any) -> Forward:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        gates = torch.nn.functional.silu(module.gate_proj(inputs), inplace=True)
        output: torch.Tensor = module.down_proj(gates.mul_(module.up_proj(inputs)))
        return output

    return forward


def _rotary_of(model: Any, kernels: LayerKernels, dtype: torch.dtype) -> tuple[Any, Any, Any] | None:
    """Return the module, its rotary function, and our replacement."""
    place = sys.modules[type(model).__module__]
    rotary = getattr(place, _ROTARY, None)
    if rotary is None or not kernels.takes(dtype):
        return None

    def turned(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any, **named: Any
    ) -> Any:
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype and q.stride(-1) == k.stride(-1) == 1
        shape = (len(q), 1, q.shape[-1])
        if (
            others
            or named
            or not alike
            or q.shape[2] != 1
            or cos.shape != shape
            or cos.stride() != sin.stride()
        ):
            return rotary(q, k, cos, sin, *others, **named)
        if cos.stride(-1) != 1 or k.shape[-1] != q.shape[-1]:
            return rotary(q, k, cos, sin)
        return kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin)

    draw = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(*shape, generator=draw).to(model.device, dtype)
        for shape in ((3, 4, 1, 16), (3, 2, 1, 16), (3, 1, 16), (3, 1, 16))
    )
    try:
        expected = rotary(q, k, cos, sin)
    except Exception:  # whatever another family's function raises that takes other arguments: it stays
        return None
    if not isinstance(expected, tuple) or len(expected) != 2:
        return None
    same = all(agree(mine, theirs) for mine, theirs in zip(turned(q, k, cos, sin), expected, strict=True))
    return (place, rotary, turned) if same else None
