"""Readers of published measured profiles."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import FloatArray
from ..costs.layer_profile import LayerProfile, Operation
from ..costs.model_shape import ModelShape
from ..files.disk import InputError, read_json_object, read_text

if TYPE_CHECKING:
    import pandas as pd

_MICROSECOND = 1e-6
_ONCE = {"embedding", "final_layernorm"}
_TWICE = {"layernorm"}
"""Operations that run twice a layer and were timed once."""
_FEED_FORWARD = {"gate_up_proj", "act_fn", "down_proj"}
"""Operations of a layer without experts."""
DEVICE_BYTES: Mapping[str, float] = {
    "RTX4090": 25_250_627_584,
    "RTXPRO6000": 96 * 2**30,
    "a100-80gb": 80 * 2**30,
    "h100-80gb": 80 * 2**30,
}
"""Memory of a device by its name, in bytes."""


def read_profile(path: str | os.PathLike[str], *, expert_parallel: int = 1) -> LayerProfile:
    """Read a layer profile from a file or a folder."""
    if Path(path).is_dir():
        return read_layer_profiles(path, expert_parallel=expert_parallel)
    return LayerProfile.load(path)


def read_layer_profiles(folder: str | os.PathLike[str], *, expert_parallel: int = 1) -> LayerProfile:
    """Read a table of kernel times in LLMServingSim's format.

    The folder is ``DEVICE-MODEL-tpN``, or ``DEVICE/MAKER/MODEL/VARIANT/tpN`` as in LLMServingSim's tree. It
    holds ``dense.csv`` (layer, tokens, time_us), ``attention.csv`` (prefill_chunk, kv_prefill or prefill_key,
    n_decode, kv_decode, time_us), ``per_sequence.csv`` (layer, sequences, time_us), and ``moe.csv`` (ep,
    tokens, activated_experts, time_us) of a model with experts. ``prefill_key`` counts half of the chunk. The
    model's configuration is ``MODEL.json`` next to the folder, or ``configs/model/MAKER/MODEL.json``.
    """
    folder = Path(folder)
    device, model, degree, maker = _measured(folder)
    beside = folder.resolve().parent / f"{model}.json"
    if maker:
        # LLMServingSim's tree: profiler/perf/DEVICE/MAKER/MODEL/VARIANT/tpN.
        of_tree = Path(*folder.resolve().parts[:-7], "configs", "model", maker, f"{model}.json")
        beside = of_tree if of_tree.exists() else beside
    shape = ModelShape.from_config(read_json_object(beside), model)
    strange = folder / "linear_attention.csv"
    if strange.exists():
        hint = "Give a profile of a model with attention in every layer."
        raise InputError("linear attention cannot be costed", file=strange, hint=hint)
    operations = [
        *_named(folder / "dense.csv", "tokens", shape),
        *_named(folder / "per_sequence.csv", "sequences", shape),
        *_attention(folder / "attention.csv"),
    ]
    if shape.experts:
        file = folder / "moe.csv"
        if expert_parallel > 1 and not file.exists():
            alone = "tp1" if maker else f"{device}-{model}-tp1"
            file = folder.resolve().parent / alone / "moe.csv"
        operations.append(_experts(file, shape, expert_parallel))
    warnings = []
    if degree > 1:
        warnings.append("the files hold no synchronisation between devices: name the link between them")
    return LayerProfile(
        shape=shape,
        device=device,
        device_bytes=DEVICE_BYTES.get(device, 0.0),
        tensor_parallel=degree,
        operations=tuple(operations),
        source=f"measured kernel times of {model} on {device}, in LLMServingSim's format",
        warnings=tuple(warnings),
    )


def _measured(folder: Path) -> tuple[str, str, int, str]:
    """Return device, model, degree and maker from a folder's name."""
    device, _, rest = folder.name.partition("-")
    model, _, degree = rest.rpartition("-tp")
    if device and model and degree.isdigit():
        return device, model, int(degree), ""
    parts, degree = folder.resolve().parts, folder.name.removeprefix("tp")
    if folder.name.startswith("tp") and degree.isdigit() and len(parts) > 5:
        return parts[-5], parts[-3], int(degree), parts[-4]
    hint = "Name it like RTX4090-Llama-3.1-8B-tp1."
    raise InputError("the folder's name does not say DEVICE-MODEL-tpN", file=folder, hint=hint)


def _operation(path: Path, **fields: Any) -> Operation:
    points, at = np.unique(fields["points"], axis=0, return_inverse=True)
    if len(points) < len(at):
        seconds = np.bincount(at, weights=fields["seconds"]) / np.bincount(at)
        fields |= {"points": points, "seconds": seconds}
    try:
        return Operation(**fields)
    except ValueError as error:
        raise InputError(str(error), file=path, hint="Correct the times or leave the rows out.") from None


