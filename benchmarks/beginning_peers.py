"""
Jobs whose prompts share beginnings, and jobs whose prompts do not, on our engine and on vLLM, in turns.

Each engine runs in processes of its own, pinned to one core, with one thread for products; the others are
stopped while it works. Seconds are of the wall and of the processor from the first prompt to the last token,
after loading and a short warm-up. Completions are greedy and end at an end token or at the cap; with
``--generate`` those of float32 are compared with ``generate`` of transformers, one prompt at a time. vLLM
runs as it is installed: compiled, with its prefix cache, which is emptied before each job.

- ``examples``: GSM8K questions with five worked examples before each; ``system``: under one system prompt of
  300 tokens; ``documents``: on documents of 220 tokens, six questions on each; ``texts``: on texts of 500
  words, five on each.
- ``questions``: GSM8K questions alone; ``long``: prompts of 1,750 tokens that share nothing.

Run: ``python benchmarks/beginning_peers.py --model DIR --vllm PYTHON --core 1 --output FILE``
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Kind:
    """A kind of job: requests, cap of the completions, slots."""

    requests: int
    cap: int
    slots: int


KINDS = {
    "examples": Kind(48, 64, 16),
    "system": Kind(24, 16, 8),
    "documents": Kind(60, 24, 8),
    "texts": Kind(100, 32, 16),
    "questions": Kind(64, 128, 32),
    "long": Kind(8, 64, 8),
}
DONE = "beginning_peers: done"
SYSTEM_TOKENS, DOCUMENT_TOKENS, TEXT_WORDS, LONG_TOKENS = 300, 220, 500, 1_750


def prompts_of(kind: str, requests: int, folder: Path, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of a job's prompts."""
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    questions = [row["question"] for row in rows]
    text = " ".join(f"{row['question']} {row['answer']}" for row in rows[200:])
    ids = tokenizer.encode(text).ids
    words = text.split()

    def asked(before: list[int], at: int) -> list[int]:
        return [*before, *tokenizer.encode(f"\n\nQuestion: {questions[at]}\nAnswer:").ids]

    if kind == "questions":
        return [asked([], at) for at in range(requests)]
    if kind == "long":
        return [ids[at * LONG_TOKENS : (at + 1) * LONG_TOKENS] for at in range(requests)]
    if kind == "examples":
        shots = "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows[100:105])
        return [asked(tokenizer.encode(shots).ids, at) for at in range(requests)]
    if kind == "system":
        return [asked(ids[:SYSTEM_TOKENS], at) for at in range(requests)]
    each = 6 if kind == "documents" else 5
    prompts = []
    for at in range(requests):
        begin = at // each
        if kind == "documents":
            before = ids[begin * DOCUMENT_TOKENS : (begin + 1) * DOCUMENT_TOKENS]
        else:
            before = tokenizer.encode(" ".join(words[begin * TEXT_WORDS : (begin + 1) * TEXT_WORDS])).ids
        prompts.append(asked(before, at))
    return prompts


Complete = Callable[[dict[str, Any]], tuple[list[list[int]], dict[str, Any]]]
"""Completes a job; returns its completions, and what else is known of the run."""


def ours(folder: Path, number_format: str) -> Complete:
    """Load a model for ``LLM.generate``."""
    import torch

    from batchbound import LLM
    from batchbound.executor.models.source import load_model
    from batchbound.executor.models.tokenizers import load_tokenizer

    torch.set_num_threads(1)
    model = load_model(str(folder), dtype=number_format, device="cpu")
    tokenizer = load_tokenizer(str(folder))

    def complete(job: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
        llm = LLM(model, tokenizer, slots=job["slots"])
        answers: list[list[int]] = [[] for _ in job["prompts"]]
        for done in llm.generate(job["prompts"], temperature=0, max_tokens=job["cap"]):
            answers[done.index] = list(done.completion_ids)
        return answers, {"computed_prompt_tokens": llm.report().prompt_tokens}

    return complete


def vllm(folder: Path, number_format: str) -> Complete:
    """Load a model for vLLM's offline engine, with scheduler and worker in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    most = max(kind.slots for kind in KINDS.values())
    llm = LLM(str(folder), dtype=number_format, max_num_seqs=most, max_model_len=2_048)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def complete(job: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
        llm.reset_prefix_cache()
        scheduler.max_num_active_reqs = job["slots"]
        settings = SamplingParams(temperature=0.0, max_tokens=job["cap"], detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        done = llm.generate(prompts, settings, use_tqdm=False)
        return [list(reply.outputs[0].token_ids) for reply in done], {}

    return complete


def generate(folder: Path, number_format: str) -> Complete:
    """Load a model for ``generate`` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, number_format))

    def complete(job: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
        answers = []
        for prompt in job["prompts"]:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=job["cap"]
            )
            answers.append(output[0, len(prompt) :].tolist())
        return answers, {}

    return complete


WAYS: dict[str, Callable[[Path, str], Complete]] = {
    "batchbound": ours,
    "vllm": vllm,
    "generate": generate,
}


