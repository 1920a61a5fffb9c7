"""``batchbound validate``: print the simulator's error against a measured run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...data.costs.link import FREE_LINK
from ...data.files.disk import InputError
from ...data.readers.measured_run import read_vllm_run
from ...data.readers.profile_readers import read_profile
from ...data.trace import Trace
from ...executor.profiling.validate import Validation, validate_run, validate_trace
from ...heuristics.iterations.replay import mismatches
from ..inputs import read_cost, refuse_given
from ..links import LINK_OPTIONS, add_link, link_of, say_link
from ..output import note
from ..parser import Parser
from ..streams import say


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run_path",
        metavar="RUN",
        help="folder of a measured vLLM run (meta.json, requests.jsonl), or a trace of `batchbound run`",
    )
    parser.add_argument(
        "--profile",
        metavar="PATH",
        help="layer profile of the vLLM run's device: a file, or a folder in LLMServingSim's format",
    )
    parser.add_argument(
        "--cost", metavar="paper|FILE", help="cost model of a trace: a file of `batchbound profile`"
    )
    add_link(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Replay the run in the simulator, and print the errors."""
    if Path(args.run_path).is_dir():
        if args.profile is None:
            hint = "Give the layer profile of the run's device as --profile."
            raise InputError("the run is a vLLM run and needs a layer profile", file=args.run_path, hint=hint)
        if args.cost is not None:
            raise InputError("is for a trace, not for a vLLM run", where="--cost", hint="Leave it out.")
        validation, warnings = _replayed(args)
    else:
        if args.profile is not None:
            raise InputError("is for a vLLM run, not for a trace", where="--profile", hint="Leave it out.")
        trace = Trace.load(args.run_path)
        if args.cost is None:
            hint = "Give a file of `batchbound profile` as --cost."
            raise InputError("the trace needs a cost model", file=args.run_path, hint=hint)
        refuse_given(args, LINK_OPTIONS, "on one device")
        if not (trace.finished > 0).all() or not len(trace):
            hint = "Give the trace of a run that served its requests."
            raise InputError(
                "the trace has no request, or one that never finished", file=args.run_path, hint=hint
            )
        validation, warnings = validate_trace(trace, read_cost(args.cost)[0]), []
    if args.json:
        say(json.dumps({"warnings": warnings} | validation.to_json()))
    else:
        say("\n".join([*(f"WARNING: {warning}" for warning in warnings), _table(validation)]))
    return 0


def _replayed(args: argparse.Namespace) -> tuple[Validation, list[str]]:
    measured = read_vllm_run(args.run_path)
    shared = measured.tensor_parallel * measured.data_parallel if measured.expert_parallel else 1
    profile = read_profile(args.profile, expert_parallel=shared)
    link = link_of(args, profile.device) if profile.tensor_parallel * measured.data_parallel > 1 else None
    if link is None:
        refuse_given(args, LINK_OPTIONS, "on one device")
    if measured.kv_capacity is None:
        note("the run does not state its KV capacity: it is taken as unlimited")
    warnings = mismatches(measured, profile)
    if link is None:
        warnings += profile.warnings
        note("no link: the model is on one device")
        return validate_run(measured, profile, None), warnings
    say_link(link)
    found = validate_run(measured, profile, link)
    free = validate_run(measured, profile, FREE_LINK)
    took, without = (one.metrics["makespan_s"].simulated for one in (found, free))
    note(f"{1 - without / took:.1%} of the simulated time depends on the link ({took - without:,.3f} s)")
    return found, warnings


def _table(validation: Validation) -> str:
    lines = [f"  {'':14s} {'measured':>10s} {'simulated':>10s} {'error':>8s}"]
    for name, metric in validation.metrics.items():
        figures = f"{metric.measured:10.4g} {metric.simulated:10.4g} {metric.error:+8.1%}"
        lines.append(f"  {name:14s} {figures}")
    lines.append(f"  {'order of completion':25s} {validation.order_correlation:10.4f} (Spearman)")
    return "\n".join(lines)
