"""Quantile levels of predictors, and the share of test prompts."""

from __future__ import annotations

from ...data.predictor import COVERAGE

HELD_OUT = 0.2
"""Share of the prompts on which errors are measured."""

LEVELS = ((1 - COVERAGE) / 2, 0.5, (1 + COVERAGE) / 2)
"""Quantiles to predict: the interval's ends and the median."""
