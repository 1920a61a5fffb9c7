"""Predicting an answer's length from its prompt: learning, saving, loading, and measuring the error."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ..data.cost import FloatArray, IntArray
from ..data.files import InputError, atomic_write, read_json_object, write_json
from ..data.predictor import COVERAGE, Examples, Predicted, PredictionQuality

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

PREDICTOR_VERSION = 1
HELD_OUT = 0.2
"""Share of the prompts that a predictor's error is measured on."""

_LEVELS = ((1 - COVERAGE) / 2, 0.5, (1 + COVERAGE) / 2)


class LengthPredictor(Protocol):
    """Says how long answers will be."""

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return the predicted length of the answer to each prompt, with its interval."""
        ...

    def save(self, folder: Path) -> dict[str, object]:
        """Write what does not fit into JSON to a folder that exists, and return the rest."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantPredictor:
    """
    The same for every prompt: what should be beaten.

    Parameters
    ----------
    low, tokens, high
        Quantiles of the lengths learnt from, tokens.
    """

    low: float
    tokens: float
    high: float

    @classmethod
    def learnt(cls, examples: Examples) -> Self:
        """Return the median and the interval of the examples' lengths."""
        return cls(*np.quantile(examples.lengths, _LEVELS).tolist())

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return the constant for each."""
        columns = (np.full(len(prompts), value) for value in (self.tokens, self.low, self.high))
        return Predicted.of(*columns)

    def save(self, folder: Path) -> dict[str, object]:
        """Return the three numbers."""
        return {"low": self.low, "tokens": self.tokens, "high": self.high}

    @classmethod
    def load(cls, folder: Path, fields: dict[str, Any]) -> Self:
        """Return the predictor that :meth:`save` wrote."""
        return cls(float(fields["low"]), float(fields["tokens"]), float(fields["high"]))


@dataclass(frozen=True, slots=True)
class GroupMeanPredictor:
    """
    The mean of earlier answers to the same prompt; lengths of answers to one prompt correlate.

    Parameters
    ----------
    means
        Tokens by prompt.
    spread
        Quantiles of a length over its group's mean of the other answers.
    otherwise
        For prompts that were never answered.
    """

    means: dict[str, float]
    spread: tuple[float, float]
    otherwise: ConstantPredictor

    @classmethod
    def learnt(cls, examples: Examples) -> Self:
        """Return the means of the examples' prompts."""
        lengths: dict[str, list[int]] = {}
        for prompt, length in zip(examples.prompts, examples.lengths.tolist(), strict=True):
            lengths.setdefault(prompt, []).append(length)
        ratios = [
            length * (len(group) - 1) / (sum(group) - length)
            for group in lengths.values()
            if len(group) > 1
            for length in group
        ]
        low, high = np.quantile(ratios, (_LEVELS[0], _LEVELS[2])).tolist() if ratios else (0.5, 2.0)
        means = {prompt: sum(group) / len(group) for prompt, group in lengths.items()}
        return cls(means, (low, high), ConstantPredictor.learnt(examples))

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return each prompt's own mean, or the constant."""
        rest = self.otherwise.predict(prompts)
        mean = np.array([self.means.get(prompt, np.nan) for prompt in prompts])
        known = np.isfinite(mean)
        return Predicted.of(
            np.where(known, mean, rest.tokens),
            np.where(known, mean * self.spread[0], rest.low),
            np.where(known, mean * self.spread[1], rest.high),
        )

    def save(self, folder: Path) -> dict[str, object]:
        """Return the means, their spread and the constant."""
        return {"means": self.means, "spread": self.spread, "otherwise": self.otherwise.save(folder)}

    @classmethod
    def load(cls, folder: Path, fields: dict[str, Any]) -> Self:
        """Return the predictor that :meth:`save` wrote."""
        low, high = fields["spread"]
        return cls(fields["means"], (low, high), ConstantPredictor.load(folder, fields["otherwise"]))


