"""
Predictors of GSM8K's answer lengths: 7,473 answers to learn from, 1,319 to be measured on, GPT-2's tokens.

One line each for the constant, quantile
regression on cheap features, MICO's classifier on a small DistilBERT of random weights (the path a real
checkpoint would take), and, where several models answered the test questions, what the answers of the others
tell of one model's.

Run: ``python benchmarks/predictors.py`` (``BATCHBOUND_DATA`` names the folder of public data).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from small_encoder import save_small_distilbert

from batchbound.data.predictor import Examples, Predicted, PredictionQuality
from batchbound.executor.models.tokenizers import load_tokenizer
from batchbound.executor.predictors.encoder import EncoderPredictor
from batchbound.executor.predictors.predictor import ConstantPredictor, LengthPredictor, learn
from batchbound.executor.predictors.quantiles import LEVELS

DATA = Path(os.environ.get("BATCHBOUND_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
Count = Callable[[str], int]


def read(name: str, count: Count) -> Examples:
    """Return questions and the tokens of their reference answers."""
    with (DATA / "gsm8k" / name).open() as stream:
        rows = [json.loads(line) for line in stream]
    lengths = np.array([count(row["answer"]) for row in rows], dtype=np.int64)
    return Examples(tuple(row["question"] for row in rows), lengths)


def other_models(count: Count) -> tuple[Examples, Examples]:
    """Return the answers of all models but the last to the test questions, and the last one's."""
    others: list[tuple[str, int]] = []
    last: list[tuple[str, int]] = []
    with (DATA / "gsm8k" / "example_model_solutions.jsonl").open() as stream:
        for line in stream:
            row = json.loads(line)
            tokens = [count(value["solution"]) for value in row.values() if isinstance(value, dict)]
            others += [(row["question"], number) for number in tokens[:-1]]
            last.append((row["question"], tokens[-1]))
    return tuple(  # type: ignore[return-value]  # two of two
        Examples(tuple(prompt for prompt, _ in pairs), np.array([tokens for _, tokens in pairs]))
        for pairs in (others, last)
    )


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
        """Return nothing: it is not kept."""
        return {}


def show(name: str, seconds: float, predictor: LengthPredictor, unseen: Examples, longest: int) -> None:
    """Print a predictor's line."""
    found = PredictionQuality.measured(predictor.predict(unseen.prompts), unseen.lengths, longest=longest)
    print(
        f"| {name} | {found.mean_error:.1f} | {found.log_sd:.3f} | {found.accuracy:.1%}"
        f" | {found.neighbour_accuracy:.1%} | {found.coverage:.1%} | {seconds:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3, help="of the encoder (default %(default)s)")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=1e-3,
        help="of the encoder; 5e-5, the paper's, is for a pretrained one (default %(default)s)",
    )
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(DATA / "gpt2_bpe"))

    def count(text: str) -> int:
        return max(1, len(tokenizer.encode(text)))

    train, test = read("train.jsonl", count), read("test.jsonl", count)
    longest = int(train.lengths.max()) + 1
    print(
        "| predictor | mean error (tokens) | sd of log error | right tenth | or next to it | 90 % interval"
        " holds | training (CPU s) |"
    )
    print("|---|---|---|---|---|---|---|")
    for method in ("constant", "quantile"):
        begun = time.process_time()
        predictor = learn(method, train)
        show(method, time.process_time() - begun, predictor, test, longest)
    with tempfile.TemporaryDirectory() as folder:
        save_small_distilbert(Path(folder), train.prompts)
        begun = time.process_time()
        encoder = EncoderPredictor.learnt(train, folder, epochs=args.epochs, learning_rate=args.learning_rate)
        seconds = time.process_time() - begun
    show("small DistilBERT, random weights", seconds, encoder, test, longest)
    with tempfile.TemporaryDirectory() as folder:
        again = EncoderPredictor.load(Path(folder), json.loads(json.dumps(encoder.save(Path(folder)))))
    show("the same, saved and loaded", 0.0, again, test, longest)
    others, last = other_models(count)
    begun = time.process_time()
    answered = GroupMeanPredictor.learnt(others)
    seconds = time.process_time() - begun
    show("other models' answers (their mean)", seconds, answered, last, longest)
    show("constant, on the same", 0.0, answered.otherwise, last, longest)


if __name__ == "__main__":
    main()
