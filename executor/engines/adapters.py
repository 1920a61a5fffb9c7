"""LoRA adapters in PEFT's format: reading, and temporary merging into a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.files.disk import InputError, read_json_object, shown
from ..models.wrapped import restoring, unwrapped

if TYPE_CHECKING:
    import torch

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")

_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(
        (
            "modules_to_save",
            "layer_replication",
            "alora_invocation_tokens",
            "trainable_token_indices",
            "target_parameters",
        ),
        (None, [], {}),
    ),
}
"""Unsupported settings of an adapter, with their supported values."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Changes of some layers' weights, as products of two factors.

    factors: Factors by layer, shapes (rank, inputs) and (outputs, rank), and the scale of their product.
    transposed: True if the layers keep their weights as (inputs, outputs).
    """

    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]
    transposed: bool = False

    @classmethod
    def read(cls, folder: str, model: Any) -> Adapter:
        """Read an adapter; raise InputError if invalid or of another model."""
        from safetensors.torch import load_file

        path = Path(folder)
        if not (path / _CONFIG).is_file() or not (path / _WEIGHTS).is_file():
            what = f"is not an adapter: {_CONFIG} or {_WEIGHTS} is missing"
            raise InputError(what, file=folder, hint="Give a folder that PEFT's save_pretrained wrote.")
        settings = read_json_object(path / _CONFIG)
        for name, plain in _PLAIN.items():
            if settings.get(name, plain[0]) not in plain:
                what, hint = f"{shown(settings[name])} is not served", "Merge the adapter into its model."
                raise InputError(what, file=path / _CONFIG, where=f"field '{name}'", hint=hint)
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        try:
            weights = load_file(path / _WEIGHTS)
        except Exception as error:  # safetensors' error has no public base class
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(f"cannot be read ({why})", file=path / _WEIGHTS, hint="Copy it again.") from None
        for key, value in weights.items():
            match = _FACTOR.fullmatch(key)
            if match is None:
                what = f"{key!r} is not a factor of a linear layer"
                raise InputError(what, file=path / _WEIGHTS, hint="Merge the adapter into its model.")
            pairs.setdefault(match[1], {})[match[2]] = value
        transposed = bool(settings.get("fan_in_fan_out"))
        adapter = cls(
            {
                name: (weight["A"], weight["B"], _scale(settings, name, len(weight["A"])))
                for name, weight in pairs.items()
            },
            transposed,
        )
        adapter._check(model, folder)
        return adapter

    def _check(self, model: Any, folder: str) -> None:
        modules = dict(unwrapped(model).named_modules())
        shared = unwrapped(model).get_input_embeddings().weight
        hint = "Give an adapter of this model."
        for name, (first, second, _) in self.factors.items():
            weight = getattr(modules.get(name), "weight", None)
            if weight is None:
                raise InputError(f"changes the layer {name!r}, which the model lacks", file=folder, hint=hint)
            if weight is shared or not weight.is_floating_point():
                what = f"changes {name!r}, whose weight is {'shared' if weight is shared else 'quantised'}"
                raise InputError(what, file=folder, hint="Merge the adapter into its model.")
            shape = (second.shape[0], first.shape[1])
            if tuple(weight.shape) != (shape[::-1] if self.transposed else shape):
                what = f"changes {name!r} of {shape}, and the model's is {tuple(weight.shape)}"
                raise InputError(what, file=folder, hint=hint)

    @contextmanager
    def merged(self, model: Any) -> Iterator[None]:
        """Merge the changes into the model's weights, and restore these afterwards."""
        import torch

        modules = dict(unwrapped(model).named_modules())
        before: dict[str, torch.Tensor] = {}

        def restore() -> None:
            with torch.no_grad():
                for name, weight in before.items():
                    modules[name].weight.copy_(weight)

        with restoring(restore):
            with torch.no_grad():
                for name, (first, second, scale) in self.factors.items():
                    weight = modules[name].weight
                    change = (second.to(weight.device).float() @ first.to(weight.device).float()) * scale
                    before[name] = weight.detach().to("cpu", copy=True)
                    weight.add_((change.T if self.transposed else change).to(weight.dtype))
            yield


def _scale(settings: Mapping[str, Any], name: str, rank: int) -> float:
    alpha = settings.get("lora_alpha", 8)
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = value
            break
    return float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))
