"""``batchbound predict``: predict completion lengths from past completions."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np

from ...data.files.disk import InputError, atomic_write
from ...data.files.outputs import refuse_outputs
from ...data.predictor import Examples, PredictionQuality, prompt_text
from ...data.readers.completions import is_parquet_name, read_answer_lengths
from ...data.readers.openai_batch import read_batch
from ..inputs import named_files, random_seed
from ..output import note
from ..parser import Parser, Rule
from ..streams import say

_METHODS = ("constant", "group-mean", "quantile", "encoder")


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    tasks = parser.add_subparsers(dest="task", metavar="TASK", required=True)
    train = tasks.add_parser(
        "train", help="train on past completions, and measure the error on held-out ones"
    )
    _add_answers(train)
    train.add_argument("-o", "--output", required=True, metavar="DIR", help="folder of the predictor")
    train.add_argument("--overwrite", action="store_true", help="replace the predictor if it exists")
    train.add_argument(
        "--method",
        choices=_METHODS,
        default="quantile",
        help="method: constant; group-mean over earlier completions of the same prompt; quantile regression"
        " on cheap features of the prompt (default); encoder, a fine-tuned classifier of ranges",
    )
    train.add_argument(
        "--encoder", metavar="NAME", help="hub name or folder to fine-tune (default: distilbert-base-uncased)"
    )
    train.rules.append(
        Rule(("--encoder",), when=lambda args: args.method != "encoder", where="with --method {method}")
    )
    train.add_argument("--seed", type=random_seed, default=0, help="seed of training (default %(default)s)")
    refresh = tasks.add_parser("refresh", help="retrain a predictor on its completions and new ones")
    refresh.add_argument("predictor", metavar="DIR", help="folder that `predict train` wrote; replaced")
    _add_answers(refresh)
    refresh.add_argument("--seed", type=random_seed, default=0, help="seed of training (default %(default)s)")
    evaluate = tasks.add_parser("eval", help="measure a predictor's error on other completions")
    evaluate.add_argument("predictor", metavar="DIR", help="folder that `predict train` wrote")
    _add_answers(evaluate)
    apply = tasks.add_parser("apply", help="predict the lengths of completions to prompts")
    apply.add_argument("predictor", metavar="DIR", help="folder that `predict train` wrote")
    apply.add_argument("prompts", metavar="PROMPTS", help="OpenAI batch file")
    apply.add_argument(
        "-o",
        "--output",
        default="lengths.jsonl",
        metavar="FILE",
        help="file of lengths, for `plan --lengths completions:FILE` (default %(default)s)",
    )
    apply.add_argument("--overwrite", action="store_true", help="replace the output if it exists")


def run(args: argparse.Namespace) -> int:
    """Run the task."""
    tasks = {"train": _train, "refresh": _refresh, "eval": _evaluate, "apply": _apply}
    return tasks[args.task](args)


def _add_answers(parser: Parser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="PROMPTS COMPLETIONS",
        help="pairs of an OpenAI batch file and the output file of its completions",
    )


def _train(args: argparse.Namespace) -> int:
    from ...executor.predictors.predictor import TrainedPredictor

    if Path(args.output).is_file():
        raise InputError("is a file", file=args.output, hint="Name a folder.")
    if Path(args.output).exists():
        refuse_outputs([Path(args.output) / "predictor.json"], args.overwrite)
    trained = TrainedPredictor.train(args.method, _examples(args), seed=args.seed, encoder=args.encoder)
    trained.save(args.output)
    _print(trained.quality)
    note(
        f"{args.output}: `batchbound predict apply {args.output} PROMPTS`, then plan with --lengths"
        f" completions:lengths.jsonl --length-error {Path(args.output) / 'errors.csv'}"
    )
    return 0


def _refresh(args: argparse.Namespace) -> int:
    from ...executor.predictors.predictor import TrainedPredictor

    trained = TrainedPredictor.load(args.predictor)
    refreshed = trained.refreshed(_examples(args), args.predictor, seed=args.seed)
    refreshed.save(args.predictor)
    say(f"before: {trained.quality.requests:,} held out, {trained.quality.mean_error:.1f} tokens off")
    _print(refreshed.quality)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from ...executor.predictors.predictor import TrainedPredictor

    trained = TrainedPredictor.load(args.predictor)
    examples = _examples(args)
    predicted = trained.predictor.predict(examples.prompts)
    quality = trained.quality
    _print(
        PredictionQuality.measured(
            predicted, examples.lengths, longest=quality.longest, buckets=quality.buckets
        ),
        "completions, held out if the predictor was not trained on them",
    )
    return 0


def _apply(args: argparse.Namespace) -> int:
    from ...executor.predictors.predictor import TrainedPredictor

    if is_parquet_name(args.output):
        raise InputError("lengths are not written as .parquet", file=args.output, hint="Name a .jsonl file.")
    refuse_outputs([args.output], args.overwrite, named_files(args, "output"))
    predictor = TrainedPredictor.load(args.predictor).predictor
    records = read_batch(args.prompts)
    predicted = predictor.predict([prompt_text(record) for record in records])
    most = np.array([record.max_tokens or np.iinfo(np.int64).max for record in records])
    columns = (predicted.tokens, predicted.low, predicted.high)
    rows = np.minimum(columns, most).T.tolist()
    with atomic_write(args.output) as stream:
        for record, (tokens, low, high) in zip(records, rows, strict=True):
            usage = {"completion_tokens": tokens}
            line = {
                "custom_id": record.custom_id,
                "response": {"status_code": 200, "body": {"usage": usage}},
                "error": None,
                "predicted": {"tokens": tokens, "low": low, "high": high},
            }
            stream.write(json.dumps(line) + "\n")
    say(f"{args.output}: {len(records):,} lengths, {int(np.minimum(predicted.tokens, most).sum()):,} tokens")
    return 0


def _examples(args: argparse.Namespace) -> Examples:
    files = args.files
    if len(files) % 2:
        message = f"{len(files)} files: prompts and completions come in pairs"
        raise InputError(message, hint="Give PROMPTS ANSWERS, and further pairs.")
    parts = []
    pairs = zip(files[::2], files[1::2], strict=True)
    # A pair named twice would be both trained on and held out.
    for prompts, answers in {tuple(map(os.path.realpath, pair)): pair for pair in pairs}.values():
        records, lengths = read_batch(prompts), read_answer_lengths(answers)
        if not any(record.custom_id in lengths for record in records):
            hint = "Give the output file of these prompts."
            raise InputError(f"holds completions of none of {prompts}", file=answers, hint=hint)
        parts.append(Examples.of(records, lengths))
    return Examples(
        tuple(prompt for part in parts for prompt in part.prompts),
        np.concatenate([part.lengths for part in parts]),
    )


def _print(quality: PredictionQuality, what: str = "held-out completions") -> None:
    say(
        f"{quality.requests:,} {what}: mean error {quality.mean_error:.1f} tokens,"
        f" log(predicted / true) {quality.log_bias:+.3f} +- {quality.log_sd:.3f},"
        f" 90 % intervals hold {quality.coverage:.1%}"
    )
    say(
        f"{quality.buckets} ranges up to {quality.longest} tokens: accuracy {quality.accuracy:.1%},"
        f" within a neighbour {quality.neighbour_accuracy:.1%}"
    )
