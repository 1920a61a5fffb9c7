"""The whole path: prompts, plan, run on a model, answers. Tokens are judged against per-request generate."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import COMMAND, begun, ended
from tiny_checkpoint import write_checkpoint

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.plan import Plan
from batchbound.data.trace import Trace
from batchbound.executor.jobs.journal import Journal

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

FAMILIES = (
    "gpt2",
    "gpt-neo",
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi",
    "bloom",
    "falcon",
    "mpt",
)


def write_prompts(path: Path, count: int, longest: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    with path.open("w") as stream:
        for number in range(count):
            text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 40)))
            body = {"prompt": text, "max_tokens": rng.randint(1, longest)}
            stream.write(json.dumps({"custom_id": f"r{number}", "body": body}) + "\n")


def plan_and_run(folder: Path, model: str, *options: str, slots: int = 5) -> list[dict[str, Any]]:
    common = [str(folder / "prompts.jsonl"), "--model", model, "--slots", str(slots)]
    assert main(["plan", *common, "--time-limit", "0.2", "-o", str(folder / "plan.json"), "--overwrite"]) == 0
    answers = folder / "answers.jsonl"
    run = ["run", str(folder / "plan.json"), "--model", model, "--dtype", "float64", "--threads", "1"]
    assert main([*run, "-o", str(answers), "--trace", str(folder / "trace.jsonl"), *options]) == 0
    return [json.loads(line) for line in answers.read_text().splitlines()]


def generated(model_name: str, prompts: Path) -> dict[str, tuple[str, int]]:
    """Return the text and length that transformers' generate gives each prompt on its own."""
    from transformers import GenerationConfig

    from batchbound.executor.models.source import load_model
    from batchbound.executor.models.tokenizers import load_tokenizer

    torch.set_num_threads(1)
    model, tokenizer = load_model(model_name, dtype="float64", device="cpu"), load_tokenizer(model_name)
    answers = {}
    for line in prompts.read_text().splitlines():
        record = json.loads(line)
        ids = torch.tensor([tokenizer.encode(record["body"]["prompt"])])
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=record["body"]["max_tokens"],
            do_sample=False,
            eos_token_id=list(tokenizer.eos_ids),
            pad_token_id=0,
        )
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens = out[0, ids.shape[1] :].tolist()
        text = tokens[:-1] if tokens[-1] in tokenizer.eos_ids else tokens
        answers[record["custom_id"]] = (tokenizer.decode(text), len(tokens))
    return answers


def said(answers: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    return {
        name: (body["choices"][0]["text"], body["usage"]["completion_tokens"])
        for name, body in bodies.items()
    }


def test_no_answer_is_longer_than_the_longest_planned_whatever_its_request_states(tmp_path: Path) -> None:
    limits = {"old": {"max_tokens": 999}, "new": {"max_completion_tokens": 999}, "short": {"max_tokens": 2}}
    prompts, plan = tmp_path / "prompts.jsonl", tmp_path / "plan.json"
    lines = [{"custom_id": name, "body": {"prompt": "Count.", **limit}} for name, limit in limits.items()]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", str(prompts), "--model", "tiny:llama", "--time-limit", "0.1", "-o", str(plan)]
    assert main([*words, "--lengths", "constant:3", "--longest-completion", "7"]) == 0
    out = ["-o", str(tmp_path / "answers.jsonl"), "--trace", str(tmp_path / "trace.jsonl")]
    assert main(["run", str(plan), "--model", "tiny:llama", *out]) == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {name: tokens for name, (_, tokens) in said(answers).items()} == {"old": 7, "new": 7, "short": 2}


def test_answers_are_those_of_generate_in_input_order(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=12, longest=12)
    answers = plan_and_run(tmp_path, "tiny:llama")
    assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(12)]
    assert said(answers) == generated("tiny:llama", tmp_path / "prompts.jsonl")
    assert not (tmp_path / "answers.jsonl.journal").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_every_family_are_those_of_generate(family: str, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=16, longest=10)
    answers = plan_and_run(tmp_path, f"tiny:{family}", slots=6)
    assert said(answers) == generated(f"tiny:{family}", tmp_path / "prompts.jsonl")


