"""Measured points of serving engines that others published: latencies at a batch, a length and a degree."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.readers.profile_readers import read_table

_DEEPSEEK = ModelShape(
    "DeepSeek-V3", 61, 7168, 128, 128, 128, 18432, 129280, experts=256, active_experts=8,
    expert_intermediate=2048, shared_intermediate=2048, dense_layers=3, latent=512, query_latent=1536,
    rope_dim=64, value_dim=128,
)  # fmt: skip
_QWEN_32B = ModelShape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, head_norm=True)
KNOWN_MODELS: Mapping[str, ModelShape] = {
    "MiniMax-M2.5": ModelShape(
        "MiniMax-M2.5", 62, 3072, 48, 8, 128, 1536, 200064, experts=256, active_experts=8,
        expert_intermediate=1536, head_norm=True, norm_across=True,
    ),
    "Kimi-K2.5": ModelShape(
        "Kimi-K2.5", 61, 7168, 64, 64, 128, 18432, 163840, experts=384, active_experts=8,
        expert_intermediate=2048, shared_intermediate=2048, dense_layers=1, latent=512, query_latent=1536,
        rope_dim=64, value_dim=128,
    ),
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-R1": _DEEPSEEK,
    "DeepSeek-R1-NVFP4": _DEEPSEEK,
    "DeepSeek-V3.1-NVFP4": _DEEPSEEK,
    "Qwen3-32B": _QWEN_32B,
    "Qwen3-32B-NVFP4": _QWEN_32B,
    "Qwen3-235B-A22B-FP8": ModelShape(
        "Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 12288, 151936, experts=128, active_experts=8,
        expert_intermediate=1536, head_norm=True,
    ),
    "Llama-3.1-8B-Instruct": ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    "Llama-3.1-70B": ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    "gpt-oss-120b": ModelShape(
        "gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, experts=128, active_experts=4,
        expert_intermediate=2880, window=128, window_layers=18,
    ),
}  # fmt: skip
"""By the last part of the name in the points' files; sizes from each model's ``config.json``."""

_COLUMNS = ("isl", "osl", "batch_size", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")
_WORDS = ("backend", "model_path", "system", "gemm_quant_mode", "moe_quant_mode")
_BYTES = {"fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625, "int4_wo": 0.5625}
_BITS = {"fp8": 8, "fp8_block": 8, "nvfp4": 4}
_NODE = 8
"""Devices of a node: tables that say more of one multiplied two widths with each other."""
SYSTEMS: Mapping[str, str] = {
    "h100_sxm": "h100-80gb",
    "h200_sxm": "h200",
    "a100_sxm": "a100-80gb",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "l40s": "l40s",
}
"""The rooflines' names of aiconfigurator's systems."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """
    One measurement of a serving engine.

    Parameters
    ----------
    model, device, backend
        What ran: the model's name, the device as rooflines name it, the engine.
    shape
        The model, its weights as they were quantised.
    sequences
        Requests under way.
    input_tokens, output_tokens
        Of each.
    degree, expert_degree
        Devices that share every layer, and those that share out whole experts.
    ttft, tpot
        Seconds to the first token and between two tokens, measured.
    """

    model: str
    device: str
    backend: str
    shape: ModelShape
    sequences: float
    input_tokens: float
    output_tokens: float
    degree: int
    ttft: float
    tpot: float
    expert_degree: int = 1


def read_aiconfigurator(
    file: str | os.PathLike[str], shapes: Mapping[str, ModelShape] = KNOWN_MODELS
) -> tuple[list[MeasuredPoint], Counter[str]]:
    """
    Return the measured points of a table of aiconfigurator's, and how many were left out, by reason.

    Parameters
    ----------
    file
        Comma-separated: backend, model_path, system, gemm_quant_mode, moe_quant_mode, isl, osl, batch_size,
        tp_size, attention_dp_size, silicon_ttft_ms, silicon_tpot_ms.
    shapes
        By the last part of a model's name.

    Raises
    ------
    InputError
        If the file is missing or no such table.
    """
    table = read_table(Path(file), (*_COLUMNS, *_WORDS, "attention_dp_size"), text=_WORDS)
    found: list[MeasuredPoint] = []
    left_out: Counter[str] = Counter()
    for row in table.to_dict("records"):
        model = str(row["model_path"]).rpartition("/")[2]
        replicas = row["attention_dp_size"]
        if model not in shapes:
            left_out[f"{model}: its layers have no formula here"] += 1
        elif row["system"] not in SYSTEMS:
            left_out[f"{row['system']}: no rates are known"] += 1
        elif replicas > 1:
            left_out["attention in replicas: the batch is one replica's in some rows, all in others"] += 1
        elif row["tp_size"] > _NODE:
            left_out["more devices than a node has: widths were multiplied with each other"] += 1
        else:
            found.append(_point(model, {str(name): value for name, value in row.items()}, shapes[model]))
    return found, left_out


def _point(model: str, row: Mapping[str, object], shape: ModelShape) -> MeasuredPoint:
    matrices = _word(row, "gemm_quant_mode")
    mode = (_word(row, "moe_quant_mode") or matrices) if shape.experts else matrices
    # Models with latent attention, and gpt-oss, keep attention in 16 bits where experts have 4.
    spared = mode in ("nvfp4", "int4_wo") and bool(shape.experts)
    shape = replace(
        shape,
        feed_forward_bytes=_BYTES.get(mode, 0.0),
        attention_bytes=0.0 if spared else _BYTES.get(matrices, 0.0),
        multiply_bits=_BITS.get(mode, 16),
    )

    def number(name: str) -> float:
        value = row[name]
        assert isinstance(value, (int, float))
        return float(value)

    experts = row.get("moe_ep_size")
    return MeasuredPoint(
        model=shape.name,
        device=SYSTEMS[_word(row, "system")],
        backend=_word(row, "backend"),
        shape=shape,
        sequences=number("batch_size"),
        input_tokens=number("isl"),
        output_tokens=number("osl"),
        degree=max(1, round(number("tp_size"))),
        ttft=number("silicon_ttft_ms") / 1e3,
        tpot=number("silicon_tpot_ms") / 1e3,
        expert_degree=round(experts) if isinstance(experts, (int, float)) and experts > 1 else 1,
    )


def _word(row: Mapping[str, object], name: str) -> str:
    value = row[name]
    return value if isinstance(value, str) else ""
