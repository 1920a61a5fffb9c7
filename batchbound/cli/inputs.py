"""From the command line to a problem: a workload, costs and limits, as all commands take them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..data.calibration import CalibratedCost
from ..data.cost import CostModel
from ..data.files import InputError
from ..data.openai_batch import PromptRecord
from ..data.plan import PromptSource
from ..data.problem import Problem, ProblemError
from ..data.read import JobInput, TokenCounter, read_workload
from ..data.workload import Workload

DEFAULT_SLOTS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A problem, and where each part of it comes from."""

    problem: Problem
    job: JobInput
    cost_source: dict[str, object]
    tokenizer: str


def add_problem(parser: argparse.ArgumentParser, *, auto_slots: bool = False) -> None:
    """Add the options that make a problem out of a workload; its number of slots may be left to us."""
    parser.add_argument(
        "workload",
        metavar="FILE",
        help="prompts (OpenAI batch JSONL), a table of lengths (CSV, Parquet, JSONL), or NAME:SEED[:COUNT]"
        " of a generator (table3, exegpt-S, sharegpt, ...)",
    )
    group = parser.add_argument_group("problem")
    group.add_argument(
        "--slots",
        type=positive_or_auto if auto_slots else positive,
        default=DEFAULT_SLOTS,
        metavar="N|auto" if auto_slots else "N",
        help="requests in progress at a time"
        + ("; auto chooses them, given --kv-capacity" if auto_slots else "")
        + " (default %(default)s)",
    )
    group.add_argument(
        "--kv-capacity", type=positive, metavar="TOKENS", help="most tokens of keys and values held"
    )
    group.add_argument(
        "--prefill-token-cap", type=positive, metavar="TOKENS", help="most prompt tokens of one prefill stage"
    )
    group.add_argument(
        "--max-position",
        type=positive,
        metavar="TOKENS",
        help="most tokens of a prompt and its answer (the model's)",
    )
    group.add_argument(
        "--cost",
        default="paper",
        metavar="paper|FILE",
        help="what stages cost: the hybrid paper's measurements, or a file of `batchbound profile`"
        " (default %(default)s)",
    )
    group.add_argument(
        "--lengths",
        metavar="SOURCE",
        help="answer lengths: known, cap (max_tokens), constant:N, answers:FILE or quantile:Q:FILE"
        " (default: known where given, else cap)",
    )
    group.add_argument(
        "--first-token",
        choices=("prefill", "decode"),
        help="what yields an answer's first token: the prefill stage, as in engines, or a decode round, as"
        " the hybrid paper counts (default: prefill; decode for generators)",
    )
    group.add_argument(
        "--drop-unanswered", action="store_true", help="leave out rows of a table whose answer has no token"
    )
    group.add_argument(
        "--model", metavar="MODEL", help="hub name, directory or tiny:FAMILY whose tokenizer counts"
    )
    group.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="another tokenizer: bytes, a directory or a hub name (default: the model's)",
    )


def read_inputs(args: argparse.Namespace, *, keep_arrivals: bool) -> Inputs:
    """
    Return the problem that the options of :func:`add_problem` describe.

    Parameters
    ----------
    args
        The parsed options.
    keep_arrivals
        Whether requests arrive when the workload says, or are all there at the start.

    Raises
    ------
    InputError
        If something the user named cannot be read, or a request cannot be served at all.
    """
    tokenizer = args.tokenizer or args.model or "bytes"
    job = read_workload(
        args.workload,
        lengths=args.lengths,
        count_tokens=_counter(tokenizer),
        drop_unanswered=args.drop_unanswered,
    )
    cost, source = read_cost(args.cost)
    first = args.first_token or ("decode" if job.digest is None else "prefill")
    workload = job.workload if keep_arrivals else without_arrivals(job.workload)
    try:
        problem = Problem(
            workload,
            cost,
            args.slots or len(workload),
            kv_capacity=args.kv_capacity,
            prefill_token_cap=args.prefill_token_cap,
            max_position=args.max_position or _positions(args.model),
            prefill_emits_first_token=first == "prefill",
        )
    except ProblemError as error:
        records = job.records
        place = f"line {records[error.request].line}" if records else f"request {error.request}"
        raise InputError(str(error), file=job.source, where=place) from None
    return Inputs(problem, job, source, tokenizer)


def read_cost(spec: str) -> tuple[CostModel, dict[str, object]]:
    """
    Return a cost model and what a plan records of its origin.

    Parameters
    ----------
    spec
        ``paper``, or a file that ``batchbound profile`` wrote.
    """
    if spec == "paper":
        return CostModel.paper(), {"name": "paper"}
    if not Path(spec).exists():
        raise InputError(
            "no such cost model", file=spec, mend="Give paper, or a file of `batchbound profile`."
        )
    calibrated = CalibratedCost.load(spec)
    return calibrated.cost, {"name": spec, **calibrated.to_json()}


def prompt_source(inputs: Inputs, plan_path: str | os.PathLike[str]) -> PromptSource | None:
    """Return where the prompts of a job stand as seen from its plan, or None if it has none."""
    if not inputs.job.records or inputs.job.digest is None:
        return None
    folder = Path(plan_path).resolve().parent
    path = os.path.relpath(Path(inputs.job.source).resolve(), folder)
    return PromptSource(path=path, sha256=inputs.job.digest, tokenizer=inputs.tokenizer)


def without_arrivals(workload: Workload) -> Workload:
    """Return the same requests, all there at the start."""
    return replace(workload, arrival=np.zeros(len(workload)))


def positive(text: str) -> int:
    """Return a whole number of at least one, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive_or_auto(text: str) -> int:
    """Return a whole number of at least one, or 0 for ``auto``, for argparse."""
    return 0 if text == "auto" else positive(text)


def seconds(text: str) -> float:
    """Return a positive, finite number of seconds, for argparse."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def refuse_existing(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise InputError if an output file is there already and may not be replaced, or has no folder."""
    target = Path(path)
    if target.is_dir():
        raise InputError("is a folder", file=path, mend="Name a file.")
    if target.exists() and not overwrite:
        raise InputError("exists already", file=path, mend="Say --overwrite, or name another file.")
    if not target.parent.is_dir():
        raise InputError("its folder does not exist", file=path, mend="Make the folder first.")


def _counter(tokenizer: str) -> TokenCounter:
    def count(records: Sequence[PromptRecord]) -> Sequence[int]:
        from ..executor.prompts import encoded
        from ..executor.tokenizers import load_tokenizer

        return [len(tokens) for tokens in encoded(records, load_tokenizer(tokenizer))]

    return count


def _positions(model: str | None) -> int | None:
    if model is None:
        return None
    from ..executor.model_source import load_config, position_limit

    return position_limit(load_config(model))
