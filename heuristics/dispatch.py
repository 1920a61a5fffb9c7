"""Dispatch of requests to replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ..data.arrays import FloatArray, IntArray
from ..data.fleet import Fleet, Groups
from ..models.bounds.fleet import request_costs
from ..models.bounds.fleet_partition import least_loaded, spread_groups
from ..models.bounds.packing.heuristics import karmarkar_karp

BUCKETS = 10
"""Ranges of predicted length in MICO's dispatch (N, section 4.1.1)."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Units of dispatch: requests, or groups of them.

    answer_tokens, prompt_tokens: Predicted and known tokens of each, shape (units,).
    costs: Seconds of each on each kind of replica, shape (kinds, units).
    kind_of, busy, shares: Kind, seconds busy and share of the work of each replica, shape (replicas,). The
    shares sum to one.
    """

    names: tuple[str, ...]
    answer_tokens: IntArray
    prompt_tokens: IntArray
    costs: FloatArray
    kind_of: IntArray
    busy: FloatArray
    shares: FloatArray

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, fleet: Fleet, unit_of: IntArray) -> Units:
        """Return a fleet's units; ``unit_of`` numbers them, shape (requests,)."""
        kinds = list(dict.fromkeys(fleet.replicas))
        kind_of = np.array([kinds.index(replica) for replica in fleet.replicas], dtype=np.int64)
        costs = np.array(
            [np.bincount(unit_of, weights=request_costs(fleet, kind, "slots", "slots")) for kind in kinds]
        )
        busy = np.array([replica.busy for replica in fleet.replicas])
        _, first = np.unique(unit_of, return_index=True)
        workload = fleet.workload
        return cls(
            tuple(workload.ids[first].tolist()),
            np.bincount(unit_of, weights=workload.output_tokens).astype(np.int64),
            np.bincount(unit_of, weights=workload.input_tokens).astype(np.int64),
            costs,
            kind_of,
            busy,
            _shares(fleet, costs.sum(axis=1)[kind_of], busy),
        )

    def tickets(self) -> IntArray:
        """Return each unit's replica in proportion to the shares."""
        replicas, count = len(self.shares), len(self)
        if np.ptp(self.shares) == 0:
            return np.arange(count) % replicas
        largest = np.ceil(self.shares * count).astype(np.int64) + 1
        replica = np.repeat(np.arange(replicas), largest)
        turn = np.arange(len(replica)) - np.repeat(np.cumsum(largest) - largest, largest)
        with np.errstate(divide="ignore"):
            due = (turn + 0.5) / self.shares[replica]
        return replica[np.argsort(due, kind="stable")][:count]


def round_robin(units: Units) -> IntArray:
    """Deal units out in turn, as schedulers without lengths do."""
    return units.tickets()


def hashed(units: Units) -> IntArray:
    """Choose a replica by each unit's name.

    The choice is the same in every run; counts are even only on average.
    """
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in units.names)
    numbers = np.frombuffer(digests, dtype=np.uint64) / 2.0**64
    replica = np.searchsorted(np.cumsum(units.shares), numbers, side="right")
    return np.minimum(replica, len(units.shares) - 1)


