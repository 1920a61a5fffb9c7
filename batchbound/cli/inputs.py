"""Problems from the command line: workload, costs and limits."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import inputs
from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.lengths.prediction_error import LARGEST_SD
from ..data.problem import MOST_SLOTS
from ..data.prompts.columns import PromptColumns
from ..data.readers.tables import LengthColumns
from ..data.workload import LONGEST
from ..inputs import Inputs as Inputs
from ..inputs import each_once as each_once
from ..inputs import provenance_of as provenance_of
from ..inputs import read_cost as read_cost
from ..inputs import say_texts as say_texts
from ..options.option import fields_of
from ..options.problem import LimitOptions
from .parser import Group, Parser

DEFAULT_SLOTS = 32


def add_problem(parser: Parser, *, auto_slots: bool = False, workload_needed: bool = True) -> None:
    """Add the options of a problem.

    ``auto_slots`` allows ``--slots auto``.
    """
    parser.add_argument(
        "workload",
        nargs=None if workload_needed else "?",
        metavar="FILE",
        help="prompts (OpenAI batch JSONL, or a table with --prompt-column), a table of lengths (CSV,"
        " Parquet, JSONL), or NAME:SEED[:COUNT] of a generator (table3, exegpt-S, sharegpt, ...)",
    )
    add_columns(parser.add_argument_group("prompts in a table: Parquet, CSV, JSONL, a dataset's folder"))
    add_length_columns(parser.add_argument_group("lengths in a table with columns of other names"))
    group = parser.add_argument_group("problem")
    group.add_argument(
        "--slots",
        type=slot_count_or_auto if auto_slots else slot_count,
        default=DEFAULT_SLOTS,
        metavar="N|auto" if auto_slots else "N",
        everyday=True,
        help="maximum number of requests in progress"
        + ("; auto needs --kv-capacity or a measured --cost" if auto_slots else "")
        + " (default %(default)s)",
    )
    group.add_argument(
        "--kv-capacity", type=positive, metavar="TOKENS", help="KV capacity in tokens (default: no limit)"
    )
    group.add_argument(
        "--prefix-cache",
        type=tokens_or_none,
        metavar="TOKENS",
        help="part of --kv-capacity that keeps shared prompts between prefill stages, in tokens; with 0 each"
        " stage computes the shared prompts that it needs (default: a quarter of the slots' capacity, or the"
        " part with the shortest quick schedule)",
    )
    group.add_argument(
        "--prefill-token-cap", type=positive, metavar="TOKENS", help="maximum prompt tokens per prefill stage"
    )
    group.add_argument(
        "--max-position",
        type=positive,
        metavar="TOKENS",
        help="maximum tokens of a prompt and its completion (default: the model's)",
    )
    group.add_argument(
        "--cost",
        default="paper",
        metavar="paper|FILE",
        everyday=True,
        help="cost model: the hybrid paper's, or a JSON file of `batchbound profile` or of coefficients"
        " (default %(default)s)",
    )
    group.add_argument(
        "--lengths",
        metavar="SOURCE",
        everyday=True,
        help="completion lengths: known, cap (max_tokens), constant:N, completions:FILE, history:FILE"
        " or quantile:Q:FILE (default: known if the file has them, else cap)",
    )
    add_longest(
        group,
        "maximum tokens of a completion, in plans and runs; caps known lengths and each request's own limit"
        " (default: max_tokens or max_completion_tokens of the request)",
    )
    group.add_argument(
        "--first-token",
        choices=("prefill", "decode"),
        help="stage that yields a completion's first token: prefill as in engines, decode as in the hybrid"
        " paper (default: prefill; decode for generators)",
    )
    group.add_argument(
        "--drop-unanswered", action="store_true", help="leave out rows of a table without a completion"
    )
    group.add_argument(
        "--model",
        metavar="MODEL",
        everyday=True,
        help="hub name, directory or tiny:FAMILY; its tokenizer counts the tokens of prompts",
    )
    group.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer that counts tokens: bytes, a directory or a hub name (default: the model's)",
    )


def add_longest(group: Group, said: str) -> None:
    """Add the option of the longest completion, with its older names."""
    group.add_argument("--longest-completion", type=positive, metavar="TOKENS", everyday=True, help=said)
    for other in ("--longest-answer", "--max-tokens"):
        group.add_argument(other, type=positive, dest="longest_completion", help=argparse.SUPPRESS)


def add_columns(group: Group) -> None:
    """Add the options that name the columns of a table of prompts."""
    group.add_argument(
        "--prompt-column",
        metavar="NAME",
        everyday=True,
        help="column of texts, or of conversations: lists of messages with role and content",
    )
    group.add_argument(
        "--id-column",
        metavar="NAME",
        needs=["--prompt-column"],
        help="column of the requests' ids (default: they are numbered)",
    )
    group.add_argument(
        "--max-tokens-column",
        metavar="NAME",
        needs=["--prompt-column"],
        help="column of the maximum tokens of each completion (default: max_tokens, if there is one)",
    )
    group.add_argument(
        "--drop-last-assistant",
        action="store_true",
        needs=["--prompt-column"],
        help="leave out a conversation's last message if it is the assistant's",
    )
    group.add_argument(
        "--raw",
        action="store_true",
        needs=["--prompt-column"],
        help="send texts as they are; by default a text is a user's message, which the model's chat template"
        " writes, and on a server goes to the chat endpoint",
    )


def add_length_columns(group: Group) -> None:
    """Add the options that name the columns of a table of lengths."""
    group.add_argument("--input-column", metavar="NAME", help="tokens of each prompt")
    group.add_argument("--output-column", metavar="NAME", help="tokens of each completion")
    group.add_argument(
        "--benchmark-run",
        type=positive,
        metavar="N",
        help="number of the run, from 1, in a result file of a serving benchmark with several runs",
    )


def length_columns_of(args: argparse.Namespace) -> LengthColumns | None:
    """Return the named columns of a table of lengths, or None."""
    given = LengthColumns(args.input_column, args.output_column, args.benchmark_run)
    return None if given == LengthColumns() else given


def columns_of(args: argparse.Namespace, tokenizer: str | None = None) -> PromptColumns | None:
    """Return the named columns of a table of prompts, or None.

    Texts are messages unless --raw is given, or the ``tokenizer`` has no chat template.
    """
    if args.prompt_column is None:
        return None
    from ..executor.models.tokenizers import has_chat_template

    named = args.prompt_column, args.id_column, args.max_tokens_column, args.drop_last_assistant
    return PromptColumns(*named, chat=not args.raw and (tokenizer is None or has_chat_template(tokenizer)))


def read_inputs(args: argparse.Namespace, *, keep_arrivals: bool) -> Inputs:
    """Return the problem of the options of :func:`add_problem`."""
    stated = {field.name: getattr(args, field.name) for field in fields_of(LimitOptions)}
    options = LimitOptions(**stated | {"slots": args.slots or "auto"})
    return inputs.read_inputs(options, args.workload, keep_arrivals=keep_arrivals)


def check_counted(args: argparse.Namespace, *, counts: bool, positions: bool) -> None:
    """Raise InputError if a tokenizer or model is named without effect."""
    inputs.check_counted(args, args.workload, counts=counts, positions=positions)  # type: ignore[arg-type]


def positive(text: str) -> int:
    """Parse a whole number of at least one."""
    return _whole(text, 1, LONGEST)


def tokens_or_none(text: str) -> int:
    """Parse a whole number of tokens, or 0."""
    return _whole(text, 0, LONGEST)


def slot_count(text: str) -> int:
    """Parse a whole number of slots."""
    return _whole(text, 1, MOST_SLOTS)


def slot_count_or_auto(text: str) -> int:
    """Parse a whole number of slots, or ``auto`` as 0."""
    return 0 if text == "auto" else slot_count(text)


def random_seed(text: str) -> int:
    """Parse a seed that every random generator accepts."""
    return _whole(text, 0, 2**31 - 1)


def _whole(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{value} is more than {most}")
    return value


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    value = at_least_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def at_least_zero(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def log_deviation(text: str) -> float:
    """Parse a standard deviation of a length's logarithm."""
    value = at_least_zero(text)
    if value > LARGEST_SD:
        raise argparse.ArgumentTypeError(f"{text} is more than {LARGEST_SD:g}")
    return value


