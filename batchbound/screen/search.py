"""Screen of ``batchbound search``."""

from __future__ import annotations

import json
import math

from ..models.exegpt.configuration import Strategy
from ..options.search import SearchOptions
from ..searching import ConfigurationSearch
from ..solvers.exegpt.execution_search import Found
from .streams import say
from .terminal import note

_COLUMNS = (
    "strategy", "TP", "B_E", "N_D", "B_m", "groups", "stages", "B_D", "GB", "latency", "TTFT", "TPOT",
    "req/s", "looked at",
)  # fmt: skip

_LEGEND = """  TP: devices per layer; B_E: prompts per encoding phase; N_D: decode iterations between phases;
  B_m: parts of a decode batch; groups: groups of TP devices; stages: pipeline stages;
  B_D: decoding requests; GB: memory of the fullest device; latency: start of a prompt to last token;
  TTFT: to first token; TPOT: time per further token"""


def show(found: ConfigurationSearch, options: SearchOptions) -> int:
    """Print the configurations; return 1 if there is none."""
    correlation = found.timelines[False].lengths.correlation
    if abs(correlation) > 0.1:
        note(f"input and output lengths correlate at {correlation:+.2f}; taken into account")
    if found.devices > len(found.timelines) == 1:
        note("WAA is left out: the profile has no interference of two workers")
    _show_configurations(found, options)
    for config, at_once, measured in found.extrapolated():
        note(
            f"{config.strategy.value}: {at_once:,.0f} requests decode at a time, the profile was measured"
            f" with {measured:,.0f} at most: its figures are extrapolated (profile with more --slots)"
        )
    if options.output is not None:
        strategy = found.runnable[0].strategy.value
        note(f"{options.output}: the {strategy} configuration as a plan for `batchbound run`")
    return 0 if found.best else 1


def _show_configurations(found: ConfigurationSearch, options: SearchOptions) -> None:
    timeline, targets = found.timelines[False], found.targets
    curve = found.frontier() if options.frontier else None
    if options.json:
        value = {
            "advice": found.advice(),
            "costs": timeline.profile.source,
            "latency_bound_s": _finite(targets.latency),
            "ttft_bound_s": _finite(targets.ttft),
            "tpot_bound_s": _finite(targets.tpot),
            "latency_length": timeline.longest,
            "correlation": timeline.lengths.correlation,
            "configurations": [_row(each, timeline.longest) for each in found.found],
            "seconds": found.seconds,
        }
        if curve is not None:
            value["frontier"] = [{"latency_s": at, "requests_per_s": rate} for at, rate in curve]
        say(json.dumps(value))
        return
    say(f"latency bound {targets}, for {timeline.longest} decode iterations (99th percentile)")
    say(found.advice())
    say("  " + " ".join(f"{name:>9s}" for name in _COLUMNS))
    for each in found.found:
        say("  " + " ".join(f"{text:>9s}" for text in _cells(each, timeline.longest)))
    say(_LEGEND)
    if curve is not None:
        say("throughput against latency, of the whole grid")
        for latency, rate in curve:
            say(f"  {latency:9.3f} s {rate:9.2f} requests/s")


def _finite(target: float) -> float | None:
    return target if math.isfinite(target) else None


def _row(each: Found, longest: int) -> dict[str, object]:
    config, reached = each.config, each.performance
    violated = [result.violations for result in each.results]
    row: dict[str, object] = {
        "strategy": each.strategy.value,
        "tensor_degree": each.tensor_degree,
        "evaluated": each.evaluated,
        "grid": each.grid,
        "proven": "within the gap of the best on the grid",
        "violations": {
            "pairs": sum(found.pairs for found in violated),
            "latency": sum(found.latency for found in violated),
            "throughput": sum(found.throughput for found in violated),
            "worst_latency": max((found.worst_latency for found in violated), default=0.0),
            "worst_throughput": max((found.worst_throughput for found in violated), default=0.0),
        },
    }
    if config is not None and reached is not None:
        row |= {
            "encode_batch": config.encode_batch,
            "decode_steps": config.decode_steps,
            "micro_batches": config.micro_batches,
            "tensor_groups": config.tensor_groups,
            "stages": list(reached.stages),
            "decode_batch": reached.decode_batch,
            "device_bytes": reached.device_bytes,
            "latency_s": reached.latency,
            "ttft_s": reached.ttft,
            "tpot_s": (reached.latency - reached.ttft) / longest,
            "requests_per_s": reached.throughput,
        }
    return row


def _cells(each: Found, longest: int) -> list[str]:
    config, reached = each.config, each.performance
    looked = f"{each.evaluated}/{each.grid}"
    if config is None or reached is None:
        return [each.strategy.value, str(each.tensor_degree), *["-"] * 11, looked]
    stages = (
        "+".join(map(str, reached.stages)) if each.strategy is not Strategy.RRA else str(reached.stages[0])
    )
    return [
        each.strategy.value,
        str(each.tensor_degree),
        str(config.encode_batch),
        str(config.decode_steps),
        str(config.micro_batches),
        str(config.tensor_groups),
        stages,
        f"{reached.decode_batch:.0f}",
        f"{reached.device_bytes / 1e9:.1f}",
        f"{reached.latency:.3f} s",
        f"{reached.ttft:.3f} s",
        f"{1e3 * (reached.latency - reached.ttft) / longest:.1f} ms",
        f"{reached.throughput:.2f}",
        looked,
    ]
