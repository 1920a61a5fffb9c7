"""Requests to send to servers, their plan, and the options of sending."""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..data.arrays import IntArray
from ..data.files.disk import InputError, read_json_object, read_text
from ..data.files.sources import local_file
from ..data.iteration_plan import IterationPlan, load_plan
from ..data.iterations import Sequences
from ..data.plan import Plan, holds_requests
from ..data.prompts.columns import PromptColumns
from ..data.prompts.table import is_prompt_table
from ..data.readers.completions import ending_of, output_lines
from ..data.readers.server_batch import ServerBatch, completion_ids, planned_lengths, read_server_batch
from ..data.readers.server_run import ServerRun
from ..executor.jobs.params import RunParams
from ..planning.release import Releasable, plan_order
from .load import refuse_changed
from .options import file_of, params_of

Order = Literal["auto", "plan", "longest", "file"]

RETRIED = ("failed", "expired", "cut")
"""Endings of rows that a run can repeat."""

SAME_CAP = "--retry cut would cut the same completions again"
HIGHER_CAP = "Add --longest-completion N, a higher cap."

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""Name of an HTTP header."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Servers that complete a batch, and options of sending.

    Parameters
    ----------
    urls
        Addresses ``http://HOST:PORT`` of the servers, replicas of one another.
    model
        Name that replaces every request's model; None to keep them.
    prompts
        File of the planned prompts, if moved.
    columns
        Columns of a table of prompts that is sent without a plan.
    lengths
        Completion lengths of a batch file, as in ``plan --lengths``; by default those stated, else those of
        an earlier run of the same requests.
    kv_tokens
        KV capacity of each engine in tokens. By default the plan's; the server's own counts only for a model
        without sliding windows.
    slots
        Slots of each engine; by default the plan's or the server's.
    in_flight
        Completions in flight on each server; by default nine eighths of the slots, more if its queue empties.
    order
        Order of the requests; ``"auto"`` chooses the one of fewest simulated iterations.
    batched_tokens
        Maximum tokens per iteration; by default 2048 in the simulation and no limit in the bound.
    timeout
        Time limit of a request in seconds; by default that of ``params``.
    attempts
        Attempts at a request if the server is busy or fails with a 5xx; by default those of ``params``.
    outage
        Seconds without a reachable server until the run stops; by default those of ``params``.
    deadline
        Seconds until the run ends; unfinished requests are marked ``batch_expired``.
    body
        JSON file of fields to add to request bodies that lack them.
    header
        Headers of each request, ``NAME=VALUE``, or ``@FILE`` with one in each line. They are never written.
    ca
        File of certificates to trust; by default those of the system and of ``SSL_CERT_FILE``.
    longest_completion
        Cap in tokens of completions that have none; with ``retry`` of those cut, of each with a lower one.
    temperature
        Sampling temperature of requests that state none.
    retry
        Endings of rows of an earlier run to send again: ``"failed"``, ``"expired"``, ``"cut"`` at the cap.
    seed
        Seed of shuffled orders and of the waits between attempts.
    params
        Parameters that tune the run, or a TOML file of them.

    Raises
    ------
    ValueError
        If no server is named, or the order is unknown.
    """

    urls: tuple[str, ...]
    model: str | None = None
    prompts: str | None = None
    columns: PromptColumns | None = None
    lengths: str | None = None
    kv_tokens: int | None = None
    slots: int | None = None
    in_flight: int | None = None
    order: Order = "auto"
    batched_tokens: int | None = None
    timeout: float | None = None
    attempts: int | None = None
    outage: float | None = None
    deadline: float | None = None
    body: str | None = None
    header: tuple[str, ...] = field(default=(), repr=False)
    ca: str | None = None
    longest_completion: int | None = None
    temperature: float | None = None
    retry: tuple[str, ...] = ("failed", "expired")
    seed: int = 0
    params: RunParams | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not self.urls or isinstance(self.urls, str):
            raise ValueError(f"urls are {self.urls!r}, not a tuple of one URL or more")
        if self.order not in get_args(Order):
            raise ValueError(f"the order {self.order!r} is not one of {', '.join(get_args(Order))}")
        if isinstance(self.retry, str) or not set(self.retry) <= set(RETRIED):
            raise ValueError(f"retry is {self.retry!r}, not a tuple of {', '.join(RETRIED)}")
        if "cut" in self.retry and self.longest_completion is None:
            raise InputError(SAME_CAP, hint=HIGHER_CAP)
        if isinstance(self.header, str):
            raise ValueError("header is a text, not a tuple of NAME=VALUE")
        if self.ca is not None:
            _check_certificates(self.ca)

    @property
    def defaults(self) -> dict[str, object]:
        """Fields to add to request bodies that lack them."""
        fields = {} if self.body is None else read_json_object(Path(self.body))
        if self.temperature is None:
            return fields
        if "temperature" in fields:
            hint = "Leave it out of one of the two."
            raise InputError("--temperature and --body both state a temperature", file=self.body, hint=hint)
        return {**fields, "temperature": self.temperature}

    @property
    def sent_headers(self) -> dict[str, str]:
        """Headers of each request beside our own."""
        headers = {}
        for text in self.header:
            lines = read_text(Path(text[1:])).splitlines() if text.startswith("@") else [text]
            for line in filter(str.strip, lines):
                name, _, value = line.partition("=")
                if (
                    not _HEADER.fullmatch(name.strip())
                    or not value.strip().isprintable()
                    or not value.strip()
                ):
                    # The line may hold a secret, so no message repeats it.
                    where = f"--header {text}" if text.startswith("@") else "--header"
                    hint = "Write NAME=VALUE, such as --header X-Project=evaluation, or @FILE."
                    raise InputError("it is not NAME=VALUE", where=where, hint=hint)
                headers[name.strip()] = value.strip()
        return headers

    @property
    def tuned(self) -> RunParams:
        """Parameters of the run, with the options of time and retries."""
        params = params_of(self.params)
        patience = params.patience
        if self.attempts is not None:
            patience = replace(patience, attempts=self.attempts)
        if self.outage is not None:
            patience = replace(patience, outage_seconds=self.outage)
        seconds = params.request_seconds if self.timeout is None else self.timeout
        return replace(params, patience=patience, request_seconds=seconds)

    def files(self) -> Iterator[Path]:
        """Yield the files that a run reads, except the batch."""
        headers = (text[1:] for text in self.header if text.startswith("@"))
        for text in filter(
            None, (self.prompts, self.lengths, self.body, file_of(self.params), self.ca, *headers)
        ):
            for name in {text, text.rpartition(":")[2]}:
                if Path(name).is_file():
                    yield Path(name)


def _check_certificates(path: str) -> None:
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        hint = "Name a PEM file of the certificates to trust."
        raise InputError(
            f"no certificates can be read ({error.strerror or error})", file=path, hint=hint
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Requests to send, and their plan.

    path: File of the requests.
    requests: Requests in the order of the file.
    output: Planned tokens of each completion, shape (requests,).
    planned: Positions of the requests in the plan's order; None without a plan.
    slots: Slots of the plan; None without one.
    iterations: Plan for servers; None without one.
    unknown: Number of requests with neither length nor cap.
    earlier: True if an earlier run of these requests gave the lengths.
    source: Kind of the plan's lengths; None without a plan.
    """

    path: Path
    requests: ServerBatch
    output: IntArray
    planned: IntArray | None
    slots: int | None
    iterations: IterationPlan | None = None
    unknown: int = 0
    earlier: bool = False
    source: str | None = None

    def lengths_known(self, options: ServerOptions) -> bool:
        """Return whether a plan, an option, the file or a run gives lengths."""
        stated = self.planned is not None or options.lengths is not None or self.earlier
        return stated or bool(self.requests.stated.any())

    def with_earlier(self, options: ServerOptions, output: Path, trace: Path, run: str) -> Batch:
        """Return the batch with the lengths of an earlier run's completions, if they repeat.

        output, trace: Completions and trace of the earlier run.
        run: Digest of this run, which the earlier one must have.
        """
        if self.lengths_known(options) or not self.requests.repeats:
            return self
        if run_of(trace) != run or not output.is_file():
            return self
        lengths = self.repeated_lengths(output_lines(output))
        return self if lengths is None else replace(self, output=lengths, unknown=0, earlier=True)

    def under_cap(self, cap: int, sent: npt.NDArray[np.bool_]) -> Batch:
        """Return the batch with the caps of a retry as lengths; those of unsent rows order nothing.

        cap: New cap of rows with a lower one.
        sent: True for rows to send, shape (requests,).
        """
        return replace(self, output=np.where(sent, np.maximum(self.output, cap), cap), unknown=0)

    def repeated_lengths(self, lines: Iterable[Mapping[str, Any]]) -> IntArray | None:
        """Return each request's length in the next run; None if output lines do not tell all."""
        from ..executor.server.server_job import usage_of

        batch = self.requests
        # Only the sum of several completions is known.
        if not batch.repeats or (batch.choices > 1).any():
            return None
        lengths = np.zeros_like(batch.caps)
        for line in lines:
            place = batch.names.find(str(line["custom_id"]))
            if place is None or line.get("id") != batch.line_id(place):
                continue
            ending, cap = ending_of(line), int(batch.caps[place])
            if ending in ("whole", "cut"):
                tokens = usage_of(line["response"]["body"])[1]
                # A completion cut at a lower cap goes on under a higher one.
                lower = ending == "cut" and batch.uncapped[place] and tokens < cap
                lengths[place] = 0 if lower else min(tokens, cap) if cap else tokens
        return lengths if (lengths > 0).all() else None

    def had_lengths(self, options: ServerOptions) -> bool:
        """Return whether the run's lengths were those of its completions, as far as known."""
        given = self.source or (options.lengths or "").partition(":")[0]
        return (
            given in ("known", "completions") if given else self.earlier or bool(self.requests.stated.all())
        )

    def work(self) -> Releasable:
        """Return the requests with planned lengths, for the simulation."""
        if self.iterations is not None:
            plan = self.iterations
            request = np.repeat(np.arange(len(self.requests)), self.requests.choices)
            rows = Sequences(plan.workload.input_tokens, plan.workload.output_tokens, tree=plan.tree)
            return Releasable.of_rows(rows, request, exact=plan.provenance.lengths.get("kind") == "known")
        return Releasable(
            self.requests.prompt_tokens,
            self.output,
            self.requests.choices,
            exact=self.earlier or bool(self.requests.stated.all()),
        )