@dataclass(frozen=True, slots=True, eq=False)
class QuantilePredictor:
    """
    Quantile regression on cheap features of the prompt, its interval widened until held-out answers fit.

    Parameters
    ----------
    words
        Turns prompts into weighted word counts.
    mean
        Ridge regression of the logarithm of the length on them.
    quantiles
        Gradient-boosted trees for the low, middle and high quantile, on a prompt's counts and that mean.
    widening
        Logarithm by which the interval is widened at both ends (conformalized quantile regression, Romano,
        Patterson and Candes 2019).
    """

    words: Any
    mean: Any
    quantiles: tuple[Any, Any, Any]
    widening: float

    @classmethod
    def learnt(cls, examples: Examples, seed: int = 0) -> Self:
        """
        Return the predictor fitted to the examples; the same for the same seed.

        Raises
        ------
        ImportError
            If scikit-learn is not installed.
        """
        _need_scikit_learn()
        from sklearn.ensemble import HistGradientBoostingRegressor
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import Ridge
        from sklearn.model_selection import KFold, cross_val_predict

        # Not the seed that sets prompts apart to measure the error: none of those would be left here.
        learn, check = examples.split(HELD_OUT, seed + 1)
        target = np.log(learn.lengths)
        words = TfidfVectorizer(sublinear_tf=True, min_df=2 if len(learn) > 50 else 1, ngram_range=(1, 2))
        matrix = words.fit_transform(learn.prompts)
        folds = KFold(min(5, len(learn)), shuffle=True, random_state=seed) if len(learn) > 1 else None
        # The trees see means of prompts that the mean was not fitted to, as they will when they predict.
        mean = Ridge(alpha=3.0)
        unseen = target * 0 if folds is None else cross_val_predict(mean, matrix, target, cv=folds)
        mean.fit(matrix, target)
        features = np.column_stack((prompt_features(learn.prompts), unseen))
        trees = [
            HistGradientBoostingRegressor(
                loss="quantile",
                quantile=level,
                learning_rate=0.05,
                max_iter=150,
                max_leaf_nodes=8,
                min_samples_leaf=min(30, max(1, len(learn) // 4)),
                random_state=seed,
            ).fit(features, target)
            for level in _LEVELS
        ]
        fitted = cls(words, mean, (trees[0], trees[1], trees[2]), 0.0)
        low, _, high = fitted._logs(check.prompts)
        actual = np.log(check.lengths)
        outside = np.maximum(low - actual, actual - high)
        widening = float(np.quantile(outside, min(1.0, COVERAGE * (1 + 1 / len(check)))))
        return cls(words, mean, fitted.quantiles, widening)

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return the middle quantile of each prompt's length, and the widened interval."""
        low, middle, high = self._logs(prompts)
        return Predicted.of(np.exp(middle), np.exp(low - self.widening), np.exp(high + self.widening))

    def _logs(self, prompts: Sequence[str]) -> list[FloatArray]:
        matrix: csr_matrix = self.words.transform(prompts)
        features = np.column_stack((prompt_features(prompts), self.mean.predict(matrix)))
        return [tree.predict(features) for tree in self.quantiles]

    def save(self, folder: Path) -> dict[str, object]:
        """Write the fitted models as scikit-learn's own files (pickles: load only what you trust)."""
        import joblib

        joblib.dump((self.words, self.mean, self.quantiles), folder / "model.joblib")
        return {"widening": self.widening}

    @classmethod
    def load(cls, folder: Path, fields: dict[str, Any]) -> Self:
        """
        Return the predictor that :meth:`save` wrote.

        Raises
        ------
        ImportError
            If scikit-learn is not installed.
        """
        _need_scikit_learn()
        import joblib

        words, mean, quantiles = joblib.load(folder / "model.joblib")
        return cls(words, mean, quantiles, float(fields["widening"]))


def prompt_features(prompts: Sequence[str]) -> FloatArray:
    """Return what is counted in each prompt: characters, words, numbers, ..., shape (prompts, features)."""
    rows = []
    for prompt in prompts:
        words = prompt.split()
        numbers = [word for word in words if any(letter.isdigit() for letter in word)]
        rows.append(
            (
                len(prompt),
                len(words),
                len(set(words)),
                len(numbers),
                len(set(numbers)),
                prompt.count("."),
                prompt.count("?"),
                prompt.count(","),
                prompt.count("\n"),
                prompt.count("%") + prompt.count("/"),
                prompt.count("$"),
                sum(word[:1].isupper() for word in words),
                len(prompt) / max(1, len(words)),
            )
        )
    return np.array(rows, dtype=np.float64)


METHODS = ("constant", "group-mean", "quantile", "encoder")
"""The methods by name."""


def learn(method: str, examples: Examples, *, seed: int = 0, encoder: str | None = None) -> LengthPredictor:
    """
    Return a predictor learnt from examples.

    Parameters
    ----------
    method
        One of :data:`METHODS`.
    examples
        What to learn from.
    seed
        Of everything random.
    encoder
        For ``encoder``: a hub name or local folder of the encoder to fine-tune; DistilBERT by default.

    Raises
    ------
    ValueError
        If there is no such method.
    ImportError
        If what the method needs is not installed.
    """
    if method == "constant":
        return ConstantPredictor.learnt(examples)
    if method == "group-mean":
        return GroupMeanPredictor.learnt(examples)
    if method == "quantile":
        return QuantilePredictor.learnt(examples, seed)
    if method == "encoder":
        from .encoder_predictor import DISTILBERT, EncoderPredictor

        return EncoderPredictor.learnt(examples, encoder or DISTILBERT, seed=seed)
    raise ValueError(f"no method is called {method!r}; there are {', '.join(METHODS)}")


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPredictor:
    """
    A predictor with the error it was measured to have.

    Parameters
    ----------
    method
        One of :data:`METHODS`.
    predictor
        Says the lengths.
    quality
        On prompts it had not seen when it was measured.
    predicted, actual
        The measured pairs behind it, tokens, shape (held-out requests,).
    examples
        What it was learnt from and measured on.
    """

    method: str
    predictor: LengthPredictor
    quality: PredictionQuality
    predicted: IntArray
    actual: IntArray
    examples: Examples

    @classmethod
    def train(cls, method: str, examples: Examples, *, seed: int = 0, encoder: str | None = None) -> Self:
        """
        Return a predictor learnt from a part of the prompts and measured on the others.

        ``group-mean``, whose point is to have seen the prompt, is measured on held-out answers instead.

        Parameters
        ----------
        method, examples, seed, encoder
            As of :func:`learn`; there must be two prompts (two answers).

        Raises
        ------
        InputError
            If there are too few examples.
        """
        count = len(examples) if method == "group-mean" else len(set(examples.prompts))
        if count < 2:
            raise InputError("there are fewer than two prompts to learn from", mend="Give more answers.")
        if method == "group-mean":
            apart = np.zeros(len(examples), dtype=np.bool_)
            held = max(1, round(HELD_OUT * len(examples)))
            apart[np.random.default_rng(seed).permutation(len(examples))[:held]] = True
            known, unseen = examples.select(~apart), examples.select(apart)
        else:
            known, unseen = examples.split(HELD_OUT, seed)
        predictor = learn(method, known, seed=seed, encoder=encoder)
        longest = int(examples.lengths.max()) + 1
        predicted = predictor.predict(unseen.prompts)
        quality = PredictionQuality.measured(predicted, unseen.lengths, longest=longest)
        return cls(method, predictor, quality, predicted.tokens, unseen.lengths, examples)

    def refreshed(self, examples: Examples, folder: str | os.PathLike[str], *, seed: int = 0) -> Self:
        """
        Return the predictor learnt from new answers beside the old ones, and measured anew.

        Parameters
        ----------
        examples
            The new answers.
        folder
            Where this predictor is saved: an encoder goes on from the one there.
        seed
            That of the first training, for the same prompts to be held out.
        """
        encoder = str(Path(folder) / "encoder") if self.method == "encoder" else None
        return self.train(self.method, self.examples.joined(examples), seed=seed, encoder=encoder)

    def save(self, path: str | os.PathLike[str]) -> None:
        """
        Write the predictor to a folder, with its error, and ``errors.csv`` for ``plan --length-error``.

        Raises
        ------
        InputError
            If the folder cannot be made.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot be made ({error.strerror})", file=path, mend="Name another folder."
            ) from None
        fields = self.predictor.save(folder)
        with atomic_write(folder / "errors.csv") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(("predicted", "actual"))
            writer.writerows(zip(self.predicted.tolist(), self.actual.tolist(), strict=True))
        with atomic_write(folder / "examples.jsonl") as stream:
            for prompt, length in zip(self.examples.prompts, self.examples.lengths.tolist(), strict=True):
                stream.write(json.dumps({"prompt": prompt, "tokens": length}) + "\n")
        header = {"batchbound_predictor": PREDICTOR_VERSION, "method": self.method}
        write_json(folder / "predictor.json", {**header, "quality": self.quality.to_json(), "fields": fields})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """
        Return the predictor that :meth:`save` wrote.

        Raises
        ------
        InputError
            If the folder does not hold one of this version.
        """
        folder = Path(path)
        value = read_json_object(folder / "predictor.json")
        mend = "Give a folder that this version of `batchbound predict train` wrote."
        if value.get("batchbound_predictor") != PREDICTOR_VERSION:
            raise InputError("is no predictor of this version", file=folder / "predictor.json", mend=mend)
        try:
            with open(folder / "errors.csv", encoding="utf-8") as stream:
                pairs = [(int(row["predicted"]), int(row["actual"])) for row in csv.DictReader(stream)]
            columns = np.array(pairs, dtype=np.int64)
            with open(folder / "examples.jsonl", encoding="utf-8") as stream:
                rows = [json.loads(line) for line in stream]
            lengths = np.array([int(row["tokens"]) for row in rows], dtype=np.int64)
            examples = Examples(tuple(str(row["prompt"]) for row in rows), lengths)
            quality = PredictionQuality(**json.loads(json.dumps(value["quality"])))
            predictor = _load(str(value["method"]), folder, value["fields"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"is damaged ({error})", file=folder, mend=mend) from None
        return cls(str(value["method"]), predictor, quality, columns[:, 0], columns[:, 1], examples)


def _load(method: str, folder: Path, fields: Any) -> LengthPredictor:
    if method == "encoder":
        from .encoder_predictor import EncoderPredictor

        return EncoderPredictor.load(folder, fields)
    kinds: dict[str, type[ConstantPredictor] | type[GroupMeanPredictor] | type[QuantilePredictor]] = {
        "constant": ConstantPredictor,
        "group-mean": GroupMeanPredictor,
        "quantile": QuantilePredictor,
    }
    return kinds[method].load(folder, fields)


def _need_scikit_learn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ImportError(
            "quantile regression needs scikit-learn: pip install 'batchbound[predict]'"
        ) from None