def test_a_policy_may_serve_the_requests_instead_of_the_schedule(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=12, longest=12)
    answers = plan_and_run(tmp_path, "tiny:llama", "--policy", "fcfs", slots=3)
    assert said(answers) == generated("tiny:llama", tmp_path / "prompts.jsonl")
    trace = Trace.load(tmp_path / "trace.jsonl")
    assert (np.diff(trace.prefilled) >= 0).all()


def test_a_run_at_pinned_lengths_follows_the_plan_to_the_step(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=40, longest=30)
    plan_and_run(tmp_path, "tiny:llama", "--pinned")
    plan, trace = Plan.load(tmp_path / "plan.json"), Trace.load(tmp_path / "trace.jsonl")
    assert (trace.tokens == plan.problem.workload.output_tokens).all()
    assert trace.decode_steps == plan.schedule.decode_steps.sum()
    assert trace.prefill_stages == plan.schedule.prefill_stages()
    assert (trace.slot_of == plan.schedule.slot_of).all()


def test_sampled_answers_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=9, longest=12)
    sampling = ("--temperature", "0.9", "--top-p", "0.9", "--seed", "5", "--overwrite")
    few = said(plan_and_run(tmp_path, "tiny:llama", *sampling, slots=3))
    many = said(plan_and_run(tmp_path, "tiny:llama", *sampling, slots=20))
    other = said(plan_and_run(tmp_path, "tiny:llama", *sampling[:-2], "6", "--overwrite", slots=20))
    assert few == many
    assert few != other


def test_each_line_of_a_batch_file_is_sampled_as_it_asks(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=9, longest=8)
    # Its weights are fixed: --seed would draw others.
    model = "tiny:llama:0"
    plain = (tmp_path / "prompts.jsonl").read_text()
    asked: list[dict[str, float]] = [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.2, "top_k": 7}]
    alone = []
    for fields in asked:
        options = [
            word for name, value in fields.items() for word in (f"--{name}".replace("_", "-"), str(value))
        ]
        alone.append(said(plan_and_run(tmp_path, model, *options, "--overwrite", slots=4)))
    lines = [json.loads(line) for line in plain.splitlines()]
    for number, record in enumerate(lines):
        record["body"].update(asked[number % 3])
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    mixed = said(plan_and_run(tmp_path, model, "--overwrite", slots=4))
    assert mixed == {f"r{number}": alone[number % 3][f"r{number}"] for number in range(9)}
    greedy = said(plan_and_run(tmp_path, model, "--temperature", "0", "--overwrite", slots=4))
    assert greedy == alone[0]


