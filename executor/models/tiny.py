"""Tiny models for tests and demos, random or trained."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from ...data.files.disk import InputError

_POSITIONS = 512
_VOCABULARY = 288
"""Tokens of the byte tokenizer, with room to spare."""

_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _POSITIONS,
}
_GPT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": _POSITIONS,
}
_WINDOW: dict[str, Any] = {"sliding_window": 24}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], **_WINDOW}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT),
    "gpt-neo": (
        "gpt_neo",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 24,
            "max_position_embeddings": _POSITIONS,
        },
    ),
    "opt": (
        "opt",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": _POSITIONS,
            "word_embed_proj_dim": 64,
        },
    ),
    "llama": ("llama", _COMMON),
    "mistral": ("mistral", {**_COMMON, **_WINDOW}),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", {**_COMMON, "head_dim": 16}),
    "gemma": ("gemma", {**_COMMON, "head_dim": 16}),
    "gemma2": ("gemma2", {**_COMMON, **_MIXED, "head_dim": 16}),
    "gemma3": ("gemma3_text", {**_COMMON, **_MIXED, "head_dim": 16}),
    "phi": ("phi", _COMMON),
    "phi3": ("phi3", {**_COMMON, **_WINDOW}),
    "bloom": ("bloom", {"vocab_size": _VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "falcon",
        {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "falcon-alibi": (
        "falcon",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
            "new_decoder_architecture": False,
            "multi_query": False,
        },
    ),
    "mpt": (
        "mpt",
        {"vocab_size": _VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": _POSITIONS},
    ),
    "stablelm": ("stablelm", _COMMON),
    "gpt-neox": ("gpt_neox", {**_COMMON, "num_key_value_heads": None}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 8}),
    "codegen": ("codegen", {**_GPT, "rotary_dim": 8}),
    "olmo": ("olmo", _COMMON),
    "olmo2": ("olmo2", _COMMON),
    "olmo3": ("olmo3", {**_COMMON, **_MIXED}),
    "cohere": ("cohere", _COMMON),
    "cohere2": ("cohere2", {**_COMMON, **_MIXED}),
    "mixtral": ("mixtral", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {**_COMMON, **_EXPERTS, "head_dim": 16, "num_experts": 4}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
    ),
    "granite": ("granite", _COMMON),
    "xglm": (
        "xglm",
        {
            "vocab_size": _VOCABULARY,
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": _POSITIONS,
        },
    ),
    "starcoder2": ("starcoder2", {**_COMMON, **_WINDOW}),
    "gpt-bigcode": ("gpt_bigcode", _GPT),
    "smollm3": ("smollm3", _COMMON),
    "glm": ("glm", {**_COMMON, "head_dim": 16}),
    "nemotron": ("nemotron", _COMMON),
    "persimmon": ("persimmon", {**_COMMON, "num_key_value_heads": None}),
    "gpt-oss": (
        "gpt_oss",
        {**_COMMON, **_MIXED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""transformers model type and configuration of each family."""


def tiny_settings(family: str) -> tuple[str, dict[str, Any]]:
    """Return a family's model type and settings."""
    if family == SPELLER:
        return "llama", _SPELLER
    if family not in FAMILIES:
        known = [SPELLER, *sorted(FAMILIES)]
        near = difflib.get_close_matches(family, known, n=1)
        hint = f"Did you mean tiny:{near[0]}?" if near else f"Choose from {', '.join(known)}."
        raise InputError(f"there is no tiny model 'tiny:{family}'", hint=hint)
    return FAMILIES[family]


def tiny_config(family: str) -> Any:
    """Return a family's configuration: two layers, few weights."""
    model_type, settings = tiny_settings(family)
    from transformers import AutoConfig

    settings = {name: value for name, value in settings.items() if value is not None}
    tokens = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    return AutoConfig.for_model(model_type, **settings, **tokens, name_or_path=f"tiny:{family}")


SPELLER = "speller"
"""Trained tiny model, which spells, counts and reverses."""

_SPELLER: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 259,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
}


def speller_weights() -> dict[str, Any]:
    """Return the weights that ``benchmarks/train_speller.py`` wrote."""
    from safetensors.torch import load_file

    return load_file(Path(__file__).parent / "speller.safetensors")
