"""Predictors of completion lengths from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from ...data.files.record import is_number
from ...data.predictor import Examples, Predicted
from ...data.workload import LONGEST
from .levels import LEVELS


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


@dataclass(frozen=True, slots=True)
class GroupMeanPredictor:
    """Mean of earlier completions of the same prompt.

    means: Tokens by prompt.
    spread: Quantiles of a length over its group's mean of the other completions.
    otherwise: Predictor for new prompts.
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
        low, high = np.quantile(ratios, (LEVELS[0], LEVELS[2])).tolist() if ratios else (0.5, 2.0)
        means = {prompt: sum(group) / len(group) for prompt, group in lengths.items()}
        return cls(means, (low, high), ConstantPredictor.learnt(examples))

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return each prompt's mean, or the constant."""
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
        means, (low, high) = fields["means"], fields["spread"]
        if not all(map(is_number, (low, high, *means.values()))):
            raise ValueError("a mean or the spread is not a number")
        if not all(0 <= mean <= LONGEST for mean in means.values()) or not 0 <= low <= high <= LONGEST:
            raise ValueError(f"a mean or the spread is not between 0 and {LONGEST}")
        return cls(means, (float(low), float(high)), ConstantPredictor.load(folder, fields["otherwise"]))


METHODS = ("constant", "group-mean", "quantile", "encoder")


def learn(method: str, examples: Examples, *, seed: int = 0, encoder: str | None = None) -> LengthPredictor:
    """Return a predictor learnt from examples."""
    if method == "constant":
        return ConstantPredictor.learnt(examples)
    if method == "group-mean":
        return GroupMeanPredictor.learnt(examples)
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
    kinds: dict[str, type[ConstantPredictor] | type[GroupMeanPredictor]] = {
        "constant": ConstantPredictor,
        "group-mean": GroupMeanPredictor,
    }
    return kinds[method].load(folder, fields)
