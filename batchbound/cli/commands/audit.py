"""``batchbound audit``: what a finished run of a server lost, against what is proven."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ...data.files.disk import InputError, read_text
from ...data.iterations import EngineLimits, Sequences
from ...data.readers.iteration_log import is_iteration_log, read_iteration_log
from ...data.readers.measured_run import MeasuredRun, read_vllm_run
from ...data.readers.server_run import ServerRun
from ...data.readers.tables import read_lengths
from ...executor.reports.iteration_audit import audit_iterations, order_audit
from ...executor.reports.log_audit import audit_log
from ...models.certificates.iterations import verify_iterations
from ...models.exegpt.layer_cost import LayerCost
from ..inputs import positive, slot_count
from ..output import note
from .validate import read_profile

_BUDGET = 2048


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run_path",
        metavar="RUN",
        help="a trace of `batchbound run --server`; vLLM's output with --enable-logging-iteration-details;"
        " the folder of a measured vLLM run (meta.json, requests.jsonl); or a table of lengths that came out",
    )
    parser.add_argument(
        "--slots", type=slot_count, metavar="N", help="of the server, max_num_seqs (default: as RUN says)"
    )
    parser.add_argument(
        "--batched-tokens",
        type=positive,
        metavar="N",
        help="most tokens of an iteration, max_num_batched_tokens (default: as RUN says, else 2048 in the"
        " simulation and no limit in the bound)",
    )
    parser.add_argument(
        "--kv-tokens", type=positive, metavar="N", help="room for keys and values (default: as RUN says)"
    )
    parser.add_argument(
        "--block-tokens", type=positive, metavar="N", help="tokens of a block of them (default: as RUN says)"
    )
    parser.add_argument(
        "--iterations",
        type=_span,
        metavar="FIRST:LAST",
        help="of a log that holds several jobs: those of one, counted from 0 (default: all)",
    )
    parser.add_argument(
        "--profile",
        metavar="PATH",
        help="layer profile of a measured vLLM run's device: adds the bound and the losses in seconds",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Read the run, and print the bound and what each cause cost beyond it."""
    found = _audited(args)
    if args.json:
        print(json.dumps(found))
        return 0
    for title, table in found.items():
        if not isinstance(table, Mapping):
            continue
        print(title)
        for name, value in table.items():
            print(f"  {name:46s} {_shown(value)}")
    return 0


def _audited(args: argparse.Namespace) -> dict[str, object]:
    path = Path(args.run_path)
    if path.is_dir():
        if args.iterations is not None:
            raise InputError("--iterations is for a log of iterations", file=path, hint="Leave it out.")
        return _measured(args)
    if args.profile is not None:
        raise InputError("--profile is for a measured vLLM run", file=path, hint="Leave it out.")
    text = read_text(path)
    if args.iterations is not None and not is_iteration_log(text):
        raise InputError("--iterations is for a log of iterations", file=path, hint="Leave it out.")
    if "batchbound_server_run" in text.partition("\n")[0]:
        return _server_run(args)
    if is_iteration_log(text):
        return _log(args)
    return _lengths(args)


def _server_run(args: argparse.Namespace) -> dict[str, object]:
    ran = ServerRun.load(args.run_path)
    count = len(ran.servers)
    room = [server.kv_tokens for server in ran.servers if server.kv_tokens is not None]
    blocks = {server.block_tokens for server in ran.servers} - {None}
    limits = EngineLimits(
        sequences=(args.slots or ran.slots) * count,
        batched_tokens=(args.batched_tokens or _BUDGET) * count,
        kv_tokens=args.kv_tokens or (sum(room) if len(room) == count else None),
        block_tokens=args.block_tokens or (next(iter(blocks)) or 16 if len(blocks) == 1 else 1),
    )
    try:
        audit = audit_iterations(ran, limits, budget_known=args.batched_tokens is not None)
    except ValueError as error:
        raise InputError(str(error), file=args.run_path, hint="Nothing can be audited.") from None
    _confirm(verify_iterations(audit.sequences, audit.limits, audit.bound))
    return {
        "iterations": {
            "counted by the server": audit.counted,
            f"proven least, by {audit.bound.source}": audit.bound.iterations,
            **{f"lost: {name}": value for name, value in audit.losses.items()},
        },
        "by the order of the requests (simulated)": {
            name: one.iterations for name, one in audit.simulated.items()
        },
        "certificate": dict(audit.bound.certificate),
    }


