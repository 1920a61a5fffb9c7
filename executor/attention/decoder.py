"""Calls into a transformers model: tokens in, next logits out.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..models.families import cache_argument, layer_windows, needs_padding_mask
from .fixed_products import FixedProducts, fixed_rows_of
from .float_products import FloatProducts, settled_arithmetic
from .functions import ATTENTION
from .fused_layers import FusedLayers
from .host_kernels import HostKernels, built
from .packed_weights import PackedWeights
from .products import Products, fastest_products

_LOG = logging.getLogger(__name__)

Mask = torch.Tensor | dict[str, torch.Tensor]


class Decoder:
    """Causal language model, called without ``generate``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device: torch.device = model.device
        rows = fixed_rows_of(model)
        self._fixed = None if rows is None else FixedProducts(model, rows)
        chosen = settled_arithmetic(model)
        kernels = built() if chosen is not None and chosen.widened else None
        self._wide = None if kernels is None else FloatProducts(model, kernels)
        self.dtype: torch.dtype = model.dtype if self._wide is None else torch.float32
        self.kv_dtype: torch.dtype | None = None if self._wide is None else model.dtype
        kinds, windows = layer_windows(model.config)
        self.sliding_windows = windows
        self.windows_by_kind = dict(zip(kinds, windows, strict=True))
        self.padding_mask = needs_padding_mask(model.config)
        self._cache_argument = cache_argument(type(model))
        self._takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        self._packed = PackedWeights(model) if self._wide is None and self._fixed is None else None
        fastest = Products() if self._fixed else fastest_products(self.device, self.dtype)
        self.attend_long = ATTENTION[fastest.attention]
        """Attention of long prompts."""
        self._layers: FusedLayers | None = None
        self.call_tokens = _call_tokens(self.device, model.num_parameters(), len(windows))

    def use_host_kernels(self) -> HostKernels | None:
        """Compute norms and rotary embeddings by our C++ functions."""
        kernels = built() if self.device.type == "cpu" else None
        if kernels is None or not kernels.takes(self.dtype):
            return None
        self._layers = FusedLayers(self.model, kernels, self.dtype)
        return kernels

    def use_device_kernels(self) -> None:
        """Compute norms and rotary embeddings by our GPU kernels."""
        if self.device.type != "cuda":
            return
        try:
            from .device_kernels import DeviceKernels

            self._layers = FusedLayers(self.model, DeviceKernels(), self.dtype)
        except Exception as error:  # whatever triton raises where it is not installed or does not compile
            _LOG.info("norms and rotary embeddings stay torch's: %s: %s", type(error).__name__, error)

    def reload_weights(self) -> None:
        """Copy packed weights again, as the model's may have changed."""
        if self._packed is not None:
            self._packed.repack()

    def forward(
        self,
        cache: Cache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        mask: Mask | None = None,
        last: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run tokens; return logits (tokens wanted, vocabulary).

        Shapes: ids, positions (sequences, tokens).
        """
        arguments: dict[str, Any] = {"input_ids": ids, self._cache_argument: cache, "use_cache": True}
        if mask is not None:
            arguments["attention_mask"] = mask
        if self._takes_positions:
            arguments["position_ids"] = positions
        if last is None:
            # The compiler packs weights and joins operations itself.
            with nullcontext() if torch.compiler.is_compiling() else self._faster():
                logits: torch.Tensor = self.model(**arguments).logits
            return logits[:, -1]
        with self._only(last), self._faster():
            logits = self.model(**arguments).logits
        return logits[:, 0] if logits.shape[1] == 1 else logits[last]

    @contextmanager
    def _faster(self) -> Iterator[None]:
        linear = self._fixed or self._wide or self._packed
        assert linear is not None
        with linear.in_place(), self._layers.in_place() if self._layers else nullcontext():
            yield

    @contextmanager
    def _only(self, last: tuple[torch.Tensor, torch.Tensor]) -> Iterator[None]:
        """Let the output layer see only the wanted tokens.

        Logits of whole prompts would be larger than the KV cache.
        """
        head = self.model.get_output_embeddings()
        if head is None:
            yield
            return

        def pick(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (inputs[0][last][:, None], *inputs[1:])

        handle = head.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            handle.remove()


def _call_tokens(device: torch.device, weights: int, layers: int) -> float:
    """Estimate a forward call's fixed cost, in tokens."""
    if device.type == "cpu":
        # A layer's interpreter time, 0.4 ms, at some 30 GFLOP/s and two operations per weight and token.
        return layers * 4e-4 * 3e10 / (2 * weights)
    # Its launches, 0.15 ms, at some 400 TFLOP/s, and the weights read once at some 4 TB/s.
    return layers * 1.5e-4 * 4e14 / (2 * weights) + 100
