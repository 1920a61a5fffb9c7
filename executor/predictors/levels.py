"""Quantile levels that predictors learn, and the share of prompts that they are tested on."""

from __future__ import annotations

from ...data.predictor import COVERAGE

HELD_OUT = 0.2
"""Share of the prompts that a predictor's error is measured on."""

LEVELS = ((1 - COVERAGE) / 2, 0.5, (1 + COVERAGE) / 2)
"""Levels of the quantiles that are predicted: the interval's ends and the median."""