def test_what_a_line_asks_of_its_end_and_its_log_probabilities_is_in_its_answer(tmp_path: Path) -> None:
    from batchbound.executor.llm import LLM

    engine = LLM.from_pretrained("tiny:llama:0", dtype="float64", device="cpu", slots=3)
    fields: list[dict[str, Any]] = [
        {"logprobs": 2, "repetition_penalty": 1.4},
        {"stop": ["e", "t", "a", "o"], "logit_bias": {"101": 6.0}, "include_stop_str_in_output": True},
        {"stop_token_ids": list(range(64)), "min_tokens": 3, "bad_words": ["ab"]},
        {"ignore_eos": True, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    ]
    asked: list[dict[str, Any]] = [{} for _ in fields]
    for own, given in zip(asked, fields, strict=True):
        for name, value in given.items():
            plain = (
                {int(token): bias for token, bias in value.items()}.items() if name == "logit_bias" else value
            )
            own[name] = tuple(plain) if isinstance(value, list | dict) else value
    prompts = [f"prompt {number}" for number in range(8)]
    with (tmp_path / "prompts.jsonl").open("w") as stream:
        for number, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": 20, **fields[number % 4]}
            stream.write(json.dumps({"custom_id": f"r{number}", "body": body}) + "\n")
    lines = plan_and_run(tmp_path, "tiny:llama:0", slots=3)
    for number, line in enumerate(lines):
        (expected,) = engine.generate([prompts[number]], max_tokens=20, **asked[number % 4])
        (choice,) = line["response"]["body"]["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
        assert line["response"]["body"]["usage"]["completion_tokens"] == len(expected.completion_ids)
        if number % 4:
            assert choice["logprobs"] is None
            continue
        assert expected.log_probabilities is not None
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(list(expected.log_probabilities))
        assert all(1 <= len(others) <= 2 for others in choice["logprobs"]["top_logprobs"])
    assert {line["response"]["body"]["choices"][0]["finish_reason"] for line in lines[1::4]} == {"stop"}


def test_a_stop_text_may_be_a_special_token(tmp_path: Path) -> None:
    from batchbound.executor.llm import LLM

    folder = str(write_checkpoint(tmp_path / "model"))
    llm = LLM.from_pretrained(folder)
    (own,) = llm.generate(["w5 w6"], max_tokens=9, stop=("<pad>", "w7"), logit_bias=((0, 50.0),))
    assert (own.completion_ids, own.text, own.finish_reason) == ((0,), "", "stop")
    # A text that the vocabulary lacks is written as <unk>, which writes others as well.
    (unknown,) = llm.generate(["w5 w6"], max_tokens=9, stop=("Ω",), logit_bias=((2, 50.0),))
    assert unknown.completion_ids == 9 * (2,)
    body = {"prompt": "w5 w6", "max_tokens": 9, "stop": ["<pad>", "w7"], "logit_bias": {"0": 50}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"custom_id": "a", "body": body}) + "\n")
    (line,) = plan_and_run(tmp_path, folder)
    assert line["response"]["body"]["usage"]["completion_tokens"] == 1
    assert line["response"]["body"]["choices"][0]["finish_reason"] == "stop"


def test_a_job_of_lengths_runs_on_random_prompts(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n5,7\n3,1\n9,4\n")
    plan, answers = str(tmp_path / "plan.json"), tmp_path / "answers.jsonl"
    assert (
        main(["plan", str(tmp_path / "lengths.csv"), "--slots", "2", "--time-limit", "0.1", "-o", plan]) == 0
    )
    words = [
        "run",
        plan,
        "--model",
        "tiny:gpt2",
        "--pinned",
        "-o",
        str(answers),
        "--trace",
        str(tmp_path / "t"),
    ]
    assert main(words) == 0
    usages = [json.loads(line)["response"]["body"]["usage"] for line in answers.read_text().splitlines()]
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages] == [
        (5, 7),
        (3, 1),
        (9, 4),
    ]


def no_hub(*_: Any, **__: Any) -> None:
    raise AssertionError("a folder's name is asked of a hub")


def test_a_model_saved_to_a_directory_runs_with_its_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from batchbound.executor.models.tiny import tiny_config

    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<unk>", "</s>", "how", "many", "eggs", "now"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    body = {"prompt": "how many eggs now", "max_tokens": 3}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"custom_id": "a", "body": body}) + "\n")
    [answer] = plan_and_run(tmp_path, str(folder))
    assert answer["response"]["body"]["usage"]["prompt_tokens"] == 4

    # A plan that named the folder as seen from here runs from elsewhere, and where the folder has moved.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("huggingface_hub.file_download.hf_hub_download", no_hub)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "prompts.jsonl", "--model", "model", "--work", "1", "-o", "here.json"]) == 0
    source = Plan.load("here.json").provenance.prompts
    assert source is not None
    assert (source.path, source.tokenizer) == ("prompts.jsonl", "./model")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["run", "../here.json", "--model", "../model"]) == 0
    folder.rename(tmp_path / "moved")
    assert main(["run", "../here.json", "--model", "../moved", "-o", "again.jsonl", "--overwrite"]) == 0
    assert main(["run", "../here.json", "--model", "tiny:llama", "-o", "never.jsonl", "--overwrite"]) == 2


