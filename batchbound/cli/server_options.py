"""Options of ``run --server``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import get_args

from ..run_job.batch_to_send import RETRIED, Order, ServerOptions
from .inputs import columns_of, positive, say_texts, seconds
from .parser import Parser

_OF_SERVERS = (
    *("server", "in_flight", "order", "batched_tokens", "kv_tokens"),
    *("timeout", "attempts", "outage", "deadline", "body", "header", "ca", "retry"),
)
_SHARED = ("plan", "prompts", "model", "output", "trace", "overwrite", "json", "seed", "params")
_PLANNING = (
    "slots",
    "lengths",
    "prompt_column",
    "id_column",
    "max_tokens_column",
    "drop_last_assistant",
    "raw",
    "longest_completion",
    "temperature",
)

ON_SERVERS = (*_OF_SERVERS, *_SHARED, *_PLANNING)
"""Options of ``run`` for servers; the others are for our own engine."""


def add_server(parser: Parser) -> None:
    """Add the options that send a job to servers."""
    group = parser.add_argument_group(
        "server",
        "Send the requests to a server with OpenAI's API (vLLM, SGLang, llama.cpp, ...), in the plan's order."
        " PLAN may then be a batch file, and --model replaces the model's name in every request.",
    )
    group.add_argument(
        "--server",
        action="append",
        metavar="URL",
        everyday=True,
        help="address of a server, http://HOST:PORT; may be repeated for replicas",
    )
    group.add_argument(
        "--in-flight",
        needs=["--server"],
        type=positive,
        metavar="N",
        help="completions in flight on each server (default: the slots and an eighth more, at least 4; raised"
        " up to fourfold if its queue runs empty)",
    )
    group.add_argument(
        "--order",
        needs=["--server"],
        choices=get_args(Order),
        help="order of the requests; auto: the order of fewest simulated iterations (default: auto)",
    )
    group.add_argument(
        "--batched-tokens",
        needs=["--server"],
        type=positive,
        metavar="N",
        help="maximum tokens per iteration, vLLM's --max-num-batched-tokens (default: 2048 in the simulation,"
        " no limit in the bound)",
    )
    group.add_argument(
        "--timeout",
        needs=["--server"],
        type=seconds,
        metavar="S",
        help="time limit of a request in seconds (default: 3600)",
    )
    group.add_argument(
        "--attempts",
        needs=["--server"],
        type=positive,
        metavar="N",
        help="attempts at a request if the server is busy or fails with a 5xx (default: 8)",
    )
    group.add_argument(
        "--outage",
        needs=["--server"],
        type=seconds,
        metavar="S",
        help="seconds without a reachable server until the run stops (default: 600)",
    )
    group.add_argument(
        "--deadline",
        needs=["--server"],
        type=seconds,
        metavar="S",
        help="seconds until the run ends; unfinished requests are marked batch_expired",
    )
    group.add_argument(
        "--body",
        needs=["--server"],
        metavar="FILE",
        help="JSON object of fields to add to request bodies that lack them",
    )
    group.add_argument(
        "--retry",
        needs=["--server"],
        action="append",
        choices=RETRIED,
        help="rows of an earlier run to send again: failed, expired by --deadline, cut at max_tokens (then"
        " under the cap of --longest-completion); may be repeated (default: failed and expired)",
    )
    group.add_argument(
        "--header",
        needs=["--server"],
        action="append",
        metavar="NAME=VALUE",
        help="header of each request, such as a gateway's key; may be repeated; @FILE reads one a line",
    )
    group.add_argument(
        "--ca",
        needs=["--server"],
        metavar="FILE",
        help="certificates to trust (default: the system's, and SSL_CERT_FILE)",
    )


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the options of a run on servers."""
    named = {field.name: getattr(args, field.name) for field in fields(ServerOptions) if field.name in args}
    given = {name: value for name, value in named.items() if value is not None}
    given |= {name: tuple(given[name]) for name in ("header", "retry") if name in given}
    columns = columns_of(args)
    say_texts(args.plan, columns, "to the chat endpoint")
    return ServerOptions(tuple(args.server), columns=columns, **given)
