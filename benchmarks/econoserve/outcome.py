"""A system's figures on a trace, and what bound it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from setting import FORWARD

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.heuristics.serving.disaggregated import DisaggregatedRun
from batchbound.heuristics.serving.metrics import ServingMetrics
from batchbound.heuristics.serving.simulation import QUEUED, WAITING, ServingRun

COLUMNS: tuple[tuple[str, str], ...] = (
    ("completion", "JCT"), ("waiting", "wait"), ("execution", "exec"), ("queueing", "queue"),
    ("preemption", "preempt"), ("between_tokens", "TBT"), ("slo_satisfaction", "SSR"),
    ("requests_per_s", "req/s"), ("tokens_per_s", "tok/s"), ("kv_held", "KV"), ("kv_promised", "given"),
    ("kv_full", "full"), ("forward_size", "fwd"), ("completed_per_iteration", "done/it"),
    ("failed", "failed"),
)  # fmt: skip
BINDING = ("memory", "slots", "forward", "prompts", "idle")
_ROUNDING = 1e-9
"""Seconds: times that are sums of the same parts in another order."""


@dataclass(frozen=True, slots=True)
class Binding:
    """
    What a run was bound by, as shares of its busy time.

    Parameters
    ----------
    memory
        At least 95 % of it is promised, or somebody waits for a place though neither of the next two binds.
    slots
        As many requests generate or compute their prompt as the system allows at most.
    forward
        At least 95 % of the target forward size is used.
    prompts
        Prompts are computed, so that the answers under way take the longer. (DistServe: on the other device.)
    idle
        Nobody waits: for a prompt, between prompt and answer, or stopped.
    when
        ``memory`` in each quarter of the run.
    """

    memory: float
    slots: float
    forward: float
    prompts: float
    idle: float
    when: tuple[float, ...]

    @classmethod
    def of(cls, run: ServingRun, slots: float, split: DisaggregatedRun | None) -> Binding:
        """Return the shares of a run of a system that has at most so many under way."""
        busy, at = run.seconds.sum(), run.start + _ROUNDING
        arrival, sent = run.workload.arrival, 0.0 if split is None else split.transfer_seconds
        waited, drawn = run.spent[:, WAITING], run.first_token
        never = np.isnan(drawn) & (waited == 0)

        def reached(times: FloatArray) -> IntArray:
            return np.searchsorted(np.sort(times), at, side="right")

        came, over = reached(arrival), reached(run.finished)
        begun, first = reached(np.where(never, np.inf, arrival + waited)), reached(drawn)
        between = first - reached(drawn + run.spent[:, QUEUED])
        # vLLM's answers sit out the iterations of prompts.
        sit_out = (run.decodes == 0) & (run.prompt_tokens > 0)
        last = np.maximum.accumulate(np.where(sit_out, 0, np.arange(len(at))))
        decodes = run.decodes[last]
        stopped = np.where(sit_out, 0, came - over - (came - begun) - (begun - first) - between - decodes)
        held_up = reached(drawn + sent) - reached(drawn + np.maximum(run.spent[:, QUEUED], sent))
        held_up = held_up + np.maximum(stopped, 0) + (came - begun if split is None else 0)
        full = decodes + begun - first >= slots
        forward = run.decodes + run.prompt_tokens >= 0.95 * FORWARD
        memory = (run.promised >= 0.95 * run.capacity) | ((held_up > 0) & ~forward & ~full)
        quarter = np.minimum(4 * (np.cumsum(run.seconds) - run.seconds) // busy, 3)

        def share(when: NDArray[np.bool_], among: NDArray[np.bool_] | slice = slice(None)) -> float:
            return float(run.seconds[among][when[among]].sum() / run.seconds[among].sum())

        computing = share(run.prompt_tokens > 0) if split is None else split.prompt_seconds / run.start[-1]
        return cls(
            memory=share(memory),
            slots=share(full),
            forward=share(forward),
            prompts=computing,
            idle=share(held_up <= 0),
            when=tuple(share(memory, quarter == part) for part in range(4)),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A system's figures on a trace, and what bound it."""

    metrics: ServingMetrics
    binding: Binding
    served_tokens: float
    """Mean length of the completions served, tokens: a run that is cut may have served the short ones."""

    def why(self) -> str:
        """Return in words where the time went and what bound it."""
        bound, metrics = self.binding, self.metrics
        quarters = ", ".join(f"{100 * share:.0f}" for share in bound.when)
        return (
            f"{metrics.completion:.3g} s: waiting {metrics.waiting:.3g}, queued {metrics.queueing:.3g},"
            f" stopped {metrics.preemption:.2g}, running {metrics.execution:.3g}"
            f" ({1e3 * (metrics.between_tokens or 0):.0f} ms a token);"
            f" memory {bound.memory:.0%} (by quarter {quarters}), slots {bound.slots:.0%},"
            f" forward {bound.forward:.0%}, prompts {bound.prompts:.0%}, idle {bound.idle:.0%} of the time;"
            f" held {metrics.kv_held:.2f} of {metrics.kv_promised:.2f} promised;"
            f" {metrics.failed:.0%} stopped"
        )


def table(rows: dict[str, Outcome]) -> None:
    print(
        f"{'':16}"
        + "".join(f"{head:>9}" for _, head in COLUMNS)
        + f"{'length':>8}{'sched us':>10}"
        + "".join(f"{name:>8}" for name in BINDING)
    )
    for name, one in rows.items():
        figures = (getattr(one.metrics, field) for field, _ in COLUMNS)
        values = "".join(f"{'-':>9}" if figure is None else f"{figure:9.3g}" for figure in figures)
        binding = "".join(f"{getattr(one.binding, field):8.2f}" for field in BINDING)
        print(
            f"{name:16}{values}{one.served_tokens:8.0f}{1e6 * one.metrics.decision:10.1f}{binding}",
            flush=True,
        )
