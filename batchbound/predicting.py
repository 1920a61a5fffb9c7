"""Predict completion lengths from past completions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .data.files.disk import InputError, atomic_write
from .data.files.outputs import refuse_outputs
from .data.predictor import Examples, PredictionQuality, prompt_text
from .data.readers.completions import is_parquet_name, read_answer_lengths
from .data.readers.openai_batch import read_batch
from .options.option import PathText
from .options.predict import ApplyOptions, EvaluateOptions, TrainOptions

if TYPE_CHECKING:
    from .executor.predictors.predictor import TrainedPredictor


def predict(
    prompts: PathText,
    completions: PathText,
    *,
    output: PathText = "predictor",
    overwrite: bool = False,
    method: str = "quantile",
    encoder: str | None = None,
    seed: int = 0,
) -> TrainedPredictor:
    """Train a predictor of completion lengths, as ``batchbound predict train`` does.

    Parameters
    ----------
    prompts, completions
        Batch file, and output file of its completions.
    output
        Folder of the predictor.
    overwrite
        True to replace the predictor if it exists.
    method
        ``"constant"``, ``"quantile"`` or ``"encoder"``.
    encoder
        Hub name or folder of the encoder to fine-tune.
    seed
        Seed of training.
    """
    files = (prompts, completions)
    return train(
        TrainOptions(files, output=output, overwrite=overwrite, method=method, encoder=encoder, seed=seed)
    )


def train(options: TrainOptions) -> TrainedPredictor:
    """Train a predictor, and save it with its error on held-out completions."""
    from .executor.predictors.predictor import TrainedPredictor

    folder = Path(options.output)
    if folder.is_file():
        raise InputError("is a file", file=folder, hint="Name a folder.")
    if folder.exists():
        refuse_outputs([folder / "predictor.json"], options.overwrite)
    trained = TrainedPredictor.train(
        options.method, _examples(options.files), seed=options.seed, encoder=options.encoder
    )
    trained.save(folder)
    return trained


def evaluate(options: EvaluateOptions) -> PredictionQuality:
    """Return a predictor's quality on other completions."""
    from .executor.predictors.predictor import TrainedPredictor

    trained, examples = TrainedPredictor.load(options.predictor), _examples(options.files)
    predicted, quality = trained.predictor.predict(examples.prompts), trained.quality
    return PredictionQuality.measured(
        predicted, examples.lengths, longest=quality.longest, buckets=quality.buckets
    )


@dataclass(frozen=True, slots=True)
class Predicted:
    """Counts of predicted lengths."""

    requests: int
    tokens: int


def apply(options: ApplyOptions) -> Predicted:
    """Write the predicted lengths of the completions to prompts."""
    from .executor.predictors.predictor import TrainedPredictor

    if is_parquet_name(options.output):
        raise InputError(
            "lengths are not written as .parquet", file=options.output, hint="Name a .jsonl file."
        )
    refuse_outputs([options.output], options.overwrite, options.read_files())
    predictor = TrainedPredictor.load(options.predictor).predictor
    records = read_batch(options.prompts)
    predicted = predictor.predict([prompt_text(record) for record in records])
    most = np.array([record.max_tokens or np.iinfo(np.int64).max for record in records])
    columns = (predicted.tokens, predicted.low, predicted.high)
    rows = np.minimum(columns, most).T.tolist()
    with atomic_write(options.output) as stream:
        for record, (tokens, low, high) in zip(records, rows, strict=True):
            usage = {"completion_tokens": tokens}
            line = {
                "custom_id": record.custom_id,
                "response": {"status_code": 200, "body": {"usage": usage}},
                "error": None,
                "predicted": {"tokens": tokens, "low": low, "high": high},
            }
            stream.write(json.dumps(line) + "\n")
    return Predicted(len(records), int(np.minimum(predicted.tokens, most).sum()))


def _examples(files: Sequence[PathText]) -> Examples:
    if len(files) % 2:
        message = f"{len(files)} files: prompts and completions come in pairs"
        raise InputError(message, hint="Give PROMPTS ANSWERS, and further pairs.")
    parts = []
    pairs = zip(files[::2], files[1::2], strict=True)
    # A pair named twice would be both trained on and held out.
    for prompts, completions in {tuple(map(os.path.realpath, pair)): pair for pair in pairs}.values():
        records, lengths = read_batch(prompts), read_answer_lengths(completions)
        if not any(record.custom_id in lengths for record in records):
            hint = "Give the output file of these prompts."
            raise InputError(f"holds completions of none of {prompts}", file=completions, hint=hint)
        parts.append(Examples.of(records, lengths))
    return Examples(
        tuple(prompt for part in parts for prompt in part.prompts),
        np.concatenate([part.lengths for part in parts]),
    )
