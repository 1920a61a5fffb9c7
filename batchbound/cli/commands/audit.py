"""``batchbound audit``: lower bound and losses of a finished server run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ...auditing import audit
from ...data.files.disk import InputError
from .. import WRONG_BOUND
from ..inputs import check_outputs, positive, slot_count
from ..output import note
from ..parser import Parser
from ..reporting import print_tables
from ..streams import say


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run_path",
        metavar="RUN",
        help="a trace of `batchbound run --server`; vLLM's output with --enable-logging-iteration-details;"
        " the folder of a measured vLLM run (meta.json, requests.jsonl); times of requests (CSV with id,"
        " prompt_tokens, completion_tokens, start, first, last, or a batch's output with vLLM's metrics);"
        " or a table of the actual lengths",
    )
    parser.add_argument(
        "--slots",
        everyday=True,
        type=slot_count,
        metavar="N",
        help="slots of the server, max_num_seqs (default: as in RUN)",
    )
    parser.add_argument(
        "--batched-tokens",
        everyday=True,
        type=positive,
        metavar="N",
        help="maximum tokens per iteration, max_num_batched_tokens (default: as in RUN, else 2048 in the"
        " simulation and no limit in the bound)",
    )
    parser.add_argument(
        "--kv-tokens", type=positive, metavar="N", help="KV capacity in tokens (default: as in RUN)"
    )
    parser.add_argument(
        "--block-tokens",
        type=positive,
        metavar="N",
        help="tokens per block of KV cache (default: as in RUN, else 16 simulated, 1 in the bound)",
    )
    parser.add_argument(
        "--iterations",
        type=_span,
        metavar="FIRST:LAST",
        help="iterations to audit, counted from 0, if the log has several jobs (default: all)",
    )
    parser.add_argument(
        "--profile",
        metavar="PATH",
        help="layer profile of the device of a measured vLLM run; adds the bound and the losses in seconds",
    )
    parser.add_argument(
        "--html", metavar="FILE", everyday=True, help="draw the audit on one page for a browser"
    )
    parser.add_argument(
        "--save-cost",
        metavar="FILE",
        help="write the cost of an iteration, fitted to the run, for `plan --for ENGINE --cost FILE`",
    )
    parser.add_argument(
        "--overwrite",
        everyday=True,
        action="store_true",
        needs=["--html", "--save-cost"],
        help="replace files that exist",
    )
    parser.add_argument(
        "--json", action="store_true", everyday=True, help="print one JSON object instead of tables"
    )


def run(args: argparse.Namespace) -> int:
    """Read the run, and print the bound and the loss by cause."""
    check_outputs(args, "html", "save_cost")
    found = audit(
        args.run_path,
        slots=args.slots,
        batched_tokens=args.batched_tokens,
        kv_tokens=args.kv_tokens,
        block_tokens=args.block_tokens,
        iterations=args.iterations,
        profile=args.profile,
    )
    if args.html is not None:
        found.save_html(args.html, Path(args.run_path).name)
        note(f"wrote {args.html}: open it in a browser")
    for assumption in found.assumptions:
        note(assumption)
    if args.save_cost is not None:
        if found.rates is None:
            hint = "Leave out --save-cost" + (" or --profile." if args.profile else ".")
            raise InputError("no cost of an iteration was fitted", file=args.run_path, hint=hint)
        found.rates.save(args.save_cost)
        note(f"wrote {args.save_cost}: plan with `batchbound plan FILE --for ENGINE --cost {args.save_cost}`")
    if args.json:
        claims = {"assumptions": [asdict(one) for one in found.claims]} if found.claims else {}
        say(json.dumps({**found.tables, **claims}))
    else:
        print_tables(found.tables)
    return WRONG_BOUND if found.is_defect else 0


def _span(text: str) -> tuple[int, int]:
    """Parse ``FIRST:LAST``."""
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, two whole numbers in order")
    return int(first), int(last)
