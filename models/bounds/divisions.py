"""Bounds for every division of memory between requests and kept prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Concatenate, ParamSpec

import numpy as np

from ...data.bound import Bound
from ...data.fleet import Fleet, Replica
from ...data.problem import Problem
from ...data.workload import Workload

EVERY_DIVISION = "every division"
"""Kind of the certificates."""

Parameters = ParamSpec("Parameters")


def for_every_division(
    prove: Callable[Concatenate[Problem, Parameters], Bound],
) -> Callable[Concatenate[Problem, Parameters], Bound]:
    """Make a bound hold for every division of the KV memory, if the search chose one.

    Two problems are bounded in place of the given one, and any schedule of any division takes as long as one
    of theirs at least:

    - **own tokens**: requests hold and compute only their own tokens, in the whole memory. Tokens of shared
      prompts cost extra, once, and their reads as well;
    - **prompts kept**: memory has no limit, and each shared prompt is computed once.

    So the bounds hold, too, where one memory holds each shared prompt once for all its requests.
    """

    @functools.wraps(prove)
    def bound(problem: Problem, /, *more: Parameters.args, **named: Parameters.kwargs) -> Bound:
        if not is_divided(problem):
            return prove(problem, *more, **named)
        apart = prove(with_own_tokens(problem), *more, **named)
        bounds = [
            _wrapped(apart, "own tokens", _beside_own_tokens(problem)),
            _wrapped(prove(with_prompts_kept(problem), *more, **named), "prompts kept"),
        ]
        return max(bounds, key=lambda bound: bound.seconds)

    return bound


def for_every_division_of_fleets(
    prove: Callable[Concatenate[Fleet, Parameters], Bound],
) -> Callable[Concatenate[Fleet, Parameters], Bound]:
    """Make a fleet's bound hold for every division of each KV memory."""

    @functools.wraps(prove)
    def bound(fleet: Fleet, /, *more: Parameters.args, **named: Parameters.kwargs) -> Bound:
        work = fleet.workload
        divided = work.shared_tokens.any() and any(replica.memory_divided for replica in fleet.replicas)
        if not divided or is_one_engine(fleet):
            return prove(fleet, *more, **named)
        total = int(np.unique(np.stack((work.group, work.shared_tokens)), axis=1)[1].sum())
        own_fleet = replace(fleet, workload=_own(work), replicas=tuple(map(_undivided, fleet.replicas)))
        kept_prompts = tuple(
            replace(replica, kv_capacity=None, prefix_cache=total, memory_divided=False)
            for replica in fleet.replicas
        )
        bounds = [
            _wrapped(prove(own_fleet, *more, **named), "own tokens"),
            _wrapped(prove(replace(fleet, replicas=kept_prompts), *more, **named), "prompts kept"),
        ]
        return max(bounds, key=lambda bound: bound.seconds)

    return bound


def is_one_engine(fleet: Fleet) -> bool:
    """Return whether a fleet is one idle replica, bounded by its problem."""
    return len(fleet.replicas) == 1 and fleet.replicas[0].busy == 0


def is_divided(problem: Problem) -> bool:
    """Return whether the search divided the KV memory."""
    return problem.memory_divided and len(problem.prefix_tokens) > 0


def with_own_tokens(problem: Problem) -> Problem:
    """Return the problem without shared tokens, in the whole memory."""
    assert problem.kv_capacity is not None
    return replace(
        problem,
        workload=_own(problem.workload),
        kv_capacity=problem.kv_capacity + problem.prefix_cache,
        prefix_cache=0,
        memory_divided=False,
    )


def with_prompts_kept(problem: Problem) -> Problem:
    """Return the problem with room for every request and every shared prompt."""
    total = int(problem.prefix_tokens.sum())
    return replace(problem, kv_capacity=None, prefix_cache=total, memory_divided=False)


def _own(workload: Workload) -> Workload:
    none = np.zeros_like(workload.shared_tokens)
    return replace(workload, input_tokens=workload.input_tokens - workload.shared_tokens, shared_tokens=none)


def _undivided(replica: Replica) -> Replica:
    capacity = None if replica.kv_capacity is None else replica.kv_capacity + replica.prefix_cache
    return replace(replica, kv_capacity=capacity, prefix_cache=0, memory_divided=False)


def _beside_own_tokens(problem: Problem) -> dict[str, float]:
    """Return the seconds of shared prompts beside the requests' own tokens.

    A stage's floor may hide the tokens that it computes.
    """
    cost = problem.cost
    once = 0 if cost.prefill_floor else int(problem.prefix_tokens.sum())
    read = int((problem.workload.shared_tokens * problem.decode_steps).sum())
    return {
        "shared prompts": cost.prefill_per_token * once,
        "KV reads of shared prompts": cost.decode_per_kv_token * read,
    }


def _wrapped(bound: Bound, holds: str, beside: Mapping[str, float] | None = None) -> Bound:
    terms = {**bound.terms, **(beside or {})}
    certificate: dict[str, object] = {"kind": EVERY_DIVISION, "holds": holds, "of": dict(bound.certificate)}
    if bound.certificate.get("evictions") is True:
        certificate["evictions"] = True
    source = f"{EVERY_DIVISION} of the KV capacity: {bound.source}"
    return Bound(sum(terms.values()), source, terms, certificate)
