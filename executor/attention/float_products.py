"""Float32 arithmetic on 16-bit weights.

Some processors multiply bfloat16 slowly. There, float32 sums of widened weights are faster and have smaller
rounding errors. Activations are float32; nothing but small norms is copied. Where memory holds a copy of the
weights, :mod:`.packed_weights` is faster.

This module needs torch when it is imported.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..models.faults import available_bytes
from ..models.source import take_open_format
from ..models.wrapped import restoring
from .host_kernels import HostKernels, built
from .packed_weights import packed_bytes
from .products import fastest_products, least, pack, product

_LOG = logging.getLogger(__name__)

Forward = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A model's number format for products on a CPU.

    widened: True if products are float32 on weights that stay in 16 bits.
    rates: Measured rates of products, FLOP/s, by number format.
    """

    widened: bool
    stored: str
    rates: dict[str, float]

    def __str__(self) -> str:
        rates = " and ".join(f"{1e-9 * rate:.0f} GFLOP/s in {name}" for name, rate in self.rates.items())
        taken = f"products in float32, weights and KV cache in {self.stored}" if self.widened else self.stored
        return f"{taken} (measured {rates})"


@dataclass(frozen=True, slots=True)
class Trial:
    """Trial that finds the fastest number format for a model.

    rows: Rows of the inputs, as of a decode step with that many slots.
    outputs: Outputs of a weight that are computed; more take longer and measure better.
    repeats: Calls of which the fastest counts.
    gain: Speed-up that justifies float32; larger keeps the checkpoint's format more often.
    clock: Seconds from any origin.
    """

    rows: int = 32
    outputs: int = 512
    repeats: int = 3
    gain: float = 1.1
    clock: Callable[[], float] = time.perf_counter


_CHOSEN: weakref.WeakKeyDictionary[Any, Arithmetic] = weakref.WeakKeyDictionary()


def arithmetic_of(model: Any) -> Arithmetic | None:
    """Return a model's chosen arithmetic, or None."""
    return _CHOSEN.get(model)


def settled_arithmetic(model: Any) -> Arithmetic | None:
    """Return a model's arithmetic, after a trial the first time."""
    if take_open_format(model) and model not in _CHOSEN:
        choose_arithmetic(model, built())
        if model in _CHOSEN:
            _LOG.info("arithmetic: %s", _CHOSEN[model])
    return arithmetic_of(model)


def choose_arithmetic(model: Any, kernels: HostKernels | None, trial: Trial | None = None) -> Any:
    """Choose the fastest number format of this CPU for a model.

    Weights that only linear layers and embeddings read stay as they are. Other models are converted to
    float32 as a whole, where twice their size is free.
    """
    trial = trial or Trial()
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float16) or kernels is None:
        return model
    if fastest_products(model.device, model.dtype).halves and packed_bytes(model) > 0:
        # Products in float32 on packed weights read as little, in an order that is faster to read.
        return model
    rates = _rates(model, kernels, trial)
    stored = str(model.dtype).removeprefix("torch.")
    if not rates or rates["float32"] < trial.gain * rates[stored]:
        if rates:
            _CHOSEN[model] = Arithmetic(False, stored, rates)
        return model
    if _widens(model) and _runs(model, kernels):
        _CHOSEN[model] = Arithmetic(True, stored, rates)
    elif 2 * sum(weight.nbytes for weight in model.parameters()) < available_bytes():
        model = model.float()
        _CHOSEN[model] = Arithmetic(False, "float32", rates)
    return model


class FloatProducts:
    """Layers that read 16-bit weights into float32.

    Outputs of embeddings are float32, so that what follows is; torch itself promotes the rest.

    model, kernels: Model, and the products of few rows.
    widened_from: Rows of inputs from which a weight is copied to float32 for torch's product, as in prefill
        stages; larger copies less often and is slower on long prompts.
    """

    def __init__(self, model: torch.nn.Module, kernels: HostKernels, widened_from: int = 256) -> None:
        self._forwards: list[tuple[Any, Forward]] = []
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                self._forwards.append((module, _embedding(module)))
            elif type(module) is torch.nn.Linear:
                self._forwards.append((module, _linear(module, kernels, widened_from)))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use these products in the layers within a context."""
        with restoring(self._restore):
            for module, forward in self._forwards:
                module.__dict__["forward"] = forward
            yield

    def _restore(self) -> None:
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)


def _embedding(module: Any) -> Forward:
    module_forward = type(module).forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = module_forward(module, ids)
        return states.float()

    return forward


def _linear(module: torch.nn.Linear, kernels: HostKernels, widened_from: int) -> Forward:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        if inputs.numel() >= widened_from * inputs.shape[-1]:
            wide = None if bias is None else bias.float()
            return torch.nn.functional.linear(inputs.float(), weight.float(), wide)
        if not weight.is_contiguous():
            weight = weight.contiguous()
        return kernels.product(inputs.float(), weight, None if bias is None else bias.float())

    return forward


def _widens(model: torch.nn.Module) -> bool:
    """Return whether all matrices are plain bfloat16 weights."""
    read = set()
    for module in model.modules():
        plain = isinstance(module, torch.nn.Embedding) or type(module) is torch.nn.Linear
        if plain and "forward" not in vars(module):
            read.add(id(module.weight))
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    usual = all(type(w) is torch.nn.Parameter and w.dtype == torch.bfloat16 for w in matrices)
    return usual and all(id(weight) in read for weight in matrices)


@torch.inference_mode()
def _runs(model: Any, kernels: HostKernels) -> bool:
    try:
        with FloatProducts(model, kernels).in_place():
            logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    except Exception:  # whatever a model's code raises on numbers of two formats
        return False
    return bool(logits.dtype == torch.float32 and logits.isfinite().all())


@torch.inference_mode()
def _rates(model: Any, kernels: HostKernels, trial: Trial) -> dict[str, float]:
    """Measure FLOP/s of a model's products, by number format."""
    weights: dict[tuple[int, ...], torch.Tensor] = {}
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            weights.setdefault(tuple(module.weight.shape), module.weight)
    seconds: dict[str, float] = {}
    operations = 0
    for weight in weights.values():
        part = weight[: trial.outputs]
        own, wide = part.new_ones(trial.rows, part.shape[1]), torch.ones(trial.rows, part.shape[1])
        # Float16 is widened as a whole: there are no products of our own for it.
        held = part if part.dtype == torch.bfloat16 else part.float()
        operations += 2 * trial.rows * part.numel()
        packed = pack(part)
        for name, call in (
            (str(part.dtype).removeprefix("torch."), lambda own=own, packed=packed: product(own, packed)),
            ("float32", lambda wide=wide, held=held: kernels.product(wide, held.contiguous(), None)),
        ):
            seconds[name] = seconds.get(name, 0.0) + least(call, trial.clock, trial.repeats)
    return {name: operations / max(taken, 1e-9) for name, taken in seconds.items()}
