"""Options of ``audit``, ``report``, ``verify`` and ``validate``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from .link import LinkOptions
from .option import Option, Options, PathText, everyday, option
from .values import AnyPath, File, Positive, SlotCount


def _span(text: str) -> tuple[int, int]:
    """Parse ``FIRST:LAST``."""
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ValueError(f"{text!r} is not FIRST:LAST, two whole numbers in order")
    return int(first), int(last)


@dataclass(frozen=True)
class AuditOptions(Options):
    """A server's run, its limits, and files to write."""

    run: Annotated[
        PathText,
        Option(
            "a trace of `batchbound run --server`; vLLM's output with --enable-logging-iteration-details;"
            " the folder of a measured vLLM run (meta.json, requests.jsonl); times of requests (CSV with id,"
            " prompt_tokens, completion_tokens, start, first, last, or a batch's output with vLLM's metrics);"
            " or a table of the actual lengths",
            positional=True,
            metavar="RUN",
        ),
    ]
    _: KW_ONLY
    slots: SlotCount | None = everyday(None, "slots of the server, max_num_seqs (default: as in RUN)")
    batched_tokens: Positive | None = everyday(
        None,
        "maximum tokens per iteration, max_num_batched_tokens (default: as in RUN, else 2048 in the"
        " simulation and no limit in the bound)",
    )
    kv_tokens: Positive | None = option(None, "KV capacity in tokens (default: as in RUN)")
    block_tokens: Positive | None = option(
        None, "tokens per block of KV cache (default: as in RUN, else 16 simulated, 1 in the bound)"
    )
    iterations: tuple[int, int] | None = option(
        None,
        "iterations to audit, counted from 0, if the log has several jobs (default: all)",
        metavar="FIRST:LAST",
        parse=_span,
    )
    profile: AnyPath | None = option(
        None, "layer profile of the device of a measured vLLM run; adds the bound and the losses in seconds"
    )
    html: File | None = everyday(None, "draw the audit on one page for a browser", writes=True)
    save_cost: File | None = option(
        None,
        "write the cost of an iteration, fitted to the run, for `plan --for ENGINE --cost FILE`",
        writes=True,
    )
    overwrite: bool = everyday(False, "replace files that exist", needs=("html", "save_cost"))
    json: bool = everyday(False, "print one JSON object instead of tables")


@dataclass(frozen=True)
class ReportOptions(Options):
    """A plan, the trace of its run, and files to write."""

    plan: PathText | None = option(
        None,
        "plan (default: the newest plan.json or NAME.plan.json in this folder)",
        positional=True,
        metavar="PLAN",
    )
    trace: PathText | None = option(
        None,
        "trace of the run; for replicas, the name given to `run --trace` (default: NAME.trace.jsonl for"
        " NAME.plan.json, else trace.jsonl; if neither exists, the report is of the plan alone)",
        positional=True,
        metavar="TRACE",
    )
    _: KW_ONLY
    gantt: tuple[File, ...] = option(
        (), "draw the schedule as .png or .svg; may be repeated", words="append", writes=True
    )
    html: File | None = option(None, "write one page for a browser, with a chart to zoom", writes=True)
    perfetto: File | None = option(None, "write a trace for ui.perfetto.dev", writes=True)
    overwrite: bool = option(False, "replace files that exist", needs=("html", "gantt", "perfetto"))
    json: bool = option(False, "print one JSON object instead of a table")


@dataclass(frozen=True)
class VerifyOptions(Options):
    """A plan to verify, or two traces to compare."""

    plan: PathText = option(
        "plan.json", "plan or replay (default %(default)s)", positional=True, metavar="PLAN"
    )
    _: KW_ONLY
    same_as: PathText | None = option(
        None,
        "compare the digests of two traces of runs with --repeatable: PLAN and this one",
        metavar="TRACE",
    )
    prompts: PathText | None = option(
        None, "the plan's requests: derive the tree of shared beginnings from them again", metavar="FILE"
    )
    json: bool = option(False, "print one JSON object instead of text")


@dataclass(frozen=True)
class ValidateOptions(LinkOptions):
    """A measured run, and the costs of its simulation."""

    run: Annotated[
        PathText,
        Option(
            "folder of a measured vLLM run (meta.json, requests.jsonl), or a trace of `batchbound run`",
            positional=True,
            metavar="RUN",
        ),
    ]
    _: KW_ONLY
    profile: AnyPath | None = option(
        None, "layer profile of the vLLM run's device: a file, or a folder in LLMServingSim's format"
    )
    cost: PathText | None = option(
        None, "cost model of a trace: a file of `batchbound profile`", metavar="paper|FILE"
    )
    json: bool = option(False, "print one JSON object instead of a table")
