"""``batchbound predict``: predict completion lengths from past completions."""

from __future__ import annotations

from ...options.predict import ApplyOptions, EvaluateOptions, RefreshOptions, TrainOptions
from ...predicting import apply, evaluate, refresh, train
from ...screen.predict import show_applied, show_evaluated, show_refreshed, show_trained

TASKS = {
    "train": (
        "train on past completions, and measure the error on held-out ones",
        TrainOptions,
        lambda options: show_trained(train(options), options),
    ),
    "refresh": (
        "retrain a predictor on its completions and new ones",
        RefreshOptions,
        lambda options: show_refreshed(refresh(options)),
    ),
    "eval": (
        "measure a predictor's error on other completions",
        EvaluateOptions,
        lambda options: show_evaluated(evaluate(options)),
    ),
    "apply": (
        "predict the lengths of completions to prompts",
        ApplyOptions,
        lambda options: show_applied(apply(options), options),
    ),
}
