"""Options of the tasks of ``batchbound predict``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from .option import Option, Options, PathText, Rule, option
from .values import File, Name, Seed

PREDICTOR = Option("folder that `predict train` wrote", positional=True, metavar="DIR")
PAIRS = Option(
    "pairs of an OpenAI batch file and the output file of its completions",
    positional=True,
    metavar="PROMPTS COMPLETIONS",
    words="+",
)


@dataclass(frozen=True)
class TrainOptions(Options):
    """Past completions, and the predictor to train on them."""

    RULES = (
        Rule(("encoder",), when=lambda options: options.method != "encoder", where="with --method {method}"),
    )

    files: Annotated[tuple[PathText, ...], PAIRS]
    _: KW_ONLY
    output: Annotated[PathText, Option("folder of the predictor", metavar="DIR", short="-o", writes=True)]
    overwrite: bool = option(False, "replace the predictor if it exists")
    method: str = option(
        "quantile",
        "method: constant; quantile regression on cheap features of the prompt (default); encoder, a"
        " fine-tuned classifier of ranges",
        choices=("constant", "quantile", "encoder"),
    )
    encoder: Name | None = option(None, "hub name or folder to fine-tune (default: distilbert-base-uncased)")
    seed: Seed = option(0, "seed of training (default %(default)s)")

    @property
    def errors(self) -> Path:
        """File of the predictor's errors."""
        return Path(self.output) / "errors.csv"


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """A predictor, and completions to test it on."""

    predictor: Annotated[PathText, PREDICTOR]
    files: Annotated[tuple[PathText, ...], PAIRS]


@dataclass(frozen=True)
class ApplyOptions(Options):
    """A predictor, prompts, and the file of their predicted lengths."""

    predictor: Annotated[PathText, PREDICTOR]
    prompts: Annotated[PathText, Option("OpenAI batch file", positional=True, metavar="PROMPTS")]
    _: KW_ONLY
    output: File = option(
        "lengths.jsonl",
        "file of lengths, for `plan --lengths completions:FILE` (default %(default)s)",
        short="-o",
        writes=True,
    )
    overwrite: bool = option(False, "replace the output if it exists")
