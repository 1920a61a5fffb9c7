"""Length predictor with its measured error."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ...data.arrays import IntArray
from ...data.files.disk import InputError, atomic_write, read_json_object, write_json
from ...data.files.record import record
from ...data.files.versioned_folder import current_version, new_version
from ...data.predictor import Examples, PredictionQuality
from .kinds import LengthPredictor, learn, load_predictor
from .levels import HELD_OUT

PREDICTOR_VERSION = 3

_SHOWN = ("predictor.json", "errors.csv")
"""Files in a predictor's folder itself."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPredictor:
    """Predictor with its measured error.

    method: One of :data:`~batchbound.executor.predictors.kinds.METHODS`.
    quality: Quality on prompts that were not used for learning.
    predicted, actual: Measured pairs, tokens, shape (held-out requests,).
    """

    method: str
    predictor: LengthPredictor
    quality: PredictionQuality
    predicted: IntArray
    actual: IntArray

    @classmethod
    def train(cls, method: str, examples: Examples, *, seed: int = 0, encoder: str | None = None) -> Self:
        """Learn from a part of the prompts, and measure on the others."""
        if len(set(examples.prompts)) < 2:
            raise InputError("there are fewer than two prompts to learn from", hint="Give more completions.")
        known, unseen = examples.split(HELD_OUT, seed)
        predictor = learn(method, known, seed=seed, encoder=encoder)
        longest = int(examples.lengths.max()) + 1
        predicted = predictor.predict(unseen.prompts)
        quality = PredictionQuality.measured(predicted, unseen.lengths, longest=longest)
        return cls(method, predictor, quality, predicted.tokens, unseen.lengths)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the predictor to a folder.

        ``errors.csv`` is for ``plan --length-error``. An earlier predictor is replaced whole, even by a
        killed process.
        """
        with new_version(path, _SHOWN) as folder:
            self._write(folder)

    def _write(self, folder: Path) -> None:
        fields = self.predictor.save(folder)
        with atomic_write(folder / "errors.csv") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(("predicted", "actual"))
            writer.writerows(zip(self.predicted.tolist(), self.actual.tolist(), strict=True))
        header = {"batchbound_predictor": PREDICTOR_VERSION, "method": self.method}
        write_json(folder / "predictor.json", {**header, "quality": self.quality.to_json(), "fields": fields})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the predictor that :meth:`save` wrote."""
        folder = current_version(path)
        value = read_json_object(folder / "predictor.json")
        hint = "Train it again with this version: `batchbound predict train`."
        if value.get("batchbound_predictor") != PREDICTOR_VERSION:
            raise InputError("is no predictor of this version", file=folder / "predictor.json", hint=hint)
        try:
            with open(folder / "errors.csv", encoding="utf-8") as stream:
                pairs = [(int(row["predicted"]), int(row["actual"])) for row in csv.DictReader(stream)]
            if not pairs:
                raise ValueError("errors.csv holds no pair")
            columns = np.array(pairs, dtype=np.int64)
            quality = record(
                PredictionQuality, value["quality"], file=folder / "predictor.json", within="quality"
            )
            predictor = load_predictor(str(value["method"]), folder, value["fields"])
        except InputError:
            raise
        except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(f"is damaged ({error})", file=path, hint=hint) from None
        return cls(str(value["method"]), predictor, quality, columns[:, 0], columns[:, 1])
