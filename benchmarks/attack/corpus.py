"""One small sound file of every kind that batchbound reads, with the command that reads it."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchbound.cli import main

Form = str
"""How a file is damaged with sense: json, jsonl, csv, text or binary."""


@dataclass(frozen=True)
class Kind:
    """
    A kind of file.

    Parameters
    ----------
    name
        What it is.
    file
        Where it stands in the folder of sound files.
    form
        Its form.
    words
        The command that reads it.
    outputs
        What the command may write.
    """

    name: str
    file: str
    form: Form
    words: tuple[str, ...]
    outputs: tuple[str, ...] = ()

    @property
    def weight(self) -> int:
        """How often it is damaged beside the others: less where a command takes long."""
        return 1 if self.words[0] in ("run", "plan", "serve") or "quantile" in self.file else 3


_PLAN = ("--slots", "3", "--work", "1", "-o", "out.json")
_MODEL = ("--model", "tiny:llama:1")
_TABLE = "input_tokens,output_tokens,arrival,group\n" + "".join(
    f"{3 + 5 * i % 17},{1 + 7 * i % 11},{0.1 * i:.1f},{i // 3}\n" for i in range(10)
)


def make_corpus(folder: Path) -> list[Kind]:
    """Write a sound file of each kind, and return them."""
    folder.mkdir()
    kinds = []
    for make in (workloads, costs, plans, runs, profiles, predictors, audits):
        kinds += make(folder)
    return kinds


def _done(*words: str) -> None:
    status = main(list(words))
    assert status == 0, words


def workloads(folder: Path) -> list[Kind]:
    """Write requests: prompts, tables of lengths, past answers."""
    rng = random.Random(0)
    chats, prompts, answers, served = [], [], [], []
    for i in range(8):
        text = "".join(rng.choice("abc ") for _ in range(5 + i))
        body = {"prompt": text, "max_tokens": 2 + i, "temperature": 0.5, "stop": ["x"], "seed": i}
        prompts.append({"custom_id": f"r{i}", "body": body})
        messages = [{"role": "user", "content": text}]
        chats.append(
            {
                "custom_id": f"r{i}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": messages, "max_completion_tokens": 3 + i, "logit_bias": {"7": 1.5}},
            }
        )
        usage = {"prompt_tokens": 5, "completion_tokens": 2 + i, "total_tokens": 7 + i}
        choice = {"index": 0, "text": "abc", "finish_reason": "stop", "logprobs": None}
        response = {"status_code": 200, "body": {"choices": [choice], "usage": usage}}
        answers.append({"id": f"x{i}", "custom_id": f"r{i}", "response": response, "error": None})
        served.append({"timestamp": 100 * i, "input_length": 5 + i, "output_length": 2 + i, "hash_ids": [i]})
    tables: dict[str, list[Any]] = {
        "prompts": chats,
        "plain": prompts,
        "answers": answers,
        "mooncake": served,
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lengths.csv").write_text(_TABLE)
    (folder / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:0{i}.9799600,{4 + i},{1 + i}\n" for i in range(8))
    )
    (folder / "pairs.csv").write_text(
        "predicted,actual\n" + "".join(f"{9 + i},{7 + 2 * i}\n" for i in range(9))
    )
    _parquet(folder)
    many = ("--slots", "3", "--time-limit", "0.02", "-o", "out.json")
    return [
        Kind(
            "prompts, chat (OpenAI batch)",
            "prompts.jsonl",
            "jsonl",
            ("plan", "prompts.jsonl", *_PLAN),
            ("out.json",),
        ),
        Kind(
            "prompts, completion (OpenAI batch)",
            "plain.jsonl",
            "jsonl",
            ("plan", "plain.jsonl", *_PLAN),
            ("out.json",),
        ),
        Kind("table of lengths, CSV", "lengths.csv", "csv", ("plan", "lengths.csv", *_PLAN), ("out.json",)),
        Kind(
            "table of lengths, Parquet",
            "lengths.parquet",
            "binary",
            ("plan", "lengths.parquet", *_PLAN),
            ("out.json",),
        ),
        Kind("trace of requests, Azure", "azure.csv", "csv", ("bound", "azure.csv", "--slots", "3")),
        Kind(
            "trace of requests, Mooncake",
            "mooncake.jsonl",
            "jsonl",
            ("simulate", "mooncake.jsonl", "--slots", "3"),
        ),
        Kind(
            "requests to serve",
            "lengths.csv",
            "csv",
            (
                "serve",
                "lengths.csv",
                "--kv-capacity",
                "400",
                "--engine",
                "tiny:llama:1",
            ),
        ),
        Kind(
            "past answers (lengths)",
            "answers.jsonl",
            "jsonl",
            ("plan", "plain.jsonl", "--lengths", "completions:answers.jsonl", *_PLAN),
            ("out.json",),
        ),
        Kind(
            "past answers (quantile)",
            "answers.jsonl",
            "jsonl",
            ("plan", "plain.jsonl", "--lengths", "quantile:0.9:answers.jsonl", *_PLAN),
            ("out.json",),
        ),
        Kind(
            "measured length errors",
            "pairs.csv",
            "csv",
            ("plan", "lengths.csv", "--length-error", "pairs.csv", *many),
            ("out.json",),
        ),
    ]


def _parquet(folder: Path) -> None:
    import pandas as pd

    pd.read_csv(folder / "lengths.csv").to_parquet(folder / "lengths.parquet")


def costs(folder: Path) -> list[Kind]:
    """Write a cost model and a fleet."""
    from batchbound.data.costs.cost import CalibratedCost, CostModel, FitError

    error = FitError(prefill_mape=0.01, decode_mape=0.02, makespan=0.0, prefill_stages=3, decode_steps=9)
    engine = {"name": "huggingface", "model": "llama", "device": "cpu", "dtype": "float32"}
    CalibratedCost(CostModel.paper(), error, engine, "2026-01-01", (1, 2, 4), (8, 16)).save(
        folder / "cost.json"
    )
    fleet = {"replicas": [{"count": 2}, {"speed": 0.5, "slots": 2, "kv_capacity": 900, "busy": 0.5}]}
    (folder / "fleet.json").write_text(json.dumps(fleet))
    return [
        Kind(
            "cost model",
            "cost.json",
            "json",
            ("plan", "lengths.csv", "--cost", "cost.json", *_PLAN),
            ("out.json",),
        ),
        Kind(
            "cost model (bound)",
            "cost.json",
            "json",
            ("bound", "lengths.csv", "--slots", "3", "--cost", "cost.json"),
        ),
        Kind(
            "fleet",
            "fleet.json",
            "json",
            (
                "plan",
                "lengths.csv",
                "--replicas",
                "fleet.json",
                "--slots",
                "3",
                "--time-limit",
                "0.02",
                "-o",
                "out.json",
            ),
            ("out.json",),
        ),
    ]


def plans(folder: Path) -> list[Kind]:
    """Write plans and a linear model."""
    here = str(folder)
    for name, words in {
        "plan": ("plain.jsonl", *_MODEL, "--slots", "3", "--work", "2"),
        "known": ("lengths.csv", "--slots", "3", "--work", "2"),
        "shared": ("lengths.csv", "--slots", "3", "--replicas", "2", "--time-limit", "0.05"),
    }.items():
        _done("plan", f"{here}/{words[0]}", *words[1:], "-o", f"{here}/{name}.json")
    _write_mps(folder / "model.mps")
    return [
        Kind("plan (verify)", "plan.json", "json", ("verify", "plan.json")),
        Kind("plan (report)", "plan.json", "json", ("report", "plan.json")),
        Kind("plan of lengths (verify)", "known.json", "json", ("verify", "known.json")),
        Kind(
            "plan of lengths (simulate)",
            "known.json",
            "json",
            ("simulate", "lengths.csv", "--plan", "known.json"),
        ),
        Kind("plan of a fleet (verify)", "shared.json", "json", ("verify", "shared.json")),
        Kind("plan of a fleet (report)", "shared.json", "json", ("report", "shared.json")),
        Kind(
            "linear model, MPS",
            "model.mps",
            "text",
            ("compare", "model.mps", "--solvers", "highs", "--time-limit", "2"),
        ),
    ]


def _write_mps(path: Path) -> None:
    from batchbound.data.costs.cost import CostModel
    from batchbound.data.problem import Problem
    from batchbound.data.workload import Workload
    from batchbound.models.formulations.linear_files import write_mps
    from batchbound.models.formulations.slot_free import slot_free_model

    problem = Problem(Workload.from_lengths([3, 5, 2], [2, 4, 3]), CostModel.paper(), 2)
    write_mps(slot_free_model(problem).model, path)


def runs(folder: Path) -> list[Kind]:
    """Run a plan, and return what reads its outputs."""
    here = str(folder)
    run = ("run", "plan.json", *_MODEL, "--threads", "1")
    _done("run", f"{here}/plan.json", *_MODEL, "-o", f"{here}/served.jsonl", "--trace", f"{here}/trace.jsonl")
    _done(
        "run", f"{here}/known.json", *_MODEL, "--pinned", "-o", f"{here}/b", "--trace", f"{here}/pinned.jsonl"
    )
    (folder / "b").unlink()
    return [
        Kind("trace (report)", "trace.jsonl", "jsonl", ("report", "plan.json", "trace.jsonl")),
        Kind("trace (validate)", "pinned.jsonl", "jsonl", ("validate", "pinned.jsonl", "--cost", "paper")),
        Kind(
            "plan (run)",
            "plan.json",
            "json",
            (*run, "-o", "done.jsonl", "--trace", "t"),
            ("done.jsonl", "t", "done.jsonl.journal"),
        ),
        Kind(
            "prompts (run)",
            "plain.jsonl",
            "jsonl",
            (*run, "-o", "done.jsonl", "--trace", "t"),
            ("done.jsonl", "t", "done.jsonl.journal"),
        ),
        Kind(
            "finished outputs, typed again",
            "trace.jsonl",
            "jsonl",
            (*run, "-o", "served.jsonl", "--trace", "trace.jsonl"),
        ),
    ]


def profiles(folder: Path) -> list[Kind]:
    """Write layer profiles and a measured run."""
    from batchbound.data.costs.cost import CalibratedCost
    from batchbound.models.exegpt.whole_model_profile import whole_model_profile

    cost = CalibratedCost.load(folder / "cost.json").cost
    whole_model_profile(cost, "test").save(folder / "profile.json")
    measured = folder / "A100-toy-tp1"
    measured.mkdir()
    shape = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "torch_dtype": "float16",
        "model_type": "llama",
    }
    (folder / "toy.json").write_text(json.dumps(shape))
    (measured / "dense.csv").write_text(
        "layer,tokens,time_us\n"
        + "".join(
            f"{layer},{t},{10 + t}\n"
            for layer in (
                "layernorm",
                "qkv_proj",
                "rotary_emb",
                "o_proj",
                "gate_up_proj",
                "act_fn",
                "down_proj",
                "embedding",
                "final_layernorm",
                "lm_head",
            )
            for t in (1, 8, 64)
        )
    )
    rows = [
        (c, k, n, d)
        for c, n in ((0, 1), (0, 4), (16, 0), (32, 0), (16, 2), (32, 4))
        for k in (0, 16)
        for d in (16, 64)
    ]
    (measured / "attention.csv").write_text(
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"
        + "".join(f"{c},{k},{n},{d},{5 + c + n}\n" for c, k, n, d in rows)
    )
    (measured / "per_sequence.csv").write_text(
        "layer,sequences,time_us\n"
        + "".join(f"lm_head,{s},{3 + s}\nsampler,{s},{2 + s}\n" for s in (1, 4, 16))
    )
    search = ("search", "lengths.csv", "--most-encode-batch", "4")
    ran = _measured_run(folder)
    return [
        Kind("layer profile", "profile.json", "json", (*search, "--profile", "profile.json")),
        Kind(
            "model's configuration (roofline)",
            "toy.json",
            "json",
            (*search, "--roofline", "a40", "--model-config", "toy.json"),
        ),
        *(
            Kind(
                f"published profile, {name}",
                f"{measured.name}/{name}",
                "csv",
                (*search, "--profile", measured.name),
            )
            for name in ("dense.csv", "attention.csv", "per_sequence.csv")
        ),
        Kind(
            "measured run, meta.json",
            f"{ran}/meta.json",
            "json",
            ("validate", ran, "--profile", measured.name),
        ),
        Kind(
            "measured run, requests.jsonl",
            f"{ran}/requests.jsonl",
            "jsonl",
            ("validate", ran, "--profile", measured.name),
        ),
        Kind("measured run, audited", f"{ran}/requests.jsonl", "jsonl", ("audit", ran)),
    ]


def _measured_run(folder: Path) -> str:
    ran = folder / "A100-toy"
    ran.mkdir()
    meta = {
        "model": "toy",
        "engine_kwargs": {"max_num_seqs": 4, "max_num_batched_tokens": 256},
        "kv_cache": {"num_kv_tokens": 2048, "block_size": 16},
        "resolved_config": {
            "scheduler_config": {"async_scheduling": True},
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
        },
    }
    (ran / "meta.json").write_text(json.dumps(meta))
    rows = [
        {
            "request_id": f"q{i}",
            "input_toks": 4 + i,
            "output_toks": 2 + i,
            "queued_ts": 5 + 0.1 * i,
            "scheduled_ts": 5.1 + 0.1 * i,
            "first_token_ts": 5.2 + 0.1 * i,
            "last_token_ts": 6 + 0.2 * i,
        }
        for i in range(6)
    ]
    (ran / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ran.name


def predictors(folder: Path) -> list[Kind]:
    """Train predictors."""
    kinds = []
    for method in ("constant", "quantile"):
        name = f"predictor-{method}"
        _done(
            "predict",
            "train",
            f"{folder}/plain.jsonl",
            f"{folder}/answers.jsonl",
            "-o",
            f"{folder}/{name}",
            "--method",
            method,
        )
        # Links are not copied as such: the folder of the version in force stands for itself.
        version = (folder / name / "current").resolve()
        flat = folder / f"flat-{name}"
        shutil.copytree(version, flat)
        shutil.rmtree(folder / name)
        apply = ("predict", "apply", flat.name, "plain.jsonl", "-o", "out.jsonl")
        for file in sorted(path.name for path in flat.iterdir()):
            form = {".json": "json", ".csv": "csv", ".jsonl": "jsonl"}.get(Path(file).suffix, "binary")
            kinds.append(
                Kind(f"predictor {method}, {file}", f"{flat.name}/{file}", form, apply, ("out.jsonl",))
            )
    return kinds


def audits(folder: Path) -> list[Kind]:
    """Write what an audit reads."""
    from batchbound.data.readers.server_run import ServerCount, ServerRun

    ones, times = np.ones(3, dtype=np.int64), np.arange(3, dtype=np.float64)
    ServerRun(
        ids=("a", "b", "c"),
        choices=ones,
        prompt_tokens=ones * 3,
        completion_tokens=np.array([2, 2, 4]),
        position=np.arange(3),
        sent=times,
        finished=times + 1,
        server_of=ones * 0,
        failed=ones * 0,
        slots=2,
        in_flight=6,
        order="file order",
        retries=0,
        servers=(ServerCount("http://x", "vllm", iterations=7, prefix_caching=False, cached_tokens=0),),
    ).save(folder / "server.jsonl")
    line = (
        "(APIServer pid=1) INFO 11-23 06:47:57 [loggers.py:199] Engine 000: Iteration({}): {} context"
        " requests, {} context tokens, {} generation requests, {} generation tokens, iteration elapsed"
        " time: {} ms, CPU KV cache usage: 2.6%\n"
    )
    rows = [(2, 20, 0, 0, 4.0), (0, 0, 2, 2, 2.0), (1, 9, 1, 1, 3.0), (0, 0, 1, 1, 1.0), (0, 0, 0, 0, 9.0)]
    (folder / "vllm.log").write_text(
        "INFO non-default args: {'max_num_seqs': 4}\n"
        + "".join(line.format(k, *row) for k, row in enumerate(rows))
    )
    return [
        Kind("trace of a server's run", "server.jsonl", "jsonl", ("audit", "server.jsonl")),
        Kind("server's log of iterations", "vllm.log", "text", ("audit", "vllm.log")),
        Kind("lengths that came out (audit)", "lengths.csv", "csv", ("audit", "lengths.csv", "--slots", "2")),
    ]
