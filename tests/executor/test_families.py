from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")
transformers = pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.executor.models.families import (
    UnsupportedModelError,
    check_supported,
    layer_windows,
    needs_padding_mask,
)
from batchbound.executor.models.tiny import FAMILIES, tiny_config

# GPT-BigCode in transformers 5.17 scripts a function, which newer torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_tiny_families_are_supported(family: str) -> None:
    check_supported(tiny_config(family))


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("whisper", {}, "encoder-decoder"),
        ("bert", {}, "encoder with a language modelling head"),
        ("roberta", {"is_decoder": True}, "encoder with a language modelling head"),
        ("mamba", {}, "recurrent state"),
        ("jamba", {}, "recurrent state"),
        ("rwkv", {}, "recurrent state"),
        ("recurrent_gemma", {}, "recurrent state"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "not plain attention"),
        ("xlnet", {}, "does not take a key-value cache"),
        ("reformer", {}, "encoder with a language modelling head"),
        ("openai-gpt", {}, "does not take a key-value cache"),
        ("gemma3", {}, "multimodal"),
        ("llava", {}, "multimodal"),
        ("gemma3n_text", {}, "share the KV cache of others"),
        ("llama4_text", {}, "chunked_attention"),
        ("moshi", {}, "numbers positions or masks tokens on its own"),
        ("blt", {}, "cannot tell what its layers cache"),
        ("vit", {}, "no causal language model"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attend to those after them"),
        ("llama", {"is_causal": False}, "attend to those after them"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "RoPE frequencies .dynamic. depend on the longest row",
        ),
        (
            "phi3",
            {"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": LONGROPE},
            "RoPE frequencies .longrope.",
        ),
    ],
)
def test_what_the_window_would_get_wrong_is_refused_by_name(
    model_type: str, settings: dict[str, Any], reason: str
) -> None:
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_supported(config)
    assert caught.value.model_type == model_type
    assert f"{model_type!r} cannot be run" in str(caught.value)
    assert caught.value.hint in str(caught.value)


def test_fixed_rope_scaling_is_no_reason_to_refuse() -> None:
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    check_supported(transformers.AutoConfig.for_model("llama", rope_parameters=scaling))


def test_each_layer_says_how_far_back_it_attends() -> None:
    kinds, windows = layer_windows(tiny_config("gemma2"))
    assert list(zip(kinds, windows, strict=True)) == [("sliding_attention", 24), ("full_attention", None)]
    assert layer_windows(tiny_config("mistral"))[1] == [24, 24]
    assert layer_windows(tiny_config("llama"))[1] == [None, None]


def test_alibi_models_need_a_padding_mask() -> None:
    needy = [family for family in FAMILIES if needs_padding_mask(tiny_config(family))]
    assert needy == ["bloom", "falcon-alibi"]
