"""Options of a problem: requests, their lengths, costs and limits."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from ..data.prompts.columns import PromptColumns
from ..data.readers.tables import LengthColumns
from .numbers import Positive, SlotCount, Tokens
from .option import Option, Options, PathText

DEFAULT_SLOTS = 32

LENGTHS = (
    "completion lengths: known, cap (max_tokens), constant:N, completions:FILE, history:FILE"
    " or quantile:Q:FILE (default: known if the file has them, else cap)"
)


@dataclass(frozen=True, kw_only=True)
class PromptTable(Options):
    """Columns of a table of prompts."""

    TITLE = "prompts in a table: Parquet, CSV, JSONL, a dataset's folder"

    prompt_column: Annotated[
        str | None,
        Option(
            "column of texts, or of conversations: lists of messages with role and content",
            everyday=True,
            metavar="NAME",
        ),
    ] = None
    id_column: Annotated[
        str | None,
        Option(
            "column of the requests' ids (default: they are numbered)",
            metavar="NAME",
            needs=("prompt_column",),
        ),
    ] = None
    max_tokens_column: Annotated[
        str | None,
        Option(
            "column of the maximum tokens of each completion (default: max_tokens, if there is one)",
            metavar="NAME",
            needs=("prompt_column",),
        ),
    ] = None
    drop_last_assistant: Annotated[
        bool,
        Option("leave out a conversation's last message if it is the assistant's", needs=("prompt_column",)),
    ] = False

    raw: Annotated[
        bool,
        Option(
            "send texts as they are; by default a text is a user's message, which the model's chat template"
            " writes, and on a server goes to the chat endpoint",
            needs=("prompt_column",),
        ),
    ] = False

    def columns_of(self, tokenizer: str | None = None) -> PromptColumns | None:
        """Return the named columns of a table of prompts, or None.

        Texts are messages unless --raw is given, or the ``tokenizer`` has no chat template.
        """
        if self.prompt_column is None:
            return None
        from ..executor.models.tokenizers import has_chat_template

        named = self.prompt_column, self.id_column, self.max_tokens_column, self.drop_last_assistant
        chat = not self.raw and (tokenizer is None or has_chat_template(tokenizer))
        return PromptColumns(*named, chat=chat)


@dataclass(frozen=True, kw_only=True)
class LengthTable(Options):
    """Columns of a table of lengths."""

    TITLE = "lengths in a table with columns of other names"

    input_column: Annotated[str | None, Option("tokens of each prompt", metavar="NAME")] = None
    output_column: Annotated[str | None, Option("tokens of each completion", metavar="NAME")] = None
    benchmark_run: Annotated[
        Positive | None,
        Option(
            "number of the run, from 1, in a result file of a serving benchmark with several runs",
            metavar="N",
        ),
    ] = None

    @property
    def length_columns(self) -> LengthColumns | None:
        """Named columns of a table of lengths, or None."""
        columns = LengthColumns(self.input_column, self.output_column, self.benchmark_run)
        return None if columns == LengthColumns() else columns


@dataclass(frozen=True, kw_only=True)
class LimitOptions(PromptTable, LengthTable):
    """Limits, costs and lengths of a problem."""

    TITLE = "problem"

    slots: Annotated[
        SlotCount | Literal["auto"],
        Option(
            "maximum number of requests in progress; auto needs --kv-capacity or a measured --cost"
            " (default %(default)s)",
            everyday=True,
            metavar="N|auto",
        ),
    ] = DEFAULT_SLOTS
    kv_capacity: Annotated[
        Positive | None, Option("KV capacity in tokens (default: no limit)", metavar="TOKENS")
    ] = None
    prefix_cache: Annotated[
        Tokens | None,
        Option(
            "part of --kv-capacity that keeps shared prompts between prefill stages, in tokens; with 0 each"
            " stage computes the shared prompts that it needs (default: a quarter of the slots' capacity, or"
            " the part with the shortest quick schedule)",
            metavar="TOKENS",
        ),
    ] = None
    prefill_token_cap: Annotated[
        Positive | None, Option("maximum prompt tokens per prefill stage", metavar="TOKENS")
    ] = None
    max_position: Annotated[
        Positive | None,
        Option("maximum tokens of a prompt and its completion (default: the model's)", metavar="TOKENS"),
    ] = None
    cost: Annotated[
        PathText,
        Option(
            "cost model: the hybrid paper's, or a JSON file of `batchbound profile` or of coefficients"
            " (default %(default)s)",
            everyday=True,
            metavar="paper|FILE",
        ),
    ] = "paper"
    lengths: Annotated[str | None, Option(LENGTHS, everyday=True, metavar="SOURCE")] = None
    longest_completion: Annotated[
        Positive | None,
        Option(
            "maximum tokens of a completion, in plans and runs; caps known lengths and each request's own"
            " limit (default: max_tokens or max_completion_tokens of the request)",
            everyday=True,
            metavar="TOKENS",
            older=("--longest-answer", "--max-tokens"),
        ),
    ] = None
    first_token: Annotated[
        Literal["prefill", "decode"] | None,
        Option(
            "stage that yields a completion's first token: prefill as in engines, decode as in the hybrid"
            " paper (default: prefill; decode for generators)",
        ),
    ] = None
    drop_unanswered: Annotated[bool, Option("leave out rows of a table without a completion")] = False
    model: Annotated[
        str | None,
        Option(
            "hub name, directory or tiny:FAMILY; its tokenizer counts the tokens of prompts",
            everyday=True,
            metavar="MODEL",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            "tokenizer that counts tokens: bytes, a directory or a hub name (default: the model's)",
            metavar="NAME",
        ),
    ] = None


WORKLOAD = (
    "prompts (OpenAI batch JSONL, or a table with --prompt-column), a table of lengths (CSV,"
    " Parquet, JSONL), or NAME:SEED[:COUNT] of a generator (table3, exegpt-S, sharegpt, ...)"
)


@dataclass(frozen=True)
class ProblemOptions(LimitOptions):
    """A file of requests, with the limits and costs of their problem."""

    TITLE = ""

    workload: Annotated[PathText, Option(WORKLOAD, positional=True, metavar="FILE")]
    _: KW_ONLY
    slots: Annotated[
        SlotCount,
        Option("maximum number of requests in progress (default %(default)s)", everyday=True, metavar="N"),
    ] = DEFAULT_SLOTS
