"""Serving policies by name, with the settings of the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from .baselines import MultiRes, Sarathi, SyncCoupled, Vllm
from .chunked_prefill import ChunkedPrefill
from .econoserve.paper import EconoServe
from .econoserve.sizes import EconoServeSizes
from .max_allocation import FastServe, Orca, ShortestRemaining
from .pipelined import Pipelined
from .policy import ServingPolicy
from .published import PUBLISHED, Queued, Rule


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options of serving policies.

    longest: Tokens of the longest possible sequence, promised by max-allocation.
    forward_size: Target tokens of an iteration (TFS).
    sizes: Memory that EconoServe and the pipelined scheduler keep free; ``forward_size`` overrides theirs.
    orca_batch: Most running requests of ORCA.
    """

    longest: int = 2048
    forward_size: int = 512
    sizes: EconoServeSizes = field(default_factory=EconoServeSizes)
    orca_batch: int = 8

    @property
    def at_forward_size(self) -> EconoServeSizes:
        """Sizes with the forward size of these options."""
        return replace(self.sizes, forward_size=self.forward_size)


def _econoserve(options: ServingOptions, **parts: bool) -> ServingPolicy:
    return EconoServe(options.at_forward_size, **parts)


ORDERED = frozenset({"shortest-first", "longest-first", "smallest-area-first", "sorted-f", "paired"})
"""Policies that sort vLLM's queue by lengths."""


def _queued(options: ServingOptions, rule: Rule) -> ServingPolicy:
    return Queued(options.forward_size, min(256, options.forward_size), rule)


SERVING_POLICIES: Mapping[str, Callable[[ServingOptions], ServingPolicy]] = {
    "orca": lambda options: Orca(options.longest, options.orca_batch),
    "srtf": lambda options: ShortestRemaining(options.longest),
    "fastserve": lambda options: FastServe(options.longest),
    "vllm": lambda options: Vllm(),
    "vllm-v1": lambda options: ChunkedPrefill(options.forward_size, min(256, options.forward_size)),
    "sarathi": lambda options: Sarathi(options.forward_size),
    "multires": lambda options: MultiRes(options.forward_size),
    "sync-coupled": lambda options: SyncCoupled(options.forward_size),
    "econoserve-d": partial(_econoserve, synced=False, ordered=False, lending=False),
    "econoserve-sd": partial(_econoserve, ordered=False, lending=False),
    "econoserve-sdo": partial(_econoserve, lending=False),
    "econoserve": _econoserve,
    "pipelined": lambda options: Pipelined(options.at_forward_size),
    **{name: partial(_queued, rule=PUBLISHED[name]) for name in sorted(ORDERED)},
}

BLOCK_ALLOCATION = frozenset({"vllm", "vllm-v1", "sarathi", "pipelined"}) | ORDERED
"""Policies that take blocks one at a time."""


def serving_policy(name: str, options: ServingOptions | None = None) -> ServingPolicy:
    """Return a fresh serving policy.

    Raises ValueError if there is no policy of that name.
    """
    make = SERVING_POLICIES.get(name)
    if make is None:
        raise ValueError(f"no serving policy is called {name!r}; there are {', '.join(SERVING_POLICIES)}")
    return make(ServingOptions() if options is None else options)
