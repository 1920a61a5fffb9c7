"""Every kind of bad input: one clear error on stderr, exit status 2, nothing half-written left behind."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from batchbound.cli import main

LINE = {
    "custom_id": "a",
    "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
}


def line(**changes: object) -> str:
    return json.dumps({**LINE, **changes})


def body(**changes: object) -> str:
    return line(body={**LINE["body"], **changes})  # type: ignore[dict-item]


def batch(*lines: str, options: tuple[str, ...] = ()) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        return ["plan", "prompts.jsonl", *options]

    return write


def table(text: str, *options: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "lengths.csv").write_text(text)
        return ["plan", "lengths.csv", *options]

    return write


def options(*words: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_text(line() + "\n")
        return list(words)

    return write


def planned(
    *lines: str,
    change: Callable[[Path], None] = lambda _: None,
    plan: tuple[str, ...] = (),
    run: tuple[str, ...] = (),
) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_text("\n".join(lines or (line(),)) + "\n")
        words = ["plan", "prompts.jsonl", "--tokenizer", "bytes", "--time-limit", "0.05", *plan]
        assert main(words) == 0
        change(folder)
        usual = {"--model": "tiny:llama", "--tokenizer": "bytes"}
        more = [word for name, value in usual.items() if name not in run for word in (name, value)]
        return ["run", "plan.json", *more, *run]

    return write


def edited(place: str, value: object) -> Callable[[Path], None]:
    """Return what sets one place of the plan, named by its fields, to a value."""

    def edit(folder: Path) -> None:
        plan = json.loads((folder / "plan.json").read_text())
        *steps, last = place.split(".")
        inside = plan
        for step in steps:
            inside = inside[int(step) if isinstance(inside, list) else step]
        inside[last] = value
        (folder / "plan.json").write_text(json.dumps(plan))

    return edit


def cost_file(text: str, *options: str, command: str = "plan") -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_text(line() + "\n")
        (folder / "cost.json").write_text(text)
        return [command, "prompts.jsonl", "--cost", "cost.json", *options]

    return write


def binary(content: bytes) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_bytes(content)
        return ["plan", "prompts.jsonl"]

    return write


def piped(*words: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        os.mkfifo(folder / "pipe")
        (folder / "prompts.jsonl").write_text(line() + "\n")
        return list(words)

    return write


def of_another_plan(folder: Path) -> list[str]:
    words = planned_report("trace.jsonl")(folder)
    workload = {"id": "other", "input_tokens": 2, "output_tokens": 3}
    (folder / "other.jsonl").write_text(json.dumps(workload) + "\n")
    assert main(["simulate", str(folder / "other.jsonl"), "--trace", str(folder / "trace.jsonl")]) == 0
    return words


def of_other_slots(folder: Path) -> list[str]:
    words = planned_report("trace.jsonl")(folder)
    plan = json.loads((folder / "plan.json").read_text())["fleet"]["replicas"][0]
    job, trace = str(folder / "prompts.jsonl"), str(folder / "trace.jsonl")
    assert main(["simulate", job, "--slots", str(plan["slots"] + 1), "--trace", trace]) == 0
    return words


def without_a_calibration(folder: Path) -> list[str]:
    words = planned_report()(folder)
    plan = json.loads((folder / "plan.json").read_text())
    plan["provenance"]["cost_source"] |= {"batchbound_cost": 1, "cost": {"decode_base": 1.0}}
    (folder / "plan.json").write_text(json.dumps(plan))
    return words


def planned_report(*words: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        planned()(folder)
        return ["report", "plan.json", *words]

    return write


def demonstration_in_a_folder_of_ours(folder: Path) -> list[str]:
    (folder / "answers.jsonl").write_text("mine\n")
    return ["demo", "-o", "."]


def model_of(config: dict[str, object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config))

    return write


def replaced(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text(line(custom_id="b"))


def measured(**costs: float) -> str:
    """A file of `profile`, of no seconds but those given."""
    names = ("prefill_base", "prefill_per_token", "decode_base", "decode_per_slot")
    error = {
        "prefill_mape": 0.0,
        "decode_mape": 0.0,
        "makespan": 0.0,
        "prefill_stages": 1,
        "decode_steps": 1,
    }
    engine = {"name": "huggingface", "model": "llama", "device": "cpu", "dtype": "float32"}
    cost = {**dict.fromkeys(names, 0.0), **costs}
    grids = {"slots_grid": [1], "prompt_grid": [8]}
    whole = {
        "batchbound_cost": 1,
        "cost": cost,
        "error": error,
        "engine": engine,
        "date": "2026-01-01",
        **grids,
    }
    return json.dumps(whole)


def trace_of_nothing(folder: Path) -> list[str]:
    planned()(folder)
    return ["report", "plan.json", "prompts.jsonl"]


CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "half a line of JSON": (batch(line(), line(custom_id="b")[:40]), r"prompts.jsonl, line 2.*JSON"),
    "a line that is no object": (batch(line(), "[1, 2]"), r"line 2"),
    "an empty file": (batch(""), r"prompts.jsonl.*(empty|no request)"),
    "a file that is not UTF-8": (binary(b'{"custom_id": "\xff"}\n'), r"prompts.jsonl.*UTF-8"),
    "a missing custom_id": (batch(json.dumps({"body": LINE["body"]})), r"line 1, field 'custom_id'"),
    "a duplicate custom_id": (batch(line(), line()), r"line 2.*custom_id.*'a'.*line 1"),
    "an empty custom_id": (batch(line(custom_id="")), r"line 1, field 'custom_id'"),
    "a custom_id that is a number": (batch(line(custom_id=7)), r"line 1, field 'custom_id'.*7"),
    "no body": (batch(json.dumps({"custom_id": "a"})), r"line 1, field 'body'"),
    "neither messages nor prompt": (batch(line(body={"max_tokens": 3})), r"line 1"),
    "a message without content": (batch(body(messages=[{"role": "user"}])), r"line 1, .*content"),
    "an endpoint that generates nothing": (
        batch(line(url="/v1/embeddings")),
        r"line 1, field 'url'.*embeddings",
    ),
    "zero max_tokens": (batch(body(max_tokens=0)), r"line 1, .*max_tokens.*0"),
    "negative max_tokens": (batch(body(max_tokens=-5)), r"line 1, .*max_tokens.*-5"),
    "absurd max_tokens": (batch(body(max_tokens=10**12)), r"line 1, .*max_tokens.*1000000000000"),
    "max_tokens that is no number": (batch(body(max_tokens="many")), r"line 1, .*max_tokens.*many"),
    "no answer length at all": (
        batch(line(body={"prompt": "x"})),
        r"no max_tokens in .*Add --longest-completion",
    ),
    "an unknown source of lengths": (options("plan", "prompts.jsonl", "--lengths", "guess"), r"'guess'"),
    "an answers file that answers nothing": (
        options("plan", "prompts.jsonl", "--lengths", "completions:prompts.jsonl"),
        r"prompts.jsonl",
    ),
    "a zero length in a table": (
        table("input_tokens,output_tokens\n5,3\n4,0\n"),
        r"line 3, column 'output_tokens'",
    ),
    "a negative length in a table": (
        table("input_tokens,output_tokens\n-5,3\n"),
        r"line 2, column 'input_tokens'.*-5",
    ),
    "a length that is no number": (
        table("input_tokens,output_tokens\n5,x\n"),
        r"line 2, column 'output_tokens'.*x",
    ),
    "an absurd length": (table("input_tokens,output_tokens\n5,1e15\n"), r"line 2, column 'output_tokens'"),
    "a row of more values than columns": (
        table("input_tokens,output_tokens\n5,3,7\n"),
        r"lengths.csv, line 2: more values than the 2 columns",
    ),
    "two columns of one name": (
        table("input_tokens,output_tokens,output_tokens\n5,3,4\n"),
        r"lengths.csv, column 'output_tokens': 2 columns",
    ),
    "an arrival that never comes": (
        table("input_tokens,output_tokens,arrival\n5,3,inf\n"),
        r"line 2, column 'arrival': inf is too late",
    ),
    "an answer of months": (
        table("input_tokens,output_tokens\n5,2000000000\n"),
        r"lengths.csv, request 0: a completion of 2,000,000,000 tokens",
    ),
    "a job of months": (
        table("input_tokens,output_tokens\n" + "5,90000000\n" * 4, "--slots", "2"),
        r"lengths.csv: 2 slots need at least 180,000,000 decode steps",
    ),
    "half a compressed file": (binary(gzip.compress(b"{}")[:-9]), r"prompts.jsonl: damaged compressed file"),
    "a spreadsheet": (binary(b"PK\x03\x04\x14"), r"prompts.jsonl: is compressed .*save a spreadsheet as CSV"),
    "an Arrow file": (
        binary(b"ARROW1\0\0\xff"),
        r"prompts.jsonl: is an Arrow file. Write it as Parquet, to a",
    ),
    "an Arrow stream": (binary(b"\xff" * 4), r"prompts.jsonl: is an Arrow stream. Write it as Parquet"),
    "a plan to standard output": (
        options("plan", "prompts.jsonl", "-o", "-"),
        r"-: is not a regular file\. Name a file",
    ),
    "a plan to a device": (
        options("plan", "prompts.jsonl", "-o", "/dev/null", "--overwrite"),
        r"/dev/null: is not a regular file\. Name a file",
    ),
    "requests from a pipe": (piped("plan", "pipe"), r"pipe: is a pipe or a device, no file\. Write"),
    "a plan from a pipe": (piped("verify", "pipe"), r"pipe: is a pipe or a device, no file\. Write"),
    "completions from a pipe": (
        piped("plan", "prompts.jsonl", "--tokenizer", "bytes", "--lengths", "completions:pipe"),
        r"pipe: is a pipe or a device, no file\. Write",
    ),
    "requests from standard input": (options("plan", "-"), r"-: standard input is not read\. Write"),
    "blank lines alone": (batch("", " "), r"prompts.jsonl: the file is empty"),
    "an array of requests": (batch(f"[{line()}]"), r"line 1: a JSON array, .*`jq -c '\.\[\]'`"),
    "an array on lines": (batch("[", line(), "]"), r"line 1, .*`jq -c '\.\[\]'` makes"),
    "one request on lines": (batch("{", line()[1:]), r"line 1, .*: `jq -c \.` makes"),
    "zero bytes": (binary(b"{}\n\0\0\n"), r"prompts.jsonl, line 2: not text"),
    "a zero character in a name": (batch(line(custom_id="a\0")), r"line 1, field 'custom_id'.*zero"),
    "a name that is a list": (
        batch('{"id": ["a"], "input_tokens": 1, "output_tokens": 2}'),
        r"line 1, column 'id': \['a'\] is not a name",
    ),
    "JSON nested without end": (batch("[" * 100_000), r"prompts.jsonl, line 1: not valid JSON"),
    "a token id beyond any model": (batch(line(body={"prompt": [10**30], "max_tokens": 3})), r"body.prompt"),
    "a seed beyond 64 bits": (batch(body(seed=10**30)), r"line 1, field 'body.seed'.*64 bits"),
    "costs of a device that is real": (
        options("serve", "alpaca:0:2", "--kv-capacity", "9", "--engine", "tiny:llama", "--cost", "c.json"),
        r"--cost has no effect with --engine",
    ),
    "a forward size of a policy without": (
        options("serve", "alpaca:0:2", "--kv-capacity", "9", "--policy", "vllm", "--forward-size", "9"),
        r"--forward-size has no effect with --policy vllm. Leave it out, or choose one of econoserve, ",
    ),
    "what max-allocation promises without it": (
        options("serve", "alpaca:0:2", "--kv-capacity", "9", "--longest", "9"),
        r"--longest has no effect with --policy pipelined. .*one of fastserve, orca, srtf",
    ),
    "a transfer to no second device": (
        options("serve", "alpaca:0:2", "--kv-capacity", "9", "--transfer", "1e-5"),
        r"--transfer has no effect with --policy pipelined. .*one of distserve",
    ),
    "a seed of nothing drawn": (
        options("serve", "alpaca:0:2", "--kv-capacity", "9", "--seed", "1"),
        r"--seed has no effect without --length-error",
    ),
    "several devices of one that is real": (
        options(
            "serve",
            "alpaca:0:2",
            *("--kv-capacity", "9", "--engine", "tiny:llama", "--tensor-parallel", "2"),
        ),
        r"--tensor-parallel has no effect with --engine",
    ),
    "a name too long for a file": (
        options("plan", "x" * 300),
        r"x: cannot be reached \(File name too long\)",
    ),
    "a name too long for an output": (
        options("plan", "table3:0:5", "-o", "x" * 300),
        r"x: cannot be reached \(File name too long\)",
    ),
    "a cost model of no time": (cost_file(measured()), r"cost.json: no stage of this job takes any time"),
    "decoding that takes no time, and no prefill either": (
        cost_file(measured(decode_base=1.0), "--lengths", "constant:1"),
        r"cost.json: no stage of this job takes any time",
    ),
    "a cost model of endless decode steps": (
        cost_file(measured(decode_base=1e308)),
        r"cost.json, field 'cost': CostModel.decode_base is 1e\+308; it must be finite and not negative",
    ),
    "a search with nothing to weigh": (
        cost_file(measured(decode_base=1.0), command="search"),
        r"cost.json: the search needs both prefill and decoding",
    ),
    "a plan of more slots than memory": (
        planned(change=edited("fleet.replicas.0.slots", 10**12)),
        r"plan.json, field 'fleet.replicas.0': slots is 1000000000000; it must be at most 1,000,000",
    ),
    "an endless temperature": (
        planned(run=("--temperature", "inf")),
        r"--temperature: 'inf' is not a number of at least 0",
    ),
    "an answer beyond the model's positions": (
        table("input_tokens,output_tokens\n50,60\n", "--max-position", "100"),
        r"lengths.csv.*110 tokens.*max_position = 100.*Lower its output.*--longest-completion \(50 fit",
    ),
    "a stated limit beyond the model's positions": (
        batch(
            line(),
            line(custom_id="b", body={"prompt": "Hi", "max_completion_tokens": 999}),
            options=("--model", "tiny:llama"),
        ),
        r"prompts.jsonl, line 2, field 'body.max_completion_tokens'.*max_position = 512.*"
        r"Lower its max_completion_tokens, cap every completion with --longest-completion \(\d+ fit",
    ),
    "a stated limit of a table beyond the model's positions": (
        table(
            "text,cap\nHi,5\nHo,999\n",
            *("--model", "tiny:llama", "--prompt-column", "text", "--max-tokens-column", "cap"),
        ),
        r"lengths.csv, row 2, column 'cap'.*max_position = 512.*Lower its cap, cap every completion with",
    ),
    "a stated limit beyond the model's positions, planned shorter": (
        planned(body(max_tokens=999), plan=("--lengths", "constant:4")),
        r"line 1, field 'body.max_tokens'.*512 positions.*Lower its max_tokens.*--longest-completion",
    ),
    "a prompt beyond the model's positions": (
        table("input_tokens,output_tokens\n50,6\n", "--max-position", "50"),
        r"Shorten its prompt, raise --max-position or leave",
    ),
    "a longest answer of none in a plan": (
        planned(change=edited("provenance.lengths", {"kind": "cap", "longest": 0})),
        r"field 'provenance.lengths.longest'",
    ),
    "one request larger than the KV capacity": (
        table("input_tokens,output_tokens\n50,60\n", "--kv-capacity", "64"),
        r"kv_capacity = 64",
    ),
    "a prompt larger than a prefill stage": (
        table("input_tokens,output_tokens\n50,6\n", "--prefill-token-cap", "16"),
        r"prefill_token_cap = 16",
    ),
    "more slots than memory": (
        options("plan", "prompts.jsonl", "--slots", "9" * 20),
        r"--slots: 9+ is more than 1000000",
    ),
    "more replicas than memory": (
        options("plan", "prompts.jsonl", "--replicas", "9" * 12),
        r"replicas: 999,999,999,999 replicas are more than 100,000",
    ),
    "more requests than memory": (options("plan", "table3:0:999999999999"), r"count from 1 to 10,000,000"),
    "groups of no fleet": (
        options("plan", "prompts.jsonl", "--groups", "together"),
        r"--groups has no effect without --replicas",
    ),
    "costs of a packing": (
        options("export", "table3:0:5", "--cost", "cost.json", "--formulation", "packing"),
        r"--cost has no effect on the formulation packing",
    ),
    "a tokenizer of lengths": (
        table("input_tokens,output_tokens\n50,6\n", "--tokenizer", "bytes"),
        r"lengths.csv: --tokenizer has no effect on lengths",
    ),
    "a tokenizer of lengths for a server": (
        options("plan", "table3:0:5", "--tokenizer", "bytes", "--for", "vllm"),
        r"table3:0:5: --tokenizer has no effect on lengths",
    ),
    "a model for servers where there is nothing to count": (
        table("input_tokens,output_tokens\n5,6\n", "--for", "vllm", "--model", "tiny:llama"),
        r"lengths.csv: --model has no effect on lengths",
    ),
    "a model whose positions are said and whose tokenizer is another": (
        batch(line(), options=("--model", "tiny:llama", "--tokenizer", "bytes", "--max-position", "99")),
        r"--model has no effect with --tokenizer, which counts. Leave one of them out.",
    ),
    "rows without a completion of a generator": (
        options("plan", "table3:0:5", "--drop-unanswered"),
        r"table3:0:5: only tables of lengths have rows without a completion. Leave --drop-unanswered",
    ),
    "rows without a completion of prompts": (
        options("plan", "prompts.jsonl", "--drop-unanswered"),
        r"prompts.jsonl: only tables of lengths have rows without a completion",
    ),
    "rows without a completion of prompts for a server": (
        options("plan", "prompts.jsonl", "--drop-unanswered", "--for", "vllm"),
        r"prompts.jsonl: only tables of lengths have rows without a completion",
    ),
    "a search that is too large under a cap": (
        options("plan", "table3:0:60", "--slots", "2", "--prefill-token-cap", "400", "--solver", "exact"),
        r"--solver exact: the exact search cannot take 60 requests on 2 slots.*search, takes every job",
    ),
    "a solver whose printed model has no bend": (
        cost_file(
            measured(decode_base=0.02, prefill_base=0.01, prefill_bend=1.0, prefill_per_token_beyond=0.01),
            *("--tokenizer", "bytes", "--solver", "literal:highs"),
        ),
        r"--solver literal:highs: .* bends at 1 tokens",
    ),
    "a solver that plans for one replica": (
        options("plan", "prompts.jsonl", "--replicas", "2", "--solver", "exact"),
        r"--solver has no effect with --replicas",
    ),
    "a seed below zero": (options("plan", "prompts.jsonl", "--seed", "-1"), r"--seed: -1 is not at least 0"),
    "a cost model that is none": (cost_file('{"prefill_base": 1}'), r"cost.json"),
    "a cost model cut in half": (cost_file('{"prefill_base": '), r"cost.json, line 1: .*JSON"),
    "an output in place of the input": (
        options("plan", "prompts.jsonl", "--overwrite", "-o", "prompts.jsonl"),
        r"prompts.jsonl: is read by this command",
    ),
    "an output in place of a source of lengths": (
        options(
            "plan",
            "table3:0",
            "--lengths",
            "completions:prompts.jsonl",
            "--overwrite",
            "-o",
            "./prompts.jsonl",
        ),
        r"prompts.jsonl: is read by this command",
    ),
    "answers in place of the plan": (
        planned(run=("-o", "plan.json", "--overwrite")),
        r"plan.json: is read by this command",
    ),
    "answers and trace in one file": (
        planned(run=("-o", "both.jsonl", "--trace", "both.jsonl")),
        r"both.jsonl: is to hold two outputs",
    ),
    "a trace of another plan": (of_another_plan, r"^batchbound: trace.jsonl: the trace serves 'other'"),
    "a trace of more slots than the plan's": (
        of_other_slots,
        r"^batchbound: trace.jsonl: a trace is of \d+ slots, the plan's replica has \d+. Give the plan",
    ),
    "a plan whose costs are no calibration": (
        without_a_calibration,
        r"^batchbound: plan.json: field 'provenance.cost_source': field 'cost.prefill_base': .*Plan again.$",
    ),
    "a full disk": (options("plan", "prompts.jsonl", "--overwrite", "-o", "/dev/full"), r"/dev/full"),
    "a plan of another version": (planned(change=edited("batchbound_plan", 99)), r"plan.json.*version 99"),
    "a plan whose schedule was edited": (
        planned(change=edited("schedule.schedules", [{"bin_of": [0], "slot_of": [0], "decode_steps": [1]}])),
        r"plan.json: the plan's schedule breaks a rule: every request finishes",
    ),
    "prompts that changed since they were planned": (
        planned(change=replaced),
        r"prompts.jsonl: the file has changed since it was planned",
    ),
    "prompts that are gone": (
        planned(change=lambda folder: (folder / "prompts.jsonl").unlink()),
        r"--prompts",
    ),
    "a model that keeps no keys and values": (
        planned(change=model_of({"model_type": "mamba"}), run=("--model", "./model")),
        r"mamba",
    ),
    "an encoder-decoder": (
        planned(
            change=model_of({"model_type": "t5", "is_encoder_decoder": True}), run=("--model", "./model")
        ),
        r"(?i)encoder-decoder",
    ),
    "an unknown field": (
        batch(line(custom_id="b"), body(temprature=1)),
        r"prompts.jsonl, line 2, field 'body.temprature': .* Did you mean temperature",
    ),
    "structured output": (batch(body(guided_json=5)), r"line 1, field 'body.guided_json'.*cannot be served"),
    "a number of likeliest tokens below zero": (
        batch(body(top_k=-2)),
        r"prompts.jsonl, line 1, field 'body.top_k': top_k must be 0 \(off\) or more, got -2",
    ),
    "a bias for a token that is not there": (
        planned(body(logit_bias={"9999": 1})),
        r"prompts.jsonl, line 1, field 'body.logit_bias': logit_bias names token 9999, the model knows 288",
    ),
    "what no chat template takes": (
        batch(body(chat_template_kwargs={"enable_thinking": False}), options=("--tokenizer", "bytes")),
        r"line 1, field 'body.chat_template_kwargs': the tokenizer 'bytes' has no chat template",
    ),
    "a random model's seed beyond 64 bits": (
        planned(run=("--model", "tiny:llama:" + "9" * 20)),
        r"tiny:FAMILY:SEED",
    ),
    "an encoding worker that the plan has not": (
        planned(run=("--encode-device", "cpu")),
        r"plan.json: --encode-device is for a WAA plan",
    ),
    "a cluster for one replica": (planned(run=("--ray-address", "auto")), r"--ray-address is for several"),
    "too little memory for the longest request": (planned(run=("--kv-tokens", "1")), r"--kv-tokens"),
    "a temperature below zero": (planned(run=("--temperature", "-1")), r"temperature.*-1"),
    "a share of likely tokens where none is drawn": (
        planned(run=("--top-p", "0.9")),
        r"--top-p has no effect at temperature 0, .* Give --temperature above 0 as well, or leave it out.",
    ),
    "a number of likely tokens at temperature 0": (
        planned(run=("--top-k", "5", "--temperature", "0")),
        r"--top-k has no effect at temperature 0",
    ),
    "a token that the model has not": (
        planned(line(body={"prompt": [7, 5000], "max_tokens": 2})),
        r"the prompt of 'a' holds token 5000",
    ),
    "a demonstration in a folder of ours": (
        demonstration_in_a_folder_of_ours,
        r"answers.jsonl: exists already. Say --overwrite",
    ),
    "a trace of nothing": (
        trace_of_nothing,
        r"prompts.jsonl.*trace",
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_bad_input_is_named_and_nothing_is_left(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make, expected = CASES[kind]
    words = make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    capsys.readouterr()
    try:
        status = main(words)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    said = capsys.readouterr()
    assert status == 2, said
    lines = said.err.strip().splitlines()
    message = lines[-2] if lines[-1].startswith("See `batchbound") else lines[-1]
    assert re.search(expected, message), message
    assert "Traceback" not in said.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("how", [(), ("--replicas", "2"), ("--hidden-lengths",)])
def test_a_trace_that_exists_is_refused_before_the_simulation(
    how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("trace.jsonl", "trace.0.jsonl"):
        (tmp_path / name).write_text("precious")
    for name in ("simulate_problem", "simulate_fleet", "simulate_file_hidden"):
        monkeypatch.setattr(f"batchbound.simulating.{name}", lambda *_, **__: pytest.fail("the work began"))
    assert main(["simulate", "table3:0:5", "--trace", str(tmp_path / "trace.jsonl"), *how]) == 2
    assert "jsonl: exists already" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not by its permissions: those do not bind the user that some machines run tests as.
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr(
        "batchbound.plan_requests.read_inputs", lambda *_, **__: pytest.fail("the work began")
    )
    assert main(["plan", "table3:0:5", "-o", str(tmp_path / "plan.json")]) == 2
    assert "plan.json: its folder cannot be written to" in capsys.readouterr().err
