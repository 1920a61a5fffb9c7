"""
A step of rollouts on our engine and on vLLM, in turns on one core.

Each engine runs in a process of its own, pinned to one core with one thread for products; one waits while the
other works. Seconds are of the wall from the first prompt to the last token, after a short warm-up; memory is
the peak of a process that has loaded the model. vLLM runs as installed, compiled, with its prefix cache in
blocks of 32 tokens, which is emptied before each job.

- ``shared``: 8 prompts of 889 tokens, of which 800 are equal, 8 samples of 128 tokens each.
- ``plain``: 8 GSM8K questions, 8 samples of 128 tokens each.
- ``turns``: 16 conversations of five turns; 24 tokens are drawn in each, and 29 given between two.

Run: ``python benchmarks/rollout_peers.py --model DIR --vllm PYTHON --core 1 --output FILE``
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

PROMPTS, SAMPLES, CAP, COMMON, WHOLE = 8, 8, 128, 800, 889
CONVERSATIONS, TURNS, DRAWN, GIVEN = 16, 5, 24, 29
JOBS = ("shared", "plain", "turns")


def prompts_of(job: str, model: Path, data: Path) -> list[list[int]]:
    """Return the token ids of a job's prompts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = (data / "test.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [list(tokenizer.encode(json.loads(line)["question"]).ids) for line in lines[:200]]
    if job == "turns":
        return questions[:CONVERSATIONS]
    if job == "plain":
        return questions[:PROMPTS]
    ids = [token for question in questions for token in question]
    return [ids[:COMMON] + ids[at : at + WHOLE - COMMON] for at in range(2000, 2000 + 100 * PROMPTS, 100)]


def given_tokens(position: int, turn: int) -> list[int]:
    """Return the tokens of a tool's result."""
    return [1_000 + (37 * position + 11 * turn + at) % 5_000 for at in range(GIVEN)]


Run = Callable[[str, list[list[int]]], dict[str, int]]
"""Runs a job of some prompts; returns counts of tokens."""


def ours(model: Path, number_format: str) -> Run:
    """Load a model for our engine."""
    import torch

    from batchbound import LLM, Sampling

    torch.set_num_threads(1)
    llm = LLM.from_pretrained(str(model), dtype=number_format, device="cpu", slots=PROMPTS * SAMPLES)
    ends = {turn * (DRAWN + GIVEN) + DRAWN for turn in range(TURNS)}
    turns = Sampling(temperature=0.0, ignore_eos=True, stop_when=lambda tokens: len(tokens) in ends)

    def next_turn(position: int, tokens: tuple[int, ...]) -> Future[Any] | None:
        if len(tokens) >= max(ends):
            return None
        tool: Future[Any] = Future()
        tool.set_result(given_tokens(position, len(tokens) // (DRAWN + GIVEN)))
        return tool

    def run(job: str, prompts: list[list[int]]) -> dict[str, int]:
        if job == "turns":
            done = list(llm.converse(next_turn, prompts, turns, max_tokens=max(ends)))
        else:
            how: dict[str, Any] = {"n": SAMPLES, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            done = list(llm.generate(prompts, max_tokens=CAP, ignore_eos=True, **how))
        tokens = sum(len(one.completion_ids) for one in done)
        return {"tokens": tokens, "computed_prompt_tokens": llm.report().prompt_tokens}

    return run


def vllm(model: Path, number_format: str) -> Run:
    """Load a model for vLLM's engine, with scheduler and worker in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    rows = PROMPTS * SAMPLES
    llm = LLM(str(model), dtype=number_format, max_num_seqs=rows, max_model_len=2_048, block_size=32)

    def run(job: str, prompts: list[list[int]]) -> dict[str, int]:
        llm.reset_prefix_cache()
        if job != "turns":
            how = SamplingParams(
                n=SAMPLES, temperature=1.0, max_tokens=CAP, ignore_eos=True, detokenize=False
            )
            done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
            return {"tokens": sum(len(out.token_ids) for one in done for out in one.outputs)}
        how = SamplingParams(temperature=0.0, max_tokens=DRAWN, ignore_eos=True, detokenize=False)
        engine, total = llm.llm_engine, 0

        def ask(position: int, turn: int, ids: list[int]) -> None:
            engine.add_request(f"{position}-{turn}-{time.monotonic_ns()}", {"prompt_token_ids": ids}, how)

        for position, ids in enumerate(prompts):
            ask(position, 0, ids)
        while engine.has_unfinished_requests():
            for reply in engine.step():
                if not reply.finished:
                    continue
                position, turn = map(int, reply.request_id.split("-")[:2])
                drawn = list(reply.outputs[0].token_ids)
                total += len(drawn) + GIVEN * (turn > 0)
                if turn + 1 < TURNS:
                    ids = [*reply.prompt_token_ids, *drawn, *given_tokens(position, turn)]
                    ask(position, turn + 1, ids)
        return {"tokens": total}

    return run


WAYS: dict[str, Callable[[Path, str], Run]] = {"batchbound": ours, "vllm": vllm}
DONE = "rollout_peers: "


def work(way: str, model: Path, number_format: str, data: Path) -> None:
    """Run the jobs that standard input names; print a line of figures after each."""
    run = WAYS[way](model, number_format)
    run("plain", [[1, 2, 3], [4, 5, 6]])
    for line in sys.stdin:
        job = line.strip()
        prompts = prompts_of(job, model, data)
        start, cpu = time.perf_counter(), time.process_time()
        figures: dict[str, Any] = dict(run(job, prompts))
        figures["seconds"], figures["cpu_seconds"] = time.perf_counter() - start, time.process_time() - cpu
        figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(DONE + json.dumps(figures), flush=True)


def started(way: str, options: argparse.Namespace, number_format: str) -> subprocess.Popen[str]:
    """Start a way's process on the core."""
    environment = dict(os.environ)
    python = options.vllm if way == "vllm" else sys.executable
    if way == "vllm":
        # Our packages are not its packages.
        environment.pop("PYTHONPATH", None)
    own = [python, __file__, "--worker", way, "--model", str(options.model), "--formats", number_format]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = ["taskset", "-c", str(options.core), *own, "--data", str(options.data)]
    return subprocess.Popen(command, env=environment, **pipes)


def figures_of(process: subprocess.Popen[str], job: str) -> dict[str, Any]:
    """Run a job in a process; return its figures."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(job, file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith(DONE):
            return dict(json.loads(line.removeprefix(DONE)))
    raise RuntimeError(f"a worker ended with status {process.wait()}")


def medians(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the median of each figure of each way, and all seconds."""
    return {
        way: {
            **{name: statistics.median(run[name] for run in figures) for name in figures[0]},
            "all_seconds": [round(run["seconds"], 2) for run in figures],
        }
        for way, figures in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--vllm", help="a Python that has vLLM; without it our engine runs alone")
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--formats", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--core", type=int, default=0)
    data = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=data / "gsm8k")
    parser.add_argument("--output", type=Path, help="JSON, written after every job")
    parser.add_argument("--worker", choices=sorted(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, options.formats[0], options.data)
        return
    ways = ["batchbound", "vllm"] if options.vllm else ["batchbound"]
    rows: list[dict[str, Any]] = []
    for number_format in options.formats:
        for job in options.jobs:
            # A job has processes of its own, as memory that one has taken is not given back.
            processes = {way: started(way, options, number_format) for way in ways}
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for _ in range(options.repeats):
                for way, process in processes.items():
                    runs[way].append(figures_of(process, job))
            for process in processes.values():
                process.kill()
                process.wait()
            row = {"job": job, "format": number_format, **medians(runs)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.output:
                options.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
