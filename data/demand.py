"""Demand of jobs by a deadline, beyond what devices can do: a certificate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Least work of some completions.

    tokens: Tokens computed, each shared beginning once.
    drawn: Tokens drawn.
    reads: KV tokens read by decodes, those of shared beginnings left out.
    longest: Tokens of the longest completion.
    """

    tokens: int
    drawn: int
    reads: int
    longest: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What some devices do at most for a model.

    flops, bandwidth, memory: Operations a second, bytes a second, and bytes of all devices.
    weights, read: Bytes of all weights, and of those that an iteration reads at least.
    kv_token: Bytes of KV cache of a token.
    flops_token, flops_drawn: Operations for a computed token, and for a drawn one besides.
    """

    flops: float
    bandwidth: float
    memory: float
    weights: float
    read: float
    kv_token: float
    flops_token: float
    flops_drawn: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Work that is due by a deadline.

    jobs: Numbers of the jobs due.
    window: Seconds until the deadline.
    """

    jobs: tuple[int, ...]
    window: float
    work: Work


@dataclass(frozen=True, slots=True)
class Excess:
    """Demand that no schedule meets.

    seconds: Least seconds of the demand; infinite if the weights do not fit.
    limit: ``arithmetic``, ``reading`` or ``memory``.
    """

    demand: Demand
    seconds: float
    limit: str
