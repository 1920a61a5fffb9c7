"""Plans in verl: priorities, and a replica for each prompt.

The module imports verl only when it needs a class. Tested with the classes of verl 0.9.1. The example
``examples/verl_rollout.py`` runs batchbound's engine as a rollout of verl.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..data.arrays import IntArray

PRIORITY = "priority"

_BALANCERS = (
    ("verl.workers.rollout.router", "GlobalRequestLoadBalancer"),
    ("verl.workers.rollout.llm_server", "GlobalRequestLoadBalancer"),
    ("verl.experimental.agent_loop.agent_loop", "GlobalRequestLoadBalancer"),
)
"""Modules and names of verl's load balancer, newest version first."""


def priorities(lengths: Sequence[int] | IntArray) -> IntArray:
    """Return priorities that begin the longest completion first, shape (rows,).

    The lowest begins first, as in vLLM. They count from one, as verl drops a zero. ``lengths`` are each row's
    expected tokens, shape (rows,).
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(1, len(order) + 1)
    return rank


def set_priorities(batch: Any, values: Sequence[int] | IntArray) -> None:
    """Set a batch's priorities before ``generate_sequences``."""
    column = np.asarray(values, dtype=np.int64)
    if column.shape != (len(batch),):
        raise ValueError(f"{column.size} priorities for {len(batch)} rows")
    if (column < 1).any():
        raise ValueError(f"verl drops priority {int(column.min())}: count from one")
    batch.non_tensor_batch[PRIORITY] = column


class Placement:
    """Replicas of the completions of each prompt.

    prompts: Token ids of each row's prompt; rows with equal prompts are completions of one prompt.
    replica_of: Replica of each row, shape (rows,).
    """

    def __init__(self, prompts: Iterable[Sequence[int]], replica_of: Sequence[int] | IntArray) -> None:
        self._left: dict[tuple[int, ...], deque[int]] = {}
        for prompt, replica in zip(prompts, np.asarray(replica_of).tolist(), strict=True):
            self._left.setdefault(tuple(prompt), deque()).append(replica)

    def take(self, prompt: Sequence[int] | None) -> int | None:
        """Return the replica of a prompt's next completion, or None."""
        left = self._left.get(tuple(prompt or ()))
        return left.popleft() if left else None


def planned_load_balancer(placement: Placement, base: type | None = None) -> type:
    """Return a load balancer class that keeps a placement.

    Pass it as ``LLMServerManager(load_balancer_cls=...)``. Replica ``k`` is the ``k``-th server by name. verl
    itself places unplanned prompts, requests to lost servers, and its sticky sessions.
    """

    class PlannedLoadBalancer(base or _balancer()):  # type: ignore[misc]  # depends on verl's version
        def acquire_server(self, request_id: str, **extra: Any) -> Any:
            prompt = extra.pop("prompt_ids", None)
            if request_id not in self._request_id_to_server:
                replica, names = placement.take(prompt), sorted(self._servers)
                if replica is not None and replica < len(names):
                    self._request_id_to_server[request_id] = names[replica]
            return super().acquire_server(request_id, **extra)

        def require_acquire_fields(self) -> list[str]:
            """Return the request fields that choose a server."""
            return ["prompt_ids"]

    return PlannedLoadBalancer


def _balancer() -> type:
    for module, name in _BALANCERS:
        try:
            found: Mapping[str, Any] = vars(importlib.import_module(module))
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            continue
        if isinstance(found.get(name), type):
            return found[name]  # type: ignore[no-any-return]
    raise ImportError("verl has no GlobalRequestLoadBalancer: pass its load balancer as base")
