"""Sizes of a transformer that determine its costs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ..arrays import FloatArray
from ..files.disk import InputError
from ..files.record import Positive

_SCALED = {4: 0.5 + 1 / 16, 8: 1.0 + 1 / 16}
"""Bytes of a weight by its bits, with a scale for 16 weights."""
_BYTES = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "fp4": 0.5 + 1 / 16,
    "int8": 1.0,
}
_MULTIPLIED = {"fp8": 8, "fbgemm_fp8": 8, "int8": 8, "nvfp4": 4, "mxfp4": 4, "fp4": 4}
"""Bits of the factors in methods that also quantise activations."""
_BY_BITS = ("gptq", "awq", "auto-round", "bitsandbytes", "compressed-tensors", "hqq", "torchao", "quanto")
_ATTENTION = ("self_attn", "attention", "attn")

WeightBytes = Annotated[float, msgspec.Meta(ge=0, le=64)]
"""Bytes of a weight, as valid in a file."""

LARGEST_SIZE = 10**9
"""Largest size of a layer; products stay countable."""

_UNCOSTED = {
    "index_topk": "attention that selects its keys by an index",
    "linear_num_value_heads": "layers of linear attention",
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "state_size": "Mamba layers",
    "attention_hidden_size": "RWKV layers",
    "block_types": "recurrent blocks",
    "hybrid_override_pattern": "Mamba layers",
}
"""Fields of layers without a cost formula here."""


_PLAIN = ("bloom", "falcon", "mpt")
"""Families without a gate or a named activation function."""
_TIED = ("bloom", "cohere", "falcon", "gemma", "gpt2", "mpt", "opt", "t5")
"""Families that share the embedding with the output head by default."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a transformer that determine its costs.

    hidden, heads, kv_heads, head_dim, intermediate, vocabulary: Widths in values, and numbers of heads.
        ``kv_heads`` is 1 for multi-query attention.
    bytes_per_value: Bytes of a value of the KV cache, of activations, and of weights that are not quantised.
    encoder_layers: Encoder layers; 0 for a decoder-only model.
    gated: True if the feed-forward part has a gate (three matrices instead of two).
    tied_embedding: True if the output head shares the embedding's weights.
    experts, active_experts, expert_intermediate: Experts of a layer, experts used by a token, and width of an
        expert; 0 for a dense model.
    shared_intermediate: Total width of the experts that every token uses.
    dense_layers: Layers without experts in a model with experts.
    latent, query_latent, rope_dim, value_dim: Sizes of latent attention (MLA): latent of keys and values,
        latent of queries (0 for none), key part with positions, and value of a head; ``latent`` is 0 for
        other models.
    window, window_layers: Tokens of a sliding window, and number of layers with one.
    feed_forward_bytes, attention_bytes: Bytes of a quantised weight of the feed-forward part (or experts) and
        of attention; 0 for ``bytes_per_value``.
    multiply_bits: Bits of the factors in products with weights: 16, or 8 or 4 with quantised activations.
    head_norm, norm_across: True if queries and keys are normalised, and if over all heads at once; devices
        that share a layer then add up the squares.
    """

    name: str
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: int
    intermediate: int
    vocabulary: int
    bytes_per_value: int = 2
    encoder_layers: int = 0
    gated: bool = True
    tied_embedding: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    latent: int = 0
    query_latent: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    window: int = 0
    window_layers: int = 0
    feed_forward_bytes: WeightBytes = 0.0
    attention_bytes: WeightBytes = 0.0
    multiply_bits: int = 16
    head_norm: bool = False
    norm_across: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str = "") -> ModelShape:
        """Return the shape in a HuggingFace ``config.json``."""
        outer, inner = config, config.get("text_config")
        if isinstance(inner, dict):
            config = {**outer, **inner}
        refuse_uncosted(config)
        read = _Sizes(config)
        hidden = read.size("hidden_size", "d_model", "n_embd", least=1)
        heads = read.size("num_attention_heads", "num_heads", "n_head", least=1)
        kind = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
        layers = read.size("num_hidden_layers", "num_decoder_layers", "num_layers", "n_layer", least=1)
        value = {"float64": 8, "float32": 4}.get(kind, 2)
        feed_forward, attention, bits = weight_bytes_of(config, value)
        normed, across = _norms(config)
        return cls(
            name=name or str(config.get("model_type", "model")),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_kv_heads(config, read, heads),
            head_dim=read.size("head_dim", "d_kv", "qk_nope_head_dim", default=hidden // heads)
            if not config.get("kv_lora_rank")
            else read.size("qk_nope_head_dim"),
            intermediate=read.size("intermediate_size", "d_ff", "ffn_dim", "n_inner", default=4 * hidden),
            vocabulary=read.size("vocab_size", least=1),
            bytes_per_value=value,
            encoder_layers=read.size("num_layers", "encoder_layers")
            if config.get("is_encoder_decoder")
            else 0,
            gated=_gated(config),
            tied_embedding=_tied(outer, config),
            feed_forward_bytes=feed_forward,
            attention_bytes=attention,
            multiply_bits=bits,
            head_norm=normed,
            norm_across=across,
            **_experts(config, read, layers),
            **_latent(config, read),
            **_window(config, layers),
        )

    @property
    def attention_values(self) -> int:
        """Values of one layer's attention weights, without cross-attention."""
        if not self.latent:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        key, into = self.head_dim + self.rope_dim, self.query_latent or self.hidden
        query = self.hidden * self.query_latent + into * self.heads * key
        down = self.hidden * (self.latent + self.rope_dim)
        up = self.latent * self.heads * (self.head_dim + self.value_dim)
        return query + down + up + self.heads * self.value_dim * self.hidden

    @property
    def expert_values(self) -> int:
        """Values of one expert's weights."""
        return self._matrices * self.hidden * self.expert_intermediate

    @property
    def shared_values(self) -> int:
        """Values of the shared expert and the router."""
        return self._matrices * self.hidden * self.shared_intermediate + self.hidden * self.experts

    @property
    def dense_values(self) -> int:
        """Values of the feed-forward weights in a layer without experts."""
        return self._matrices * self.hidden * self.intermediate

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding_values(self) -> int:
        """Values of the embedding and the output head."""
        return (1 if self.tied_embedding else 2) * self.vocabulary * self.hidden

    @property
    def kernels(self) -> float:
        """Mean number of kernels that a layer launches.

        Nine kernels: two norms, queries with KV, their positions, attention, its output, and three of the
        feed-forward part. Norms of queries and keys add one. A latent adds five (two norms, queries in two
        steps, absorbed KV). Experts have seven instead of three (router, choice, order, three, sum). Shared
        experts add three.
        """
        share = self.expert_layers / self.layers
        launches = 9 + self.head_norm + (5 if self.latent else 0)
        return launches + share * (4 + (3 if self.shared_intermediate else 0))

    @property
    def layer_bytes(self) -> float:
        """Mean bytes of a layer's weights, all experts included."""
        return float(self.read_bytes(np.array([np.inf]))[0])

    def experts_read(self, tokens: FloatArray) -> FloatArray:
        """Return how many different experts tokens use on average."""
        if not self.experts:
            return np.zeros_like(tokens)
        missed = 1.0 - self.active_experts / self.experts
        return np.asarray(self.experts * (1.0 - missed**tokens))

    def read_bytes(self, tokens: FloatArray) -> FloatArray:
        """Return the mean bytes of weights that a layer reads."""
        return np.asarray(self.feed_forward_read(tokens) + self.attention_read)

    @property
    def attention_read(self) -> float:
        """Bytes of the weights of one layer's attention and norms."""
        of_attention = self.attention_values * (self.attention_bytes or self.bytes_per_value)
        return of_attention + 2 * self.hidden * self.bytes_per_value

    def feed_forward_read(self, tokens: FloatArray) -> FloatArray:
        """Return the mean bytes of feed-forward weights that a layer reads."""
        of_experts = self.experts_read(tokens) * self.expert_values + self.shared_values
        share = self.expert_layers / self.layers
        feed_forward = share * of_experts + (1 - share) * self.dense_values
        return np.asarray(feed_forward * (self.feed_forward_bytes or self.bytes_per_value))

    @property
    def token_values(self) -> float:
        """Mean values of a layer's weights per token."""
        share = self.expert_layers / self.layers
        of_experts = self.active_experts * self.expert_values + self.shared_values
        feed_forward = share * of_experts + (1 - share) * self.dense_values
        return feed_forward + self.attention_values + 2 * self.hidden

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, all experts included."""
        layers = self.layers + self.encoder_layers
        return layers * self.layer_bytes + self.bytes_per_value * self.embedding_values

    @property
    def kv_bytes_per_layer_token(self) -> int:
        """Bytes of KV cache, or of the latent, per token and layer."""
        if self.latent:
            return (self.latent + self.rope_dim) * self.bytes_per_value
        return 2 * self.kv_heads * self.head_dim * self.bytes_per_value

    def kv_copies(self, devices: int) -> float:
        """Return how many devices hold a copy of the same KV cache."""
        return devices if self.latent else max(1.0, devices / self.kv_heads)

    def attended(self, context: FloatArray) -> FloatArray:
        """Return the mean number of tokens that a layer attends to."""
        if not self.window_layers:
            return context
        share = self.window_layers / self.layers
        return np.asarray(share * np.minimum(context, self.window) + (1 - share) * context)

    @property
    def prompt_pair_flops(self) -> int:
        """Operations of a layer's attention per pair of prompt tokens."""
        if self.latent:
            return 2 * self.heads * (self.head_dim + self.rope_dim + self.value_dim)
        return 4 * self.heads * self.head_dim


