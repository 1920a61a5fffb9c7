"""Screens of the tasks of ``batchbound predict``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..data.predictor import PredictionQuality
from ..options.predict import ApplyOptions, TrainOptions
from ..predicting import Predicted
from .streams import say
from .terminal import note

if TYPE_CHECKING:
    from ..executor.predictors.predictor import TrainedPredictor


def show_trained(trained: TrainedPredictor, options: TrainOptions) -> int:
    """Print the error of a new predictor."""
    _show(trained.quality)
    note(
        f"{options.output}: `batchbound predict apply {options.output} PROMPTS`, then plan with --lengths"
        f" completions:lengths.jsonl --length-error {options.errors}"
    )
    return 0


def show_evaluated(quality: PredictionQuality) -> int:
    """Print a predictor's error on other completions."""
    _show(quality, "completions, held out if the predictor was not trained on them")
    return 0


def show_applied(predicted: Predicted, options: ApplyOptions) -> int:
    """Print the number of predicted lengths."""
    say(f"{options.output}: {predicted.requests:,} lengths, {predicted.tokens:,} tokens")
    return 0


def _show(quality: PredictionQuality, what: str = "held-out completions") -> None:
    say(
        f"{quality.requests:,} {what}: mean error {quality.mean_error:.1f} tokens,"
        f" log(predicted / true) {quality.log_bias:+.3f} +- {quality.log_sd:.3f},"
        f" 90 % intervals hold {quality.coverage:.1%}"
    )
    say(
        f"{quality.buckets} ranges up to {quality.longest} tokens: accuracy {quality.accuracy:.1%},"
        f" within a neighbour {quality.neighbour_accuracy:.1%}"
    )
