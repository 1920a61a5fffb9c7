"""Screen of ``batchbound size``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..data.figures import clock_text
from ..data.files.disk import atomic_write
from ..data.files.record import plain
from ..options.size import SizeOptions
from ..sizing.result import START_OFF, Deployment, Sizing
from .gain import command_lines
from .streams import say

_SHOWN = 5
"""Deployments in the table."""


def show(sizing: Sizing, options: SizeOptions) -> int:
    """Print the deployments; return 1 if none keeps the windows."""
    if options.picture is not None:
        from ..drawing import deployments

        with atomic_write(options.picture, binary=True) as stream:
            deployments(sizing).savefig(stream, format=Path(options.picture).suffix[1:])
    if options.json:
        say(json.dumps(_summary(sizing)))
    else:
        for line in _lines(sizing):
            say(line)
    return 0 if sizing.kept else 1


def _summary(sizing: Sizing) -> dict[str, object]:
    """Return the sizing as plain JSON values."""
    return {
        "lengths": sizing.pooled.word,
        "proven": sizing.pooled.proven,
        "windows_s": dict(zip(sizing.names, sizing.windows, strict=True)),
        "keeps": bool(sizing.kept),
        "choice": None if sizing.choice is None else _values(sizing.choice),
        "kept": [_values(one) for one in sizing.kept],
        "next_cheaper": None if sizing.next_cheaper is None else _values(sizing.next_cheaper),
        "frontier": [_values(one) for one in sizing.frontier],
        "impossible": {
            name: {"devices": count, **plain(more)} if more.limit != "memory" else {"devices": count}
            for name, (count, more) in sizing.impossible.items()
        },
        "jobs": [{"file": sizing.names[job], "kept": kept, **plain(end)} for job, end, kept in sizing.agenda],
        "commands": list(sizing.commands),
    }


def _values(one: Deployment) -> dict[str, object]:
    replica = one.replica
    settings = {name: getattr(replica, name) for name in ("degree", "slots", "batched_tokens", "kv_tokens")}
    named = {"device": replica.offer.name, "replicas": one.replicas}
    return {**named, **settings, "cost": one.cost, "sure_cost": one.sure_cost, **plain(one.end)}


def _lines(sizing: Sizing) -> Iterator[str]:
    rows, word = sizing.pooled.rows, sizing.pooled.word
    each = f"{rows.prompt.mean():,.0f} tokens in and {rows.output.mean():,.0f} out each"
    yield f"{sizing.model}: {sizing.weights / 1e9:,.1f} GB of weights by {sizing.options.model}"
    yield f"{len(rows):,} requests, {each}{' at most' * (word == 'at most')}"
    if sizing.too_long:
        yield f"{sizing.too_long:,} of them exceed the model's {sizing.positions:,} positions: refused there"
    shared = rows.cached.sum() / rows.prompt.sum()
    yield f"{shared:.0%} of the prompts' tokens in beginnings that are computed once"
    if not sizing.pooled.counted:
        yield "prompts are counted at four bytes a token; --tokenizer counts them"
    priced = all(one.replica.offer.price is not None for one in sizing.tried)
    title = "at caps" if word == "at most" else word
    head = f"{title:>9s} {'90 % interval':>18s} {'90 % sure':>9s} {'cost' if priced else 'device-h':>8s}"
    yield f"  {'':24s} slots {head}"
    shown = sizing.kept[:_SHOWN] or ((sizing.choice,) if sizing.choice else ())
    yield from (_row(one, "->" if sizing.kept and one is sizing.choice else "") for one in shown)
    yield from _verdict(sizing)
    yield from _impossible(sizing)
    yield from _jobs(sizing)
    yield from _replica(sizing)


def _row(one: Deployment, mark: str) -> str:
    end = one.end
    interval = f"{clock_text(end.low)}-{clock_text(end.high)}"
    times = f"{clock_text(end.expected):>9s} {interval:>18s} {clock_text(end.sure):>9s}"
    return f"  {mark:3s}{one.name:21s} {one.replica.slots:5d} {times} {one.cost:8,.2f}"


def _verdict(sizing: Sizing) -> Iterator[str]:
    window = ", ".join(dict.fromkeys(map(clock_text, sizing.windows)))
    if sizing.kept and sizing.choice is not None:
        choice, done = (
            sizing.choice,
            map(sizing.time_of, (sizing.choice.end.expected, sizing.choice.end.sure)),
        )
        yield (
            f"{choice.name}: done by {next(done)}, 90 % sure by {next(done)}"
            f" {sizing.now.astimezone():%Z}, if started now"
        )
        unit = "cost" if choice.replica.offer.price is not None else "device-hours"
        yield f"  {unit} {choice.cost:,.2f}, 90 % sure at most {choice.sure_cost:,.2f}"
    if not sizing.tried:
        yield "no replica of up to 8 devices holds the weights and the longest request"
    elif not sizing.kept:
        yield f"nothing that was tried ends with 90 % within {window}; the nearest is shown"
        if sizing.choice is not None and sizing.choice.replica.offer.startup is None:
            start = clock_text(sizing.choice.replica.startup)
            yield f"  its start alone is assumed to take {start}; `startup` in --prices states yours"
    elif sizing.next_cheaper is None:
        yield f"nothing cheaper was tried; window {window}"
    else:
        cheaper, several = sizing.next_cheaper, len(sizing.names) > 1
        late = ", ".join(sizing.names[job] for job in sizing.order_on(cheaper)[1] if several)
        fails = f"{cheaper.cost:,.2f}, sure only by {clock_text(cheaper.end.sure)}"
        yield f"next cheaper, too late for {late or window}: {cheaper.name}, {fails}"


def _impossible(sizing: Sizing) -> Iterator[str]:
    proven = sizing.pooled.proven
    for name, (count, excess) in sizing.impossible.items():
        few = f"{count} x {name}" + (" or fewer" if count > 1 else "")
        if excess.limit == "memory":
            yield f"impossible: {few}, whose memory is less than the weights"
            continue
        due = ", ".join(sizing.names[job] for job in excess.demand.jobs)
        of = f" for {due}" if len(sizing.names) > 1 else ""
        least = f"at least {clock_text(excess.seconds)}{of}, by {excess.limit}"
        yield f"{'impossible, proven' if proven else 'too few, with such lengths'}: {few}: {least}"
    if sizing.impossible:
        yield "  at the stated rates and this precision of weights, whatever the scheduler does;"
        yield "  assuming: one token a sequence and"
        table = "" if sizing.pooled.sendable else ",\n  prompts that share no more than the table says"
        yield f"  iteration, KV cache as the model computes, no offload, a cold prefix cache{table}"


def _jobs(sizing: Sizing) -> Iterator[str]:
    if len(sizing.names) == 1:
        return
    yield "order of the jobs:"
    for job, finish, kept in sizing.agenda:
        until = f"{clock_text(finish.expected)}, 90 % sure by {clock_text(finish.sure)}"
        late = "" if kept else ": LATE"
        yield f"  {sizing.names[job]}: {until}, window {clock_text(sizing.windows[job])}{late}"


def _replica(sizing: Sizing) -> Iterator[str]:
    if sizing.choice is None or not sizing.kept:
        return
    replica, replicas = sizing.choice.replica, sizing.choice.replicas
    running = replica.running(sizing.load, replicas)
    shared = sizing.load.beginnings(running)
    of = f"each of {replicas} replicas" if replicas > 1 else "the replica"
    assumed = ""
    if replica.offer.startup is None:
        least, most = replica.startup / START_OFF, replica.startup * START_OFF
        assumed = f" (assumed, {least:,.0f} to {most:,.0f} s; see --prices)"
    yield f"{of}, {replica.startup:,.0f} s after its start{assumed}:"
    kv = f"{replica.kv_tokens:,} tokens of KV cache, {shared:,.0f} for shared beginnings"
    yield f"  {running:,.0f} requests at a time, {kv}"
    for command in sizing.commands:
        yield from command_lines("$", command)
