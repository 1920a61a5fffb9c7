"""
An unmodified vLLM in our order and in the file's: iterations that its own log counts, against the bound.

Three jobs of an RL step's lengths (PolyTrace's DAPO-32B, scaled down), each by ``batchbound run --server``:
all requests at once in file order; in the order that ``auto`` chooses; longest first. In the third job keys
and values run out. The model is random and small, lengths are pinned by ``min_tokens``: an iteration of vLLM
is the same whatever it computes, its seconds are not, and are not reported. (With a model of a million
parameters an iteration on a CPU takes less than the client's round trip, which no real model does.)

Each run is audited by ``batchbound audit`` as a user would: does the bound lie below, do the losses add up,
and how many iterations did the audit of the file order's run predict for longest first?

Run: ``python benchmarks/server_orders.py --vllm PATH -o FILE``, with BATCHBOUND_DATA set
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_server import VllmServer, save_tiny_llama

SLOTS, BUDGET, BLOCK = 16, 512, 32


@dataclass(frozen=True)
class JobOf:
    """A job: so many first rows of an RL step, their tokens divided, and the server's blocks if few."""

    name: str
    step: int
    requests: int
    divisor: float
    blocks: int | None = None


JOBS = (
    JobOf("step 4", 4, 160, 8.0),
    JobOf("step 5", 5, 192, 10.0),
    JobOf("step 5, little KV", 5, 192, 10.0, 40),
)


def write_batch(job: JobOf, path: Path) -> int:
    """Write a job's batch file, and return its completions' tokens."""
    rng, rows = random.Random(job.step), []
    with (Path(os.environ["BATCHBOUND_DATA"]) / "rollouts" / "dapo_qwen32b.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if int(row["step"]) == job.step][: job.requests]
    total = 0
    with path.open("w") as stream:
        for row in rows:
            tokens = max(1, round(int(row["output_tokens"]) / job.divisor))
            prompt = [
                rng.randint(3, 250) for _ in range(max(1, round(int(row["input_tokens"]) / job.divisor)))
            ]
            pinned = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
            body = {"model": "tiny", "prompt": prompt, **pinned}
            stream.write(json.dumps({"custom_id": row["id"], "body": body, "output_tokens": tokens}) + "\n")
            total += tokens
    return total


def batchbound(*words: str) -> dict[str, Any]:
    """Return what a command prints with ``--json``."""
    done = subprocess.run(
        [sys.executable, "-m", "batchbound", *words, "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_PROXY": "*"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def measure(server: VllmServer, batch: Path, way: str, count: int) -> dict[str, Any]:
    """Run a job in one way, and audit the run."""
    order, in_flight = ("file", str(count)) if way == "all at once" else (way, None)
    trace, before = batch.with_suffix(".trace"), server.iterations()
    words = ["run", str(batch), "--server", server.url, "--slots", str(SLOTS), "--order", order]
    words += ["--batched-tokens", str(BUDGET), "-o", str(batch.with_suffix(".out")), "--trace", str(trace)]
    ran = batchbound(*words, "--overwrite", *(("--in-flight", in_flight) if in_flight else ()))
    audit = batchbound("audit", str(trace), "--batched-tokens", str(BUDGET))
    iterations = audit["iterations"]
    lost = sum(value for name, value in iterations.items() if name.startswith("lost"))
    bound = next(value for name, value in iterations.items() if name.startswith("proven"))
    return {
        "way": way,
        "order": ran["order"],
        "counted": ran["iterations"],
        "logged": server.iterations() - before,
        "predicted": ran["predicted_iterations"],
        "preemptions": ran["preemptions"],
        "bound": bound,
        "bound_source": ran["bound_source"],
        "losses_miss": lost - (ran["iterations"] - bound),
        "audit_says_longest_first": audit["by the order of the requests (simulated)"]["longest first"],
        "completions": sum(1 for _ in batch.with_suffix(".out").open()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default="vllm", help="the command that starts a server")
    parser.add_argument("--nice", type=int, default=0, help="of the server")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("-o", "--output", default="server_orders.json")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_llama(folder / "model", 512)
        for blocks in (None, JOBS[-1].blocks):
            options = ["--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET)]
            options += ["--block-size", str(BLOCK)]
            options += [] if blocks is None else ["--num-gpu-blocks-override", str(blocks)]
            with VllmServer(
                args.vllm, folder / "model", folder / f"{blocks}.log", options, nice=args.nice
            ) as server:
                for job in (one for one in JOBS if one.blocks == blocks):
                    tokens = write_batch(job, folder / "in.jsonl")
                    for repeat in range(args.repeats):
                        for way in ("all at once", "auto", "longest"):
                            row = measure(server, folder / "in.jsonl", way, job.requests)
                            found.append({**asdict(job), "tokens": tokens, "repeat": repeat, **row})
                            print(json.dumps(found[-1]), flush=True)
    Path(args.output).write_text(
        json.dumps({"slots": SLOTS, "batched_tokens": BUDGET, "runs": found}, indent=1)
    )


if __name__ == "__main__":
    main()
