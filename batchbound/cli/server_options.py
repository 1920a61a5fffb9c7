"""The options of ``run --server``, and which others have no effect there."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import get_args

from ..data.files.disk import InputError
from ..running.server import Order, ServerOptions
from .inputs import columns_of, positive, refuse_given, seconds

_SHARED = frozenset({"plan", "prompts", "model", "output", "trace", "overwrite", "json", "seed"})
"""Options of ``run`` that a run on servers heeds as well; its others say how our own engine works."""

_SERVER_ONLY = {
    "--in-flight": "in_flight",
    "--order": "order",
    "--batched-tokens": "batched_tokens",
    "--timeout": "timeout",
    "--attempts": "attempts",
    "--outage": "outage",
}

_PLANNING = ("slots", "lengths", "prompt_column", "id_column", "max_tokens_column", "drop_last_assistant")
"""Options that say how prompts without a plan are taken, by a server as by a model of our own."""


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options that send a job to servers instead of a model of our own."""
    group = parser.add_argument_group(
        "server",
        "send the requests to a server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, ...), in the"
        " plan's order; PLAN may then be a batch file, and --model renames the model in every request",
    )
    group.add_argument(
        "--server", action="append", metavar="URL", help="http://HOST:PORT; several are replicas"
    )
    group.add_argument(
        "--in-flight",
        type=positive,
        metavar="N",
        help="completions kept in flight on each server (default: the slots and an eighth more, 4 at least;"
        " up to four times as many where its queue is seen to run empty)",
    )
    group.add_argument(
        "--order",
        choices=get_args(Order),
        help="of the requests: auto takes the one of fewest simulated iterations (default: auto)",
    )
    group.add_argument(
        "--batched-tokens",
        type=positive,
        metavar="N",
        help="most tokens of an iteration, vLLM's --max-num-batched-tokens (default: 2048 in the simulation,"
        " no limit in the bound)",
    )
    group.add_argument(
        "--timeout", type=seconds, metavar="S", help="seconds a request may take (default: 3600)"
    )
    group.add_argument(
        "--attempts",
        type=positive,
        metavar="N",
        help="at a request that the server calls busy or fails with a 5xx (default: 8)",
    )
    group.add_argument(
        "--outage",
        type=seconds,
        metavar="S",
        help="seconds no server may be reachable before the run stops (default: 600)",
    )


def refuse_without_server(args: argparse.Namespace) -> None:
    """Raise InputError if an option of servers is given without one, or a model is missing."""
    for option, name in _SERVER_ONLY.items():
        if getattr(args, name) is not None:
            raise InputError(f"{option} is for a server", hint="Give --server URL, or leave it out.")
    if args.model is None:
        hint = "Name a model with --model, or a server with --server."
        raise InputError("nothing is named to run the requests on", hint=hint)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """
    Return what the options of :func:`add_server` say, with those of ``run`` that servers heed.

    Raises
    ------
    InputError
        If an option of our own engine is given, which no server would heed.
    """
    heeded = {*_SHARED, *_SERVER_ONLY.values(), *_PLANNING, "server"}
    usual = vars(_defaults())
    hint = "Leave it out: the server decides, or the request's body."
    refuse_given(args, (name for name in usual if name not in heeded), "on a server", hint, usual=usual)
    named = {field.name: getattr(args, field.name) for field in fields(ServerOptions) if field.name in args}
    given = {name: value for name, value in named.items() if value is not None}
    return ServerOptions(tuple(args.server), columns=columns_of(args), **given)


def _defaults() -> argparse.Namespace:
    from .commands.run import configure

    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args([])
