"""``batchbound serve``: run a serving policy on arriving requests."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...data.arrays import IntArray
from ...data.costs.iteration_cost import read_distserve_cost
from ...data.files.disk import InputError
from ...data.files.kinds import refuse_other_kinds
from ...data.readers.requests import read_workload
from ...data.readers.tables import is_table
from ...data.workload import LONGEST, Workload
from ...heuristics.serving.disaggregated import simulate_disaggregated
from ...heuristics.serving.econoserve.sizes import EconoServeSizes
from ...heuristics.serving.metrics import serving_metrics
from ...heuristics.serving.registry import BLOCK_ALLOCATION, SERVING_POLICIES, ServingOptions, serving_policy
from ...heuristics.serving.simulation import ServingError, ServingRun, simulate_serving
from ..inputs import at_least_zero, log_deviation, positive, random_seed
from ..parser import Parser, Rule
from ..streams import say

TWO_DEVICES = "distserve"
"""Name of the policy that runs prefill and decode on two devices."""


_PIPELINED = frozenset({"econoserve", "pipelined"})
_ECONOSERVE = _PIPELINED | {"econoserve-d", "econoserve-sd", "econoserve-sdo"}
_PREDICTING = _ECONOSERVE | {"srtf", "multires", "sync-coupled"}
_MAX_ALLOCATION = frozenset({"orca", "srtf", "fastserve"})

_HEEDED_BY = {
    "padding": _ECONOSERVE,
    "reserved": _ECONOSERVE,
    "buffer": _PIPELINED,
    "longest": _MAX_ALLOCATION,
    "forward_size": frozenset(SERVING_POLICIES) - _MAX_ALLOCATION - {"vllm"},
    "length_error": _PREDICTING,
    "swap": _PREDICTING | {"fastserve", "vllm", TWO_DEVICES},
    "transfer": frozenset({TWO_DEVICES}),
}
"""Options that only some policies heed, and those policies."""

_DEFAULTS = {"forward_size": 512, "length_error": 0.0, "swap": 0.0, "transfer": 0.0}
"""Defaults of these options; None for the others."""


_SIZES = ("padding", "reserved", "buffer")


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "workload",
        metavar="FILE",
        help="a table of lengths (CSV, Parquet, JSONL) with arrivals and deadlines, or NAME:SEED[:COUNT] of a"
        " generator (alpaca, sharegpt, bookcorpus, ...)",
    )
    parser.add_argument(
        "--policy",
        everyday=True,
        choices=[*SERVING_POLICIES, TWO_DEVICES],
        default="pipelined",
        help="policy (default %(default)s)",
    )
    device = parser.add_argument_group("device, simulated")
    device.add_argument(
        "--cost", everyday=True, metavar="FILE", help="JSON file of fitted coefficients in DistServe's format"
    )
    device.add_argument(
        "--model", everyday=True, help="name of the model in that file, for instance facebook/opt-13b"
    )
    device.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="devices (default %(default)s)"
    )
    parser.add_argument(
        "--kv-capacity",
        everyday=True,
        type=positive,
        required=True,
        metavar="TOKENS",
        help="KV capacity in tokens",
    )
    parser.add_argument(
        "--block-tokens",
        type=positive,
        default=32,
        metavar="N",
        help="tokens per block (default %(default)s)",
    )
    device.add_argument(
        "--swap",
        type=at_least_zero,
        default=_DEFAULTS["swap"],
        metavar="SECONDS",
        help="seconds to move the KV cache of one token to the host or back",
    )
    device.add_argument(
        "--transfer",
        type=at_least_zero,
        default=_DEFAULTS["transfer"],
        metavar="SECONDS",
        help="seconds to send the KV cache of one token to a second device",
    )
    engine = parser.add_argument_group("device, real")
    engine.add_argument(
        "--engine",
        everyday=True,
        metavar="MODEL",
        help="serve random prompts of these lengths on a model: hub name, directory or tiny:FAMILY[:SEED]",
    )
    engine.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "float64", "bfloat16", "float16")
    )
    engine.add_argument(
        "--verify",
        action="store_true",
        help="compare every completion with the model's own for the request alone",
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--longest",
        type=positive,
        metavar="TOKENS",
        help="tokens that max-allocation reserves per request (default: those of the longest request)",
    )
    sizes.add_argument(
        "--forward-size",
        type=positive,
        default=_DEFAULTS["forward_size"],
        metavar="N",
        help="target tokens per iteration (default %(default)s)",
    )
    default = EconoServeSizes()
    for name, what in (
        ("padding", "share to add to predicted lengths"),
        ("reserved", "share of the memory kept for prompts"),
        ("buffer", "share of a predicted length by which a guest may overstay"),
    ):
        sizes.add_argument(
            f"--{name}",
            type=float,
            metavar="SHARE",
            help=f"EconoServe and pipelined: {what} (default {getattr(default, name)})",
        )
    sizes.add_argument(
        "--length-error",
        type=log_deviation,
        default=_DEFAULTS["length_error"],
        metavar="SD",
        help="standard deviation of log(predicted / actual) lengths (default: lengths are known)",
    )
    sizes.add_argument(
        "--seed", type=random_seed, default=0, help="seed of the prediction error (default %(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", everyday=True, help="print one JSON object instead of a table"
    )
    parser.rules += [
        Rule(
            (f"--{name.replace('_', '-')}",),
            when=partial(_ignored, policies),
            where="with --policy {policy}",
            hint=f"Leave it out, or choose one of {', '.join(sorted(policies))}.",
        )
        for name, policies in _HEEDED_BY.items()
    ]
    parser.rules += [
        Rule(
            ("--seed",),
            when=lambda args: not args.length_error and args.engine is None,
            where="without --length-error",
        ),
        Rule(("--tensor-parallel", "--cost", "--model", "--swap", "--transfer"), conflicts=("--engine",)),
        Rule(("--verify", "--dtype"), without=("--engine",)),
    ]


def _ignored(heeding: frozenset[str], args: argparse.Namespace) -> bool:
    return args.policy not in heeding


def run(args: argparse.Namespace) -> int:
    """Simulate or serve, and print the figures."""
    refuse_other_kinds(args.workload, "no requests")
    if Path(args.workload).is_file() and not is_table(args.workload):
        hint = "Give a table of lengths, or a generator; `run --policy` serves prompts."
        raise InputError("holds prompts, not lengths", file=args.workload, hint=hint)
    workload = read_workload(args.workload).workload
    longest = int((workload.input_tokens + workload.output_tokens).max())
    if args.longest is not None and args.longest < longest:
        what = f"a request has {longest:,} tokens, beyond --longest {args.longest:,}"
        raise InputError(what, file=args.workload, hint=f"Raise it to {longest}, or leave it out.")
    longest = args.longest or longest
    figures: dict[str, Any] = {"policy": args.policy, "requests": len(workload)}
    try:
        given = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
        sizes = EconoServeSizes(**given)
        options = ServingOptions(longest, args.forward_size, sizes)
        noise = np.random.default_rng(args.seed).standard_normal(len(workload))
        guess = np.rint(workload.output_tokens * np.exp(args.length_error * noise))
        predicted = np.clip(guess, 1, LONGEST).astype(np.int64)
        if args.engine is not None:
            served, extra = _on_model(args, workload, options, predicted)
            figures |= extra
        else:
            served = _simulated(args, workload, options, predicted)
    except (ServingError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(str(error), file=args.workload, hint="Check --kv-capacity and the sizes.") from None
    figures |= serving_metrics(served).to_json()
    figures["failures"], figures["lent_tokens"] = served.failures, served.lent_tokens
    figures["kv_held_per_iteration"] = float(served.held.mean()) / served.capacity
    say(json.dumps(figures) if args.json else _table(figures))
    return 0 if figures.get("wrong_answers", 0) == 0 else 1


def _simulated(
    args: argparse.Namespace, workload: Workload, options: ServingOptions, predicted: IntArray
) -> ServingRun:
    if args.cost is None or args.model is None:
        raise InputError(
            "there is neither a device to simulate nor a model to run",
            hint="Give --cost FILE and --model NAME, or --engine MODEL.",
        )
    cost = read_distserve_cost(
        args.cost,
        args.model,
        args.tensor_parallel,
        swap_per_token=args.swap,
        transfer_per_token=args.transfer,
    )
    if args.policy == TWO_DEVICES:
        return simulate_disaggregated(workload, cost, args.kv_capacity, block_tokens=args.block_tokens).run
    return simulate_serving(
        workload,
        serving_policy(args.policy, options),
        cost,
        args.kv_capacity,
        block_tokens=args.block_tokens,
        predicted=predicted,
    )


def _on_model(
    args: argparse.Namespace, workload: Workload, options: ServingOptions, predicted: IntArray
) -> tuple[ServingRun, dict[str, Any]]:
    if args.policy == TWO_DEVICES:
        raise InputError(f"policy '{TWO_DEVICES}' needs two devices", hint="Simulate it, without --engine.")
    from ...executor.models.prompts import Prompts
    from ...executor.models.source import load_model, position_limit, require_engine
    from ...executor.serving.run import own_answer, serve_on_model

    require_engine()
    model = load_model(args.engine, dtype=args.dtype, seed=args.seed)
    limit, longest = position_limit(model.config), workload.input_tokens + workload.output_tokens
    if limit is not None and longest.max() > limit:
        raise InputError(
            f"a request of {longest.max()} tokens on a model of {limit} positions",
            file=args.workload,
            hint="Choose a model with more positions, or leave such requests out.",
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = Prompts.random(workload, vocabulary, args.seed).tokens
    done = serve_on_model(
        model,
        prompts,
        workload,
        serving_policy(args.policy, options),
        args.kv_capacity,
        block_tokens=args.block_tokens,
        paged=args.policy in BLOCK_ALLOCATION,
        predicted=predicted,
    )
    extra: dict[str, Any] = {"moved_tokens": done.moved_tokens, "compactions": done.compactions}
    if args.verify:
        own = zip(prompts, done.answers, strict=True)
        extra["wrong_answers"] = sum(own_answer(model, prompt, len(a)) != a for prompt, a in own)
    return done.run, extra


def _table(figures: dict[str, Any]) -> str:
    lines = [f"  {figures.pop('policy')}, {figures.pop('requests')} requests"]
    known = ((name, value) for name, value in figures.items() if value is not None)
    lines += [f"  {name.replace('_', ' '):26s} {value:12.5g}" for name, value in known]
    return "\n".join(lines)
