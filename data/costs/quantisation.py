"""Bytes of a quantised weight, by a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping

from ..files.disk import InputError

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
