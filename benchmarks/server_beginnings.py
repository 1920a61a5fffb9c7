"""
An unmodified vLLM with its prefix cache, on jobs whose prompts share beginnings: counted and predicted.

Kinds of jobs: questions on documents, rows under long system prompts, few-shot questions with endings. Each
is tidy (in the order of its beginnings) or interleaved, and the KV cache holds a part of the tree of its
prompts. Prompts are token ids; lengths are pinned by ``min_tokens``.

Ways: ``auto`` is ``batchbound run --server`` with known lengths, ``unknown`` the same without them; ``file``,
``sorted``, ``longest`` and ``leaf`` send a file in that order as it is. The cache is emptied before each.
Iterations and prompt tokens are those of vLLM's own log. ``predicted`` is the simulation of the order as
sent, ``fcfs`` the simulated first come, first served, which the way ``file`` counts.

Run: ``python benchmarks/server_beginnings.py --vllm PATH [--model DIR] -o FILE``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_server import VllmServer, save_tiny_llama

from batchbound.data.prefix_tree import PrefixTree

SLOTS, BUDGET, BLOCK = 8, 512, 32

WAYS = ("file", "sorted", "longest", "leaf", "auto", "unknown")

_LOGGED = re.compile(r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation")


@dataclass(frozen=True)
class JobOf:
    """A job: its kind, whether it is tidy, and the KV cache as a part of its tree."""

    kind: str
    tidy: bool
    part: float


Row = tuple[tuple[int, ...], int, int]
"""Prompt, tokens of the completion, and the number of its leaf."""


def rows_of(job: JobOf, scale: float) -> list[Row]:
    """Draw a job's rows."""
    rng = random.Random(f"{job.kind} {job.tidy}")

    def text(tokens: int) -> tuple[int, ...]:
        return tuple(rng.randint(3, 250) for _ in range(tokens))

    def length(mean: float) -> int:
        return max(2, min(int(rng.lognormvariate(0, 0.8) * mean), round(8 * mean)))

    rows: list[Row] = []
    if job.kind == "documents":
        system = text(64)
        for document in range(round(24 * scale)):
            beginning = system + text(rng.randint(200, 400))
            rows += [(beginning + text(rng.randint(10, 30)), length(10), document) for _ in range(5)]
    elif job.kind == "systems":
        for document in range(6):
            beginning = text(rng.randint(400, 600))
            rows += [
                (beginning + text(rng.randint(15, 60)), length(12), document)
                for _ in range(round(20 * scale))
            ]
    else:
        for subject in range(round(10 * scale)):
            shots = text(rng.randint(300, 500))
            for question in range(5):
                beginning = shots + text(rng.randint(40, 80))
                rows += [(beginning + text(rng.randint(1, 4)), 2, 5 * subject + question) for _ in range(4)]
    if not job.tidy:
        rng.shuffle(rows)
    return rows


def in_order(rows: list[Row], way: str) -> list[Row]:
    """Return the rows in the order of a way."""
    if way == "sorted":
        return sorted(rows)
    if way == "longest":
        return sorted(rows, key=lambda row: -row[1])
    if way == "leaf":
        first: dict[int, int] = {}
        for at, row in enumerate(rows):
            first.setdefault(row[2], at)
        return sorted(rows, key=lambda row: first[row[2]])
    return rows


def write(rows: list[Row], path: Path, *, lengths: bool) -> None:
    with path.open("w") as stream:
        for number, (prompt, tokens, _) in enumerate(rows):
            pinned = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
            # A cap that is no length, as users have it.
            body = {"model": "tiny", "prompt": list(prompt), **pinned}
            row: dict[str, Any] = {"custom_id": f"r{number}", "url": "/v1/completions", "body": body}
            stream.write(json.dumps(row | ({"output_tokens": tokens} if lengths else {})) + "\n")


def logged(server: VllmServer) -> tuple[int, int]:
    """Return the iterations and prompt tokens of a server's log so far."""
    found = _LOGGED.findall(server.log.read_text(errors="replace"))
    busy = [int(tokens) for chunks, tokens, decodes in found if int(chunks) + int(decodes)]
    return len(busy), sum(busy)


def measure(server: VllmServer, rows: list[Row], way: str, folder: Path) -> dict[str, Any]:
    """Run a job in one way."""
    server.post("/reset_prefix_cache", b"")
    batch = folder / f"{way}.jsonl"
    write(in_order(rows, way), batch, lengths=way != "unknown")
    order = "auto" if way in ("auto", "unknown") else "file"
    before = logged(server)
    words = ["run", str(batch), "--server", server.url, "--slots", str(SLOTS), "--order", order]
    words += ["--batched-tokens", str(BUDGET), "-o", str(batch.with_suffix(".out")), "--overwrite", "--json"]
    if order == "file":
        words += ["--in-flight", str(3 * SLOTS)]
    done = subprocess.run(
        [sys.executable, "-m", "batchbound", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_PROXY": "*"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    ran = json.loads(done.stdout)
    iterations, tokens = (now - then for now, then in zip(logged(server), before, strict=True))
    tokens_simulated = ran.get("simulated_prompt_tokens", {})
    return {
        "way": way,
        "order": ran["order"],
        "iterations": iterations,
        "prompt_tokens": tokens,
        "needed": ran.get("prompt_tokens_needed"),
        "counted_by_us": ran.get("prompt_tokens_computed"),
        "preemptions": ran["preemptions"],
        "seconds": ran["makespan_s"],
        "predicted": [ran["simulated_iterations"].get("as sent"), tokens_simulated.get("as sent")],
        "fcfs": [ran["simulated_iterations"].get("file order"), tokens_simulated.get("file order")],
    }


def runs_of(job: JobOf, options: argparse.Namespace, folder: Path, model: Path) -> Iterator[dict[str, Any]]:
    """Yield a run for each way of a job."""
    rows = rows_of(job, options.scale)
    tree = PrefixTree.of_prompts([prompt for prompt, _, _ in rows], unit=BLOCK)
    longest = max(len(prompt) + tokens for prompt, tokens, _ in rows)
    blocks = max(round(job.part * tree.distinct_tokens), 2 * longest) // BLOCK + 1
    name = f"{job.kind}, {'tidy' if job.tidy else 'interleaved'}, {job.part:g}"
    limits = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks + 1)]
    limits += ["--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET)]
    limits += ["--enable-prefix-caching", "--max-model-len", "1024"]
    with VllmServer(options.vllm, model, folder / f"{name}.log", limits, nice=options.nice) as server:
        for way in options.ways:
            run = {"name": name, **asdict(job), "requests": len(rows), "blocks": blocks}
            yield run | measure(server, rows, way, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default="vllm", help="the command that starts a server")
    parser.add_argument("--model", type=Path, help="folder of a model; by default a tiny random one")
    parser.add_argument("--nice", type=int, default=0, help="of the server")
    parser.add_argument("--scale", type=float, default=1.0, help="of the jobs' sizes")
    parser.add_argument("--kinds", nargs="*", default=["documents", "systems", "few-shot"])
    parser.add_argument("--parts", nargs="*", type=float, default=[0.3, 1.0, 3.0])
    parser.add_argument("--tidy", nargs="*", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("-o", "--output", default="server_beginnings.json")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        model = options.model or Path(name) / "model"
        if options.model is None:
            save_tiny_llama(model)
        for kind in options.kinds:
            for part in options.parts:
                for tidy in options.tidy:
                    for run in runs_of(JobOf(kind, bool(tidy), part), options, Path(name), model):
                        runs.append(run)
                        print(json.dumps(run), flush=True)
                        Path(options.output).write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