def work(way: str, folder: Path, number_format: str) -> None:
    """Complete the jobs whose files standard input names; write each result beside its job."""
    complete = WAYS[way](folder, number_format)
    print(DONE, flush=True)
    for line in sys.stdin:
        file = Path(line.strip())
        job = json.loads(file.read_text(encoding="utf-8"))
        complete({**job, "prompts": [prompt[:8] for prompt in job["prompts"][:2]], "cap": 4})
        start, cpu = time.perf_counter(), time.process_time()
        answers, facts = complete(job)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        result = {"seconds": seconds, "cpu_seconds": cpu_seconds, "answers": answers, **facts}
        file.with_suffix(".result").write_text(json.dumps(result), encoding="utf-8")
        print(DONE, flush=True)


class Engine:
    """A way's processes, pinned to a core; they are stopped while another way works."""

    def __init__(self, way: str, python: str, core: int, model: Path, number_format: str) -> None:
        environment = dict(os.environ)
        if python != sys.executable:
            # Our packages are not its packages.
            environment.pop("PYTHONPATH", None)
        own = [__file__, "--worker", way, "--model", str(model), "--formats", number_format]
        self._way = way
        self._process = subprocess.Popen(
            ["taskset", "-c", str(core), python, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._wait_for_work()

    def _wait_for_work(self) -> None:
        """Return when the process is loaded or has ended a job; stop it."""
        assert self._process.stdout is not None
        # What its libraries print comes between.
        for line in self._process.stdout:
            if line.strip() == DONE:
                os.killpg(self._process.pid, signal.SIGSTOP)
                return
        raise RuntimeError(f"{self._way} failed with status {self._process.wait()}")

    def complete(self, file: Path) -> dict[str, Any]:
        """Complete a job's file."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        print(file, file=self._process.stdin, flush=True)
        self._wait_for_work()
        result: dict[str, Any] = json.loads(file.with_suffix(".result").read_text(encoding="utf-8"))
        return result

    def end(self) -> None:
        """End the process."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def processor() -> dict[str, Any]:
    """Return the processor's name, and whether it has bfloat16 instructions."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in names.items()}
    flags = fields.get("flags", "").split()
    return {
        "name": fields.get("model name", platform.processor()),
        "instructions": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
    }


def compared(results: dict[str, list[Any]], job: dict[str, Any]) -> dict[str, Any]:
    """Return medians of each way, and how many completions are equal."""
    row: dict[str, Any] = {}
    for way, runs in results.items():
        row[way] = {
            "seconds": statistics.median(run["seconds"] for run in runs),
            "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
            "all_cpu_seconds": [run["cpu_seconds"] for run in runs],
            "completion_tokens": sum(map(len, runs[-1]["answers"])),
        }
    own = results["batchbound"][-1]
    row["prompt_tokens"] = sum(map(len, job["prompts"]))
    row["computed_prompt_tokens"] = own["computed_prompt_tokens"]
    if "vllm" in results:
        row["ratio"] = row["batchbound"]["cpu_seconds"] / row["vllm"]["cpu_seconds"]
        row["wall_ratio"] = row["batchbound"]["seconds"] / row["vllm"]["seconds"]
        row["equal"] = sum(
            a == b for a, b in zip(own["answers"], results["vllm"][-1]["answers"], strict=True)
        )
    if "generate" in results:
        row["equal_to_generate"] = sum(
            a == b for a, b in zip(own["answers"], results["generate"][-1]["answers"], strict=True)
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--vllm", help="a Python that has vLLM; without it our engine runs alone")
    parser.add_argument("--jobs", nargs="*", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--formats", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--generate", action="store_true", help="compare float32 with generate")
    parser.add_argument("--requests", type=int, help="fewer requests of each job")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--core", type=int, default=0)
    data = Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=data / "gsm8k")
    parser.add_argument("--output", type=Path, help="JSON, written after every job")
    parser.add_argument("--worker", choices=sorted(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, options.formats[0])
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    pythons = {"batchbound": sys.executable} | ({"vllm": options.vllm} if options.vllm else {})
    rows = []
    for number_format in options.formats:
        engines = {
            way: Engine(way, python, options.core, options.model.resolve(), number_format)
            for way, python in pythons.items()
        }
        with tempfile.TemporaryDirectory() as home:
            for name in options.jobs:
                kind = KINDS[name]
                count = min(options.requests or kind.requests, kind.requests)
                job = {**asdict(kind), "prompts": prompts_of(name, count, options.data, tokenizer)}
                file = Path(home) / f"{name}.json"
                file.write_text(json.dumps(job), encoding="utf-8")
                results: dict[str, list[Any]] = {way: [] for way in engines}
                for way, engine in islice(cycle(engines.items()), options.repeats * len(engines)):
                    results[way].append(engine.complete(file))
                if options.generate and number_format == "float32":
                    reference = Engine(
                        "generate", sys.executable, options.core, options.model.resolve(), number_format
                    )
                    results["generate"] = [reference.complete(file)]
                    reference.end()
                rows.append(
                    {"job": name, "requests": count, "format": number_format} | compared(results, job)
                )
                print(json.dumps(rows[-1]), flush=True)
                if options.output:
                    whole = {"processor": processor(), "rows": rows}
                    options.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        for engine in engines.values():
            engine.end()


if __name__ == "__main__":
    main()
