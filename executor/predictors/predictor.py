"""Length predictor with its measured error."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from ...data.arrays import IntArray
from ...data.files.disk import InputError, atomic_write, read_json_object, write_json
from ...data.files.record import is_number, record
from ...data.predictor import Examples, Predicted, PredictionQuality
from .quantiles import HELD_OUT, LEVELS

_CURRENT = "current"
_VERSION = "version-"


class LengthPredictor(Protocol):
    """Predictor of completion lengths."""

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return each prompt's predicted length and interval, in tokens."""
        ...

    def save(self, folder: Path) -> dict[str, object]:
        """Write large parts to an existing folder; return the rest."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantPredictor:
    """Predictor with one length for all prompts, as a baseline.

    low, tokens, high: Quantiles of the lengths learnt from, tokens.
    """

    low: float
    tokens: float
    high: float

    @classmethod
    def learnt(cls, examples: Examples) -> Self:
        """Return the median and the interval of the examples' lengths."""
        return cls(*np.quantile(examples.lengths, LEVELS).tolist())

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return the same length for each prompt."""
        columns = (np.full(len(prompts), value) for value in (self.tokens, self.low, self.high))
        return Predicted.of(*columns)

    def save(self, folder: Path) -> dict[str, object]:
        """Return the three numbers."""
        return {"low": self.low, "tokens": self.tokens, "high": self.high}

    @classmethod
    def load(cls, folder: Path, fields: dict[str, Any]) -> Self:
        """Return the predictor that :meth:`save` wrote."""
        values = [fields[name] for name in ("low", "tokens", "high")]
        if not all(map(is_number, values)):
            raise ValueError("low, tokens and high are not three numbers")
        return cls(*map(float, values))


METHODS = ("constant", "quantile", "encoder")


def learn(method: str, examples: Examples, *, seed: int = 0, encoder: str | None = None) -> LengthPredictor:
    """Return a predictor learnt from examples."""
    if method == "constant":
        return ConstantPredictor.learnt(examples)
    if method == "quantile":
        from .quantiles import QuantilePredictor

        return QuantilePredictor.learnt(examples, seed)
    if method == "encoder":
        from .encoder import DISTILBERT, EncoderPredictor

        return EncoderPredictor.learnt(examples, encoder or DISTILBERT, seed=seed)
    raise ValueError(f"no method is called {method!r}; there are {', '.join(METHODS)}")


def load_predictor(method: str, folder: Path, fields: Any) -> LengthPredictor:
    """Load a predictor that its ``save`` wrote."""
    if method == "encoder":
        from .encoder import EncoderPredictor

        return EncoderPredictor.load(folder, fields)
    if method == "quantile":
        from .quantiles import QuantilePredictor

        return QuantilePredictor.load(folder, fields)
    if method == "constant":
        return ConstantPredictor.load(folder, fields)
    raise KeyError(method)


PREDICTOR_VERSION = 3

_SHOWN = ("predictor.json", "errors.csv")
"""Files in a predictor's folder itself."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPredictor:
    """Predictor with its measured error.

    method: One of :data:`METHODS`.
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


def current_version(path: str | os.PathLike[str]) -> Path:
    """Return the current version's folder, or the folder itself."""
    link = Path(path) / _CURRENT
    if not link.is_dir():
        return Path(path)
    version = link.resolve()
    if version.parent != Path(path).resolve():
        hint = f"Remove it, or point it at a {_VERSION}... folder next to it."
        raise InputError(f"leads out of its folder, to {version}", file=link, hint=hint)
    return version


@contextlib.contextmanager
def new_version(path: str | os.PathLike[str], shown: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder that atomically becomes the content of ``path``.

    Replacing a link is one step, so a process killed at any moment leaves the old or the new version.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            fresh = Path(tempfile.mkdtemp(prefix=_VERSION, dir=folder))
            try:
                fresh.chmod(folder.stat().st_mode)
                yield fresh
                for name in shown:
                    _link(folder / name, f"{_CURRENT}/{name}")
                _link(folder / _CURRENT, fresh.name)
            except BaseException:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
            for version in folder.glob(f"{_VERSION}*"):
                if version != fresh:
                    shutil.rmtree(version)
    except OSError as error:
        hint = "Name another folder, or check its permissions and the free space."
        raise InputError(f"cannot be written ({error.strerror})", file=path, hint=hint) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _link(path: Path, target: str) -> None:
    if path.is_symlink() and os.readlink(path) == target:
        return
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    os.replace(beside, path)
