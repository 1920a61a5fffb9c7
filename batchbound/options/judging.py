"""Options of ``audit``, ``report``, ``verify`` and ``validate``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from .link import LinkOptions
from .numbers import Positive, SlotCount
from .option import Option, Options, PathText


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
    slots: Annotated[
        SlotCount | None,
        Option("slots of the server, max_num_seqs (default: as in RUN)", everyday=True, metavar="N"),
    ] = None
    batched_tokens: Annotated[
        Positive | None,
        Option(
            "maximum tokens per iteration, max_num_batched_tokens (default: as in RUN, else 2048 in the"
            " simulation and no limit in the bound)",
            everyday=True,
            metavar="N",
        ),
    ] = None
    kv_tokens: Annotated[
        Positive | None, Option("KV capacity in tokens (default: as in RUN)", metavar="N")
    ] = None
    block_tokens: Annotated[
        Positive | None,
        Option(
            "tokens per block of KV cache (default: as in RUN, else 16 simulated, 1 in the bound)",
            metavar="N",
        ),
    ] = None
    iterations: Annotated[
        tuple[int, int] | None,
        Option(
            "iterations to audit, counted from 0, if the log has several jobs (default: all)",
            metavar="FIRST:LAST",
            parse=_span,
        ),
    ] = None
    profile: Annotated[
        PathText | None,
        Option(
            "layer profile of the device of a measured vLLM run; adds the bound and the losses in seconds",
            metavar="PATH",
        ),
    ] = None
    html: Annotated[
        PathText | None,
        Option("draw the audit on one page for a browser", everyday=True, metavar="FILE", writes=True),
    ] = None
    save_cost: Annotated[
        PathText | None,
        Option(
            "write the cost of an iteration, fitted to the run, for `plan --for ENGINE --cost FILE`",
            metavar="FILE",
            writes=True,
        ),
    ] = None
    overwrite: Annotated[
        bool, Option("replace files that exist", everyday=True, needs=("html", "save_cost"))
    ] = False
    json: Annotated[bool, Option("print one JSON object instead of tables", everyday=True)] = False


@dataclass(frozen=True)
class ReportOptions(Options):
    """A plan, the trace of its run, and files to write."""

    plan: Annotated[
        PathText | None,
        Option(
            "plan (default: the newest plan.json or NAME.plan.json in this folder)",
            positional=True,
            metavar="PLAN",
        ),
    ] = None
    trace: Annotated[
        PathText | None,
        Option(
            "trace of the run; for replicas, the name given to `run --trace` (default: NAME.trace.jsonl for"
            " NAME.plan.json, else trace.jsonl; if neither exists, the report is of the plan alone)",
            positional=True,
            metavar="TRACE",
        ),
    ] = None
    _: KW_ONLY
    gantt: Annotated[
        tuple[PathText, ...],
        Option(
            "draw the schedule as .png or .svg; may be repeated", metavar="FILE", words="append", writes=True
        ),
    ] = ()
    html: Annotated[
        PathText | None,
        Option("write one page for a browser, with a chart to zoom", metavar="FILE", writes=True),
    ] = None
    perfetto: Annotated[
        PathText | None, Option("write a trace for ui.perfetto.dev", metavar="FILE", writes=True)
    ] = None
    overwrite: Annotated[bool, Option("replace files that exist", needs=("html", "gantt", "perfetto"))] = (
        False
    )
    json: Annotated[bool, Option("print one JSON object instead of a table")] = False


@dataclass(frozen=True)
class VerifyOptions(Options):
    """A plan to verify, or two traces to compare."""

    plan: Annotated[PathText, Option("plan (default %(default)s)", positional=True, metavar="PLAN")] = (
        "plan.json"
    )
    _: KW_ONLY
    same_as: Annotated[
        PathText | None,
        Option(
            "compare the digests of two traces of runs with --repeatable: PLAN and this one", metavar="TRACE"
        ),
    ] = None
    json: Annotated[bool, Option("print one JSON object instead of text")] = False


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
    profile: Annotated[
        PathText | None,
        Option(
            "layer profile of the vLLM run's device: a file, or a folder in LLMServingSim's format",
            metavar="PATH",
        ),
    ] = None
    cost: Annotated[
        PathText | None,
        Option("cost model of a trace: a file of `batchbound profile`", metavar="paper|FILE"),
    ] = None
    json: Annotated[bool, Option("print one JSON object instead of a table")] = False