def refuse_uncosted(config: Mapping[str, object]) -> None:
    """Refuse a configuration whose layers have no cost formula here."""
    what = next((why for field, why in _UNCOSTED.items() if config.get(field)), None)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention", "sliding_attention", "attention"}:
        strange = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention", "attention"})
        what = "layers of the kind " + ", ".join(strange)
    if what is not None:
        model = config.get("model_type", "the model")
        hint = "Measure its stages with `batchbound profile`, and give that cost instead."
        raise InputError(f"{model} has {what}, which cannot be costed", where="config", hint=hint)


class _Sizes:
    """Whole numbers of a configuration by alternative names."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def size(self, *names: str, default: int | None = None, least: int = 0) -> int:
        for key in names:
            value = self._config.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                if not least <= value <= LARGEST_SIZE:
                    what = f"{value} is not a size from {least} to {LARGEST_SIZE:,}"
                    raise InputError(what, where=f"config, field '{key}'", hint="Correct it.")
                return value
        if default is None:
            hint = "Give the configuration of a transformer."
            raise InputError(f"has none of the fields {', '.join(names)}", where="config", hint=hint)
        return default


def _kv_heads(config: Mapping[str, object], read: _Sizes, heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return read.size("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)


def _norms(config: Mapping[str, object]) -> tuple[bool, bool]:
    kind = str(config.get("model_type", ""))
    normed = bool(config.get("use_qk_norm")) or kind.startswith(("qwen3", "gemma3", "olmo2", "olmo3"))
    return normed, normed and config.get("qk_norm_type") == "per_layer"


def _experts(config: Mapping[str, object], read: _Sizes, layers: int) -> dict[str, int]:
    experts = read.size("num_local_experts", "n_routed_experts", "num_experts", default=0)
    if experts < 2:
        return {}
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
    width = read.size("moe_intermediate_size", "intermediate_size")
    shared = read.size("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    if not shared:
        shared = width * read.size("n_shared_experts", "num_shared_experts", default=0)
    step = max(1, read.size("decoder_sparse_step", default=1))
    first = read.size("first_k_dense_replace", default=0)
    only = config.get("mlp_only_layers")
    without = set(only) if isinstance(only, list) else set()
    without |= {layer for layer in range(layers) if layer < first or (layer + 1) % step}
    return {
        "experts": experts,
        "active_experts": read.size(*names),
        "expert_intermediate": width,
        "shared_intermediate": shared,
        "dense_layers": len(without),
    }


def _latent(config: Mapping[str, object], read: _Sizes) -> dict[str, int]:
    if not config.get("kv_lora_rank"):
        return {}
    return {
        "latent": read.size("kv_lora_rank"),
        "query_latent": read.size("q_lora_rank", default=0),
        "rope_dim": read.size("qk_rope_head_dim"),
        "value_dim": read.size("v_head_dim"),
    }


def _gated(config: Mapping[str, object]) -> bool:
    kind, projection = str(config.get("model_type", "")), config.get("feed_forward_proj")
    if projection is not None:
        return "gated" in str(projection)
    fields = ("hidden_act", "hidden_activation", "activation_function", "activation")
    function = next((str(config[field]) for field in fields if config.get(field)), None)
    if function is None:
        return not kind.startswith(_PLAIN)
    return kind.startswith("gemma") or function in ("silu", "swish")


def _tied(outer: Mapping[str, object], config: Mapping[str, object]) -> bool:
    tied = outer.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    # Defaults of a family for fields that a configuration leaves out.
    return str(config.get("model_type", "")).startswith(_TIED) if tied is None else bool(tied)


def _window(config: Mapping[str, object], layers: int) -> dict[str, int]:
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or isinstance(window, bool) or config.get("use_sliding_window") is False:
        return {}
    # Older configurations state the interval of layers with full attention.
    alternate = 2 if str(config.get("model_type", "")).startswith("gemma2") else None
    every = config.get("sliding_window_pattern", alternate)
    if isinstance(kinds, list):
        sliding = kinds.count("sliding_attention")
    elif isinstance(every, int) and every > 0:
        sliding = layers - layers // every
    else:
        whole = config.get("max_window_layers") if config.get("use_sliding_window") else 0
        sliding = max(0, layers - whole) if isinstance(whole, int) else layers
    return {"window": window, "window_layers": sliding} if sliding else {}


def holds_whole_context(folder: str | os.PathLike[str]) -> bool | None:
    """Return whether each layer keeps the whole context in KV.

    It is None without a config.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) else config
    kinds = config.get("layer_types")
    full = not isinstance(kinds, list) or set(map(str, kinds)) <= {"full_attention", "attention"}
    window = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    # Layers without full attention have many names.
    odd = any(
        name in config for name in (*_UNCOSTED, "attention_chunk_size", "conv_L_cache", "layers_block_type")
    )
    return full and not window and not odd and "num_attention_heads" in config


