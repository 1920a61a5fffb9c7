"""
Compare the claims on recorded runs of vLLM in several configurations with its counter.

`batchbound run ROWS --server URL --slots 16 --batched-tokens N` sent each run. Its sequences and the pages of
`/metrics` before and after it are in `tests/data/server_runs`. Prints the table of `docs/results.json`, or
writes it there with `--write`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from batchbound.data.claims.assumptions import WHOLE_CONTEXT, Assumption
from batchbound.data.iterations import EngineLimits
from batchbound.data.readers.server_run import ServerCount, ServerRun
from batchbound.executor.reports.iteration_audit import IterationAudit, audit_iterations

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "tests" / "data" / "server_runs"


def recorded_runs() -> Iterator[tuple[Mapping[str, Any], IterationAudit]]:
    """Yield each recorded run with its audit."""
    for entry in json.loads((RUNS / "runs.json").read_text(encoding="utf-8")):
        server, budget, kv = ServerCount(**entry["server"]), entry["token_budget"], entry["kv_tokens"]
        limits = EngineLimits(entry["slots"] * (server.engines or 1), budget, kv, server.block_tokens or 16)
        stated = kv is not None
        yield entry, audit_iterations(_run(entry, server), limits, budget_known=True, kv_stated=stated)


def _run(entry: Mapping[str, Any], server: ServerCount) -> ServerRun:
    count = len(entry["choices"])
    nothing = np.zeros(count, dtype=np.int64)
    return ServerRun(
        ids=tuple(f"r{place}" for place in entry["position"]),
        choices=np.array(entry["choices"]),
        prompt_tokens=np.array(entry["prompt_tokens"]),
        completion_tokens=np.array(entry["completion_tokens"]),
        position=np.array(entry["position"]),
        sent=np.zeros(count),
        finished=np.ones(count),
        server_of=nothing,
        failed=nothing,
        slots=entry["slots"],
        in_flight=entry["in_flight"],
        order=entry["order"],
        retries=0,
        servers=(server,),
        assumptions=(Assumption(WHOLE_CONTEXT, "stated" if entry["kv_tokens"] else "assumed"),),
    )


def rows() -> list[list[str]]:
    """Return the rows of the table, one per configuration."""
    found: dict[str, list[str]] = {}
    for entry, audit in recorded_runs():
        counted = "not counted" if audit.counted is None else f"{audit.counted:,}"
        if entry["configuration"] in found:
            found[entry["configuration"]][4] = counted
            continue
        claimed = f"{audit.label.removesuffix(' least')} {audit.bound.iterations:,}, by {audit.bound.source}"
        broken = "; ".join(one.name for one in audit.assumptions if one.basis in ("assumed", "broken"))
        lost = max(audit.losses.items(), key=lambda part: part[1], default=("", 0))
        cause = f"{lost[0]}: {lost[1]:,}" if lost[1] else ""
        found[entry["configuration"]] = [entry["configuration"], claimed, broken, counted, "not run", cause]
    return list(found.values())


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table to docs/results.json")
    if not parser.parse_args().write:
        for row in rows():
            print(" | ".join(row))
        return
    path = ROOT / "docs" / "results.json"
    tables = json.loads(path.read_text(encoding="utf-8"))
    tables["configurations"]["rows"] = rows()
    path.write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
