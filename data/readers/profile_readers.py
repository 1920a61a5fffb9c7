"""Measured profiles that others published, read into the layer profile's table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..costs.layer_profile import LayerProfile, ModelShape, Operation
from ..files.disk import InputError, read_json_object, read_text

if TYPE_CHECKING:
    import pandas as pd

_MICROSECOND = 1e-6
_ONCE = {"embedding", "final_layernorm"}
_TWICE = {"layernorm"}
"""Before the attention and after it; the files time one of the two."""
DEVICE_BYTES: Mapping[str, float] = {
    "RTX4090": 25_250_627_584,
    "RTXPRO6000": 96 * 2**30,
    "a100-80gb": 80 * 2**30,
    "h100-80gb": 80 * 2**30,
}
"""Memory of one device by the name the files use; the first as its driver reports it, the others nominal."""


def read_profile(path: str | os.PathLike[str]) -> LayerProfile:
    """Return the layer profile of a file of ours, or of a folder in LLMServingSim's format."""
    return read_layer_profiles(path) if Path(path).is_dir() else LayerProfile.load(path)


def read_layer_profiles(
    folder: str | os.PathLike[str], *, config: str | os.PathLike[str] | None = None
) -> LayerProfile:
    """
    Return a table of per-layer kernel times in LLMServingSim's format.

    Parameters
    ----------
    folder
        Named ``DEVICE-MODEL-tpN``; holds ``dense.csv`` (layer, tokens, time_us), ``attention.csv``
        (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us) and ``per_sequence.csv`` (layer, sequences,
        time_us). Its times are those of one device of the N.
    config
        The model's HuggingFace configuration; by default ``MODEL.json`` beside the folder.

    Raises
    ------
    InputError
        If a file is missing, a column is, or the folder's name does not say what was measured.
    """
    folder = Path(folder)
    device, _, rest = folder.name.partition("-")
    model, _, degree = rest.rpartition("-tp")
    if not (device and model and degree.isdigit()):
        hint = "Name it like RTX4090-Llama-3.1-8B-tp1."
        raise InputError("the folder's name does not say DEVICE-MODEL-tpN", file=folder, hint=hint)
    shape = ModelShape.from_config(
        read_json_object(folder.parent / f"{model}.json" if config is None else config), model
    )
    operations = [
        *_named(read_table(folder / "dense.csv", ("layer", "tokens", "time_us")), "tokens"),
        *_named(read_table(folder / "per_sequence.csv", ("layer", "sequences", "time_us")), "sequences"),
        *_attention(folder / "attention.csv"),
    ]
    warnings = []
    if int(degree) > 1:
        warnings.append(
            "the files hold no synchronisation between devices; it is added by the user or not at all"
        )
    return LayerProfile(
        shape=shape,
        device=device,
        device_bytes=DEVICE_BYTES.get(device, 0.0),
        tensor_parallel=int(degree),
        operations=tuple(operations),
        source=f"measured kernel times of {model} on {device}, in LLMServingSim's format",
        warnings=tuple(warnings),
    )


def _named(table: pd.DataFrame, axis: str) -> list[Operation]:
    operations = []
    for name, rows in table.groupby("layer", sort=True):
        rows = rows.sort_values(axis)
        operations.append(
            Operation(
                name=str(name),
                phase="both",
                axes=(axis,),
                points=rows[[axis]].to_numpy(dtype=np.float64),
                seconds=rows["time_us"].to_numpy(dtype=np.float64) * _MICROSECOND,
                times=2 if name in _TWICE else 1,
                per_layer=axis == "tokens" and name not in _ONCE,
            )
        )
    return operations


def _attention(path: Path) -> list[Operation]:
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    table = read_table(path, (*columns, "time_us"))
    encoding, decoding = table["prefill_chunk"] > 0, table["n_decode"] > 0
    parts = (
        ("encode_attention", "encode", encoding & ~decoding, ("length", "past"), columns[:2]),
        ("decode_attention", "decode", decoding & ~encoding, ("decodes", "context"), columns[2:]),
        ("mixed_attention", "mixed", encoding & decoding, ("length", "past", "decodes", "context"), columns),
    )
    return [
        Operation(
            name=name,
            phase=phase,
            axes=axes,
            points=table.loc[rows, list(chosen)].to_numpy(dtype=np.float64),
            seconds=table.loc[rows, "time_us"].to_numpy(dtype=np.float64) * _MICROSECOND,
        )
        for name, phase, rows, axes, chosen in parts
    ]


def read_table(path: Path, columns: tuple[str, ...], *, text: tuple[str, ...] = ("layer",)) -> pd.DataFrame:
    """
    Return a table of comma-separated values.

    Parameters
    ----------
    path
        The file.
    columns
        It must have; all but those of ``text`` hold numbers.
    text
        Columns of words.

    Raises
    ------
    InputError
        If the file is missing or no table, a column is missing, or one of numbers holds something else.
    """
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