def weight_bytes_of(config: Mapping[str, object], value: int) -> tuple[float, float, int]:
    """Return bytes of two kinds of weights, and bits of factors.

    The weights are those of the feed-forward part and of attention. The bytes are 0 without quantisation.
    Methods that quantise only weights multiply in 16 bits.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return 0.0, 0.0, 16
    method = str(settings.get("quant_algo") or settings.get("quant_method") or "none").lower()
    if method == "modelopt":
        method = str(settings.get("quant_algo", "modelopt")).lower()
    weight_bytes = _BYTES.get(method)
    if weight_bytes is None and method in _BY_BITS:
        bits = _bits(settings)
        weight_bytes = _SCALED.get(bits, bits / 8) if bits else None
    if weight_bytes is None:
        hint = f"Known are {', '.join((*_BYTES, *_BY_BITS))}; or give the configuration without it."
        where = "config, field 'quantization_config'"
        raise InputError(f"{method!r} does not say the bytes of a weight", where=where, hint=hint)
    unquantised = [
        str(name)
        for field in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
        for name in (settings.get(field) if isinstance(settings.get(field), list) else [])  # type: ignore[union-attr]
    ]
    spared = any(part in name for name in unquantised for part in _ATTENTION)
    return weight_bytes, float(value) if spared else weight_bytes, _MULTIPLIED.get(method, 16)


def _bits(given: Mapping[str, object]) -> int:
    if given.get("load_in_4bit"):
        return 4
    if given.get("load_in_8bit"):
        return 8
    bits = given.get("bits", given.get("w_bit", given.get("nbits")))
    groups = given.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            bits = weights.get("num_bits", bits)
    return bits if isinstance(bits, int) and not isinstance(bits, bool) else 0
