"""The sizes of published models, from the fields of their configurations."""

from __future__ import annotations

import numpy as np
import pytest

from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.files.disk import InputError

QWEN3_30B: dict[str, object] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3: dict[str, object] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "vocab_size": 129280, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def test_a_model_with_experts_weighs_all_of_them_and_multiplies_with_the_active_ones() -> None:
    shape = ModelShape.from_config(QWEN3_30B)
    # Published: 30.5 billion parameters, 3.3 billion active, the embedding and the output head among them.
    assert shape.weight_bytes / 2 == pytest.approx(30.5e9, rel=0.01)
    active = shape.layers * shape.token_values + shape.embedding_values
    assert active == pytest.approx(3.35e9, rel=0.02)


def test_latent_attention_keeps_the_latent_and_the_position_of_a_token() -> None:
    shape = ModelShape.from_config(DEEPSEEK_V3)
    # Published: 671 billion parameters, 37 active; 576 values a token and layer.
    assert shape.layers * shape.layer_bytes == pytest.approx(671e9, rel=0.01)
    assert shape.layers * shape.token_values == pytest.approx(37e9, rel=0.04)
    assert shape.kv_bytes_per_layer_token == 576 * 2
    assert shape.dense_layers == 3


def test_the_experts_that_tokens_read_are_those_that_random_draws_read() -> None:
    shape = ModelShape.from_config(QWEN3_30B)
    draw = np.random.default_rng(0)
    for tokens in (1, 3, 16, 64):
        drawn = [
            len({expert for _ in range(tokens) for expert in draw.choice(128, 8, replace=False)})
            for _ in range(200)
        ]
        assert shape.experts_read(np.array([float(tokens)]))[0] == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({"multi_query": True}, 1), ({"num_key_value_heads": 2}, 2), ({}, 4)],
    ids=["one head", "groups", "a head each"],
)
def test_keys_and_values_are_those_of_the_heads_that_have_them(
    fields: dict[str, object], tokens: int
) -> None:
    base = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    assert ModelShape.from_config(base | fields).kv_bytes_per_layer_token == 2 * tokens * 16 * 2


@pytest.mark.parametrize(
    ("quantised", "feed_forward", "attention"),
    [
        ({"quant_method": "fp8"}, 1.0, 1.0),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, 0.53125, 2.0),
        ({"quant_method": "awq", "bits": 4}, 0.5625, 0.5625),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625, 0.5625),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}},
         1.0625, 1.0625),
    ],
)  # fmt: skip
def test_quantised_weights_take_the_bytes_their_method_keeps(
    quantised: dict[str, object], feed_forward: float, attention: float
) -> None:
    shape = ModelShape.from_config(QWEN3_30B | {"quantization_config": quantised})
    assert (shape.feed_forward_bytes, shape.attention_bytes) == (feed_forward, attention)
    assert shape.kv_bytes_per_layer_token == 2 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"index_topk": 2048}, "selects its keys by an index"),
        ({"mamba_d_state": 16}, "Mamba"),
        ({"quantization_config": {"quant_method": "riddle"}}, "riddle"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_cannot_be_costed_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        ModelShape.from_config(QWEN3_30B | fields)


@pytest.mark.parametrize(
    ("fields", "norms"),
    [
        ({}, (True, False)),
        ({"model_type": "llama"}, (False, False)),
        ({"model_type": "minimax_m2", "use_qk_norm": True, "qk_norm_type": "per_layer"}, (True, True)),
        ({"model_type": "glm4_moe", "use_qk_norm": False, "qk_norm_type": "per_layer"}, (False, False)),
    ],
)
def test_norms_of_queries_and_keys_are_read_from_the_configuration(
    fields: dict[str, object], norms: tuple[bool, bool]
) -> None:
    shape = ModelShape.from_config(QWEN3_30B | fields)
    assert (shape.head_norm, shape.norm_across) == norms


FAMILIES: dict[str, tuple[dict[str, object], float]] = {
    "gpt2": (
        {
            "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
            "activation_function": "gelu_new",
        },
        0.124e9,
    ),
    "opt": (
        {
            "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480,
            "vocab_size": 50272, "activation_function": "relu",
        },
        12.85e9,
    ),
    "falcon": (
        {
            "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True,
            "vocab_size": 65024,
        },
        6.92e9,
    ),
    "gemma2": (
        {
            "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 256, "intermediate_size": 14336, "hidden_act": "gelu_pytorch_tanh",
            "vocab_size": 256000, "sliding_window": 4096,
        },
        9.24e9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_configuration_weighs_what_its_makers_publish(kind: str) -> None:
    fields, published = FAMILIES[kind]
    shape = ModelShape.from_config(fields | {"model_type": kind})
    # Positions, biases and some norms are left out.
    assert shape.weight_bytes / 2 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({"model_type": "mistral"}, 48),
        ({"model_type": "gemma2"}, 24),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, 40),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 28}, 20),
        ({"model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 28}, 0),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"] * 24}, 24),
    ],
)
def test_layers_with_a_window_are_counted_as_their_family_has_them(
    fields: dict[str, object], windowed: int
) -> None:
    shape = ModelShape.from_config(QWEN3_30B | {"sliding_window": 1024} | fields)
    assert shape.window_layers == windowed


def test_a_layer_with_a_window_attends_to_no_more_than_it() -> None:
    kinds = ["sliding_attention", "full_attention"]
    shape = ModelShape.from_config(
        QWEN3_30B | {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 128}
    )
    assert shape.attended(np.array([64.0, 1128.0])).tolist() == [64.0, 628.0]
