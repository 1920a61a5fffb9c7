"""Parameters of a run: journal, watchdog and retries."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ...data.files.params import read_params
from ...heuristics.serving.in_flight import RUNNING_SHARE

LARGEST_REPLIES = 2**26
"""Most bytes of all replies in transit, by default."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Retries of requests, and of servers that fail.

    Parameters
    ----------
    attempts
        Attempts at a request while its server is busy or returns a 5xx. More attempts outlast longer
        overloads.
    timed_out_attempts
        Attempts at a request that times out. Each further attempt costs ``request_seconds``.
    backoff_seconds
        Seconds before the second attempt, doubled for each further one; half of the wait is random. A larger
        value spares a busy server and leaves slots empty.
    longest_backoff_seconds
        Largest backoff in seconds.
    outage_seconds
        Seconds without a server that accepts requests before the run stops. A larger value outlasts longer
        restarts and rate limits.
    outage_told_seconds
        Seconds without a connection before an outage is reported. A larger value keeps short restarts silent.
    breaks_before_alone
        Broken connections of a server without a completion between them before it gets one request at a time.
        A larger value needs more attempts to find a request that crashes the server.
    breaks_alone
        Connections that a request breaks alone on its server before it fails.
    hopeless_requests
        Failed requests, without any completion, that stop the run. A larger value tries more requests.
    alike_requests
        Requests of one endpoint and model, without any completion, that stop it if the server refuses them
        for a reason that all share: key, account, path or model. A larger value tries more requests.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """

    attempts: int = 8
    timed_out_attempts: int = 2
    backoff_seconds: float = 0.5
    longest_backoff_seconds: float = 60.0
    outage_seconds: float = 600.0
    outage_told_seconds: float = 3.0
    breaks_before_alone: int = 3
    breaks_alone: int = 3
    hopeless_requests: int = 20
    alike_requests: int = 4

    def __post_init__(self) -> None:
        _check(self)

    def wait(self, failures: int, rng: random.Random) -> float:
        """Return the seconds to wait after some failures in a row."""
        whole = min(self.longest_backoff_seconds, self.backoff_seconds * 2.0 ** min(failures - 1, 30))
        return whole * (0.5 + 0.5 * rng.random())


@dataclass(frozen=True, slots=True)
class RunParams:
    """Parameters of a run, on a model or on servers.

    Parameters
    ----------
    journal_sync_seconds
        Seconds between syncs of the journal. A larger value is faster on slow disks and loses more finished
        completions at a power failure; a killed process loses none.
    stall_seconds
        Seconds without a finished stage before the command gives up. A larger value tolerates longer stages
        and notices a hung device later.
    request_seconds
        Time limit of a request on a server in seconds. A larger value tolerates longer queues and notices a
        hung server later.
    metrics_seconds
        Seconds between readings of a server's counters. A larger value loads the server less and notices an
        empty queue later.
    queue_iterations
        Iterations that a server's queue should last. A larger value keeps more requests in flight and leaves
        fewer to reorder.
    most_in_flight
        Largest number of completions in flight on a server, as a multiple of the usual number.
    running_share
        Expected share of a request's several completions that run while it is in flight. A smaller value
        keeps more requests in flight and leaves fewer to reorder.
    largest_replies
        Most bytes of all replies in transit from a server. A larger value accepts longer completions, and
        takes more memory if a server sends without end.
    reorder_share
        Share of the remaining requests that must complete before the order adapts to the lengths seen. A
        larger value adapts less often.
    repeatable
        Compute each request of a run on a model as if it were alone, so that the run repeats bit by bit, and
        write a digest of tokens and log-probabilities. Decode steps with few rows take longer.
    product_rows
        Rows of each product of a repeatable run. A larger value prefills faster and makes decode steps with
        fewer rows slower. Runs with other values have other bits.
    patience
        Retries; the table ``[run.patience]`` in a file.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """

    journal_sync_seconds: float = 1.0
    stall_seconds: float = 1800.0
    request_seconds: float = 3600.0
    metrics_seconds: float = 1.0
    queue_iterations: int = 16
    most_in_flight: int = 4
    running_share: float = RUNNING_SHARE
    largest_replies: int = LARGEST_REPLIES
    reorder_share: float = 0.005
    repeatable: bool = False
    product_rows: int = 16
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> RunParams:
        """Read the table ``[run]`` of a TOML file.

        Raises
        ------
        InputError
            If the file cannot be read, or holds an unknown or impossible parameter.
        """
        return read_params(cls, path, "run")


def _check(params: Any) -> None:
    for parameter in fields(params):
        value = getattr(params, parameter.name)
        if is_dataclass(value):
            continue
        if parameter.type == "bool":
            if not isinstance(value, bool):
                raise ValueError(f"{parameter.name} is {value!r}; it must be true or false")
            continue
        is_whole = parameter.type == "int"
        good = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if not good or not (1 if is_whole else 0) <= value < float("inf") or value == 0:
            wanted = "a whole number, at least 1" if is_whole else "a number above 0"
            raise ValueError(f"{parameter.name} is {value!r}; it must be {wanted}")
