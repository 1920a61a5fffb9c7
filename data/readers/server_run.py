"""Record of a job on servers: times and counters."""

from __future__ import annotations

import array
import csv
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from ..arrays import FloatArray, IntArray
from ..claims.assumptions import Assumption
from ..files.disk import InputError, atomic_write, parsed_json, read_text, text_lines
from ..files.jsonl import json_lines
from ..files.record import Count, Positive, plain, record
from ..prefix_tree import PrefixTree

HELD_BACK = "held back"
"""In the name of an order whose requests are sent only once they fit into the KV cache."""

_HINT = "Give the file that `batchbound run --server` wrote with --trace."

Seconds = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class ServerCount:
    """Counters of one server during a job; None if missing.

    url, engine, version: Address and software of the server.
    iterations, preemptions, cached_tokens, generated: Differences of the counters; None also after a restart.
    most_running: Most requests in progress in any reading.
    plateau: The same in readings with waiting requests, which shows the server's slots.
    kv_tokens, block_tokens: Tokens of its KV cache, and of one block.
    prefix_caching: True if prompts may share KV cache.
    speculates, drafts: True if the server drafts tokens, and the most of a sequence in an iteration.
    engines: Engines behind the address.
    cached_before, looked_up_before: Prompt tokens from the prefix cache, and looked up there, before the job.
    unreachable: Seconds without a connection to the server.
    """

    url: str
    engine: str = "unknown"
    version: str | None = None
    iterations: Count | None = None
    preemptions: Count | None = None
    cached_tokens: Count | None = None
    generated: Count | None = None
    most_running: Count | None = None
    plateau: Count | None = None
    kv_tokens: Positive | None = None
    block_tokens: Positive | None = None
    prefix_caching: bool | None = None
    speculates: bool | None = None
    drafts: Count | None = None
    engines: Positive | None = None
    cached_before: Count | None = None
    looked_up_before: Count | None = None
    unreachable: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class WholeJob:
    """Marks of a job whose rows all have a completion, to know it again without reading its rows.

    rows: Number of rows.
    size, changed: Bytes of the file of requests, and its time of change in nanoseconds.
    written: Time of change that the output got, in nanoseconds.
    """

    rows: Count
    size: Count
    changed: Count
    written: Count

    @classmethod
    def of(cls, requests: Path, rows: int) -> WholeJob:
        """Return the marks of a job that ends now."""
        state = requests.stat()
        return cls(rows, state.st_size, state.st_mtime_ns, time.time_ns())

    def mark(self, output: Path) -> None:
        """Set the output's time of change."""
        os.utime(output, ns=(self.written, self.written))

    def holds(self, requests: Path, output: Path) -> bool:
        """Return whether neither file changed since the job ended."""
        try:
            state, written = requests.stat(), output.stat().st_mtime_ns
        except OSError:
            return False
        return (state.st_size, state.st_mtime_ns, written) == (self.size, self.changed, self.written)


@dataclass(frozen=True, slots=True)
class SharedNodes:
    """Nodes of the tree of prompts, as in :class:`~.prefix_tree.PrefixTree`."""

    parent: tuple[int, ...]
    tokens: tuple[Positive, ...]
    unit: Positive = 1


@dataclass(frozen=True, slots=True)
class ServerRunHeader:
    """First line of a run's file, before a line per request.

    requests: Number of lines that follow.
    nodes: Beginnings that the prompts share, by the server's token ids; None if unknown.

    The other fields are those of :class:`ServerRun`.
    """

    JSON_HEADER: ClassVar = ("batchbound_server_run", 1)
    JSON_HINT: ClassVar = _HINT

    slots: Positive
    in_flight: Positive
    order: str
    retries: Count
    servers: tuple[ServerCount, ...]
    requests: Count
    run: str | None = None
    assumptions: tuple[Assumption, ...] = ()
    endings: Mapping[str, object] = field(default_factory=dict)
    whole: WholeJob | None = None
    nodes: SharedNodes | None = None
    abandoned: Count = 0
    earlier: Count = 0

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("a run has at least one server")


@dataclass(frozen=True, slots=True)
class SentRequest:
    """Line of a request: its entries in the columns of :class:`ServerRun`.

    leaf, own, continues: Entries of the tree of prompts, if there is one.
    """

    id: str
    choices: Positive
    prompt_tokens: Count
    completion_tokens: Count
    position: Count
    sent: Seconds
    finished: Seconds
    server_of: Count
    failed: Count
    lengths: tuple[Count, ...] = ()
    leaf: int = -1
    own: Count = 0
    continues: int = -1


