"""Families of transformers models that the window tier can run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from ...data.files.disk import InputError

_ENCODER_DECODER_MEND = "use a decoder-only causal language model"
_PLAIN_CACHE_MEND = "use a model with a plain KV cache in every layer, such as Llama, Qwen, Mistral or Gemma"
_OWN_POSITIONS = frozenset({"cpmant", "git", "moshi"})
"""Families with positions or masks beyond the usual arguments."""
_DECODERS_ALL_THE_SAME = frozenset({"gpt_neox", "gpt_neox_japanese"})
"""Decoders with an unused ``is_decoder`` switch."""

_SINKS = frozenset({"gpt_oss"})
_WINDOW_MEND = "use --tier window"


class UnsupportedModelError(InputError):
    """Error of a model that the window tier would get wrong."""

    def __init__(self, model_type: str, reason: str, hint: str) -> None:
        super().__init__(f"a model of type {model_type!r} cannot be run: {reason}; {hint}")
        self.model_type = model_type
        self.reason = reason
        self.hint = hint


def check_supported(config: Any) -> None:
    """Refuse a model that the window tier cannot run."""
    for rule in _RULES:
        refusal = rule(config)
        if refusal is not None:
            raise UnsupportedModelError(config.model_type, *refusal)


def check_ragged(config: Any) -> None:
    """Refuse a model that the ragged tier cannot run."""
    check_supported(config)
    reason = None
    if not getattr(_model_class(config), "_supports_attention_backend", False):
        reason = "its layers do not call transformers' attention interface"
    elif getattr(config, "attn_logit_softcapping", None) is not None:
        reason = "its attention scores are capped"
    elif getattr(config, "kv_lora_rank", None) is not None:
        reason = "it has multi-head latent attention, whose keys differ in size from its values"
    elif config.model_type in _SINKS:
        reason = "its attention has sinks"
    if reason is not None:
        raise UnsupportedModelError(config.model_type, reason, _WINDOW_MEND)


def layer_windows(config: Any) -> tuple[list[str], list[int | None]]:
    """Return the attention window of each layer."""
    windows = [getattr(layer, "sliding_window", None) for layer in _cache_layers(config)]
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return list(kinds), windows


def needs_padding_mask(config: Any) -> bool:
    """Return whether position biases come from the padding mask."""
    return config.model_type == "bloom" or (config.model_type == "falcon" and bool(config.alibi))


def cache_argument(model_class: Any) -> str:
    """Return the name of a model's KV cache, as argument and in its output."""
    # Transformers 5.24 renamed it; models that bring their own code may keep the old name.
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


Refusal = tuple[str, str]
"""A reason and a hint."""


def _encoder_decoder(config: Any) -> Refusal | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder", _ENCODER_DECODER_MEND
    if hasattr(config, "is_decoder") and config.model_type not in _DECODERS_ALL_THE_SAME:
        return "it is an encoder with a language modelling head", _ENCODER_DECODER_MEND
    return None


def _multimodal(config: Any) -> Refusal | None:
    if config.get_text_config(decoder=True) is not config:
        return "it is multimodal", "save its language model alone with save_pretrained and use that directory"
    return None


def _not_causal(config: Any) -> Refusal | None:
    model_class = _model_class(config)
    if model_class is None:
        return "transformers has no causal language model for it", "use a decoder-only causal language model"
    if getattr(model_class, "_is_stateful", False):
        return "it carries a recurrent state instead of a KV cache", _PLAIN_CACHE_MEND
    parameters = inspect.signature(model_class.forward).parameters
    if cache_argument(model_class) not in parameters or "attention_mask" not in parameters:
        return "it does not take a key-value cache and an attention mask", _PLAIN_CACHE_MEND
    return None


def _cache(config: Any) -> Refusal | None:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share the KV cache of others", _PLAIN_CACHE_MEND
    try:
        layers = _cache_layers(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"transformers cannot tell what its layers cache ({error})", _PLAIN_CACHE_MEND
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"it has layers that are not plain attention ({type(layer).__name__})", _PLAIN_CACHE_MEND
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"its layers attend in ways of their own ({', '.join(sorted(kinds))})", _PLAIN_CACHE_MEND
    return None


def _not_one_way(config: Any) -> Refusal | None:
    # Gemma's text models have their own switch; the other is transformers', for any family.
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        return "its tokens attend to those after them", "use a model with causal attention"
    return None


def _rope(config: Any) -> Refusal | None:
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in ("dynamic", "longrope", "su"):
            return (
                f"its RoPE frequencies ({rope_type}) depend on the longest row of the batch",
                "use a model with fixed RoPE scaling (default, linear, llama3 or yarn)",
            )
    return None


def _own_positions(config: Any) -> Refusal | None:
    if config.model_type in _OWN_POSITIONS:
        return "it numbers positions or masks tokens on its own", _PLAIN_CACHE_MEND
    return None


_RULES: tuple[Callable[[Any], Refusal | None], ...] = (
    _encoder_decoder,
    _multimodal,
    _not_causal,
    _own_positions,
    _not_one_way,
    _rope,
    _cache,
)


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, dict):
        rope_type = parameters.get("rope_type", parameters.get("type"))
        if isinstance(rope_type, str):
            yield rope_type
        for value in parameters.values():
            yield from _rope_types(value)


def _model_class(config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _cache_layers(config: Any) -> list[Any]:
    from transformers import DynamicCache

    # The cache that transformers itself would make: its layers show what each model layer stores.
    layers: list[Any] = DynamicCache(config=config).layers
    return layers
