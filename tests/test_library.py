"""What a notebook imports from the package itself."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer

import batchbound
from batchbound import CostModel, Limits, Problem, Workload
from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.data.readers.openai_batch import PromptRecord
from batchbound.data.readers.requests import read_workload


def problem() -> Problem:
    return Problem(Workload.from_lengths([3, 5, 2, 4], [9, 4, 7, 2]), CostModel.paper(), 2)


@pytest.mark.parametrize("name", batchbound.__all__)
def test_every_public_name_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "AsyncRollouts":
        monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        pytest.importorskip("trl", reason="the trl extra is not installed")
    if name in ("LLM", "rollout_function"):
        pytest.importorskip("transformers", reason="the engine extra is not installed")
    assert getattr(batchbound, name) is not None
    assert name in dir(batchbound)


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        getattr(batchbound, "plann")  # noqa: B009


def test_a_plan_is_made_simulated_reported_and_verified() -> None:
    plan = batchbound.plan(problem(), limits=Limits(seconds=0.3))
    assert batchbound.verify(plan) is None
    trace = batchbound.simulate(problem(), batchbound.policy_named("fcfs", problem()))
    assert plan.makespan <= trace.makespan + 1e-9
    report = batchbound.report(plan, [trace])
    assert report.requests == 4
    assert batchbound.report(plan).makespan == pytest.approx(plan.makespan)
    assert batchbound.solve(problem(), limits=Limits(seconds=0.3)).makespan == pytest.approx(plan.makespan)


def test_a_bound_above_the_plan_is_refused() -> None:
    plan = batchbound.plan(problem(), limits=Limits(seconds=0.3))
    assert plan.bound is not None
    doubled = replace(plan, bound=replace(plan.bound, seconds=plan.bound.seconds * 2))
    assert batchbound.verify(doubled) is not None


def test_a_finished_run_is_audited(tmp_path: Path) -> None:
    # Two slots, 2 2 4 tokens in the order of the file: 6 iterations; the longest first: 4, the bound.
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n3,2\n3,2\n3,4\n")
    found = batchbound.audit(path, slots=2)
    (figures,) = [table for title, table in found.tables.items() if title.startswith("iterations")]
    assert figures["least, if assumptions hold, by slots"] == 4
    assert figures["simulated, as sent"] == 6
    assert figures["simulated, longest first"] == 4
    assert found.assumptions == ("assuming: one token a sequence and iteration",)
    for given, what in (
        ({"slots": 0}, "slots: 0 is not at least 1"),
        ({"kv_tokens": 1.5}, "kv_tokens: 1.5 is not a whole number"),
    ):
        with pytest.raises(InputError, match=what):
            batchbound.audit(path, **given)
    with pytest.raises(InputError, match="--profile is for a measured vLLM run"):
        batchbound.audit(path, slots=2, profile="profile.json")


def test_a_configuration_is_searched_for_and_planned() -> None:
    whole = Problem(
        Workload.from_lengths([5] * 12, [4, 6, 8] * 4), CostModel.paper(), 4, prefill_emits_first_token=True
    )
    found = batchbound.search(whole, latency_bound=30)
    assert found.best is not None
    reached = found.found[0].performance
    assert reached is not None
    assert reached.latency <= 30
    # No point of the frontier that meets the bound has noticeably more throughput than what was found.
    assert max(rate for latency, rate in found.frontier() if latency <= 30) <= reached.throughput * 1.005
    plan = found.plan()
    assert plan.schedule.check(plan.problem) is None
    assert plan.configuration is not None
    assert plan.configuration.encode_batch == found.best.encode_batch


def test_a_search_without_anything_to_weigh_is_refused() -> None:
    with pytest.raises(InputError, match="both prefill and decoding to take time"):
        batchbound.search(replace(problem(), cost=CostModel(0.0, 0.0, 0.1, 0.1)))
    assert batchbound.search(problem(), latency_bound=1e-3).best is None
    assert batchbound.search(problem(), latency_bound=batchbound.Targets(ttft=1e-6)).best is None
    with pytest.raises(InputError, match="link between the devices is not known"):
        batchbound.search(problem(), devices=2)
    for given, what in (
        ({"encode_batches": (5, 2)}, r"encode_batches is \(5, 2\); the smallest comes first"),
        ({"encode_batches": (0, 2)}, "encode_batches is 0; it must be at least 1"),
        ({"devices": 1.5}, "devices is 1.5; it must be a whole number"),
    ):
        with pytest.raises(ValueError, match=what):
            batchbound.search(problem(), **given)
    with pytest.raises(InputError, match=r"Loosen --latency-bound\.$"):
        batchbound.search(problem(), latency_bound=1e-3).plan()
    with pytest.raises(InputError, match=r"Loosen --ttft-bound or --tpot-bound\.$"):
        batchbound.search(problem(), latency_bound=batchbound.Targets(ttft=1e-6, tpot=1.0)).plan()


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    pytest.importorskip("transformers", reason="the engine extra is not installed")
    lines = [
        {"custom_id": f"r{k}", "body": {"prompt": "a" * (3 + k), "max_tokens": 2 + 2 * k}} for k in range(4)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", str(prompts), "--model", "tiny:llama", "--slots", "2", "--work", "20"]
    assert main([*words, "--quiet", "-o", str(tmp_path / "plan.json")]) == 0
    return tmp_path / "plan.json"


def test_a_plan_is_run_and_the_same_call_again_finds_it_done(planned: Path) -> None:
    model, folder = batchbound.ModelOptions("tiny:llama", dtype="float64", threads=1), planned.parent
    serve = partial(
        batchbound.run, planned, output=folder / "completions.jsonl", trace=folder / "trace.jsonl"
    )
    pinned = batchbound.RunOptions(pinned=True)
    result = serve(model=model, options=pinned)
    assert [one.custom_id for one in result.completions] == ["r0", "r1", "r2", "r3"]
    assert [int(n) for n in result.traces[0].tokens] == [2, 4, 6, 8]
    assert result.report is not None
    assert result.report.requests == 4
    assert result.failed == 0
    again = serve(model=model, options=pinned)
    assert again.finished_before
    assert again.completions == result.completions
    with pytest.raises(InputError, match="exists already"):
        serve(model=model)


def test_completions_are_a_table_if_the_name_says_so_and_say_when_they_were_made(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    begun = int(time.time())
    output = planned.parent / "completions.parquet"
    model, trace = batchbound.ModelOptions("tiny:llama", threads=1), planned.parent / "trace.jsonl"
    result = batchbound.run(planned, model, output=output, trace=trace)
    rows = pq.read_table(output).to_pylist()
    assert [row["custom_id"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert [row["completion_tokens"] for row in rows] == result.traces[0].tokens.tolist()
    assert all(begun <= row["created"] <= time.time() for row in rows)
    again = batchbound.run(planned, model, output=output, trace=trace)
    assert again.finished_before
    assert again.completions == result.completions
    lengths = read_workload(
        planned.parent / "prompts.jsonl", lengths=f"completions:{output}", count_tokens=counted
    )
    assert lengths.workload.output_tokens.tolist() == result.traces[0].tokens.tolist()
    with pytest.raises(InputError, match=r"completions are not written as .csv"):
        batchbound.run(planned, model, output=planned.parent / "completions.csv")


@pytest.mark.parametrize("output", ["", "."])
def test_an_output_that_is_no_file_is_refused_by_every_kind_of_run(planned: Path, output: str) -> None:
    with pytest.raises(InputError, match=r"is a folder\. Name a file"):
        batchbound.run(planned, "tiny:llama", output=output)
    with pytest.raises(InputError, match=r"is a folder\. Name a file"):
        batchbound.run(planned, batchbound.ServerOptions(("http://127.0.0.1:9",)), output=output)


def counted(records: Sequence[PromptRecord]) -> list[int]:
    return [len(str(record.prompt)) for record in records]


def test_paths_and_numpys_numbers_are_options_as_well(planned: Path, tmp_path: Path) -> None:
    from batchbound.executor.models.source import load_model

    load_model("tiny:llama", dtype="float64").save_pretrained(tmp_path / "model")
    given: list[dict[str, Any]] = [
        {"seed": 3, "temperature": 0.5},
        {"seed": np.int64(3), "temperature": np.float32(0.5)},
    ]
    found = []
    for index, one in enumerate(given):
        model = batchbound.ModelOptions(str(tmp_path / "model"), seed=one["seed"], threads=1)
        result = batchbound.run(
            planned,
            replace(model, model=tmp_path / "model"),  # type: ignore[arg-type]
            batchbound.RunOptions(tokenizer="bytes", temperature=one["temperature"]),
            output=tmp_path / f"{index}.jsonl",
            trace=tmp_path / f"{index}.trace.jsonl",
        )
        assert result.failed == 0
        lines = (tmp_path / f"{index}.jsonl").read_text().splitlines()
        found.append([json.loads(line)["response"]["body"]["choices"] for line in lines])
    assert found[0] == found[1]


def test_options_that_there_are_not_are_refused_by_name() -> None:
    run, model = batchbound.RunOptions, partial(batchbound.ModelOptions, "model")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (run, {"on_error": "ignore"}, "on_error: there is no 'ignore'; there are stop, record"),
        (run, {"tensor_parallel": 0}, "tensor_parallel: 0 is not at least 1"),
        (run, {"kv_tokens": 2.5}, "kv_tokens: 2.5 is not a whole number"),
        (model, {"load_format": "x"}, "load_format: there is no 'x'; there are auto, partial, dummy"),
        (model, {"threads": 0}, "threads: 0 is not at least 1"),
    ]
    for kind, given, message in wrong:
        with pytest.raises(ValueError, match=message):
            kind(**given)


def test_a_run_that_cannot_be_is_refused_before_the_model_loads(planned: Path) -> None:
    beside = planned.parent / "completions.jsonl"
    with pytest.raises(InputError, match="is read by this command"):
        batchbound.run(planned, "no such model", output=planned.parent / "prompts.jsonl")
    with pytest.raises(InputError, match="--tensor-parallel is for an RRA plan"):
        batchbound.run(planned, "no such model", batchbound.RunOptions(tensor_parallel=2), output=beside)
    assert not beside.exists()


def test_servers_complete_a_batch_and_what_is_done_is_not_sent_again(tmp_path: Path) -> None:
    batch, remarks = tmp_path / "batch.jsonl", list[str]()
    bodies = [{"prompt": f"r{number}", "max_tokens": 2 + number} for number in range(6)]
    lines = [json.dumps({"custom_id": body["prompt"], "body": body}) for body in bodies]
    batch.write_text("\n".join(lines) + "\n")
    completions, trace = tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    with FakeServer(slots=2) as server:
        found = batchbound.run(
            batch,
            batchbound.ServerOptions((server.url,), slots=2, order="longest", lengths="cap"),
            output=completions,
            trace=trace,
            remark=remarks.append,
        )
    assert (found.requests, found.failed, found.resumed) == (6, 0, 0)
    assert found.run.ids[0] == "r5"
    figures = found.figures()
    assert figures["output_tokens"] == sum(range(2, 8))
    # Slots of two: 7 + 4 + 3, and 6 + 5 + 2 tokens.
    assert figures["bound_iterations"] == figures["predicted_iterations"] == 14
    # In file order the second slot draws 3 + 5 + 7 = 15 tokens.
    predicted = "longest first, 14 iterations predicted, 6.7% fewer than in file order"
    assert any(predicted in remark for remark in remarks)
    # The server is gone, and not asked.
    servers = batchbound.ServerOptions((server.url,), slots=2)
    again = batchbound.run(batch, servers, output=completions, trace=trace)
    assert again.finished_before
    assert again.figures()["bound_iterations"] == 14
    with pytest.raises(InputError, match="--overwrite"):
        batchbound.run(batch, replace(servers, model="other"), output=completions, trace=trace)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"urls": ()}, "urls are \\(\\)"),
        ({"urls": ("http://x",), "order": "best"}, "the order 'best' is not one of"),
    ],
)
def test_servers_that_cannot_be_meant_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batchbound.ServerOptions(**given)
