"""``batchbound predict``: predict completion lengths from past completions."""

from __future__ import annotations

from ...options.predict import ApplyOptions, EvaluateOptions, TrainOptions
from ...predicting import apply, evaluate, train
from ...screen.predict import show_applied, show_evaluated, show_trained

TASKS = {
    "train": (
        "train on past completions, and measure the error on held-out ones",
        TrainOptions,
        lambda options: show_trained(train(options), options),
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
