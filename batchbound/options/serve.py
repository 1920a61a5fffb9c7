"""Options of ``batchbound serve``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any

from ..heuristics.serving.econoserve.sizes import EconoServeSizes
from ..heuristics.serving.registry import ORDERED, SERVING_POLICIES
from .option import Option, Options, PathText, Rule, everyday, option
from .values import AtLeastZero, File, LogDeviation, Positive, Seed, TokenCount

TWO_DEVICES = "distserve"
"""Name of the policy that runs prefill and decode on two devices."""

_PIPELINED = frozenset({"econoserve", "pipelined"})
_ECONOSERVE = _PIPELINED | {"econoserve-d", "econoserve-sd", "econoserve-sdo"}
_PREDICTING = _ECONOSERVE | {"srtf", "multires", "sync-coupled"} | ORDERED
_MAX_ALLOCATION = frozenset({"orca", "srtf", "fastserve"})

_HEEDED_BY = {
    "padding": _ECONOSERVE,
    "reserved": _ECONOSERVE,
    "buffer": _PIPELINED,
    "longest": _MAX_ALLOCATION,
    "forward_size": frozenset(SERVING_POLICIES) - _MAX_ALLOCATION - {"vllm"},
    "length_error": _PREDICTING,
    "swap": _PREDICTING - ORDERED | {"fastserve", "vllm", TWO_DEVICES},
    "transfer": frozenset({TWO_DEVICES}),
}
"""Options that only some policies heed, and those policies."""


def _ignored(policies: frozenset[str], options: Any) -> bool:
    return options.policy not in policies


@dataclass(frozen=True, kw_only=True)
class SimulatedDevice(Options):
    """A simulated device."""

    TITLE = "device, simulated"

    cost: File | None = everyday(None, "JSON file of fitted coefficients in DistServe's format")
    model: str | None = everyday(None, "name of the model in that file, for instance facebook/opt-13b")
    tensor_parallel: Positive = option(1, "devices (default %(default)s)")
    swap: AtLeastZero = option(
        0.0, "seconds to move the KV cache of one token to the host or back", metavar="SECONDS"
    )
    transfer: AtLeastZero = option(
        0.0, "seconds to send the KV cache of one token to a second device", metavar="SECONDS"
    )


@dataclass(frozen=True, kw_only=True)
class RealDevice(Options):
    """A model on this machine."""

    TITLE = "device, real"
    NEEDS = ("engine",)

    engine: str | None = everyday(
        None,
        "serve random prompts of these lengths on a model: hub name, directory or tiny:FAMILY[:SEED]",
        metavar="MODEL",
    )
    dtype: str = option(
        "auto", "data type of the weights", choices=("auto", "float32", "float64", "bfloat16", "float16")
    )
    verify: bool = option(False, "compare every completion with the model's own for the request alone")


def _share(name: str, what: str) -> Any:
    default = getattr(EconoServeSizes(), name)
    return option(None, f"EconoServe and pipelined: {what} (default {default})", metavar="SHARE")


@dataclass(frozen=True, kw_only=True)
class SizeOptions(Options):
    """Sizes of the policies, and the error of predicted lengths."""

    TITLE = "sizes"

    longest: TokenCount | None = option(
        None, "tokens that max-allocation reserves per request (default: those of the longest request)"
    )
    forward_size: Positive = option(512, "target tokens per iteration (default %(default)s)")
    padding: float | None = _share("padding", "share to add to predicted lengths")
    reserved: float | None = _share("reserved", "share of the memory kept for prompts")
    buffer: float | None = _share("buffer", "share of a predicted length by which a guest may overstay")
    length_error: LogDeviation = option(
        0.0, "standard deviation of log(predicted / actual) lengths (default: lengths are known)"
    )
    seed: Seed = option(0, "seed of the prediction error (default %(default)s)")

    @property
    def sizes(self) -> EconoServeSizes:
        """Sizes of EconoServe, by default its own."""
        stated = {name: getattr(self, name) for name in ("padding", "reserved", "buffer")}
        return EconoServeSizes(**{name: size for name, size in stated.items() if size is not None})


@dataclass(frozen=True)
class ServeOptions(SimulatedDevice, RealDevice, SizeOptions):
    """Arriving requests, the policy that serves them, and a device."""

    TITLE = ""
    RULES = (
        *(
            Rule(
                (name,),
                when=partial(_ignored, policies),
                where="with --policy {policy}",
                hint=f"Leave it out, or choose one of {', '.join(sorted(policies))}.",
            )
            for name, policies in _HEEDED_BY.items()
        ),
        Rule(
            ("seed",),
            when=lambda options: not options.length_error and options.engine is None,
            where="without --length-error",
        ),
        Rule(("tensor_parallel", "cost", "model", "swap", "transfer"), excludes=("engine",)),
    )

    workload: Annotated[
        PathText,
        Option(
            "a table of lengths (CSV, Parquet, JSONL) with arrivals and deadlines, or NAME:SEED[:COUNT] of a"
            " generator (alpaca, sharegpt, bookcorpus, ...)",
            positional=True,
            metavar="FILE",
        ),
    ]
    _: KW_ONLY
    kv_capacity: Annotated[TokenCount, Option("KV capacity in tokens", everyday=True)]
    policy: str = everyday(
        "pipelined", "policy (default %(default)s)", choices=(*SERVING_POLICIES, TWO_DEVICES)
    )
    block_tokens: Positive = option(32, "tokens per block (default %(default)s)")
    json: bool = everyday(False, "print one JSON object instead of a table")
