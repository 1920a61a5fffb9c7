"""What a run on servers came to, as figures and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from ..data.iterations import EngineLimits
from ..data.readers.server_run import ServerRun
from ..executor.reports.iteration_audit import audit_iterations
from .output import note


def server_summary(run: ServerRun, limits: EngineLimits, *, batched_stated: bool) -> dict[str, object]:
    """
    Return the figures of a run on servers, by the names that programs know.

    Parameters
    ----------
    run
        The run.
    limits
        Of its servers together.
    batched_stated
        Whether the tokens of an iteration are known, or assumed.
    """
    done = run.failed == 0
    tokens, seconds = int(run.completion_tokens.sum()), run.makespan
    latency = (run.finished - run.sent)[done]
    summary: dict[str, object] = {
        "requests": len(run),
        "retries": run.retries,
        "order": run.order,
        "in_flight": run.in_flight,
        "makespan_s": seconds,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds if seconds else None,
        "latency_s": np.quantile(latency, (0.5, 0.9, 0.99)).tolist() if len(latency) else None,
        "preemptions": _sum(run, "preemptions"),
        "cached_tokens": _sum(run, "cached_tokens"),
    }
    try:
        audit = audit_iterations(run, limits, budget_known=batched_stated)
    except ValueError as error:
        note(f"no bound: {error}")
        return summary
    for server in run.servers:
        if server.most_running is not None and server.most_running > run.slots:
            note(
                f"{server.url}: {server.most_running} requests were under way at a time, more than --slots"
                f" {run.slots}: the bound is taken for as many"
            )
        elif server.plateau is not None and server.plateau < run.slots:
            note(
                f"{server.url}: at most {server.plateau} requests were seen under way while others waited:"
                f" slots or room for KV cache are fewer than --slots {run.slots}"
            )
    return summary | {
        "iterations": audit.counted,
        "bound_iterations": audit.bound.iterations,
        "bound_source": audit.bound.source,
        "bound_certificate": dict(audit.bound.certificate),
        "bound_slots": audit.limits.sequences,
        "gap": None if audit.counted is None else audit.bound.gap(audit.counted),
        "simulated_iterations": {name: one.iterations for name, one in audit.simulated.items()},
        "losses": audit.losses,
    }


def show_server(summary: Mapping[str, object], *, as_json: bool) -> None:
    """Print the figures of a run on servers: as one JSON object, or as lines for people."""
    if as_json:
        print(json.dumps(summary))
        return
    before = f" after {summary['resumed']:,} from before" if summary.get("resumed") else ""
    retried = f", {summary['retries']:,} attempts made again" if summary["retries"] else ""
    rate = summary["output_tokens_per_s"]
    speed = f", {rate:,.0f} output tokens/s" if isinstance(rate, float) else ""
    made = f"{summary['requests']:,} requests{before} in {summary['makespan_s']:,.2f} s{speed}{retried}"
    print(f"{summary['output']}: {made}" if summary.get("output") else made)
    _show_iterations(summary)


def _show_iterations(summary: Mapping[str, object]) -> None:
    bound = summary.get("bound_iterations")
    if bound is None:
        return
    assert isinstance(bound, int)
    counted, predicted = summary.get("iterations"), summary.get("predicted_iterations")
    print(f"  {'proven least':28s} {bound:9,d} iterations, by {summary['bound_source']}")
    if isinstance(predicted, int):
        print(f"  {'predicted at planned lengths':28s} {predicted:9,d}")
    if isinstance(counted, int):
        print(f"  {'counted by the server':28s} {counted:9,d}  {counted / bound - 1:+.2%} of the bound")
    else:
        print(f"  {'counted by the server':28s} {'unknown':>9s}  (it shows no such counter, or started anew)")
    simulated = summary.get("simulated_iterations")
    for name, value in (simulated if isinstance(simulated, dict) else {}).items():
        print(f"  {'simulated, ' + name:28s} {value:9,d}  {value / bound - 1:+.2%}")
    losses = summary.get("losses")
    for name, value in (losses if isinstance(losses, dict) else {}).items():
        print(f"  {'lost: ' + name:38s} {value:+9,d}")


def _sum(run: ServerRun, name: str) -> int | None:
    values = [getattr(server, name) for server in run.servers]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
