"""
How far cost models are off that are fitted to whole-model times that others published.

    python benchmarks/published_profiles.py TIMES ...

TIMES are Splitwise's ``perf_model.csv`` and DistServe's ``profiler-*.json``; the traps in them are printed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from batchbound.data.arrays import FloatArray
from batchbound.data.costs.cost import FitError
from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.files.disk import InputError, read_json_object
from batchbound.data.readers.profile_readers import DEVICE_BYTES, read_table
from batchbound.data.trace import Stage
from batchbound.executor.profiling.calibrate import fit_cost, fit_error

if TYPE_CHECKING:
    import pandas as pd

_MILLISECOND = 1e-3
_SPLITWISE = ("model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size")
_TIMES = ("prompt_time", "token_time")
_SAME = 1e-3
"""Spread of the ratio of two machines' times below which one is taken for a copy of the other."""
_FALL = 0.8
"""A larger batch that takes less than this share of a smaller one's time was not what it says."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeModelTimes:
    """
    Times of prefill stages and decode steps of a whole model, at batches of equal lengths.

    Parameters
    ----------
    model, device
        What was measured.
    tensor_parallel
        Devices.
    prompts, prompt_seconds
        Sequences and tokens of each, shape (points, 2), and the seconds of their prefill, shape (points,).
    decodes, decode_seconds
        Sequences and tokens held by each, and the seconds of a decode step, shapes as above.
    traps
        What was found wrong and left out, one sentence each.
    """

    model: str
    device: str
    tensor_parallel: int
    prompts: FloatArray
    prompt_seconds: FloatArray
    decodes: FloatArray
    decode_seconds: FloatArray
    traps: tuple[str, ...] = ()

    def profile(self) -> LayerProfile:
        """Return the times as a layer profile: of a single layer, as the layers were not told apart."""
        return LayerProfile(
            shape=ModelShape(self.model, 1, 1, 1, 1, 1, 1, 1),
            device=self.device,
            device_bytes=DEVICE_BYTES.get(self.device, 0.0),
            tensor_parallel=self.tensor_parallel,
            operations=(
                Operation("prefill", "encode", ("sequences", "length"), self.prompts, self.prompt_seconds),
                Operation("decode", "decode", ("decodes", "context"), self.decodes, self.decode_seconds),
            ),
            source=f"measured times of {self.model} on {self.device}, whole model",
            warnings=self.traps,
        )


def read_splitwise(path: str | os.PathLike[str]) -> list[WholeModelTimes]:
    """
    Return the medians of Splitwise's ``perf_model.csv``, one for each model, device and degree.

    Two traps are found and reported: a batch that takes far less time than a smaller one of the same
    prompts, which is left out, and a device whose prefill times are those of another times a constant.

    Parameters
    ----------
    path
        The table; times in milliseconds.

    Raises
    ------
    InputError
        If the file is missing or a column is.
    """
    table = read_table(Path(path), (*_SPLITWISE, *_TIMES), text=("model", "hardware"))
    medians = table.groupby(list(_SPLITWISE), as_index=False)[list(_TIMES)].median()
    copies = _copies(medians)
    found = []
    for (model, device, degree), rows in medians.groupby(["model", "hardware", "tensor_parallel"]):
        traps = [copies[device]] if device in copies else []
        prompt, fallen = _without_falls(rows.groupby(["prompt_size", "batch_size"])[["prompt_time"]].median())
        found.append(
            WholeModelTimes(
                model=str(model),
                device=str(device),
                tensor_parallel=int(str(degree)),
                prompts=prompt[["batch_size", "prompt_size"]].to_numpy(dtype=np.float64),
                prompt_seconds=prompt["prompt_time"].to_numpy(dtype=np.float64) * _MILLISECOND,
                decodes=np.column_stack(
                    (rows["batch_size"], rows["prompt_size"] + rows["token_size"] / 2)
                ).astype(np.float64),
                decode_seconds=rows["token_time"].to_numpy(dtype=np.float64) * _MILLISECOND,
                traps=(*traps, *fallen),
            )
        )
    return found


def read_distserve(
    path: str | os.PathLike[str],
    *,
    sequences: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 95, 96, 128, 256),
    lengths: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048),
) -> list[WholeModelTimes]:
    r"""
    Return DistServe's fitted times on a grid, one for each model and degree.

    Prefill takes :math:`a + b \sum L + c \sum L^2` milliseconds; decode :math:`a + b \sum C + c B`, with
    other coefficients beyond a batch.

    Parameters
    ----------
    path
        A ``profiler-*.json``.
    sequences, lengths
        Grid the coefficients are evaluated at.

    Raises
    ------
    InputError
        If the file is missing or a coefficient is.
    """
    grid = np.array([[count, length] for count in sequences for length in lengths], dtype=np.float64)
    count, length = grid[:, 0], grid[:, 1]
    found = []
    for model, degree, fit in _distserve_fits(path):
        large = count > fit["threshold"][0]
        prefill, small, big = fit["prefill"], fit["decoding_smallbs"], fit["decoding_largebs"]
        regime = [np.where(large, beyond, below) for below, beyond in zip(small, big, strict=True)]
        traps = []
        step = (big[0] + big[2] * fit["threshold"][0]) / (small[0] + small[2] * fit["threshold"][0])
        if abs(step - 1) > 0.1:
            traps.append(
                f"decode of {model} at degree {degree} jumps by {step - 1:+.0%} where its regimes meet"
            )
        found.append(
            WholeModelTimes(
                model=model,
                device="a100-80gb",
                tensor_parallel=degree,
                prompts=grid,
                prompt_seconds=_MILLISECOND
                * (prefill[0] + prefill[1] * count * length + prefill[2] * count * length**2),
                decodes=grid,
                decode_seconds=_MILLISECOND * (regime[0] + regime[1] * count * length + regime[2] * count),
                traps=tuple(traps),
            )
        )
    return found


def _distserve_fits(path: str | os.PathLike[str]) -> Iterator[tuple[str, int, Mapping[str, list[float]]]]:
    hint = "Give one of DistServe's profiler-*.json files."
    for model, degrees in read_json_object(path).items():
        if not isinstance(degrees, dict):
            raise InputError("holds no degrees", file=path, where=f"field '{model}'", hint=hint)
        for degree, fit in degrees.items():
            place = f"field '{model}.{degree}'"
            try:
                coefficients = {
                    name: [float(value) for value in fit[name]]
                    for name in ("prefill", "decoding_smallbs", "decoding_largebs")
                }
                coefficients["threshold"] = [float(fit["decoding_large_small_bs_threshold"])]
                if any(len(values) != 3 for name, values in coefficients.items() if name != "threshold"):
                    raise ValueError("a fit has three coefficients")
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"is damaged ({error})", file=path, where=place, hint=hint) from None
            yield str(model), int(degree), coefficients


def _copies(medians: pd.DataFrame) -> dict[str, str]:
    """Return devices whose prefill is a constant times another's, with the sentence that says so."""
    point = ["model", "tensor_parallel", "prompt_size", "batch_size", "token_size"]
    times = medians.pivot_table(index=point, columns="hardware", values="prompt_time")
    copies: dict[str, str] = {}
    for late in times.columns:
        for early in times.columns:
            ratio = (times[late] / times[early]).dropna()
            constant = len(ratio) > 2 and ratio.std() < _SAME * ratio.mean()
            # Of the pair, the slower one is the copy: made up from the faster.
            if early != late and constant and ratio.mean() > 1:
                factor = f"{ratio.mean():.3f}"
                copies[str(late)] = (
                    f"prefill times of {late} are those of {early} times {factor}: not a measurement"
                )
    return copies


