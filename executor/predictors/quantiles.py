"""Quantile regression of lengths on features of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...data.arrays import FloatArray
from ...data.predictor import COVERAGE, Examples, Predicted

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


HELD_OUT = 0.2
"""Share of the prompts on which errors are measured."""

LEVELS = ((1 - COVERAGE) / 2, 0.5, (1 + COVERAGE) / 2)
"""Quantiles to predict: the interval's ends and the median."""


_FILE = "model.skops"

_TRUSTED = ["sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"]
"""Harmless types of a fitted predictor that skops does not know."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantilePredictor:
    """Quantile regression with a calibrated interval.

    words: Turns prompts into weighted word counts.
    mean: Ridge regression of the logarithm of the length on them.
    quantiles: Gradient-boosted trees for three quantiles, on a prompt's counts and that mean.
    widening: Logarithm by which the interval is widened at both ends (conformalized quantile regression,
        Romano, Patterson and Candes 2019).
    """

    words: Any
    mean: Any
    quantiles: tuple[Any, Any, Any]
    widening: float

    @classmethod
    def learnt(cls, examples: Examples, seed: int = 0) -> Self:
        """Fit a predictor to the examples, reproducibly by the seed."""
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
            for level in LEVELS
        ]
        fitted = cls(words, mean, (trees[0], trees[1], trees[2]), 0.0)
        low, _, high = fitted._logs(check.prompts)
        actual = np.log(check.lengths)
        outside = np.maximum(low - actual, actual - high)
        widening = float(np.quantile(outside, min(1.0, COVERAGE * (1 + 1 / len(check)))))
        return cls(words, mean, fitted.quantiles, widening)

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return the median length and the widened interval, tokens."""
        low, middle, high = self._logs(prompts)
        # A widening beyond all numbers gives infinite lengths, which are cut to the longest there can be.
        with np.errstate(over="ignore"):
            return Predicted.of(np.exp(middle), np.exp(low - self.widening), np.exp(high + self.widening))

    def _logs(self, prompts: Sequence[str]) -> list[FloatArray]:
        matrix: csr_matrix = self.words.transform(prompts)
        features = np.column_stack((prompt_features(prompts), self.mean.predict(matrix)))
        return [tree.predict(features) for tree in self.quantiles]

    def save(self, folder: Path) -> dict[str, object]:
        """Write the models as arrays and JSON, which run no code."""
        import skops.io

        models = {"words": self.words, "mean": self.mean, "quantiles": list(self.quantiles)}
        skops.io.dump(models, folder / _FILE)
        return {"widening": self.widening}

    @classmethod
    def load(cls, folder: Path, fields: dict[str, Any]) -> Self:
        """Load the predictor that :meth:`save` wrote, running none of its code."""
        _need_scikit_learn()
        import skops.io
        from sklearn.ensemble import HistGradientBoostingRegressor
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import Ridge

        try:
            models = skops.io.load(folder / _FILE, trusted=_TRUSTED)
            words, mean, quantiles = models["words"], models["mean"], models["quantiles"]
        except Exception as error:  # what a damaged archive may raise shares no base of its own
            raise ValueError(f"{_FILE}: {error}") from error
        kinds = (TfidfVectorizer, Ridge, *[HistGradientBoostingRegressor] * len(LEVELS))
        parts = (words, mean, *quantiles)
        if len(parts) != len(kinds) or any(
            type(part) is not kind for part, kind in zip(parts, kinds, strict=True)
        ):
            raise ValueError(f"{_FILE}: holds no quantile predictor")
        features = len(prompt_features([""])[0]) + 1
        for tree in quantiles:
            _check_nodes(tree, features)
        return cls(words, mean, tuple(quantiles), float(fields["widening"]))


def _check_nodes(regressor: Any, features: int) -> None:
    for (predictor,) in regressor._predictors:
        nodes = predictor.nodes
        inner = nodes[nodes["is_leaf"] == 0]
        # A child stands behind its parent, so every walk ends.
        behind = np.flatnonzero(nodes["is_leaf"] == 0)
        for side in ("left", "right"):
            if len(nodes) == 0 or np.any(inner[side] <= behind) or np.any(inner[side] >= len(nodes)):
                raise ValueError(f"{_FILE}: a tree's nodes point outside of it")
        if np.any(inner["feature_idx"] >= features) or np.any(inner["feature_idx"] < 0):
            raise ValueError(f"{_FILE}: a tree asks for a feature that there is not")
        if np.any(inner["is_categorical"]):
            raise ValueError(f"{_FILE}: a tree splits by category, which no predictor of lengths does")


def prompt_features(prompts: Sequence[str]) -> FloatArray:
    """Count features of each prompt, shape (prompts, features)."""
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


def _need_scikit_learn() -> None:
    try:
        import sklearn  # noqa: F401
        import skops  # noqa: F401
    except ImportError:
        raise ImportError(
            "quantile regression needs scikit-learn and skops: in the clone, run `pip install '.[predict]'`"
        ) from None