def read_batch(path: Path, options: ServerOptions) -> Batch:
    """Read a plan or a file of requests."""
    if options.columns is not None or not _is_plan(path):
        if options.prompts is not None:
            raise InputError("--prompts is for a plan", hint="Leave it out.")
        if options.order == "plan":
            hint = "Plan first with `batchbound plan`, or choose another order."
            raise InputError("--order plan needs a plan", file=path, hint=hint)
        requests = read_server_batch(path, options.columns, options.defaults, options.longest_completion)
        known = np.where(requests.stated > 0, requests.stated, requests.caps)
        unknown = int((known == 0).sum())
        if unknown and options.lengths is None and options.order in ("auto", "file"):
            # Lengths are unknown: the order is that of the file.
            return Batch(path, requests, known, None, None, unknown=unknown)
        output, _ = planned_lengths(requests, options.lengths)
        return Batch(path, requests, output, None, None)
    if options.lengths is not None:
        raise InputError("the plan states the lengths", hint="Leave --lengths out, or plan again.")
    plan = load_plan(path)
    if isinstance(plan, IterationPlan):
        slots = {share.held_back or share.limits.sequences for share in plan.shares}
    else:
        slots = {replica.slots for replica in plan.fleet.replicas}
    if len(slots) > 1 and options.slots is None:
        raise InputError("its replicas differ in slots", file=path, hint="Give --slots.")
    return _planned(plan, path, options, max(slots))


