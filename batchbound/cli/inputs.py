"""Problems from the command line: workload, costs and limits."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.arrays import IntArray
from ..data.costs.calibration import CalibratedCost
from ..data.costs.cost import CostModel
from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.files.record import plain
from ..data.lengths.prediction_error import LARGEST_SD
from ..data.plan import PromptSource, Provenance, relative_path
from ..data.predictor import prompt_text
from ..data.prefix_cache import distinct_tokens, usual_prefix_cache
from ..data.problem import MOST_SLOTS, MOST_STEPS, Problem, ProblemError
from ..data.prompts.columns import PromptColumns
from ..data.prompts.table import holds_texts
from ..data.readers.openai_batch import PromptRecord
from ..data.readers.requests import JobInput, read_workload
from ..data.readers.tables import LengthColumns
from ..data.workload import LONGEST, Workload
from ..solvers.cache_choice import choose_prefix_cache
from .output import note
from .parser import Group, Parser

DEFAULT_SLOTS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A problem and the sources of its parts."""

    problem: Problem
    job: JobInput
    cost_source: dict[str, object]
    tokenizer: str
    distinct_tokens: int | None = None

    @property
    def prompts(self) -> list[str]:
        """The prompt of each request; empty for a job of lengths."""
        return [prompt_text(entry) for entry in self.job.records or ()]


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


def say_texts(path: str, columns: PromptColumns | None, how: str) -> None:
    """Note that texts of a table are sent as messages; ``how`` names what writes them."""
    if columns is not None and columns.chat and holds_texts(path, columns):
        note(f"each text is sent as a user's message, {how}; --raw sends texts as they are")


def read_inputs(args: argparse.Namespace, *, keep_arrivals: bool) -> Inputs:
    """Return the problem of the options of :func:`add_problem`."""
    tokenizer = args.tokenizer or args.model or "bytes"
    counter, columns = _Counter(tokenizer, args.workload), columns_of(args, tokenizer)
    say_texts(args.workload, columns, f"by the chat template of {tokenizer}")
    job = read_workload(
        args.workload,
        lengths=args.lengths,
        count_tokens=counter,
        drop_unanswered=args.drop_unanswered,
        longest=args.longest_completion,
        columns=columns,
        length_columns=length_columns_of(args),
        positions=args.max_position or _positions(args.model),
    )
    # For a job of lengths a model is only useful for its positions.
    check_counted(args, counts=bool(job.records), positions=args.max_position is None)
    if job.records and tokenizer == "bytes" and args.tokenizer is None:
        note("no --model: prompts are counted in bytes")
    cost, source = read_cost(args.cost)
    first = args.first_token or ("decode" if job.digest is None else "prefill")
    workload = job.workload if keep_arrivals else job.workload.without_arrivals()
    _check_steps(job, args.slots or len(workload))
    held = args.kv_capacity or (None if args.slots else measured_capacity(source))
    kept = _prefix_cache(args, job, workload, held)
    try:
        problem = Problem(
            workload,
            cost,
            args.slots or len(workload),
            kv_capacity=None if held is None else held - kept,
            prefill_token_cap=args.prefill_token_cap,
            max_position=args.max_position or _positions(args.model),
            prefill_emits_first_token=first == "prefill",
            prefix_cache=kept,
        )
    except ProblemError as error:
        raise _too_long(job, error, given=getattr(args, error.limit) is not None, kept=kept) from None
    if args.prefix_cache is None and args.slots:
        problem = choose_prefix_cache(problem)
        if held is not None and problem.prefix_cache:
            kept, hint = problem.prefix_cache, "--prefix-cache sets another number"
            note(f"{kept:,} of {held:,} tokens of KV capacity keep shared prompts; {hint}")
    _check_time(problem, args.cost)
    return Inputs(problem, job, source, tokenizer, counter.distinct)


def check_counted(args: argparse.Namespace, *, counts: bool, positions: bool) -> None:
    """Raise InputError if a tokenizer or model is named without effect."""
    named = [f"--{name}" for name in ("tokenizer", "model") if getattr(args, name) is not None]
    if positions and "--model" in named:
        named.remove("--model")
    if named and not counts:
        what = f"{named[0]} has no effect on lengths: there are no prompts to count"
        raise InputError(what, file=args.workload, hint="Leave it out.")
    if len(named) == 2:
        raise InputError(
            "--model has no effect with --tokenizer, which counts", hint="Leave one of them out."
        )


def _prefix_cache(
    args: argparse.Namespace, job: JobInput, workload: Workload, kv_capacity: int | None
) -> int:
    given: int | None = args.prefix_cache
    if given is None:
        return usual_prefix_cache(workload, args.slots) if kv_capacity is None else 0
    if not workload.shared_tokens.any():
        what = f"--prefix-cache {given} has no effect: no two requests share a prompt"
        raise InputError(what, file=job.source, hint="Leave it out.")
    if kv_capacity is not None and given >= kv_capacity:
        what = f"--prefix-cache {given} leaves nothing of a KV capacity of {kv_capacity} tokens"
        raise InputError(what, hint="Lower it, or raise --kv-capacity.")
    return given