def _without_falls(medians: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    prompt = medians.reset_index()
    traps, dropped = [], []
    for size, rows in prompt.groupby("prompt_size"):
        longest = 0.0
        rows = rows.sort_values("batch_size")
        for index, batch, seconds in zip(rows.index, rows["batch_size"], rows["prompt_time"], strict=True):
            if seconds < _FALL * longest:
                traps.append(
                    f"prefill of {batch} prompts of {size} tokens takes {seconds:.0f} ms, a smaller batch"
                    f" {longest:.0f} ms: left out"
                )
                dropped.append(index)
            longest = max(longest, seconds)
    return prompt.drop(index=dropped), traps


def error_of_fit(times: WholeModelTimes) -> FitError:
    """Return the error of a cost model on the times that it is fitted to."""
    stages = [
        Stage("prefill", 0.0, seconds, 0, int(count), int(count * length), 0, 0)
        for (count, length), seconds in zip(times.prompts, times.prompt_seconds, strict=True)
    ] + [
        Stage("decode", 0.0, seconds, 1, int(count), int(count), int(count * held), int(count * held))
        for (count, held), seconds in zip(times.decodes, times.decode_seconds, strict=True)
    ]
    return fit_error(fit_cost(stages), stages)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", nargs="+", metavar="TIMES")
    for path in parser.parse_args().times:
        for times in (read_splitwise if path.endswith(".csv") else read_distserve)(path):
            error = error_of_fit(times)
            name = f"{times.model} on {times.tensor_parallel} {times.device}"
            print(f"{name:44s} prefill {error.prefill_mape:5.1%}, decode step {error.decode_mape:5.1%}")
            for trap in times.traps:
                print(f"    {trap}")


if __name__ == "__main__":
    main()