def _planned(plan: Plan | IterationPlan, path: Path, options: ServerOptions, slots: int) -> Batch:
    source = plan.provenance.prompts
    if source is None:
        hint = "Plan a batch file of prompts."
        raise InputError("the plan is of lengths only", file=path, hint=hint)
    prompts = local_file(options.prompts or source.file(path.resolve().parent))
    refuse_changed(prompts, source)
    requests = read_server_batch(prompts, source.columns, options.defaults, options.longest_completion)
    lengths_kind = str(plan.provenance.lengths.get("kind"))
    mixing = isinstance(plan, IterationPlan)
    names = completion_ids(requests) if mixing else list(requests.names)
    if names != plan.workload.ids.tolist():
        raise InputError("its requests are not those of the plan", file=prompts, hint="Plan again.")
    if not isinstance(plan, IterationPlan):
        lengths = plan.workload.output_tokens
        return Batch(prompts, requests, lengths, plan_order(plan), slots, source=lengths_kind)
    starts = np.cumsum(requests.choices) - requests.choices
    rank = np.argsort(plan.order)
    output = np.maximum.reduceat(plan.workload.output_tokens, starts)
    # A request is sent when the first of its completions is due.
    order = np.argsort(np.minimum.reduceat(rank, starts), kind="stable")
    return Batch(prompts, requests, output, order, slots, plan, source=lengths_kind)


def _is_plan(path: str | os.PathLike[str]) -> bool:
    if is_prompt_table(path) or holds_requests(path):
        return False
    first = read_text(path).lstrip().partition("\n")[0]
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return True
    return not (isinstance(value, dict) and ("body" in value or "custom_id" in value))


def run_of(trace: Path) -> str | None:
    """Return the digest of the run in a trace, if there is one."""
    try:
        return ServerRun.header(trace).run if trace.is_file() else None
    except InputError:
        return None


def run_in(trace: Path) -> ServerRun | None:
    """Return the run in a trace; None if the trace is not whole."""
    try:
        return ServerRun.load(trace)
    except InputError:
        return None
