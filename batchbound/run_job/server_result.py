"""Result of a run on servers, with its bound on iterations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..data.claims.assumptions import assumed_line, broken_line
from ..data.costs.iteration_rates import IterationRates
from ..data.iterations import EngineLimits
from ..data.readers.server_run import ServerRun
from ..executor.reports.iteration_audit import audit_iterations
from ..executor.reports.prompt_audit import PromptAudit

if TYPE_CHECKING:
    from ..data.arrays import IntArray
    from ..heuristics.serving.release import Release


_LATE = 1.03
"""Iterations over those predicted from which changed lengths are named."""

_NAMED = 3
"""Most changed rows that are named."""


@dataclass(frozen=True, slots=True, eq=False)
class ServerResult:
    """Result of a run on servers.

    Parameters
    ----------
    requests
        Number of requests of the whole batch.
    run
        Run of the requests sent; empty if an earlier part had completed all.
    limits
        Joint limits of the servers.
    budget_known
        True if the tokens per iteration are the servers' own; otherwise the bound ignores them.
    release
        Order, with its predicted iterations; None if the run had finished before.
    resumed
        Number of requests that an earlier part of the run had completed.
    failed
        Number of requests with an error instead of a completion.
    finished_before
        True if an earlier run had finished the job; ``run`` is that run.
    kv_stated
        True if the user stated the KV capacity; otherwise the bound ignores it.
    lengths_known
        True if the lengths were known: stated, or those of an earlier run.
    repeats
        True if the same command would know the lengths next time, from this run's trace.
    rates
        Costs of an iteration, fitted to this run; None without a fit.
    planned_tokens
        Tokens of each row's completion that the plan knew, shape (requests,); None if it knew none.
    """

    requests: int
    run: ServerRun
    limits: EngineLimits
    budget_known: bool
    release: Release | None
    resumed: int
    failed: int
    finished_before: bool = False
    kv_stated: bool = False
    lengths_known: bool = False
    repeats: bool = False
    rates: IterationRates | None = None
    planned_tokens: IntArray | None = None

    def figures(self, remark: Callable[[str], None] = lambda text: None) -> dict[str, object]:
        """Return the run's figures by JSON key.

        remark: Function that receives remarks on differences between servers and plan.
        """
        found = _of_run(self.run) | self._against_bound(remark)
        predicted = None if self.release is None else self.release.predicted
        if predicted is not None and len(self.run) == self.requests:
            found["predicted_iterations"] = predicted.iterations
            counted = found.get("iterations")
            if isinstance(counted, int) and counted > _LATE * predicted.iterations:
                found |= self._changed_lengths()
        return found | {"resumed": self.resumed, "failed": self.failed, "endings": dict(self.run.endings)}

    def _changed_lengths(self) -> dict[str, object]:
        """Return how many completions have another length than planned, and those that grew most."""
        run = self.run
        if self.planned_tokens is None:
            return {}
        single = (run.failed == 0) & (run.choices == 1)
        planned = self.planned_tokens[run.position]
        grown = np.where(single, run.completion_tokens - planned, 0)
        largest = [row for row in np.argsort(-grown, kind="stable")[:_NAMED].tolist() if grown[row] > 0]
        if not largest:
            return {}
        tokens = {run.ids[row]: [int(planned[row]), int(run.completion_tokens[row])] for row in largest}
        return {"changed_lengths": {"rows": int(np.count_nonzero(grown)), "grown_most": tokens}}

    def _against_bound(self, remark: Callable[[str], None]) -> dict[str, object]:
        run = self.run
        try:
            audit = audit_iterations(
                run,
                self.limits,
                budget_known=self.budget_known,
                kv_stated=self.kv_stated,
                rates=self.rates,
            )
        except ValueError as error:
            remark(f"no bound: {error}")
            return {}
        # Other clients explain the distance, too.
        far = None if audit.broken or run.counted_beside else audit.far
        for line in (broken_line(audit.assumptions), audit.broken, run.counted_beside, far):
            if line is not None:
                remark(line)
        for line in run.other_slots(run.slots):
            remark(line)
        return {
            "iterations": audit.counted,
            "bound_iterations": audit.bound.iterations,
            "bound_source": audit.bound.source,
            "bound_label": audit.label,
            "bound_is_wrong": audit.is_defect,
            "assumptions": [asdict(one) for one in audit.assumptions],
            "assuming": assumed_line(audit.assumptions),
            "bound_certificate": dict(audit.bound.certificate),
            "abandoned": run.abandoned,
            "bound_slots": audit.limits.sequences,
            "gap": None
            if audit.counted is None or audit.broken or run.abandoned
            else audit.bound.gap(audit.counted),
            "simulated_iterations": {name: one.iterations for name, one in audit.simulated.items()},
            "comparable": audit.comparable and not run.counted_beside,
            "losses": audit.losses,
            **self._prompts(audit.prompts),
        }

    def _prompts(self, prompts: PromptAudit | None) -> dict[str, object]:
        """Return the figures of prompt tokens, with seconds by this run's costs."""
        if prompts is None:
            return {}
        rates, again = self.rates, prompts.again
        runs = prompts.runs.items()
        return {
            "prompt_tokens_computed": prompts.computed,
            "prompt_tokens_needed": prompts.needed,
            "prompt_tokens_again": again,
            "seconds_again": None if rates is None or again is None else rates.prompt_tokens * again,
            "simulated_prompt_tokens": {name: run.prompt_tokens for name, run in runs},
            "simulated_seconds": {} if rates is None else {name: run.seconds(rates) for name, run in runs},
        }


def _of_run(run: ServerRun) -> dict[str, object]:
    done, seconds = run.failed == 0, run.makespan
    # Every completion has at least one token: fewer mean that the server sent no counts.
    unknown = bool((run.completion_tokens < run.choices)[done].any())
    tokens = None if unknown else int(run.completion_tokens.sum())
    latency = (run.finished - run.sent)[done]
    return {
        "requests": len(run),
        "retries": run.retries,
        "order": run.order,
        "in_flight": run.in_flight,
        "makespan_s": seconds,
        "unreachable_s": run.unreachable,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds if tokens is not None and seconds else None,
        "latency_s": np.quantile(latency, (0.5, 0.9, 0.99)).tolist() if len(latency) else None,
        "preemptions": _sum(run, "preemptions"),
        "cached_tokens": _sum(run, "cached_tokens"),
    }


def _sum(run: ServerRun, name: str) -> int | None:
    values = [getattr(server, name) for server in run.servers]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