def read_cost(spec: str) -> tuple[CostModel, dict[str, object]]:
    """Return the cost model of ``--cost``, and its source."""
    if spec == "paper":
        return CostModel.paper(), {"name": "paper"}
    if not Path(spec).exists():
        raise InputError(
            "no such cost model", file=spec, hint="Give paper, or a file of `batchbound profile`."
        )
    calibrated = CalibratedCost.load(spec)
    return calibrated.cost, {"name": spec, **plain(calibrated)}


def measured_capacity(source: Mapping[str, object]) -> int | None:
    """Return the KV capacity measured with the costs, or None."""
    tokens = source.get("kv_tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def provenance_of(inputs: Inputs, plan_path: str | os.PathLike[str]) -> Provenance:
    """Return the sources of a plan's lengths, costs and prompts."""
    return Provenance(inputs.job.lengths.to_json(), inputs.cost_source, _prompt_source(inputs, plan_path))


def _prompt_source(inputs: Inputs, plan_path: str | os.PathLike[str]) -> PromptSource | None:
    if not inputs.job.records or inputs.job.digest is None:
        return None
    folder = Path(plan_path).resolve().parent
    path = relative_path(inputs.job.source, folder).removeprefix("./")
    tokenizer = inputs.tokenizer
    if Path(tokenizer).is_dir():
        tokenizer = relative_path(tokenizer, folder)
    return PromptSource(path, inputs.job.digest, tokenizer, inputs.job.columns, inputs.distinct_tokens)


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


def each_once(files: Iterable[str]) -> list[str]:
    """Return files without repetitions.

    A repeated file would make intervals too narrow.
    """
    found: dict[str, str] = {}
    for name in files:
        found.setdefault(os.path.realpath(name), name)
    return list(found.values())


def _place(job: JobInput, request: int) -> str:
    if not job.records:
        return f"request {request}"
    in_lines = job.columns is None or Path(job.source).suffix in (".json", ".jsonl")
    return f"{'line' if in_lines else 'row'} {job.records[request].line}"


def _too_long(job: JobInput, error: ProblemError, *, given: bool, kept: int) -> InputError:
    what = error.what
    where, stated = _place(job, error.request), "output_tokens"
    if job.records and job.lengths.kind == "cap":
        if job.columns is None:
            stated = job.records[error.request].max_tokens_field
            where = f"{where}, field 'body.{stated}'"
        elif job.columns.max_tokens is not None:
            stated = job.columns.max_tokens
            where = f"{where}, column {stated!r}"
    room = error.allowed - int(job.workload.input_tokens[error.request])
    if room < 1 or error.limit == "prefill_token_cap":
        remedies = ["shorten its prompt"]
    else:
        remedies = [f"lower its {stated}"] if job.lengths.kind in ("cap", "known") else []
        remedies.append(f"cap every completion with --longest-completion ({room} fit this one)")
    if given:
        remedies.append(f"raise --{error.limit.replace('_', '-')}")
    if kept and error.limit == "kv_capacity":
        what += f", the rest of {error.allowed + kept} after --prefix-cache"
        remedies.append("lower --prefix-cache")
    hint = f"{', '.join(remedies)} or leave the request out."
    return InputError(what, file=job.source, where=where, hint=hint[0].upper() + hint[1:])


def _check_time(problem: Problem, source: str) -> None:
    cost, hint = problem.cost, "Measure a model with `batchbound profile`."
    decoding = problem.decode_steps.any() and cost.decode_seconds(1, 1) > 0
    if cost.prefill_seconds(1) == 0 and not decoding:
        raise InputError("no stage of this job takes any time", file=source, hint=hint)


def _check_steps(job: JobInput, slots: int) -> None:
    """Raise InputError if every schedule is too long for memory."""
    lengths, hint = job.workload.output_tokens, "Correct the lengths, or plan a part of the job."
    longest = int(lengths.argmax())
    if lengths[longest] > MOST_STEPS:
        what = f"a completion of {lengths[longest]:,} tokens, beyond {MOST_STEPS:,} decode steps"
        raise InputError(what, file=job.source, where=_place(job, longest), hint=hint)
    decode_steps = int(lengths.sum()) // slots
    if decode_steps > MOST_STEPS:
        what = f"{slots} slots need at least {decode_steps:,} decode steps, beyond {MOST_STEPS:,}"
        raise InputError(what, file=job.source, hint=hint)


@dataclass(slots=True)
class _Counter:
    """Counter of prompts' tokens.

    distinct: Tokens of all prompts, with common beginnings counted once; None before they are counted, and
        for jobs too large for it.
    """

    tokenizer: str
    path: str
    distinct: int | None = None

    def __call__(self, records: Sequence[PromptRecord]) -> Sequence[int]:
        from ..executor.models.prompts import encoded, ignored_fields
        from ..executor.models.tokenizers import load_tokenizer

        loaded = load_tokenizer(self.tokenizer)
        counts, prompts = list[int](), list[IntArray]()
        for tokens in encoded(records, loaded, self.path):
            counts.append(len(tokens))
            if len(prompts) < MOST_COMPARED:
                prompts.append(np.array(tokens, dtype=np.int64))
        for ignored in ignored_fields(records, loaded):
            note(ignored)
        self.distinct = distinct_tokens(prompts) if len(prompts) == len(counts) else None
        return counts


MOST_COMPARED = 100_000
"""Most prompts whose beginnings are compared; a larger job takes more memory."""


def _positions(model: str | None) -> int | None:
    if model is None:
        return None
    from ..executor.models.source import positions_of

    return positions_of(model)
