"""Errors of predicted lengths, and samples of true lengths."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray, IntArray
from ..files.disk import InputError, read_text
from ..files.jsonl import file_digest
from ..problem import MOST_STEPS
from ..workload import LONGEST
from .deconvolution import Deconvolution

LARGEST_SD = 3.0
"""Largest log-deviation of a prediction."""

NEIGHBOURS = 50
"""Least measured pairs for a request's length."""

SCALINGS = 30
"""Iterations of scaling lengths to a total under individual limits."""


class PredictionError(Protocol):
    """Error of predicted lengths."""

    def expected(self, predicted: IntArray, longest: IntArray | None = None) -> IntArray:
        """Return each completion's expected true length, shape (requests,)."""
        ...

    def sample(
        self, predicted: IntArray, rng: np.random.Generator, samples: int, longest: IntArray | None = None
    ) -> IntArray:
        """Sample the true lengths, shape (samples, requests).

        Every sample also draws the uncertainty of the error itself, so the samples spread as wide as the
        truth.
        """
        ...

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values for a plan's record."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormalError:
    """Multiplicative error with a stated log-deviation.

    sd: Standard deviation of ``log(predicted / true)``; 0.5 means off by a factor of 1.6 as a rule.
    reading: ``"noise"``: the prediction is the truth times the error, so large predictions are too large on
        average. Each truth then follows from all predictions by deconvolution, and the total from their sum.
        ``"spread"``: the truth is the prediction times the error, as from a regression on the logarithm.
        ``"auto"``: noise, unless the predictions are implausible with that much noise.
    """

    sd: float
    reading: Literal["auto", "noise", "spread"] = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.sd <= LARGEST_SD:
            raise ValueError(f"the log-deviation {self.sd} is not above 0 and up to {LARGEST_SD}")

    def for_predictions(self, predicted: IntArray, longest: IntArray | None = None) -> LogNormalError:
        """Choose the reading that fits some predictions."""
        if self.reading != "auto":
            return self
        fits = self._deconvolution(predicted, longest).fits
        return replace(self, reading="noise" if fits else "spread")

    def expected(self, predicted: IntArray, longest: IntArray | None = None) -> IntArray:
        """Return each completion's expected true length, shape (requests,)."""
        if self.for_predictions(predicted, longest).reading == "noise":
            means = self._deconvolution(predicted, longest).means()[None, :]
            return _whole(self._scaled(means, predicted, longest, np.zeros(1))[0], longest)
        return _whole(predicted * math.exp(self.sd**2 / 2), longest)

    def sample(
        self, predicted: IntArray, rng: np.random.Generator, samples: int, longest: IntArray | None = None
    ) -> IntArray:
        """Sample the true lengths, shape (samples, requests)."""
        if self.for_predictions(predicted, longest).reading == "noise":
            drawn = self._deconvolution(predicted, longest).sample(rng, samples)
            return _whole(self._scaled(drawn, predicted, longest, rng.standard_normal(samples)), longest)
        factors = np.exp(self.sd * rng.standard_normal((samples, len(predicted))))
        return _whole(predicted * factors, longest)

    def _scaled(
        self, lengths: FloatArray, predicted: IntArray, longest: IntArray | None, scores: FloatArray
    ) -> FloatArray:
        r"""Scale lengths to totals that the predictions allow.

        With :math:`p_i = x_i e^{\sigma z_i}`, whatever the x, :math:`\sum_i p_i e^{-\sigma^2/2}` has the mean
        :math:`\sum_i x_i` and the variance :math:`(e^{\sigma^2} - 1) \sum_i x_i^2`. The deconvolution leaves
        too little variation of the total: it takes the lowest ceiling that the data allow. With large noise a
        few predictions would dominate the sum, so powers of the lengths take their place.
        """
        power = min(1.0, 1 / self.sd)
        noise = (power * self.sd) ** 2
        moments = (lengths**power).sum(axis=1)
        total = (predicted**power).sum() * math.exp(-noise / 2)
        variance = math.expm1(noise) * (lengths ** (2 * power)).sum(axis=1) / moments**2
        factors = (total / moments * np.exp(np.sqrt(np.log1p(variance)) * scores)) ** (1 / power)
        return _with_totals(lengths, factors * lengths.sum(axis=1), longest)

    def _deconvolution(self, predicted: IntArray, longest: IntArray | None) -> Deconvolution:
        return _deconvolution(predicted.tobytes(), self.sd, None if longest is None else int(longest.max()))

    def to_json(self) -> dict[str, object]:
        """Return the deviation and its reading."""
        return {"kind": "log-normal", "sd": self.sd, "reading": self.reading}


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredError:
    """Measured pairs of predicted and actual lengths.

    A request's length is drawn from the pairs with the same prediction, such as a class. If these are fewer
    than :data:`NEIGHBOURS`, the nearest pairs are used, with lengths scaled by the ratio of the predictions.

    predicted, actual: Tokens, at least one each, shape (pairs,).
    file, digest: File that they were read from, and its SHA-256.
    """

    predicted: IntArray
    actual: IntArray
    file: str | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        if not len(self.predicted) or len(self.predicted) != len(self.actual):
            raise ValueError(f"{len(self.predicted)} predicted and {len(self.actual)} actual lengths")
        if min(self.predicted.min(), self.actual.min()) < 1:
            raise ValueError("a predicted or actual length is below one token")
        order = np.argsort(self.predicted, kind="stable")
        object.__setattr__(self, "predicted", np.asarray(self.predicted, dtype=np.int64)[order])
        object.__setattr__(self, "actual", np.asarray(self.actual, dtype=np.int64)[order])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> MeasuredError:
        """Read a CSV file with the columns ``predicted`` and ``actual``."""
        rows = csv.DictReader(read_text(path).splitlines())
        missing = [name for name in ("predicted", "actual") if name not in (rows.fieldnames or ())]
        if missing:
            hint = (
                "Give a CSV file with the columns predicted and actual, a measured pair of lengths per row."
            )
            raise InputError(f"has no column {missing[0]!r}", file=path, hint=hint)
        pairs = [
            (
                _length(row["predicted"], "predicted", rows.line_num, path),
                _length(row["actual"], "actual", rows.line_num, path),
            )
            for row in rows
        ]
        if not pairs:
            raise InputError("has no pair of lengths", file=path, hint="Give measured pairs.")
        columns = np.array(pairs, dtype=np.int64)
        return cls(columns[:, 0], columns[:, 1], os.fspath(path), file_digest(path))

    def expected(self, predicted: IntArray, longest: IntArray | None = None) -> IntArray:
        """Return each completion's expected true length, shape (requests,)."""
        first, last = self._windows(predicted)
        ratios = np.concatenate(([0.0], np.cumsum(self.actual / self.predicted)))
        return _whole(predicted * (ratios[last] - ratios[first]) / (last - first), longest)

    def sample(
        self, predicted: IntArray, rng: np.random.Generator, samples: int, longest: IntArray | None = None
    ) -> IntArray:
        """Sample the true lengths, shape (samples, requests).

        The pairs are reweighted for every sample (Bayesian bootstrap), as another measurement would differ.
        """
        first, last = self._windows(predicted)
        ratios = self.actual / self.predicted
        drawn = np.empty((samples, len(predicted)))
        for row in drawn:
            weights = np.concatenate(([0.0], np.cumsum(rng.exponential(size=len(ratios)))))
            at = weights[first] + rng.random(len(predicted)) * (weights[last] - weights[first])
            pair = np.searchsorted(weights, at, side="right") - 1
            row[:] = predicted * ratios[np.clip(pair, first, last - 1)]
        return _whole(drawn, longest)

    def _windows(self, predicted: IntArray) -> tuple[IntArray, IntArray]:
        """Return the range of pairs that each request is drawn from."""
        count = len(self.predicted)
        first = np.searchsorted(self.predicted, predicted, side="left")
        last = np.searchsorted(self.predicted, predicted, side="right")
        enough = min(NEIGHBOURS, count)
        centred = np.clip((first + last - enough) // 2, 0, count - enough)
        few = last - first < enough
        return np.where(few, centred, first), np.where(few, centred + enough, last)

    def to_json(self) -> dict[str, object]:
        """Return the number of pairs and their file."""
        fields: Mapping[str, object] = {"file": self.file, "digest": self.digest}
        return {"kind": "measured", "pairs": len(self.actual)} | {k: v for k, v in fields.items() if v}


def parse_prediction_error(spec: str) -> PredictionError:
    """Return the error that a command line names."""
    kind, _, number = spec.rpartition(":")
    if not Path(spec).exists() and kind in ("", "noise", "spread"):
        try:
            return LogNormalError(float(number), kind or "auto")  # type: ignore[arg-type]  # compared above
        except ValueError:
            hint = (
                f"Give a log-deviation above 0 and up to {LARGEST_SD:g}, or a CSV file of measured pairs with"
                " the columns predicted and actual."
            )
            raise InputError(f"{spec!r} is no prediction error", where="length-error", hint=hint) from None
    return MeasuredError.read(spec)


@lru_cache(maxsize=1)
def _deconvolution(predicted: bytes, sd: float, longest: int | None) -> Deconvolution:
    ceiling = None if longest is None else math.log(longest)
    return Deconvolution(np.log(np.frombuffer(predicted, dtype=np.int64)), sd, ceiling)


def _length(text: str | None, column: str, line: int, path: str | os.PathLike[str]) -> int:
    try:
        number = float(text or "")
        if 1 <= number <= MOST_STEPS:
            return round(number)
    except ValueError:
        pass
    raise InputError(
        f"{text!r} is not a length of at least one token and at most {MOST_STEPS:,}",
        file=path,
        where=f"line {line}, column '{column}'",
        hint="Correct the row or remove it.",
    )


def _with_totals(lengths: FloatArray, totals: FloatArray, longest: IntArray | None) -> FloatArray:
    """Scale rows to their totals, within the limits of each length."""
    largest: npt.ArrayLike = np.inf if longest is None else longest
    factors = totals / lengths.sum(axis=1)
    for _ in range(0 if longest is None else SCALINGS):
        factors *= totals / np.minimum(factors[:, None] * lengths, largest).sum(axis=1)
    scaled: FloatArray = np.minimum(factors[:, None] * lengths, largest)
    return scaled


def _whole(tokens: npt.NDArray[Any], longest: IntArray | None) -> IntArray:
    largest: npt.ArrayLike = LONGEST if longest is None else longest
    whole: IntArray = np.minimum(np.maximum(1, np.rint(tokens)), largest).astype(np.int64)
    return whole