_OF_TREE = ("leaf", "own", "continues")
_FIELDS = [field.name for field in fields(SentRequest) if field.name not in _OF_TREE]
_COLUMNS = _FIELDS[1:-1]


@dataclass(frozen=True, slots=True, eq=False)
class ServerRun:
    """Requests of a job in sending order, and their servers.

    choices: Completions of each request, shape (requests,).
    prompt_tokens, completion_tokens: Tokens of each prompt, and of all its completions, as the server states
    them (``usage``), else 0, shape (requests,).
    position: Position of each request in its file, shape (requests,).
    sent, finished: Start and end of the last attempt, seconds after the job's start, shape (requests,).
    server_of: Server of each request, shape (requests,).
    failed: True for requests without a completion, shape (requests,).
    slots: Planned requests in progress on a server.
    in_flight: Completions kept in flight on each server.
    retries: Failed attempts that were repeated.
    run: Name of the run from its requests and model; None if unknown.
    assumptions: Assumptions about the servers from the user or a model's config.
    lengths: Estimated tokens of the completions of requests with several, by request; no bound uses them.
    endings: Endings of all completions of the job, of :class:`.Endings`; empty if unknown.
    whole: Marks of the job if all of its rows have a completion, or None.
    tree: Beginnings that the prompts share, by the server's token ids; None if unknown.
    abandoned: Requests in progress at the deadline; they are none of the run's, but the servers counted them.
    earlier: Rows of the job that earlier parts had finished; they are none of the run's.
    """

    ids: Sequence[str]
    choices: IntArray
    prompt_tokens: IntArray
    completion_tokens: IntArray
    position: IntArray
    sent: FloatArray
    finished: FloatArray
    server_of: IntArray
    failed: IntArray
    slots: int
    in_flight: int
    order: str
    retries: int
    servers: tuple[ServerCount, ...]
    run: str | None = None
    assumptions: tuple[Assumption, ...] = ()
    lengths: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    endings: Mapping[str, object] = field(default_factory=dict)
    whole: WholeJob | None = None
    tree: PrefixTree | None = None
    abandoned: int = 0
    earlier: int = 0

    @property
    def sent_after(self) -> IntArray | None:
        """Ends of requests before each sending, shape (requests,); None unless they were held back."""
        if HELD_BACK not in self.order:
            return None
        ends: IntArray = np.searchsorted(np.sort(self.finished), self.sent, side="right")
        return ends

    @property
    def tokens_of_others(self) -> int:
        """Tokens that the servers generated for other clients; zero if unknown, as after a retry."""
        counts = [server.generated for server in self.servers]
        known = [count for count in counts if count is not None]
        if self.retries or self.abandoned or self.failed.any() or len(known) < len(counts):
            return 0
        return max(0, sum(known) - int(self.completion_tokens.sum()))

    @property
    def counted_beside(self) -> str | None:
        """Sentence on other work in the servers' counts; None for none known."""
        if self.abandoned:
            requests = "1 request was" if self.abandoned == 1 else f"{self.abandoned:,} requests were"
            counts = [server.generated for server in self.servers if server.generated is not None]
            lost = max(0, sum(counts) - int(self.completion_tokens.sum())) if not self.retries else 0
            gone = f"their {lost:,} tokens are lost, " if lost and len(counts) == len(self.servers) else ""
            return (
                f"{requests} in progress at the deadline: {gone}counts include them, and nothing is compared"
            )
        if others := self.tokens_of_others:
            return f"the servers generated {others:,} tokens of other clients meanwhile: counts include them"
        return None

    @property
    def only_part(self) -> str | None:
        """Sentence on rows that earlier parts of the job finished; None for a whole job."""
        if not self.earlier:
            return None
        requests = "1 request" if len(self) == 1 else f"{len(self):,} requests"
        return f"figures are of {requests}, after {self.earlier:,} from before"

    def other_slots(self, slots: int) -> list[str]:
        """Return sentences on servers that were seen with other slots than ``slots``."""
        told = list[str]()
        for server in self.servers:
            if server.most_running is not None and server.most_running > slots:
                told.append(
                    f"{server.url}: {server.most_running} requests ran at once, more than"
                    f" --slots {slots}: the bound is for that many"
                )
            elif server.plateau is not None and server.plateau < slots:
                told.append(
                    f"{server.url}: at most {server.plateau} requests were seen running while others"
                    f" waited: slots or room for KV cache are fewer than --slots {slots}"
                )
        return told

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def makespan(self) -> float:
        """Seconds from the start of the job to the last completion."""
        return float(self.finished.max(initial=0.0))

    @property
    def unreachable(self) -> float:
        """Seconds without a connection to any server, at most; of several servers none is known."""
        return self.servers[0].unreachable if len(self.servers) == 1 else 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run as JSON lines: a header, then the requests."""
        header = ServerRunHeader(
            self.slots,
            self.in_flight,
            self.order,
            self.retries,
            self.servers,
            len(self),
            self.run,
            self.assumptions,
            self.endings,
            self.whole,
            _nodes_of(self.tree),
            self.abandoned,
            self.earlier,
        )
        # Views yield one number at a time; lists would hold an object for each.
        columns = [getattr(self, name).data for name in _COLUMNS]
        each = (self.lengths.get(k, ()) for k in range(len(self)))
        names = _FIELDS
        each_row = zip(self.ids, *columns, each, strict=True)
        if self.tree is not None:
            names = [*_FIELDS, *_OF_TREE]
            of_tree = [getattr(self.tree, name).data for name in _OF_TREE]
            each_row = zip(self.ids, *columns, each, *of_tree, strict=True)
        rows = (dict(zip(names, row, strict=True)) for row in each_row)
        encode = json.JSONEncoder(allow_nan=False).encode
        with atomic_write(path) as stream:
            stream.writelines(f"{encode(line)}\n" for line in chain([plain(header)], rows))

    @staticmethod
    def header(path: str | os.PathLike[str]) -> ServerRunHeader:
        """Return the first line of the file that :meth:`save` wrote."""
        first = next(iter(text_lines(path)), "")
        return record(ServerRunHeader, parsed_json(first, path, line=1, hint=_HINT), file=path, line=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ServerRun:
        """Return the run that :meth:`save` wrote."""
        header, lines = cls.header(path), enumerate(text_lines(path), 1)
        next(lines)
        ids, lengths = list[str](), dict[int, tuple[int, ...]]()
        names = _COLUMNS if header.nodes is None else [*_COLUMNS, *_OF_TREE]
        columns = {name: array.array("d" if name in ("sent", "finished") else "q") for name in names}
        for line, text in lines:
            if not text:
                continue
            request = _request_of(text, path, line)
            if request.server_of >= len(header.servers):
                what = f"{request.server_of} is not below {len(header.servers)}"
                raise InputError(what, file=path, where=f"line {line}, field 'server_of'", hint=_HINT)
            if request.lengths:
                lengths[len(ids)] = request.lengths
            ids.append(request.id)
            for name, column in columns.items():
                column.append(getattr(request, name))
        if len(ids) != header.requests:
            raise InputError("the file ends before the run does", file=path, hint="Copy it whole.")
        leaf, own, continues = (np.asarray(columns.pop(name, ()), np.int64) for name in _OF_TREE)
        return cls(
            ids=tuple(ids),
            slots=header.slots,
            in_flight=header.in_flight,
            order=header.order,
            retries=header.retries,
            servers=header.servers,
            run=header.run,
            assumptions=header.assumptions,
            lengths=lengths,
            endings=header.endings,
            whole=header.whole,
            abandoned=header.abandoned,
            earlier=header.earlier,
            tree=_tree_of(header.nodes, leaf, own, continues, path),
            **{name: np.asarray(column) for name, column in columns.items()},
        )


_REQUEST = msgspec.json.Decoder(SentRequest)


def _request_of(text: str, path: str | os.PathLike[str], line: int) -> SentRequest:
    try:
        request = _REQUEST.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        request = None
    if request is None or max(*(getattr(request, name) for name in _COLUMNS), *request.lengths) >= 2**63:
        # The slower reader names the field and the mistake.
        value = parsed_json(text, path, line=line, hint=_HINT)
        request = record(SentRequest, value, file=path, line=line, hint=_HINT)
    return request


def _nodes_of(tree: PrefixTree | None) -> SharedNodes | None:
    if tree is None:
        return None
    return SharedNodes(tuple(tree.parent.tolist()), tuple(tree.tokens.tolist()), tree.unit)


def _tree_of(
    nodes: SharedNodes | None,
    leaf: IntArray,
    own: IntArray,
    continues: IntArray,
    path: str | os.PathLike[str],
) -> PrefixTree | None:
    if nodes is None or not len(leaf):
        return None
    parent, tokens = np.array(nodes.parent, np.int64), np.array(nodes.tokens, np.int64)
    try:
        return PrefixTree(parent, tokens, leaf, own, nodes.unit, continues)
    except ValueError as error:
        raise InputError(str(error), file=path, hint=_HINT) from None


_TIMED = ("prompt_tokens", "completion_tokens", "start", "first", "last")
_TIMED_HINT = (
    "Give the columns id, prompt_tokens, completion_tokens, start, first, last, or the lengths alone."
)


@dataclass(frozen=True, slots=True, eq=False)
class TimedRequests:
    """Completed requests of a server with their times, in sending order.

    prompt, output: Tokens of each prompt and completion, shape (requests,).
    start, first, last: Seconds of sending, first token and last token, shape (requests,).
    """

    prompt: IntArray
    output: IntArray
    start: FloatArray
    first: FloatArray
    last: FloatArray


def is_timed(text: str) -> bool:
    """Return whether a text holds :class:`TimedRequests`."""
    first = text.lstrip("\ufeff \n").partition("\n")[0]
    if not first.startswith("{"):
        return set(_TIMED) <= {name.strip() for name in first.split(",")}
    try:
        line = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and {"custom_id", "response"} <= set(line)


def read_timed_requests(path: str | os.PathLike[str]) -> TimedRequests:
    """Read successful requests with their times.

    The file is a CSV, or batch output with vLLM's ``metrics``.
    """
    text = read_text(path)
    rows = _csv_rows(text, path) if not text.lstrip("\ufeff \n").startswith("{") else _output_rows(path)
    if not rows:
        raise InputError("holds no completed request", file=path, hint=_TIMED_HINT)
    table = np.array(sorted(rows, key=lambda row: row[2]))
    counts = table[:, :2].astype(np.int64)
    return TimedRequests(counts[:, 0], counts[:, 1], table[:, 2], table[:, 3], table[:, 4])


def _csv_rows(text: str, path: str | os.PathLike[str]) -> list[tuple[float, ...]]:
    rows = []
    for number, row in enumerate(
        csv.DictReader(io.StringIO(text.lstrip("\ufeff")), skipinitialspace=True), 2
    ):
        values = []
        for name in _TIMED:
            try:
                values.append(float(row.get(name) or "nothing"))
            except ValueError:
                where = f"line {number}, column '{name}'"
                what = f"{row.get(name)!r} is not a number"
                raise InputError(what, file=path, where=where, hint=_TIMED_HINT) from None
        rows.append(_refuse_times(tuple(values), path, number))
    return rows


def _output_rows(path: str | os.PathLike[str]) -> list[tuple[float, ...]]:
    rows = []
    for number, line in json_lines(path):
        response = line.get("response")
        if not isinstance(response, Mapping) or response.get("status_code") != 200:
            continue
        body = response.get("body")
        parts = [body.get(name) if isinstance(body, Mapping) else None for name in ("usage", "metrics")]
        usage, metrics = (part if isinstance(part, Mapping) else {} for part in parts)
        found = [usage.get(name) for name in _TIMED[:2]]
        found += [metrics.get(name) for name in ("time_to_first_token_ms", "generation_time_ms")]
        values = []
        for name, value in zip((*_TIMED[:2], "metrics", "metrics"), found, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | float):
                where = f"line {number}, field 'response.body'"
                hint = "Start vLLM with --enable-per-request-metrics, or give a table of lengths."
                raise InputError(f"has no {name}", file=path, where=where, hint=hint)
            values.append(float(value))
        prompt, output, first, rest = values
        row = (prompt, output, 0.0, first * 1e-3, (first + rest) * 1e-3)
        rows.append(_refuse_times(row, path, number))
    return rows


def _refuse_times(row: tuple[float, ...], path: str | os.PathLike[str], number: int) -> tuple[float, ...]:
    """Return a row; raise InputError for impossible tokens or times."""
    prompt, output, start, first, last = row
    whole = prompt == int(prompt) and output == int(output) if np.isfinite(row).all() else False
    if not whole or prompt < 1 or output < 1 or not start <= first <= last:
        what = "tokens must be whole numbers from 1, and start, first and last in that order"
        raise InputError(what, file=path, where=f"line {number}", hint=_TIMED_HINT)
    return row
