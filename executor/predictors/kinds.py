"""Predictors of completion lengths from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from ...data.files.record import is_number
from ...data.predictor import Examples, Predicted
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
