"""Options of a problem: requests, their lengths, costs and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..data.costs.cost import CostModel
from ..data.prompts.columns import PromptColumns
from ..data.readers.tables import LengthColumns
from .option import Option, Options, PathText, everyday, option
from .values import ModelName, Name, Positive, SlotCount, TokenCount, Tokens

DEFAULT_SLOTS = 32

LENGTHS = (
    "completion lengths: known, cap (max_tokens), constant:N, completions:FILE, history:FILE"
    " or quantile:Q:FILE (default: known if the file has them, else cap)"
)


@dataclass(frozen=True, kw_only=True)
class PromptTable(Options):
    """Columns of a table of prompts."""

    TITLE = "prompts in a table: Parquet, CSV, JSONL, a dataset's folder"
    NEEDS = ("prompt_column",)

    prompt_column: Name | None = everyday(
        None, "column of texts, or of conversations: lists of messages with role and content"
    )
    id_column: Name | None = option(None, "column of the requests' ids (default: they are numbered)")
    max_tokens_column: Name | None = option(
        None, "column of the maximum tokens of each completion (default: max_tokens, if there is one)"
    )
    drop_last_assistant: bool = option(
        False, "leave out a conversation's last message if it is the assistant's"
    )

    raw: bool = option(
        False,
        "send texts as they are; by default a text is a user's message, which the model's chat template"
        " writes, and on a server goes to the chat endpoint",
    )

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

    input_column: Name | None = option(None, "tokens of each prompt")
    output_column: Name | None = option(None, "tokens of each completion")
    benchmark_run: Positive | None = option(
        None, "number of the run, from 1, in a result file of a serving benchmark with several runs"
    )

    @property
    def length_columns(self) -> LengthColumns | None:
        """Named columns of a table of lengths, or None."""
        columns = LengthColumns(self.input_column, self.output_column, self.benchmark_run)
        return None if columns == LengthColumns() else columns


@dataclass(frozen=True, kw_only=True)
class LimitOptions(PromptTable, LengthTable):
    """Limits, costs and lengths of a problem."""

    TITLE = "problem"

    slots: SlotCount | Literal["auto"] = everyday(
        DEFAULT_SLOTS,
        "maximum number of requests in progress; auto needs --kv-capacity or a measured --cost"
        " (default %(default)s)",
        metavar="N|auto",
    )
    kv_capacity: TokenCount | None = option(None, "KV capacity in tokens (default: no limit)")
    prefix_cache: Tokens | None = option(
        None,
        "tokens of --kv-capacity kept for shared beginnings that no running request reads"
        " (default: as many as there are, at most what the slots take; none with --kv-capacity)",
    )
    prefill_token_cap: TokenCount | None = option(None, "maximum prompt tokens per prefill stage")
    max_position: TokenCount | None = option(
        None, "maximum tokens of a prompt and its completion (default: the model's)"
    )
    cost: PathText | CostModel | None = everyday(
        None,
        "cost model: the hybrid paper's, or a JSON file of `batchbound profile` or of coefficients"
        " (default: what an earlier run of --model measured; else none: the paper's order requests)",
        metavar="paper|FILE",
    )
    lengths: str | None = everyday(None, LENGTHS, metavar="SOURCE")
    longest_completion: TokenCount | None = everyday(
        None,
        "maximum tokens of a completion, in plans and runs; caps known lengths and each request's own"
        " limit (default: max_tokens or max_completion_tokens of the request)",
        older=("--longest-answer", "--max-tokens"),
    )
    first_token: Literal["prefill", "decode"] | None = option(
        None,
        "stage that yields a completion's first token: prefill as in engines, decode as in the hybrid"
        " paper (default: prefill; decode for generators)",
    )
    drop_unanswered: bool = option(False, "leave out rows of a table without a completion")
    model: ModelName | None = everyday(
        None, "hub name, directory or tiny:FAMILY; its tokenizer counts the tokens of prompts"
    )
    tokenizer: Name | None = option(
        None, "tokenizer that counts tokens: bytes, a directory or a hub name (default: the model's)"
    )


WORKLOAD = (
    "prompts (OpenAI batch JSONL, or a table with --prompt-column), a table of lengths (CSV,"
    " Parquet, JSONL), or NAME:SEED[:COUNT] of a generator (table3, exegpt-S, sharegpt, ...)"
)


@dataclass(frozen=True, kw_only=True)
class SlotOptions(LimitOptions):
    """Limits, costs and lengths of a problem, with a number of slots."""

    slots: SlotCount = everyday(DEFAULT_SLOTS, "maximum number of requests in progress (default %(default)s)")


@dataclass(frozen=True)
class ProblemOptions(SlotOptions):
    """A file of requests, with the limits and costs of their problem."""

    TITLE = ""

    workload: Annotated[PathText, Option(WORKLOAD, positional=True, metavar="FILE")]
