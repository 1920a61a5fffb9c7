"""``batchbound serve``: a serving policy on requests that arrive, in the simulator, memory in blocks."""

from __future__ import annotations

import argparse
import json

import numpy as np

from ..data.files import InputError
from ..data.iteration_cost import read_distserve_cost
from ..data.read import read_workload
from ..executor.disaggregated import simulate_disaggregated
from ..executor.serving_metrics import ServingMetrics, serving_metrics
from ..executor.serving_simulation import ServingError, simulate_serving
from ..heuristics.econoserve import EconoServeSettings
from ..heuristics.serving_registry import SERVING_POLICIES, ServingOptions, serving_policy
from .inputs import positive, seconds

TWO_DEVICES = "distserve"
"""The policy's name that splits prompts and answers over two devices."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "workload",
        metavar="FILE",
        help="a table of lengths (CSV, Parquet, JSONL) with arrivals and deadlines, or NAME:SEED[:COUNT] of a"
        " generator (alpaca, sharegpt, bookcorpus, ...)",
    )
    parser.add_argument("--policy", choices=[*SERVING_POLICIES, TWO_DEVICES], default="econoserve")
    device = parser.add_argument_group("device")
    device.add_argument("--cost", required=True, metavar="FILE", help="fitted coefficients, DistServe's JSON")
    device.add_argument("--model", required=True, help="its name in that file, for instance facebook/opt-13b")
    device.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="devices (default %(default)s)"
    )
    device.add_argument(
        "--kv-capacity", type=positive, required=True, metavar="TOKENS", help="of keys and values it holds"
    )
    device.add_argument(
        "--block-tokens", type=positive, default=32, metavar="N", help="of a block (default %(default)s)"
    )
    device.add_argument(
        "--swap", type=seconds, default=0.0, metavar="SECONDS", help="per token moved to the host or back"
    )
    device.add_argument(
        "--transfer", type=seconds, default=0.0, metavar="SECONDS", help="per token sent to a second device"
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--longest",
        type=positive,
        metavar="TOKENS",
        help="what max-allocation promises (default: the longest)",
    )
    sizes.add_argument(
        "--forward-size", type=positive, default=512, metavar="N", help="target (default %(default)s)"
    )
    default = EconoServeSettings()
    for name, what in (
        ("padding", "raise predicted lengths by this share"),
        ("reserved", "share of the memory kept for prompts"),
        ("buffer", "share of a lent part its guest is not predicted to fill"),
    ):
        sizes.add_argument(
            f"--{name}",
            type=float,
            default=getattr(default, name),
            metavar="SHARE",
            help=f"EconoServe: {what} (default %(default)s)",
        )
    sizes.add_argument(
        "--length-error",
        type=seconds,
        default=0.0,
        metavar="SD",
        help="log-deviation of the predicted lengths (default: known)",
    )
    sizes.add_argument("--seed", type=int, default=0, help="of that error (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the figures."""
    job = read_workload(args.workload)
    workload = job.workload
    cost = read_distserve_cost(
        args.cost,
        args.model,
        args.tensor_parallel,
        swap_per_token=args.swap,
        transfer_per_token=args.transfer,
    )
    try:
        settings = EconoServeSettings(padding=args.padding, reserved=args.reserved, buffer=args.buffer)
        if args.policy == TWO_DEVICES:
            split = simulate_disaggregated(workload, cost, args.kv_capacity, block_tokens=args.block_tokens)
            served = split.run
        else:
            longest = int((workload.input_tokens + workload.output_tokens).max())
            options = ServingOptions(args.longest or longest, args.forward_size, settings)
            noise = np.random.default_rng(args.seed).standard_normal(len(workload))
            guess = np.rint(workload.output_tokens * np.exp(args.length_error * noise))
            served = simulate_serving(
                workload,
                serving_policy(args.policy, options),
                cost,
                args.kv_capacity,
                block_tokens=args.block_tokens,
                predicted=np.maximum(1, guess).astype(np.int64),
            )
    except (ServingError, ValueError) as error:
        raise InputError(str(error), file=args.workload, mend="Check --kv-capacity and the sizes.") from None
    metrics = serving_metrics(served)
    figures = {"policy": args.policy, "requests": len(workload), **metrics.to_json()}
    figures["failures"], figures["lent_tokens"] = served.failures, served.lent_tokens
    print(json.dumps(figures) if args.json else _table(metrics, args.policy, len(workload)))
    return 0


def _table(metrics: ServingMetrics, policy: str, requests: int) -> str:
    lines = [f"  {policy}, {requests} requests"]
    lines += [f"  {name.replace('_', ' '):26s} {value:12.5g}" for name, value in metrics.to_json().items()]
    return "\n".join(lines)