def _log(args: argparse.Namespace) -> dict[str, object]:
    for option in ("batched_tokens", "kv_tokens", "block_tokens"):
        if getattr(args, option) is not None:
            what = f"--{option.replace('_', '-')} has no effect on a log of iterations"
            raise InputError(what, file=args.run_path, hint="Leave it out.")
    log = read_iteration_log(args.run_path, args.iterations)
    sequences = args.slots or log.sequences
    if sequences is None:
        raise InputError("does not say max_num_seqs", file=args.run_path, hint="Say --slots.")
    try:
        audit = audit_log(log, int(sequences))
    except ValueError as error:
        raise InputError(str(error), file=args.run_path, hint="Correct --slots.") from None
    return {
        f"iterations ({audit.sequences} slots)": {"counted": audit.counted, **audit.parts},
        "seconds of the engine": dict(audit.seconds),
    }


def _lengths(args: argparse.Namespace) -> dict[str, object]:
    work = read_lengths(args.run_path)
    if args.slots is None:
        raise InputError("a table of lengths does not say the slots", file=args.run_path, hint="Say --slots.")
    limits = EngineLimits(args.slots, args.batched_tokens or _BUDGET, args.kv_tokens, args.block_tokens or 16)
    return _by_order(Sequences(work.input_tokens, work.output_tokens), limits, args)


def _measured(args: argparse.Namespace) -> dict[str, object]:
    ran = read_vllm_run(args.run_path)
    limits = EngineLimits(
        args.slots or ran.sequences,
        args.batched_tokens or ran.batched_tokens,
        args.kv_tokens or ran.kv_capacity,
        args.block_tokens or ran.block_tokens,
    )
    if ran.kv_capacity is None and args.kv_tokens is None:
        note("the run does not say how many tokens of keys and values fit: taken as unlimited")
    if ran.reuse:
        note("prompts are taken to share no prefix: where they do, less work was needed than is proven here")
    args.batched_tokens = limits.batched_tokens
    work = ran.workload
    order = np.argsort(work.arrival, kind="stable")
    sequences = Sequences(work.input_tokens[order], work.output_tokens[order])
    found = _by_order(sequences, limits, args)
    return found if args.profile is None else found | _in_seconds(ran, limits, args.profile)


def _in_seconds(ran: MeasuredRun, limits: EngineLimits, profile: str) -> dict[str, object]:
    from ...executor.profiling.seconds_audit import audit_seconds

    ran = replace(
        ran,
        sequences=limits.sequences,
        batched_tokens=limits.batched_tokens,
        kv_capacity=limits.kv_tokens,
        block_tokens=limits.block_tokens,
    )
    try:
        audit = audit_seconds(ran, LayerCost(read_profile(profile)))
    except ValueError as error:
        raise InputError(str(error), file=profile, hint="Give another profile, or leave it out.") from None
    return {
        "seconds, at the profile's prices": {
            "measured": audit.measured,
            "simulated": audit.simulated,
            "proven least": audit.bound,
            **{f"lost: {name}": value for name, value in audit.losses.items()},
        },
        "least seconds of an iteration": {
            name: f"{value:.4g}" for name, value in asdict(audit.minorant).items()
        },
    }


def _by_order(sequences: Sequences, limits: EngineLimits, args: argparse.Namespace) -> dict[str, object]:
    audit = order_audit(sequences, limits, budget_known=args.batched_tokens is not None)
    _confirm(verify_iterations(audit.sequences, audit.limits, audit.bound))
    return {
        "iterations, all requests there at the start": {
            f"proven least, by {audit.bound.source}": audit.bound.iterations,
            **{f"simulated, {name}": one.iterations for name, one in audit.simulated.items()},
        },
        "requests put back (simulated)": {name: one.preemptions for name, one in audit.simulated.items()},
        "certificate": dict(audit.bound.certificate),
    }


def _span(text: str) -> tuple[int, int]:
    """Return the first and last number of a range, for argparse."""
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, two whole numbers in order")
    return int(first), int(last)


def _confirm(violation: object) -> None:
    if violation is not None:
        raise RuntimeError(f"the bound does not stand up to its check: {violation}")


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "unknown" if value is None else str(value)
    return f"{value:12,d}" if isinstance(value, int) else f"{value:12,.2f}"
