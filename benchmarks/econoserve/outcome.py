"""A system's figures on a trace, and what bound it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from setting import FORWARD

from batchbound.executor.serving_metrics import ServingMetrics, serving_metrics
from batchbound.executor.serving_simulation import WAITING, ServingRun

COLUMNS: tuple[tuple[str, str], ...] = (
    ("completion", "JCT"), ("waiting", "wait"), ("execution", "exec"), ("queueing", "queue"),
    ("preemption", "preempt"), ("between_tokens", "TBT"), ("slo_satisfaction", "SSR"),
    ("requests_per_s", "req/s"), ("tokens_per_s", "tok/s"), ("kv_held", "KV"), ("kv_promised", "given"),
    ("kv_full", "full"), ("forward_size", "fwd"), ("completed_per_iteration", "done/it"),
    ("failed", "failed"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Binding:
    """
    What a run was bound by, as shares of its busy time.

    ``forward``: at least 95 % of the target forward size is used; ``memory``: at least 95 % of it is
    promised, or prompts wait though the forward size would take some; ``idle``: no prompt waits.
    """

    memory: float
    forward: float
    idle: float

    @classmethod
    def of(cls, run: ServingRun) -> Binding:
        """Return the shares of a run."""
        busy = run.seconds.sum()
        arrival = run.workload.arrival
        waited = run.spent[:, WAITING]
        never = np.isnan(run.first_token) & (waited == 0)
        begun = np.sort(np.where(never, np.inf, arrival + waited))
        came = np.searchsorted(np.sort(arrival), run.start, side="right")
        waiting = came - np.searchsorted(begun, run.start, side="right")

        def share(when: NDArray[np.bool_]) -> float:
            return float(run.seconds[when].sum() / busy)

        forward = run.decodes + run.prompt_tokens >= 0.95 * FORWARD
        memory = (run.promised >= 0.95 * run.capacity) | ((waiting > 0) & ~forward)
        return cls(share(memory), share(forward), share(waiting <= 0))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A system's figures on a trace, and what bound it."""

    metrics: ServingMetrics
    binding: Binding

    @classmethod
    def of(cls, run: ServingRun) -> Outcome:
        """Return the outcome of a run."""
        return cls(serving_metrics(run), Binding.of(run))

    def why(self) -> str:
        """Return in words what bound it."""
        bound, metrics = self.binding, self.metrics
        return (
            f"memory {bound.memory:.0%}, forward {bound.forward:.0%}, idle {bound.idle:.0%} of the time;"
            f" held {metrics.kv_held:.2f} of {metrics.kv_promised:.2f} promised;"
            f" {metrics.failed:.0%} stopped"
        )


def table(rows: dict[str, Outcome]) -> None:
    print(
        f"{'':16}"
        + "".join(f"{head:>9}" for _, head in COLUMNS)
        + f"{'sched us':>10}{'memory':>8}{'forward':>8}{'idle':>6}"
    )
    for name, one in rows.items():
        values = "".join(f"{getattr(one.metrics, field):9.3g}" for field, _ in COLUMNS)
        bound = one.binding
        print(
            f"{name:16}{values}{1e6 * one.metrics.decision:10.1f}"
            f"{bound.memory:8.2f}{bound.forward:8.2f}{bound.idle:6.2f}",
            flush=True,
        )
