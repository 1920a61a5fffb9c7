"""
An unmodified vLLM with its prefix cache, on 18 jobs whose prompts share beginnings: counted and predicted.

Kinds of jobs: questions on documents, rows under long system prompts, few-shot questions with endings. Each
is tidy (in the order of its beginnings) or interleaved, and the KV cache holds 0.3, 1 or 3 times the tree of
its prompts. Lengths are known beforehand in every second job. Prompts are token ids; lengths are pinned by
``min_tokens``.

Ways: ``auto`` is ``batchbound run --server``; ``file``, ``sorted``, ``longest`` and ``leaf`` send a file in
that order as it is; ``longest`` orders by the true lengths, also where ``auto`` is told none. The cache is
emptied before each. Iterations and prompt tokens are those of vLLM's own log. ``predicted`` is the simulation
of the order as sent, ``fcfs`` the simulated first come, first served, which the way ``file`` counts.

``cpu_seconds`` are those of the server's processes: on one core its seconds, whatever else runs there. The
seconds of all runs are fitted by one cost of an iteration, a prompt token and a decoded one. Counts priced by
it compare the ways; the table names each job's order, its ratio to the best of the four others, its
prompt tokens over those needed, its seconds over the least, and the errors of the predictions. With
``--servers 2`` several share each job; iterations are then those of the busiest.

Run: ``python benchmarks/server_beginnings.py --vllm PATH [--model DIR [--layers N]] -o FILE``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls
from vllm_server import VllmServer, save_tiny_llama

from batchbound.data.prefix_tree import PrefixTree

SLOTS, BUDGET, BLOCK = 8, 512, 32

WAITING = 64
"""Requests that wait at the server, as ``auto`` lets them."""

KINDS, PARTS = ("documents", "systems", "few-shot"), (0.3, 1.0, 3.0)

SIMPLE = ("file", "sorted", "longest", "leaf")

WAYS = (*SIMPLE, "auto")

_LOGGED = re.compile(r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation")


@dataclass(frozen=True)
class JobOf:
    """A job: its kind, whether it is tidy, and the KV cache as a part of its tree."""

    kind: str
    tidy: bool
    part: float

    @property
    def known(self) -> bool:
        """Whether lengths are known beforehand: of every second job."""
        place = KINDS.index(self.kind) + (PARTS.index(self.part) if self.part in PARTS else 0)
        return (place + self.tidy) % 2 == 0

    @property
    def name(self) -> str:
        """The job in words."""
        return f"{self.kind}, {'tidy' if self.tidy else 'interleaved'}, {self.part:g}"


Row = tuple[tuple[int, ...], int, int]
"""Prompt, tokens of the completion, and the number of its leaf."""


def rows_of(job: JobOf, scale: float) -> list[Row]:
    """Draw a job's rows."""
    rng = random.Random(job.kind)

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


def cpu_seconds(servers: Sequence[VllmServer]) -> float:
    """Return the CPU seconds of the servers so far."""
    return sum(server.cpu_seconds() for server in servers)


def measure(
    servers: Sequence[VllmServer], job: JobOf, rows: list[Row], way: str, folder: Path
) -> dict[str, Any]:
    """Run a job in one way."""
    for server in servers:
        server.post("/reset_prefix_cache", b"")
    batch = folder / f"{way}.jsonl"
    write(in_order(rows, way), batch, lengths=job.known or way != "auto")
    before, spent = [logged(server) for server in servers], cpu_seconds(servers)
    words = ["run", str(batch), "--slots", str(SLOTS), "--overwrite", "--json"]
    words += [word for server in servers for word in ("--server", server.url)]
    words += ["--order", "auto" if way == "auto" else "file", "--batched-tokens", str(BUDGET)]
    words += ["-o", str(batch.with_suffix(".out"))]
    if way != "auto":
        words += ["--in-flight", str(SLOTS + WAITING)]
    done = subprocess.run(
        [sys.executable, "-m", "batchbound", *words],
        capture_output=True,
        text=True,
        # Costs that one run keeps would plan the next one.
        env=os.environ | {"NO_PROXY": "*", "BATCHBOUND_COST_CACHE": str(folder / "costs" / way)},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    ran = json.loads(done.stdout)
    after, spent = [logged(server) for server in servers], cpu_seconds(servers) - spent
    each = [tuple(np.subtract(now, then).tolist()) for now, then in zip(after, before, strict=True)]
    tokens_simulated = ran.get("simulated_prompt_tokens", {})
    return {
        "way": way,
        "known": job.known,
        "order": ran["order"],
        "iterations": max(iterations for iterations, _ in each),
        "prompt_tokens": sum(tokens for _, tokens in each),
        "each_server": each,
        "decodes": sum(row[1] - 1 for row in rows),
        "needed": ran.get("prompt_tokens_needed"),
        "counted_by_us": ran.get("prompt_tokens_computed"),
        "preemptions": ran["preemptions"],
        "seconds": ran["makespan_s"],
        "cpu_seconds": round(spent, 2),
        "predicted": [ran["simulated_iterations"].get("as sent"), tokens_simulated.get("as sent")],
        "fcfs": [ran["simulated_iterations"].get("file order"), tokens_simulated.get("file order")],
    }


def runs_of(part: float, options: argparse.Namespace, folder: Path, model: Path) -> Iterator[dict[str, Any]]:
    """Yield a run for each job and way with a KV cache for a part of the tree."""
    jobs = {}
    for job in (JobOf(kind, bool(tidy), part) for kind in options.kinds for tidy in options.tidy):
        jobs[job] = rows_of(job, options.scale)
    trees = [PrefixTree.of_prompts([prompt for prompt, _, _ in rows], unit=BLOCK) for rows in jobs.values()]
    # One server serves the jobs, whose trees are about as large.
    mean = statistics.fmean(tree.distinct_tokens for tree in trees)
    longest = max(len(prompt) + tokens for rows in jobs.values() for prompt, tokens, _ in rows)
    blocks = max(round(part * mean), 2 * longest) // BLOCK + 1
    limits = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks + 1)]
    limits += ["--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET)]
    limits += ["--enable-prefix-caching", "--max-model-len", "1024", "--dtype", options.dtype]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                VllmServer(options.vllm, model, folder / f"{part:g} {k}.log", limits, nice=options.nice)
            )
            for k in range(options.servers)
        ]
        for (job, rows), repeat in product(jobs.items(), range(options.repeats)):
            measured = dict[tuple[Row, ...], dict[str, Any]]()
            for way in options.ways:
                run = {"name": job.name, **asdict(job), "requests": len(rows), "blocks": blocks}
                run |= {"repeat": repeat}
                order = tuple(in_order(rows, way)) if way != "auto" else ()
                if order not in measured:
                    measured[order] = measure(servers, job, rows, way, folder)
                # Ways that send the same order have the same counts.
                yield run | measured[order] | {"way": way}