def test_the_report_of_a_run_names_gap_and_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=12, longest=9)
    plan_and_run(tmp_path, "tiny:llama")
    capsys.readouterr()
    picture = tmp_path / "gantt.png"
    words = ["report", str(tmp_path / "plan.json"), str(tmp_path / "trace.jsonl"), "--json"]
    assert main([*words, "--gantt", str(picture), "--perfetto", str(tmp_path / "events.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["clock"] == "measured"
    assert report["requests"] == 12
    assert report["bound_s"] <= report["plan_makespan_s"] * (1 + 1e-12)
    assert report["gap"] >= 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "events.json").read_text())


def test_a_cost_model_of_another_machine_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=4, longest=4)
    plan, trace = str(tmp_path / "plan.json"), str(tmp_path / "trace.jsonl")
    words = [
        "plan",
        str(tmp_path / "prompts.jsonl"),
        "--model",
        "tiny:llama",
        "--slots",
        "2",
        "--cost",
        "paper",
    ]
    assert main([*words, "--time-limit", "0.2", "-o", plan]) == 0
    answers = str(tmp_path / "answers.jsonl")
    assert main(["run", plan, "--model", "tiny:llama", "-o", answers, "--trace", trace]) == 0
    assert "was not measured on this machine" in capsys.readouterr().err


