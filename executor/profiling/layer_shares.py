"""Shares of a forward call in layers and attention.

Importing this module needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

import torch

_ATTENTION = ("attn", "attention")


class LayerShares:
    """Context that times a model's layers and their attention.

    Attention is all of an attention module except its projections: positions, storing and reading KV cache,
    scores and weighted sums. This part depends on the tokens held.
    """

    def __init__(self, model: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cuda = model.device.type == "cuda"
        self._clock = clock
        self._spans: dict[str, list[tuple[Any, Any]]] = {"layers": [], "attention": [], "projections": []}
        self._handles: list[Any] = []
        self._watched = [(layer, "layers") for layer in layers_of(model)]
        for layer, _ in tuple(self._watched):
            attention = _attention_of(layer)
            self._watched.append((attention, "attention"))
            self._watched += [(module, "projections") for module in attention.modules() if _projects(module)]

    def __enter__(self) -> Self:
        for module, kind in self._watched:
            begun: list[Any] = []
            self._handles += (
                module.register_forward_pre_hook(self._begin(begun)),
                module.register_forward_hook(self._end(begun, kind)),
            )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> tuple[float, float]:
        """Return the seconds of layers and attention since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        sums = {}
        for kind, spans in self._spans.items():
            sums[kind] = sum(
                begun.elapsed_time(ended) / 1e3 if self._cuda else ended - begun for begun, ended in spans
            )
            spans.clear()
        return sums["layers"], max(0.0, sums["attention"] - sums["projections"])

    def _mark(self) -> Any:
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin(self, begun: list[Any]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            begun.append(self._mark())

        return hook

    def _end(self, begun: list[Any], kind: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._spans[kind].append((begun.pop(), self._mark()))

        return hook


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
            return list(module)
    raise ValueError(f"the model has no list of {depth} layers")


def _attention_of(layer: Any) -> Any:
    for name, module in layer.named_children():
        if name in _ATTENTION or name.endswith(tuple(f"_{word}" for word in _ATTENTION)):
            return module
    raise ValueError(f"a layer of type {type(layer).__name__} has no attention that its name shows")


def _projects(module: Any) -> bool:
    return any(weight.dim() == 2 for weight in module.parameters(recurse=False))
