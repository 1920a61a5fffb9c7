"""``batchbound validate``: the simulator's error against a measured run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...data.files.disk import InputError
from ...data.readers.measured_run import read_vllm_run
from ...data.readers.profile_readers import read_profile
from ...data.trace import Trace
from ...executor.profiling.validate import Validation, validate_run, validate_trace
from ...models.exegpt.layer_cost import LayerCost
from ..inputs import read_cost
from ..output import note


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run_path",
        metavar="RUN",
        help="the folder of a measured vLLM run (meta.json, requests.jsonl), or a trace of `batchbound run`",
    )
    parser.add_argument(
        "--profile",
        metavar="PATH",
        help="for a vLLM run: the layer profile its iterations are composed from, saved by this library"
        " or a folder in LLMServingSim's format",
    )
    parser.add_argument(
        "--cost", metavar="paper|FILE", help="for a trace: the cost model, a file of `batchbound profile`"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Replay the run in the simulator, and print the errors."""
    if Path(args.run_path).is_dir():
        if args.profile is None:
            hint = "Say --profile with the layer profile of the run's device."
            raise InputError("the run is a vLLM run and needs a layer profile", file=args.run_path, hint=hint)
        measured = read_vllm_run(args.run_path)
        profile = read_profile(args.profile)
        if measured.kv_capacity is None:
            note("the run does not say how many tokens of keys and values fit: taken as unlimited")
        validation = validate_run(measured, LayerCost(profile))
    else:
        trace = Trace.load(args.run_path)
        if args.cost is None:
            hint = "Say --cost with a file of `batchbound profile`."
            raise InputError("the trace needs a cost model", file=args.run_path, hint=hint)
        validation = validate_trace(trace, read_cost(args.cost)[0])
    print(json.dumps(validation.to_json()) if args.json else _table(validation))
    return 0


def _table(validation: Validation) -> str:
    lines = [f"  {'':14s} {'measured':>10s} {'simulated':>10s} {'error':>8s}"]
    for name, metric in validation.metrics.items():
        figures = f"{metric.measured:10.4g} {metric.simulated:10.4g} {metric.error:+8.1%}"
        lines.append(f"  {name:14s} {figures}")
    lines.append(f"  {'order of completion':25s} {validation.order_correlation:10.4f} (Spearman)")
    return "\n".join(lines)