def test_coefficients_alone_are_a_cost_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = {"prefill_base": 0.5, "prefill_per_token": 0.25, "decode_base": 2.0, "decode_per_slot": 0.0}
    (tmp_path / "own.json").write_text(json.dumps({"batchbound_cost": 1, "cost": cost}))
    (tmp_path / "jobs.csv").write_text("input_tokens,output_tokens\n2,4\n2,4\n")
    words = ["plan", str(tmp_path / "jobs.csv"), "--slots", "2", "--cost", str(tmp_path / "own.json")]
    assert main([*words, "-o", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr()
    title = " ".join(said.out.partition("  requests   ")[0].split())
    assert "in the seconds of" in title
    assert title.endswith("own.json")
    assert Plan.load(tmp_path / "plan.json").makespan == 0.5 + 0.25 * 4 + 2.0 * 3
    assert main(["report", str(tmp_path / "plan.json")]) == 0
    assert main(["verify", str(tmp_path / "plan.json")]) == 0


def run_killed_at_random(folder: Path, kills: int, seed: int) -> int:
    """Run a plan, kill it at random moments, run it to its end; return how often it was killed."""
    rng = random.Random(seed)
    words = ["run", str(folder / "plan.json"), "--model", "tiny:llama:1"]
    words += ["--dtype", "float64", "--threads", "1", "-o", str(folder / "answers.jsonl")]
    words += ["--trace", str(folder / "trace.jsonl")]
    journal = folder / "answers.jsonl.journal"
    killed = 0
    for _ in range(kills):
        before = journal.stat().st_size if journal.exists() else 0
        with begun(COMMAND, words, folder) as (process, _):
            started = time.monotonic()
            while process.is_alive() and time.monotonic() - started < 120:
                if journal.exists() and journal.stat().st_size > before:
                    break
                time.sleep(0.005)
            time.sleep(rng.uniform(0.0, 0.4))
            process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
    if not (folder / "answers.jsonl").exists():
        done = ended(COMMAND, words, folder)
        assert done.returncode == 0, done.stderr
    return killed


def undisturbed(folder: Path, count: int) -> Mapping[str, Any]:
    write_prompts(folder / "prompts.jsonl", count=count, longest=80)
    answers = plan_and_run(folder, "tiny:llama:1", slots=3)
    (folder / "answers.jsonl").unlink()
    (folder / "trace.jsonl").unlink()
    return {answer["custom_id"]: answer for answer in answers}


@pytest.mark.slow
def test_a_killed_run_loses_no_answer_and_repeats_none(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, count=60)
    assert run_killed_at_random(tmp_path, 2, seed=10) == 2, (
        "the run was over before it could be killed: give it more to do"
    )
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == list(expected)
    assert {line["custom_id"]: line for line in lines} == expected


@pytest.mark.parametrize(
    ("answered", "said"), [(3, "3 finished completions are in"), (0, "no completion was finished")]
)
def test_an_interrupted_run_says_what_is_kept_and_goes_on(
    answered: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = undisturbed(tmp_path, count=9)
    append = Journal.append

    def interrupted(journal: Journal, name: str, answer: Mapping[str, object]) -> None:
        if len(journal.finished) == answered:
            raise KeyboardInterrupt
        append(journal, name, answer)

    words = ["run", str(tmp_path / "plan.json"), "--model", "tiny:llama:1", "--dtype", "float64"]
    words += [
        "--threads",
        "1",
        "-o",
        str(tmp_path / "answers.jsonl"),
        "--trace",
        str(tmp_path / "trace.jsonl"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", interrupted)
        assert main(words) == 130
    assert said in capsys.readouterr().err
    assert (tmp_path / "answers.jsonl.journal").exists() == bool(answered)
    assert not (tmp_path / "answers.jsonl").exists()
    assert main(words) == 0
    assert (f"after {answered} from before" in capsys.readouterr().out) == bool(answered)
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {line["custom_id"]: line for line in lines} == expected


def test_a_plan_that_counts_the_first_token_as_a_step_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["plan", "table3:0:5", "--slots", "2", "--time-limit", "0.1", "-o", plan]) == 0
    assert Plan.load(plan).problem.cost == CostModel.paper()
    out = ["-o", str(tmp_path / "a"), "--trace", str(tmp_path / "t")]
    assert main(["run", plan, "--model", "tiny:llama", *out]) == 2
    assert "--first-token prefill" in capsys.readouterr().err


def test_a_quiet_command_says_nothing_on_stderr_but_what_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from contextvars import copy_context

    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"custom_id": "a", "body": {"prompt": "x", "max_tokens": 3}}\n')
    assert main(["plan", "p.jsonl", "--work", "1"]) == 0
    assert "no --model" in capsys.readouterr().err
    assert copy_context().run(main, ["plan", "p.jsonl", "--work", "1", "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    # A plan is made again at any time, another file is somebody's.
    assert copy_context().run(main, ["plan", "p.jsonl", "--work", "1", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    Path("plan.json").write_text("precious")
    assert copy_context().run(main, ["plan", "p.jsonl", "--work", "1", "--quiet"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_profile_says_where_it_measures_shorter_prompts_than_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "--model", "tiny:llama", "--slots", "2", "--points", "2", "--repeats", "1"]
    assert main([*words, "--prompt-tokens", "300", "-o", str(tmp_path / "cost.json")]) == 0
    assert "prompts of up to 234 tokens on average, not 300" in capsys.readouterr().err


def test_slots_are_chosen_by_the_cost_file_alone_within_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from batchbound.data.costs.cost import CalibratedCost

    monkeypatch.chdir(tmp_path)
    words = ["profile", "--model", "tiny:llama", "--slots", "4", "--prompt-tokens", "16", "--points", "2"]
    assert main([*words, "--repeats", "1", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    measured = CalibratedCost.load("cost.json")
    # Two layers of two heads of 16 numbers, keys and values, four bytes each.
    assert measured.kv_token_bytes == 2 * 2 * 16 * 2 * 4
    assert f"{measured.kv_tokens:,} tokens fit" in said
    assert "on a held-out job" in said
    write_prompts(tmp_path / "prompts.jsonl", count=30, longest=9)
    words = ["plan", "prompts.jsonl", "--model", "tiny:llama", "--cost", "cost.json", "--time-limit", "0.2"]
    assert main([*words, "--slots", "auto"]) == 0
    assert "in the seconds of tiny:llama on cpu" in capsys.readouterr().out.splitlines()[0]
    problem = Plan.load("plan.json").problem
    assert problem.kv_capacity == measured.kv_tokens
    assert problem.slots <= 4
    assert main([*words, "--slots", "8", "--overwrite"]) == 0
    assert "extrapolates: 8 slots, measured up to 4" in capsys.readouterr().err
    assert Plan.load("plan.json").problem.kv_capacity is None