def named_files(args: argparse.Namespace, *outputs: str) -> list[str]:
    """Return the input files that options name, also as ``KIND:FILE``."""
    given = [value for name, value in vars(args).items() if name not in outputs]
    words = [word for value in given for word in (value if isinstance(value, list) else [value])]
    texts = [word for word in words if isinstance(word, str)]
    return [name for text in texts for name in {text, text.rpartition(":")[2]} if Path(name).is_file()]


def refuse_given(
    args: argparse.Namespace,
    names: Iterable[str],
    where: str,
    hint: str = "Leave it out.",
    *,
    file: str | None = None,
) -> None:
    """Raise InputError if an option is given that the input makes useless.

    If the options alone show that, use :class:`~batchbound.cli.parser.Rule`.
    """
    given = next((name for name in names if getattr(args, name)), None)
    if given is not None:
        raise InputError(f"--{given.replace('_', '-')} has no effect {where}", file=file, hint=hint)


def check_outputs(
    args: argparse.Namespace, *outputs: str, read: Sequence[str | os.PathLike[str]] = ()
) -> None:
    """Raise InputError if an output would replace a file that matters."""
    values = [getattr(args, name) for name in outputs]
    files = [file for value in values for file in (value if isinstance(value, list) else [value])]
    written = [file for file in files if file is not None]
    refuse_outputs(written, args.overwrite, [*named_files(args, *outputs), *read])
