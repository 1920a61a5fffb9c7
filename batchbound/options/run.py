"""Options of ``batchbound run``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

from ..data.files.disk import InputError
from ..run_job.batch_to_send import HIGHER_CAP, RETRIED, SAME_CAP, Order, ServerOptions
from ..run_job.options import RunOptions
from .model import LoadingOptions, ModelOptions
from .option import Options, PathText, Rule, everyday, option
from .problem import DEFAULT_SLOTS, PromptTable
from .values import File, ModelName, Positive, Seconds, SlotCount, TokenCount

OUTPUT, TRACE = "answers.jsonl", "trace.jsonl"
"""Default files of completions and trace."""

PLANNING = (
    *("slots", "lengths", "longest_completion", "cost"),
    *("prompt_column", "id_column", "max_tokens_column", "drop_last_assistant", "raw"),
)
"""Options that plan prompts; a plan fixes them."""

_ON_SERVERS = (
    *("in_flight", "order", "batched_tokens", "kv_tokens", "timeout", "attempts", "outage", "deadline"),
    *("body", "retry", "header", "ca", "server", "plan", "prompts", "model", "output", "trace", "overwrite"),
    *("json", "seed", "params", "temperature", *PLANNING),
)
"""Options for servers; the others are for our own engine."""


def _lengths(text: str) -> str | None:
    return None if text == "auto" else text


@dataclass(frozen=True, kw_only=True)
class PlanningOptions(PromptTable):
    """How prompts are planned."""

    TITLE = "prompts instead of a plan"

    slots: SlotCount | None = everyday(
        None,
        f"maximum number of requests in progress (default {DEFAULT_SLOTS}); on a server, vLLM's"
        " --max-num-seqs (default: the plan's)",
    )
    lengths: str | None = everyday(
        None,
        "completion lengths, as in `plan --lengths`; auto: stated lengths, else those of an earlier run of"
        " the same prompts, else none (default: auto)",
        metavar="SOURCE",
        parse=_lengths,
    )
    longest_completion: TokenCount | None = everyday(
        None, "maximum tokens of a completion, as in `plan`", older=("--longest-answer", "--max-tokens")
    )
    cost: File | None = option(
        None, "cost model of `batchbound profile` (default: costs measured by an earlier run of the model)"
    )


@dataclass(frozen=True, kw_only=True)
class SendingOptions(Options):
    """Servers that complete a job, and how requests are sent."""

    TITLE = "server"
    NEEDS = ("server",)
    ABOUT = (
        "Send the requests to a server with OpenAI's API (vLLM, SGLang, llama.cpp, ...), in the plan's order."
        " PLAN may then be a batch file, and --model replaces the model's name in every request."
    )

    server: tuple[str, ...] = everyday(
        (),
        "address of a server, http://HOST:PORT; may be repeated for replicas",
        metavar="URL",
        words="append",
    )
    in_flight: Positive | None = option(
        None,
        "completions in flight on each server (default: the slots and an eighth more, at least 4; raised up"
        " to fourfold if its queue runs empty)",
    )
    order: Order | None = option(
        None, "order of the requests; auto: the order of fewest simulated iterations (default: auto)"
    )
    batched_tokens: Positive | None = option(
        None,
        "maximum tokens per iteration, vLLM's --max-num-batched-tokens (default: 2048 in the simulation, no"
        " limit in the bound)",
    )
    timeout: Seconds | None = option(None, "time limit of a request in seconds (default: 3600)", metavar="S")
    attempts: Positive | None = option(
        None, "attempts at a request if the server is busy or fails with a 5xx (default: 8)"
    )
    outage: Seconds | None = option(
        None, "seconds without a reachable server until the run stops (default: 600)", metavar="S"
    )
    deadline: Seconds | None = option(
        None, "seconds until the run ends; unfinished requests are marked batch_expired", metavar="S"
    )
    body: File | None = option(None, "JSON object of fields to add to request bodies that lack them")
    retry: tuple[str, ...] = option(
        (),
        "rows of an earlier run to complete again: cut at max_tokens (then under the cap of"
        " --longest-completion), on a server also failed, or expired by --deadline; may be repeated"
        " (default: on a server failed and expired)",
        choices=RETRIED,
        needs=(),
        words="append",
    )
    header: tuple[str, ...] = option(
        (),
        "header of each request, such as a gateway's key; may be repeated; @FILE reads one a line",
        metavar="NAME=VALUE",
        words="append",
    )
    ca: File | None = option(None, "certificates to trust (default: the system's, and SSL_CERT_FILE)")


@dataclass(frozen=True)
class JobOptions(RunOptions, LoadingOptions, PlanningOptions, SendingOptions):
    """Prompts or a plan, the model or the servers, and the files of the run."""

    TITLE = ABOUT = ""

    plan: PathText = option(
        "plan.json",
        "plan, or file of prompts to plan and run (default %(default)s)",
        positional=True,
        metavar="PLAN",
    )
    model: ModelName | None = everyday(None, "hub name, directory or tiny:FAMILY[:SEED]")
    _: KW_ONLY
    stall_seconds: Positive | None = option(
        None,
        "seconds without a finished stage until the run stops, as a device call may hang; one of several"
        " replicas is abandoned after half of them (default 1800)",
        metavar="S",
    )
    repeatable: bool = option(
        False,
        "compute each request as if it were alone: repeated runs on the same machine give the same bits,"
        " also after a stop and resume; slower with few slots. The trace has a digest, and `verify TRACE"
        " --same-as TRACE` compares two runs",
    )
    output: File | None = everyday(
        None,
        f"file of completions: OpenAI's JSONL, or a table if it ends in .parquet (default {OUTPUT})",
        short="-o",
        writes=True,
    )
    trace: File | None = option(
        None, f"file of the trace (default {TRACE}; with --output NAME.jsonl, NAME.trace.jsonl)", writes=True
    )
    overwrite: bool = everyday(False, "replace the output if it exists")
    json: bool = option(False, "print the whole report as one JSON object")

    @property
    def answers(self) -> str:
        """File of completions."""
        return OUTPUT if self.output is None else str(self.output)

    @property
    def times(self) -> str:
        """File of the trace."""
        if self.trace is not None:
            return str(self.trace)
        output = Path(self.output or "")
        # The default output has the default trace, also where its name is given.
        return str(output.with_suffix(".trace.jsonl")) if output.name and output != Path(OUTPUT) else TRACE

    @property
    def written(self) -> tuple[Path, Path]:
        """Files of completions and trace."""
        return Path(self.answers), Path(self.times)

    @property
    def source(self) -> ModelOptions:
        """The model and its loading."""
        if self.model is None:
            hint = "Name a model with --model, or a server with --server."
            raise InputError("there is no model or server to run the requests on", hint=hint)
        stated = {field.name: getattr(self, field.name) for field in fields(LoadingOptions)}
        return ModelOptions(model=self.model, **stated)

    @property
    def servers(self) -> ServerOptions:
        """The servers, and how requests are sent."""
        stated: dict[str, Any] = {name.name: getattr(self, name.name, None) for name in fields(ServerOptions)}
        stated = {name: value for name, value in stated.items() if value not in (None, ())}
        return ServerOptions(**stated | {"urls": self.server, "columns": self.columns_of()})

    @property
    def cap_of_retry(self) -> int | None:
        """Cap under which the model completes cut completions again; None without ``retry``."""
        if not self.retry:
            return None
        if self.retry != ("cut",):
            hint = "Leave it out: a model's errors repeat."
            raise InputError(f"--retry {self.retry[0]} has no effect without --server", hint=hint)
        if self.longest_completion is None:
            raise InputError(SAME_CAP, hint=HIGHER_CAP)
        self.refuse(("overwrite", "pinned", "replicas"), "with --retry, which keeps the other completions")
        return self.longest_completion

    @property
    def stalled(self) -> float:
        """Seconds without a finished stage until the run stops."""
        return float(self.stall_seconds or self.tuned.stall_seconds)


JobOptions.RULES = (
    Rule(
        tuple(
            field.name
            for field in fields(JobOptions)
            if field.name not in (*_ON_SERVERS, "patience", "cut_cap", "late_cap")
        ),
        excludes=("server",),
        hint="Leave it out: the server or the request's body decides.",
    ),
)