def _named(path: Path, axis: str, shape: ModelShape) -> list[Operation]:
    operations, table = [], read_table(path, ("layer", axis, "time_us"))
    dense = 1 - shape.expert_layers / shape.layers
    for name, rows in table.groupby("layer", sort=True):
        rows = rows.sort_values(axis)
        # In a model with experts, few layers have none.
        share = dense if name in _FEED_FORWARD else 1.0
        operations.append(
            _operation(
                path,
                name=str(name),
                phase="both",
                axes=(axis,),
                points=rows[[axis]].to_numpy(dtype=np.float64),
                seconds=rows["time_us"].to_numpy(dtype=np.float64) * _MICROSECOND * share,
                times=2 if name in _TWICE else 1,
                per_layer=axis == "tokens" and name not in _ONCE,
            )
        )
    return operations


def _attention(path: Path) -> list[Operation]:
    past = "prefill_key" if "prefill_key" in read_table(path, ()) else "kv_prefill"
    columns = ("prefill_chunk", past, "n_decode", "kv_decode")
    table = read_table(path, (*columns, "time_us"))
    if past == "prefill_key":
        table[past] = (table[past] - table["prefill_chunk"] / 2).clip(lower=0.0)
    if "layer" in table and set(table["layer"]) != {"attention"}:
        strange = ", ".join(sorted(set(table["layer"]) - {"attention"}))
        hint = "Give a profile of a model with full attention."
        raise InputError(f"{strange} cannot be costed", file=path, where="column 'layer'", hint=hint)
    if "decode_q_len" in table:
        table = table[table["decode_q_len"] == 1]
    encoding, decoding = table["prefill_chunk"] > 0, table["n_decode"] > 0
    parts = (
        ("encode_attention", "encode", encoding & ~decoding, ("length", "past"), columns[:2]),
        ("decode_attention", "decode", decoding & ~encoding, ("decodes", "context"), columns[2:]),
        ("mixed_attention", "mixed", encoding & decoding, ("length", "past", "decodes", "context"), columns),
    )
    return [
        _operation(
            path,
            name=name,
            phase=phase,
            axes=axes,
            points=table.loc[rows, list(chosen)].to_numpy(dtype=np.float64),
            seconds=table.loc[rows, "time_us"].to_numpy(dtype=np.float64) * _MICROSECOND,
        )
        for name, phase, rows, axes, chosen in parts
        if phase != "mixed" or rows.any()
    ]


def _experts(path: Path, shape: ModelShape, devices: int) -> Operation:
    table = read_table(path, ("tokens", "activated_experts", "time_us"))
    tokens = np.unique(table["tokens"].to_numpy(dtype=np.float64))
    tokens = np.unique(np.concatenate((tokens, 2.0 ** np.arange(0, np.log2(tokens[-1]), 0.25))).round())
    per_expert = tokens
    if "ep" in table:
        known = sorted(set(table["ep"].astype(int)))
        if devices not in known:
            hint = f"Known are {', '.join(map(str, known))}."
            what = f"no experts were timed that {devices} devices share out"
            raise InputError(what, file=path, where="column 'ep'", hint=hint)
        table = table[table["ep"] == devices]
    else:
        # Timed with all experts on one device: one of several computes its share of the tokens.
        per_expert = tokens / devices
    read = shape.experts_read(tokens) / devices
    points = table[["tokens", "activated_experts"]].to_numpy(dtype=np.float64)
    seconds = table["time_us"].to_numpy(dtype=np.float64) * _MICROSECOND
    by_tokens = np.unique(points[:, 0])
    rows = [points[:, 0] == at for at in by_tokens]
    known_at = np.array([np.interp(read, *_rising(points[row, 1], seconds[row])) for row in rows])
    of = np.array([np.interp(per_expert[at], by_tokens, known_at[:, at]) for at in range(len(tokens))])
    share = shape.expert_layers / shape.layers
    return Operation("moe", "both", ("tokens",), tokens[:, None], of * share)


def _rising(at: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    order = np.argsort(at)
    return at[order], values[order]


def read_table(path: Path, columns: tuple[str, ...], *, text: tuple[str, ...] = ("layer",)) -> pd.DataFrame:
    """Return a table of comma-separated values."""
    import io

    import pandas as pd

    try:
        table = pd.read_csv(io.StringIO(read_text(path)))
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InputError(
            f"is not a table ({error})", file=path, hint="Give comma-separated values."
        ) from None
    for column in columns:
        if column not in table.columns:
            hint = f"The columns {', '.join(columns)} are needed."
            raise InputError("the column is missing", file=path, where=f"column '{column}'", hint=hint)
        if column not in text and not pd.api.types.is_numeric_dtype(table[column]):
            raise InputError(
                "holds something that is not a number",
                file=path,
                where=f"column '{column}'",
                hint="Give numbers only.",
            )
    return table