def fitted(runs: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the seconds of an iteration, a prompt token and a decode, by least relative error."""
    counts = np.array([[run["iterations"], run["prompt_tokens"], run["decodes"]] for run in runs], float)
    # CPU time is counted in ticks of a hundredth of a second.
    seconds = np.maximum([run["cpu_seconds"] for run in runs], 0.01)
    iteration, token, decode = nnls(counts / seconds[:, None], np.ones(len(runs)))[0].tolist()
    return iteration, token, decode


def priced(run: dict[str, Any], cost: tuple[float, float, float]) -> float:
    """Return a run's seconds by its counts."""
    counts = (run["iterations"], run["prompt_tokens"], run["decodes"])
    return float(np.dot(counts, cost))


def run_of_median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the repeat whose seconds are the median."""
    return sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]


def table(runs: list[dict[str, Any]], cost: tuple[float, float, float]) -> Iterator[str]:
    """Yield a line for each job, one for all seconds, and one for all predictions."""
    totals = np.zeros(2)
    for name in dict.fromkeys(run["name"] for run in runs):
        repeats: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            if run["name"] == name:
                repeats.setdefault(run["way"], []).append(run)
        ways = {way: run_of_median(of_way) for way, of_way in repeats.items()}
        simple = {way: priced(run, cost) for way, run in ways.items() if way in SIMPLE}
        if "auto" not in ways or not simple:
            continue
        auto, best = ways["auto"], min(simple, key=simple.__getitem__)
        ratio, of_file = (priced(auto, cost) / simple[way] for way in (best, "file"))
        least = min(ways[way]["seconds"] for way in simple)
        totals += auto["seconds"], least
        needed = auto["prompt_tokens"] / auto["needed"] if auto["needed"] else float("nan")
        yield (
            f"{name:28} {'known' if auto['known'] else 'unknown':8} {ratio:6.3f} of {best:8}"
            f" {of_file:6.3f} of file  {needed:6.3f} of needed"
            f" {auto['seconds'] / least:6.3f} of the least seconds  {auto['iterations']:5d}"
            f" {auto['prompt_tokens']:6d}  predicted {auto['predicted']}  {auto['order']}"
            + (f"  each server {auto['each_server']}" if len(auto["each_server"]) > 1 else "")
        )
    if totals[1]:
        yield f"seconds: {totals[0] / totals[1]:.3f} of the least"
    errors = [abs(run["predicted"][0] / run["iterations"] - 1) for run in runs if run["predicted"][0]]
    errors += [abs(run["predicted"][1] / run["prompt_tokens"] - 1) for run in runs if run["predicted"][1]]
    if errors:
        yield f"predicted: median {statistics.median(errors):.2%}, worst {max(errors):.2%} of {len(errors)}"


def print_table(runs: list[dict[str, Any]]) -> None:
    cost = fitted(runs)
    print("cost of an iteration, a prompt token, a decode: {:.2g}, {:.2g}, {:.2g} s".format(*cost))
    for line in table(runs, cost):
        print(line)


def cut_model(folder: Path, layers: int, to: Path) -> Path:
    """Save the first layers of a model, which compute faster and count alike; return their folder."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=layers)
    model.save_pretrained(to)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(to)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vllm", default="vllm", help="the command that starts a server")
    parser.add_argument("--model", type=Path, help="folder of a model; by default a tiny random one")
    parser.add_argument("--layers", type=int, help="of the model, from its first on")
    parser.add_argument("--dtype", default="auto", help="of the server")
    parser.add_argument("--servers", type=int, default=1, help="replicas that share each job")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each way; medians are shown")
    parser.add_argument("--nice", type=int, default=0, help="of the server")
    parser.add_argument("--scale", type=float, default=1.0, help="of the jobs' sizes")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--parts", nargs="*", type=float, default=list(PARTS))
    parser.add_argument("--tidy", nargs="*", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--read", nargs="*", type=Path, help="print the table of these outputs, without runs")
    parser.add_argument("-o", "--output", default="server_beginnings.json")
    options = parser.parse_args()
    if options.read:
        print_table([run for path in options.read for run in json.loads(path.read_text())])
        return
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        model = options.model or Path(name) / "model"
        if options.model is None:
            save_tiny_llama(model)
        elif options.layers is not None:
            model = cut_model(model, options.layers, Path(name) / "model")
        for part in options.parts:
            for run in runs_of(part, options, Path(name), model):
                runs.append(run)
                print(json.dumps(run), flush=True)
                Path(options.output).write_text(json.dumps(runs, indent=1) + "\n")
    print_table(runs)


if __name__ == "__main__":
    main()
