"""The serving policies by name, each with what the paper sets for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .baselines import MultiRes, Sarathi, SyncCoupled, Vllm
from .econoserve.paper import EconoServe
from .econoserve.pipelined import PipelinedRequests
from .econoserve.recalled import RecalledLoans
from .econoserve.settings import EconoServeSettings
from .max_allocation import FastServe, Orca, ShortestRemaining
from .policy import ServingPolicy


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """
    What serving policies are made from.

    Parameters
    ----------
    longest
        Tokens of the longest sequence there can be, promised by max-allocation.
    forward_size
        Tokens of an iteration to aim at (TFS).
    settings
        EconoServe's sizes; its parts are switched by the policy's name, its forward size is the one above.
    orca_batch
        Most requests ORCA has under way.
    """

    longest: int = 2048
    forward_size: int = 512
    settings: EconoServeSettings = field(default_factory=EconoServeSettings)
    orca_batch: int = 8


def econoserve(settings: EconoServeSettings) -> ServingPolicy:
    """Return EconoServe with these parts and sizes, fresh."""
    if not settings.pipelined or settings.hosted == "answers":
        return EconoServe(settings)
    return RecalledLoans(settings) if settings.offloads else PipelinedRequests(settings)


def _econoserve(synced: bool, ordered: bool, pipelined: bool) -> Callable[[ServingOptions], ServingPolicy]:
    def make(options: ServingOptions) -> ServingPolicy:
        parts: dict[str, Any] = {"synced": synced, "ordered": ordered, "pipelined": pipelined}
        return econoserve(replace(options.settings, forward_size=options.forward_size, **parts))

    return make


SERVING_POLICIES: Mapping[str, Callable[[ServingOptions], ServingPolicy]] = {
    "orca": lambda options: Orca(options.longest, options.orca_batch),
    "srtf": lambda options: ShortestRemaining(options.longest),
    "fastserve": lambda options: FastServe(options.longest),
    "vllm": lambda options: Vllm(),
    "sarathi": lambda options: Sarathi(options.forward_size),
    "multires": lambda options: MultiRes(options.forward_size),
    "sync-coupled": lambda options: SyncCoupled(options.forward_size),
    "econoserve-d": _econoserve(False, False, False),
    "econoserve-sd": _econoserve(True, False, False),
    "econoserve-sdo": _econoserve(True, True, False),
    "econoserve": _econoserve(True, True, True),
}
"""Fresh policies by name."""

BLOCK_ALLOCATION = frozenset({"vllm", "sarathi", "econoserve"})
"""Policies that take a block at a time, wherever it lies (EconoServe where it hosts whole requests)."""


def serving_policy(name: str, options: ServingOptions | None = None) -> ServingPolicy:
    """
    Return a fresh serving policy.

    Parameters
    ----------
    name
        A key of :data:`SERVING_POLICIES`.
    options
        What it is made from.

    Raises
    ------
    ValueError
        If there is no policy of that name.
    """
    make = SERVING_POLICIES.get(name)
    if make is None:
        raise ValueError(f"no serving policy is called {name!r}; there are {', '.join(SERVING_POLICIES)}")
    return make(ServingOptions() if options is None else options)
