"""``plan --for``, and what reads its plan: ``verify``, ``report``, ``run --server``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer

from batchbound.cli import main
from batchbound.data.claims.assumptions import DISTINCT, REUSE_UNIT, TEXTS_DIFFER, Assumption
from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.files.jsonl import file_digest
from batchbound.data.iteration_plan import IterationPlan
from batchbound.data.iterations import EngineLimits
from batchbound.planning.iterations import Engines, make_iteration_plan
from batchbound.planning.mixed_job import read_mixed_job
from batchbound.solvers.result import Limits

LENGTHS = [5, 40, 7, 30, 6, 20, 9, 11]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


def write_batch(folder: Path, **extra: object) -> Path:
    path = folder / "in.jsonl"
    with path.open("w") as stream:
        for k, tokens in enumerate(LENGTHS):
            # What our own engine would refuse is the server's to understand.
            body = {"model": "fake", "prompt": f"r{k}", "max_tokens": tokens, "request_id": f"r{k}", **extra}
            stream.write(json.dumps({"custom_id": f"r{k}", "body": body, "output_tokens": tokens}) + "\n")
    return path


def planned(batch: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    out = ["-o", str(batch.parent / "plan.json"), "--overwrite", "--json"]
    assert main(["plan", str(batch), "--for", "vllm", "--slots", "2", "--work", "20", *out, *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert isinstance(said, dict)
    return said


def said_by(capsys: pytest.CaptureFixture[str], words: Sequence[str], status: int = 0) -> str:
    assert main(list(words)) == status
    read = capsys.readouterr()
    return read.err if status else read.out


def test_a_plan_for_servers_is_verified_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = planned(write_batch(tmp_path), capsys)
    path = str(tmp_path / "plan.json")
    assert said["bound_iterations"] <= said["iterations"]
    assert said["in_flight"] == [6]
    verified = json.loads(said_by(capsys, ["verify", path, "--json"]))
    assert (verified["verified"], verified["iterations"]) == (True, said["iterations"])
    assert f"{said['iterations']:,} iterations" in said_by(capsys, ["verify", path])
    reported = json.loads(said_by(capsys, ["report", path, "--json"]))
    assert reported["bound_iterations"] == said["bound_iterations"]
    assert "completions in flight" in said_by(capsys, ["report", path])


def test_verify_refuses_a_plan_whose_order_takes_more_than_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = planned(write_batch(tmp_path), capsys)
    path = tmp_path / "plan.json"
    value = json.loads(path.read_text())
    # The longest request last.
    value["shares"][0]["requests"].sort(key=lambda i: LENGTHS[i])
    path.write_text(json.dumps(value))
    assert f"not Predicted(iterations={said['iterations']}" in said_by(capsys, ["verify", str(path)], 1)


def test_a_server_is_sent_the_requests_in_the_order_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path)
    said = planned(batch, capsys, "--token-budget", "64")
    trace = str(tmp_path / "trace.jsonl")
    with FakeServer(slots=2, gate=6, total=len(LENGTHS)) as server:
        words = ["run", str(tmp_path / "plan.json"), "--server", server.url, "--trace", trace]
        ran = json.loads(said_by(capsys, [*words, "-o", str(tmp_path / "out.jsonl"), "--json"]))
    assert ran["order"] == "plan"
    assert ran["predicted_iterations"] == said["iterations"]
    assert ran["bound_iterations"] <= ran["iterations"]
    sent = [json.loads(line)["id"] for line in Path(trace).read_text().splitlines()[1:]]
    plan = IterationPlan.load(tmp_path / "plan.json")
    assert sent == plan.workload.ids[plan.order].tolist()
    beside = json.loads(said_by(capsys, ["report", str(tmp_path / "plan.json"), trace, "--json"]))
    assert beside["planned"]["iterations"] == said["iterations"]
    assert beside["run"]["iterations"]["counted by the server"] == ran["iterations"]
    assert "planned" in said_by(capsys, ["report", str(tmp_path / "plan.json"), trace])


def test_the_run_of_other_requests_is_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = write_batch(tmp_path)
    with FakeServer(slots=2, gate=6, total=len(LENGTHS)) as server:
        said_by(capsys, ["run", str(batch), "--server", server.url, "--slots", "2"])
    batch.write_text(batch.read_text().replace('"custom_id": "', '"custom_id": "other-'))
    planned(batch, capsys)
    assert main(["report", "plan.json"]) == 0
    captured = capsys.readouterr()
    assert "counted by the server" not in captured.out
    assert "other requests, which plan.json does not plan: left out" in " ".join(captured.err.split())
    assert main(["report", "plan.json", "trace.jsonl"]) == 2


def test_a_request_for_several_completions_is_planned_and_sent_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path, n=2)
    said = planned(batch, capsys, "--replicas", "2")
    assert said["requests"] == 16
    lines = [json.loads(line) for path in said["files"] for line in Path(path).read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == [f"r{k}" for k in range(8)]
    said = planned(batch, capsys)
    with FakeServer(slots=2) as server:
        words = [
            "run",
            str(tmp_path / "plan.json"),
            "--server",
            server.url,
            "-o",
            str(tmp_path / "out.jsonl"),
        ]
        ran = json.loads(said_by(capsys, [*words, "--trace", str(tmp_path / "t.jsonl"), "--json"]))
    assert (ran["requests"], ran["order"], ran["failed"]) == (8, "plan", 0)


def test_what_an_iteration_costs_adds_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch, cost = write_batch(tmp_path), tmp_path / "cost.json"
    IterationRates(0.02, decodes=1e-3).save(cost)
    said = planned(batch, capsys, "--cost", str(cost), "--price", "3600")
    assert said["bound_s"] <= said["makespan_s"] == pytest.approx(said["money"])
    # Every completion draws its first token in a chunk.
    work = 0.02 * said["iterations"] + 1e-3 * (sum(LENGTHS) - len(LENGTHS))
    assert said["makespan_s"] == pytest.approx(work)
    assert "s at the plan's prices" in said_by(capsys, ["verify", str(tmp_path / "plan.json")])


def test_the_seconds_of_a_run_that_was_audited_are_those_of_the_next_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ten requests one after the other on one slot: each iteration takes a tenth of a second.
    times, saved = tmp_path / "times.csv", tmp_path / "cost.json"
    rows = [
        f"r{k},1,{tokens},{0},{0.1 * (begin + 1)},{0.1 * (begin + tokens)}" for k, tokens, begin in spans()
    ]
    times.write_text("\n".join(["id,prompt_tokens,completion_tokens,start,first,last", *rows]) + "\n")
    assert main(["audit", str(times), "--slots", "1", "--save-cost", str(saved)]) == 0
    capsys.readouterr()
    assert IterationRates.load(saved).iterations == pytest.approx(0.1, rel=0.02)
    said = planned(write_batch(tmp_path), capsys, "--cost", str(saved))
    assert said["makespan_s"] == pytest.approx(0.1 * said["iterations"], rel=0.05)


def spans() -> list[tuple[int, int, int]]:
    """Return requests in a row: number, tokens and the iteration in which each begins."""
    tokens = [7, 12, 9, 15, 8, 11, 6, 14, 10, 13, 9, 12, 8, 7]
    return [(k, each, sum(tokens[:k])) for k, each in enumerate(tokens)]


def test_nothing_is_saved_where_no_seconds_are_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n3,4\n")
    words = ["audit", str(lengths), "--slots", "1", "--save-cost", str(tmp_path / "cost.json")]
    assert "no cost of an iteration was fitted" in said_by(capsys, words, 2)
    assert not (tmp_path / "cost.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prefill-token-cap", "64"], "Say --token-budget"),
        (["--prefix-cache", "64"], "--prefix-cache has no effect with --for"),
        (["--first-token", "decode"], "--first-token has no effect"),
        (["--length-error", "0.3"], "--length-error has no effect"),
        (["--solver", "exact"], "--solver has no effect"),
        (["--threads", "2"], "--threads has no effect"),
        (["--tokenizer", "bytes", "--model", "tiny:llama"], "--model has no effect with --tokenizer"),
        (["--token-budget", "1"], "1 tokens an iteration are fewer than 2 slots"),
        (["--price", "2"], "Give the cost of an iteration"),
        (["--cost", "nowhere.json"], "no such cost of an iteration"),
        (["--max-position", "20"], "beyond --max-position 20"),
        (["--kv-capacity", "30"], "a request needs"),
        (["--kv-capacity", "5"], "make no block"),
    ],
)
def test_what_has_no_effect_on_such_engines_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    batch, out = write_batch(tmp_path), ["-o", str(tmp_path / "plan.json")]
    found = said_by(capsys, ["plan", str(batch), "--for", "vllm", "--slots", "2", *out, *words], 2)
    assert said in found
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    "option", [["--token-budget", "64"], ["--block-tokens", "8"], ["--no-prefix-caching"], ["--unit", "4"]]
)
def test_limits_of_mixing_engines_are_refused_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    words = ["plan", str(write_batch(tmp_path)), "--tokenizer", "bytes", "-o", str(tmp_path / "plan.json")]
    assert f"{option[0]} has no effect without --for" in said_by(capsys, [*words, *option], 2)


def test_replicas_of_another_speed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replicas, batch = tmp_path / "replicas.json", write_batch(tmp_path)
    words = ["plan", str(batch), "--for", "vllm", "--slots", "2", "--replicas", str(replicas)]
    words += ["-o", str(tmp_path / "plan.json"), "--overwrite"]
    replicas.write_text(json.dumps({"replicas": [{"count": 2}, {"speed": 2}]}))
    assert "do not depend on the speed" in said_by(capsys, words, 2)
    replicas.write_text(json.dumps({"replicas": [{"slots": 1}, {"slots": 3, "kv_capacity": 640}]}))
    assert main(words) == 0
    shares = IterationPlan.load(tmp_path / "plan.json").shares
    assert [(share.limits.sequences, share.limits.kv_tokens) for share in shares] == [(1, None), (3, 640)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "PLAN", "--model", "tiny:llama"], "--server URL"),
        (["simulate", "PLAN"], "Send its requests"),
        (["report", "PLAN", "--gantt", "p.png"], "--gantt has no effect"),
        (["report", "PLAN", "--html", "p.html"], "--html draws a run"),
        (["plan", "PLAN"], "it is no requests|is a plan for servers"),
    ],
)
def test_what_a_plan_for_servers_is_not_for_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    planned(write_batch(tmp_path), capsys)
    path = str(tmp_path / "plan.json")
    found = said_by(capsys, [path if word == "PLAN" else word for word in words], 2)
    assert any(each in found for each in said.split("|"))


def test_a_plan_of_stages_is_no_cost_of_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path)
    planned(batch, capsys)
    words = ["plan", str(batch), "--for", "vllm", "--cost", str(tmp_path / "plan.json")]
    assert "not what an iteration costs" in said_by(capsys, [*words, "-o", str(tmp_path / "p.json")], 2)


def test_prompts_that_begin_alike_count_once_where_the_engine_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 9], [5]]
    rows = [
        {"custom_id": f"r{k}", "body": {"prompt": prompt}, "output_tokens": 2 + k}
        for k, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = read_mixed_job(path).job
    assert job.counted
    work = job.rows()
    assert work.cached.tolist() == [2, 3, 0, 0]
    assert work.shared.tolist() == [3, 3, 2, 0]
    assert [(one.name, one.basis) for one in job.assumptions] == [(TEXTS_DIFFER, "assumed")]
    assert job.workload.group[0] == job.workload.group[1] != job.workload.group[2]
    assert read_mixed_job(path, unit=None).job.tree is None


def write_documents(path: Path, documents: int = 2) -> Path:
    """Write questions on documents of 12 tokens, as token ids."""
    with path.open("w") as stream:
        for k in range(8):
            prompt = [*range(100 * (k % documents), 100 * (k % documents) + 12), 900 + k]
            row = {"custom_id": f"r{k}", "body": {"prompt": prompt}, "output_tokens": 2}
            stream.write(json.dumps(row) + "\n")
    return path


def test_a_plan_is_verified_from_its_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch, path = write_documents(tmp_path / "in.jsonl"), tmp_path / "plan.json"
    planned(batch, capsys, "--token-budget", "2")
    plan = IterationPlan.load(path)
    assert plan.tree is not None
    assert plan.tree.tokens.tolist() == [12, 12]
    # Two documents, a token of its own and one drawn for each request but its last.
    assert (plan.bound.iterations, plan.bound.source) == ((2 * 12 + 8 + 8) // 2, "tokens")
    assert "for the tree of shared beginnings in this plan" in said_by(capsys, ["verify", str(path)])
    words = ["verify", str(path), "--prompts", str(batch)]
    assert "derived from the prompts again" in said_by(capsys, words)
    assert json.loads(said_by(capsys, [*words, "--json"]))["tree_from_prompts"] is True


def test_a_plan_counts_beginnings_in_the_units_that_the_engine_reuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, path = write_documents(tmp_path / "in.jsonl"), tmp_path / "plan.json"
    planned(batch, capsys, "--token-budget", "2", "--unit", "5")
    plan = IterationPlan.load(path)
    assert plan.tree is not None
    assert plan.tree.tokens.tolist() == [10, 10]
    # Two units of each document, three tokens of its own and one drawn for each request but its last.
    assert (plan.bound.iterations, plan.bound.source) == ((2 * 10 + 8 * 3 + 8) // 2, "tokens")
    assert Assumption(REUSE_UNIT, "stated", "than 5 tokens") in plan.relied_on
    words = ["verify", str(path), "--prompts", str(batch)]
    assert "derived from the prompts again" in said_by(capsys, words)


def test_a_prediction_on_a_prefix_cache_is_simulated_on_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, path = write_documents(tmp_path / "in.jsonl"), tmp_path / "plan.json"
    # Room for two requests of one document: another order computes documents again.
    planned(batch, capsys, "--token-budget", "4", "--kv-capacity", "20", "--block-tokens", "4")
    assert said_by(capsys, ["verify", str(path)])
    plan = IterationPlan.load(path)
    share = plan.shares[0]
    assert share.predicted is not None
    assert share.predicted.tokens == 2 * 12 + 8 + 8
    fewer = replace(share, predicted=replace(share.predicted, tokens=share.predicted.tokens - 1))
    replace(plan, shares=(fewer,)).save(path)
    assert "prediction: simulated again" in said_by(capsys, ["verify", str(path)], 1)


def test_a_forged_tree_is_refused_by_the_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch, path = write_documents(tmp_path / "in.jsonl"), tmp_path / "plan.json"
    planned(batch, capsys, "--token-budget", "2")
    plan = IterationPlan.load(path)
    # Eight documents of as many tokens need more.
    job = read_mixed_job(write_documents(tmp_path / "others.jsonl", documents=8)).job
    engines = Engines((EngineLimits(2, 2),), blocks_stated=False)
    forged = make_iteration_plan(job, engines, limits=Limits(work=20))
    assert forged.bound.iterations > plan.bound.iterations
    forged.save(path)
    assert said_by(capsys, ["verify", str(path)])
    refused = said_by(capsys, ["verify", str(path), "--prompts", str(batch)], 1)
    assert "the certificate proves the bound" in refused
    other = tmp_path / "others.jsonl"
    other.write_text(batch.read_text().replace("907]", "907, 1]"))
    refused = said_by(capsys, ["verify", str(path), "--prompts", str(other)], 1)
    assert "'r7' has 14 tokens, the plan says 13" in refused
    other = write_batch(tmp_path)
    assert "its tokens are unknown" in said_by(capsys, ["verify", str(path), "--prompts", str(other)], 2)


def test_a_plan_without_a_tree_takes_no_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = write_batch(tmp_path)
    planned(batch, capsys)
    refused = said_by(capsys, ["verify", str(tmp_path / "plan.json"), "--prompts", str(batch)], 2)
    assert "holds no tree of prompts" in refused


def test_a_table_of_lengths_shares_what_its_groups_do(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("input_tokens,output_tokens,group\n5,3,0\n5,9,0\n7,2,-1\n")
    job = read_mixed_job(path).job
    assert job.rows().cached.tolist() == [0, 4, 0]
    assert [one.name for one in job.assumptions] == [DISTINCT, TEXTS_DIFFER]


def test_the_plan_names_the_prompts_that_it_was_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path)
    planned(batch, capsys)
    source = IterationPlan.load(tmp_path / "plan.json").provenance.prompts
    assert source is not None
    assert (source.path, source.sha256) == ("in.jsonl", file_digest(batch))
    batch.write_text(batch.read_text().replace("r1", "q1"))
    words = ["run", str(tmp_path / "plan.json"), "--server", "http://127.0.0.1:9"]
    assert "has changed since" in said_by(capsys, [*words, "-o", str(tmp_path / "out.jsonl")], 2)
