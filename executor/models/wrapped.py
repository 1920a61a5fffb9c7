"""Models in the state in which trainers hold them.

They may be wrapped, compiled, or in training mode. Calling these functions needs torch, and never PEFT or
DeepSpeed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .families import UnsupportedModelError

_SHARDED = {
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP",
}
"""Base classes of sharded modules, and the library that shards them."""

_TURN = threading.RLock()
"""Lock held while a model runs, as it changes state."""

_OWN_PROMPTS = "its PEFT adapter ({}) adds tokens or offsets of its own to every call"
_PEFT_MEND = "use adapters within the layers, such as LoRA, or merge them"


@contextmanager
def restoring(restore: Callable[[], None]) -> Iterator[None]:
    """Restore something after a block, even after an interrupt."""
    try:
        try:
            yield
        finally:
            restore()
    except BaseException:
        restore()
        raise


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside transparent wrappers.

    These are ``torch.compile``, ``DistributedDataParallel`` and PEFT's wrappers of adapters within the
    layers. Active adapters count, compiled code does not.
    """
    while True:
        inner = _within(model)
        if inner is None:
            break
        model = inner
    _check_whole(model)
    return model


class Evaluation:
    """Contexts in which a model runs as in inference.

    Each restores its state. Dropout is off, and so is gradient checkpointing, which would drop the KV cache.
    Code compiled by ``model.compile()`` is set aside, as it was compiled for other calls. Modules are
    switched one by one, since training may have frozen some. The model's GPU becomes the current one, as
    streams, graphs and kernels need that. Threads take turns, whichever models they run.
    """

    def __init__(self, model: Any) -> None:
        import torch

        self._modules = tuple(model.modules())
        self._parameter = next(model.parameters(), torch.empty(0))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Return a context in which the model runs as in inference."""
        self._refuse_autocast()
        with _TURN, self._as_for_inference():
            yield

    def _refuse_autocast(self) -> None:
        import torch

        number_format, kind = self._parameter.dtype, self._parameter.device.type
        # Autocast leaves double precision alone.
        if number_format == torch.float64 or not torch.amp.is_autocast_available(kind):
            return
        if not torch.is_autocast_enabled(kind):
            return
        autocast = torch.get_autocast_dtype(kind)
        if autocast != number_format:
            raise UnsupportedModelError(
                _type_of(self._modules[0]),
                f"its weights are {number_format}, and torch.autocast is on for {autocast}",
                "call outside of autocast; an autocast within the model's forward counts",
            )

    @contextmanager
    def _as_for_inference(self) -> Iterator[None]:
        import torch

        training = [module for module in self._modules if module.training]
        compiled = [
            (module, module._compiled_call_impl)
            for module in self._modules
            if getattr(module, "_compiled_call_impl", None) is not None
        ]
        config = getattr(self._modules[0], "config", None)
        attention = getattr(config, "_attn_implementation", None)

        def restore() -> None:
            for module in training:
                module.training = True
            for module, call in compiled:
                module._compiled_call_impl = call
            if getattr(config, "_attn_implementation", None) != attention:
                config._attn_implementation = attention  # type: ignore[union-attr]

        with restoring(restore):
            for module in training:
                module.training = False
            for module, _ in compiled:
                module._compiled_call_impl = None
            with torch.cuda.device_of(self._parameter):  # type: ignore[no-untyped-call]
                yield


def contents_of(model: Any) -> tuple[tuple[int, int], ...]:
    """Return a key that changes with the model's weights."""
    return tuple(
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in model.parameters()
    )


def copy_weights(model: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Copy weights by name into a model; raise ValueError for one that it has not."""
    own = unwrapped(model).state_dict()
    for name, weight in weights:
        if name not in own or own[name].shape != weight.shape:
            raise ValueError(f"the model has no weight {name!r} of the shape {tuple(weight.shape)}")
        own[name].copy_(weight)


def _within(model: Any) -> Any | None:
    """Return a wrapper's content, or None."""
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if "OptimizedModule" in kinds:
        return model._orig_mod
    if "DistributedDataParallel" in kinds:
        return model.module
    if "PeftModel" in kinds:
        config = model.active_peft_config
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or kind == "XLORA" or getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(_type_of(model), _OWN_PROMPTS.format(kind), _PEFT_MEND)
        return model.get_base_model()
    return None


def _check_whole(model: Any) -> None:
    reason = mend = None
    for module in model.modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if sharded := next((_SHARDED[kind] for kind in kinds if kind in _SHARDED), None):
            reason, mend = f"its weights are sharded by {sharded}", "give a process the whole model"
        elif "OptimizedModule" in kinds:
            reason, mend = (
                "a part of it is compiled apart by torch.compile",
                "compile the whole model or none",
            )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        reason, mend = "its weights are sharded by DeepSpeed ZeRO-3", "use ZeRO-2, or give a whole model"
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        reason, mend = f"its layers lie on {len(devices)} devices", "put the whole model on one device"
    if type(model).__module__.startswith("transformers.models.") and not model.can_generate():
        reason, mend = f"{type(model).__name__} has no logits of tokens", "load it by AutoModelForCausalLM"
    if reason is not None and mend is not None:
        raise UnsupportedModelError(_type_of(model), reason, mend)


def _type_of(model: Any) -> str:
    config = getattr(model, "config", None)
    return str(getattr(config, "model_type", type(model).__name__))
