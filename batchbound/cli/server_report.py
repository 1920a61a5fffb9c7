"""What a run on servers came to, as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..running.server_result import ServerResult
from .output import note


def show_server(result: ServerResult, output: str, *, as_json: bool) -> None:
    """Print the figures of a run on servers: as one JSON object, or as lines for people."""
    if not len(result.run):
        note(f"{output}: every request had its completion already")
        return
    summary = result.figures(note) | {"output": output}
    if as_json:
        print(json.dumps(summary))
        return
    before = f" after {summary['resumed']:,} from before" if summary["resumed"] else ""
    retried = f", {summary['retries']:,} attempts made again" if summary["retries"] else ""
    rate = summary["output_tokens_per_s"]
    speed = f", {rate:,.0f} output tokens/s" if isinstance(rate, float) else ""
    made = f"{summary['requests']:,} requests{before} in {summary['makespan_s']:,.2f} s{speed}{retried}"
    print(f"{output}: {made}")
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
