"""
An unmodified vLLM in our order and in the file's: iterations that its own log counts, against the bound.

Three jobs of an RL step's lengths (PolyTrace's DAPO-32B, scaled down). In the third, keys and values run out.

- ``file order``: all requests are in the server's queue in the file's order before it begins. It is paused
  while they are handed over one by one, each after its log names the one before, and then goes on: a
  first-come queue at its best, with nothing of ours in it.
- ``all at once``: ``batchbound run --server`` sends all requests at once, in file order; connections race.
- ``auto``, ``longest``: ``batchbound run --server`` as users call it, in its own order or longest first.

In what order requests came to the engine is read from its log: ``displaced`` counts those at another place
than in the file. The model is random and small, lengths are pinned by ``min_tokens``: an iteration of vLLM
is the same whatever it computes, its seconds are not, and are not reported. (With a model of a million
parameters an iteration on a CPU takes less than the client's round trip, which no real model does.)

Each run of the client is audited by ``batchbound audit`` as a user would: does the bound lie below, do the
losses add up, and how many iterations did the audit of the run all at once predict for longest first?

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
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from vllm_server import VllmServer, save_tiny_llama

SLOTS, BUDGET, BLOCK = 16, 512, 32

WAYS = ("file order", "all at once", "auto", "longest")

_SIMULATED = "by the order of the requests (simulated)"
"""Title of the audit's table of orders, which is left out where the simulation is far from the server."""


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
        for number, row in enumerate(rows):
            tokens = max(1, round(int(row["output_tokens"]) / job.divisor))
            prompt = [
                rng.randint(3, 250) for _ in range(max(1, round(int(row["input_tokens"]) / job.divisor)))
            ]
            pinned = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
            body = {"model": "tiny", "prompt": prompt, "request_id": f"r{number}", **pinned}
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


def queue_in_file_order(server: VllmServer, batch: Path) -> int:
    """Have a server complete a batch that it queued in file order before it began; return the completions."""
    bodies = [json.loads(line)["body"] for line in batch.read_text().splitlines()]
    before, answers, senders = len(server.arrivals()), list[dict[str, Any]](), list[Thread]()

    def send(body: dict[str, Any]) -> None:
        answers.append(json.loads(server.post("/v1/completions", json.dumps(body).encode())))

    with server.paused():
        for number, body in enumerate(bodies, 1):
            senders.append(Thread(target=send, args=(body,)))
            senders[-1].start()
            while len(server.arrivals()) < before + number:
                if not senders[-1].is_alive():
                    raise RuntimeError("a paused server answered, or refused a request")
                time.sleep(0.002)
    for sender in senders:
        sender.join()
    asked = sum(body["max_tokens"] for body in bodies)
    if sum(answer["usage"]["completion_tokens"] for answer in answers) != asked:
        raise RuntimeError("completions are of other lengths than asked for")
    return len(answers)


def displaced(arrivals: list[str]) -> int:
    """Return how many requests came to the engine at another place than they have in the file."""
    return sum(name != f"r{number}" for number, name in enumerate(arrivals))


def in_file_order(server: VllmServer, batch: Path) -> dict[str, Any]:
    """Run a job in the file's order, queued before the server begins."""
    before, arrived = server.iterations(), len(server.arrivals())
    done = queue_in_file_order(server, batch)
    logged = server.iterations() - before
    return {
        "way": "file order",
        "logged": logged,
        "displaced": displaced(server.arrivals()[arrived:]),
        "completions": done,
    }


def measure(server: VllmServer, batch: Path, way: str, count: int) -> dict[str, Any]:
    """Run a job by the client in one way, and audit the run."""
    order, in_flight = ("file", str(count)) if way == "all at once" else (way, None)
    trace, before, arrived = batch.with_suffix(".trace"), server.iterations(), len(server.arrivals())
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
        "displaced": displaced(server.arrivals()[arrived:]),
        "predicted": ran["predicted_iterations"],
        "predicted_file_order": ran["simulated_iterations"]["file order"],
        "preemptions": ran["preemptions"],
        "bound": bound,
        "bound_source": ran["bound_source"],
        "losses_miss": lost - (ran["iterations"] - bound),
        "audit_says_longest_first": audit.get(_SIMULATED, {}).get("longest first"),
        "completions": sum(1 for _ in batch.with_suffix(".out").open()),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the runs as a table in Markdown, a line a job."""
    lines = [
        "| job | bound | file order | `run --server` | predicted | fewer | above the bound | all at once |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for job in dict.fromkeys(run["name"] for run in runs):
        of = {way: [run for run in runs if (run["name"], run["way"]) == (job, way)] for way in WAYS}
        given, ours = ([run["logged"] for run in of[way]] for way in ("file order", "auto"))
        bound = of["auto"][0]["bound"]
        pairs = list(zip(given, ours, strict=True))
        cells = [
            f"{bound}, by {of['auto'][0]['bound_source']}",
            ", ".join(map(str, given)),
            f"**{', '.join(map(str, ours))}**",
            ", ".join(map(str, dict.fromkeys(run["predicted"] for run in of["auto"]))),
            ", ".join(f"{1 - mine / theirs:.1%}" for theirs, mine in pairs),
            ", ".join(f"{mine / bound - 1:.1%}" for mine in ours),
            ", ".join(f"{run['logged']} ({run['displaced']} displaced)" for run in of["all at once"]),
        ]
        lines.append(f"| {job}, {of['auto'][0]['requests']} requests | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default="vllm", help="the command that starts a server")
    parser.add_argument("--nice", type=int, default=0, help="of the server")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="the first so many (default all)")
    parser.add_argument("-o", "--output", default="server_orders.json")
    parser.add_argument("--table", type=Path, help="run nothing: print the table of such an output")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())["runs"]))
        return
    found, jobs = [], JOBS[: args.jobs]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_llama(folder / "model", 512)
        for blocks in dict.fromkeys(job.blocks for job in jobs):
            options = ["--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET)]
            options += ["--block-size", str(BLOCK), "--enable-log-requests"]
            options += [] if blocks is None else ["--num-gpu-blocks-override", str(blocks)]
            with VllmServer(
                args.vllm, folder / "model", folder / f"{blocks}.log", options, nice=args.nice
            ) as server:
                for job in (one for one in jobs if one.blocks == blocks):
                    tokens = write_batch(job, folder / "in.jsonl")
                    for repeat in range(args.repeats):
                        for way in WAYS:
                            if way == "file order":
                                row = in_file_order(server, folder / "in.jsonl")
                            else:
                                row = measure(server, folder / "in.jsonl", way, job.requests)
                            found.append({**asdict(job), "tokens": tokens, "repeat": repeat, **row})
                            print(json.dumps(found[-1]), flush=True)
    Path(args.output).write_text(
        json.dumps({"slots": SLOTS, "batched_tokens": BUDGET, "runs": found}, indent=1)
    )
    print(table(found))


if __name__ == "__main__":
    main()