def mico(units: Units) -> IntArray:
    r"""Return MICO's dispatch (section 3.3), in linear time.

    Units are grouped by :math:`\lfloor l / (l_{max} / N) \rfloor` of their predicted length. They are dealt
    out from the longest group on, one row at a time, with each replica's share. An incomplete row is filled
    from the next group, and the replicas take turns in getting the borrowed units. Within a row, the longest
    prompts go to the replica of least :math:`M_k`, its sum of prompt tokens.
    """
    longest = int(units.answer_tokens.max())
    label = np.minimum(units.answer_tokens * BUCKETS // (longest + 1), BUCKETS - 1)
    order = np.argsort(BUCKETS - 1 - label, kind="stable")
    groups, prompts = label[order].tolist(), units.prompt_tokens[order].tolist()
    tickets: list[int] = units.tickets().tolist()
    replicas = len(units.shares)
    scale = [1 / share if share else 0.0 for share in units.shares.tolist()]
    load = [0.0] * replicas
    turn = 0
    chosen = [0] * len(units)
    for first in range(0, len(units), replicas):
        last = min(first + replicas, len(units))
        row = tickets[first:last]
        bucket = first
        while bucket < last and groups[bucket] == groups[first]:
            bucket += 1
        borrowed = last - bucket
        if borrowed:
            row.sort()
            turn %= len(row)
            row = row[turn:] + row[:turn]
            turn += borrowed
        split = last - first - borrowed
        for part, begin in ((row[:split], first), (row[split:], bucket)):
            part.sort(key=load.__getitem__)
            size = len(part)
            places = sorted(range(begin, begin + size), key=prompts.__getitem__, reverse=True)
            for place, replica in zip(places, part, strict=True):
                chosen[place] = replica
                load[replica] += prompts[place] * scale[replica]
    replica_of = np.empty(len(units), dtype=np.int64)
    replica_of[order] = chosen
    return replica_of


def longest_first(units: Units) -> IntArray:
    """Return Graham's LPT: the longest unit first, where it ends first."""
    order = np.argsort(-units.costs.mean(axis=0), kind="stable")
    return least_loaded(units.costs, units.kind_of, units.busy, order)


def differencing(units: Units) -> IntArray:
    """Partition tokens by largest differencing, as RLHF frameworks do.

    Raises ValueError if the replicas differ, which the method cannot balance.
    """
    if np.ptp(units.shares) > 0:
        raise ValueError(
            "Karmarkar-Karp splits evenly; the replicas differ in speed or in what keeps them busy"
        )
    return karmarkar_karp(units.answer_tokens + units.prompt_tokens, len(units.shares))


Rule = Callable[[Units], IntArray]

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "round-robin": round_robin,
        "hash": hashed,
        "mico": mico,
        "lpt": longest_first,
        "karmarkar-karp": differencing,
    }
)


def dispatch(fleet: Fleet, rule: str = "lpt", groups: Groups = "any") -> IntArray:
    """Return the replica of each request, shape (requests,).

    rule: Key of :data:`RULES`.
    groups: ``"together"`` keeps a group on one replica; ``"spread"`` puts it on different ones (rule ``lpt``
        only).

    Raises ValueError if the rule is unknown, or cannot spread groups.
    """
    chosen = RULES.get(rule)
    if chosen is None:
        raise ValueError(f"no dispatch rule is called {rule!r}; there are {', '.join(RULES)}")
    single = np.arange(len(fleet))
    if groups == "any":
        return chosen(Units.of(fleet, single))
    unit_of = fleet.workload.group_numbers()
    if groups == "together":
        replica_of: IntArray = chosen(Units.of(fleet, unit_of))[unit_of]
        return replica_of
    if rule != "lpt":
        raise ValueError(f"the rule {rule!r} does not spread groups; 'lpt' does")
    units = Units.of(fleet, single)
    return spread_groups(units.costs, units.kind_of, units.busy, group_members(fleet))


def group_members(fleet: Fleet) -> list[IntArray]:
    """Return the requests of each group; lone requests are groups."""
    number = fleet.workload.group_numbers()
    by_group = np.argsort(number, kind="stable")
    return np.split(by_group, np.flatnonzero(np.diff(number[by_group])) + 1)


def _shares(fleet: Fleet, whole: FloatArray, busy: FloatArray) -> FloatArray:
    """Return the shares of work with which all replicas end together.

    A replica that takes ``whole`` seconds for all of it does ``(T - busy) / whole`` of it by time T.
    """
    if len(set(fleet.replicas)) == 1:
        return np.full(len(busy), 1 / len(busy))
    # A replica that takes no time counts as one that takes hardly any.
    whole = np.maximum(whole, 1e-9 * (whole.max() or 1.0))
    end = 0.0
    for last in np.argsort(busy).tolist():
        used = busy <= busy[last]
        end = (1 + (busy[used] / whole[used]).sum()) / (1 / whole[used]).sum()
        if not (busy[~used] < end).any():
            break
    share: FloatArray = np.maximum(0.0, end - busy) / whole
    total: FloatArray = share / share.sum()
    return total
