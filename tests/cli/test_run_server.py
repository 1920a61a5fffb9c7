"""``run --server`` against a server of our own that fails in every way a real one does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_server import ODD, FakeServer
from server_batches import rows_of, run_words, write_batch

from batchbound.cli import main
from batchbound.data.readers.completions import read_completions
from batchbound.data.readers.server_batch import Sent, read_server_batch
from batchbound.data.readers.server_run import ServerRun
from batchbound.executor.jobs.journal import Journal
from batchbound.executor.jobs.params import Patience, RunParams
from batchbound.executor.server import client as server_client
from batchbound.executor.server.client import ServerClient
from batchbound.executor.server.connection import Response
from batchbound.executor.server.dispatch import Dispatch
from batchbound.executor.server.reply import Kind, Reply
from batchbound.executor.server.server_job import ServerJob
from batchbound.run_job.batch_to_send import ServerOptions
from batchbound.running import run


def text_of(row: Mapping[str, Any]) -> str:
    return str(row["response"]["body"]["choices"][0]["text"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait milliseconds where a user would wait seconds; and no proxy stands between us and ourselves."""
    waits = Patience.wait
    monkeypatch.setattr(Patience, "wait", lambda *given: waits(*given) / 50)
    monkeypatch.setenv("NO_PROXY", "*")


def heavy_tailed(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [min(200, int(rng.lognormvariate(2.5, 1.0)) + 1) for _ in range(count)]


def test_the_order_is_released_so_that_the_server_ends_near_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    send = ServerClient.send

    async def noted(client: ServerClient, request: Sent) -> Reply:
        sent.append(str(json.loads(request.body)["prompt"]))
        return await send(client, request)

    monkeypatch.setattr(ServerClient, "send", noted)
    lengths = heavy_tailed(60)
    batch = write_batch(tmp_path / "in.jsonl", lengths)
    counted = {}
    for order in ("file", "auto"):
        sent.clear()
        with FakeServer(4, gate=8, total=60, sent=sent) as server:
            words = ["--slots", "4", "--in-flight", "8", "--order", order, "--lengths", "cap", "--overwrite"]
            assert main(run_words(batch, server, *words)) == 0
            assert server.most_in_flight == 8
            counted[order] = server.iterations
        said = json.loads(capsys.readouterr().out)
        assert said["iterations"] == said["predicted_iterations"] == counted[order]
        assert said["bound_iterations"] <= counted[order]
        assert sum(said["losses"].values()) == counted[order] - said["bound_iterations"]
    assert counted["auto"] <= 1.02 * said["bound_iterations"]
    assert counted["file"] > 1.05 * counted["auto"]
    rows = rows_of(batch)
    assert list(rows) == [f"r{number}" for number in range(60)]
    assert all(text_of(row) == name for name, row in rows.items())
    run = ServerRun.load(tmp_path / "trace.jsonl")
    assert run.completion_tokens.sum() == sum(lengths)
    assert (run.servers[0].engine, run.servers[0].iterations) == ("vllm", counted["auto"])


def test_the_order_adapts_to_the_lengths_of_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 20 prompts, four completions each, about as long as one another; nothing says so beforehand.
    rng = random.Random(3)
    true = {f"p{k}-{j}": max(1, round(length * rng.uniform(0.8, 1.2))) for j in range(4)
            for k, length in enumerate(heavy_tailed(20, seed=1))}  # fmt: skip
    batch = tmp_path / "in.jsonl"
    with batch.open("w") as stream:
        for name in true:
            body = {"model": "fake", "prompt": name.partition("-")[0], "max_tokens": 250, "user": name}
            stream.write(json.dumps({"custom_id": name, "body": body}) + "\n")
    sent: list[str] = []
    send = ServerClient.send

    async def noted(client: ServerClient, request: Sent) -> Reply:
        sent.append(json.loads(request.body)["user"])
        return await send(client, request)

    monkeypatch.setattr(ServerClient, "send", noted)
    with FakeServer(4, total=80, lengths=true) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 0
    captured = capsys.readouterr()
    assert "60 requests repeat a prompt" in captured.err
    assert json.loads(captured.out)["order"] == "longest first, adapted to lengths seen"
    # One of each prompt first, in the order of the file; then the longest prompts.
    assert [name.partition("-")[0] for name in sent[:20]] == [f"p{k}" for k in range(20)]
    last, middle = sent[-20:], sent[28:48]
    assert sum(true[name] for name in middle) > 3 * sum(true[name] for name in last)


def test_longer_kinds_go_first_once_completions_show_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    true = {f"word-{k}": 3 for k in range(80)} | {f"essay-{k}": 60 for k in range(10)}
    batch = tmp_path / "in.jsonl"
    with batch.open("w") as stream:
        for name in true:
            body = {"model": "fake", "prompt": name, "max_tokens": 100, "user": name}
            stream.write(json.dumps({"custom_id": name, "body": body}) + "\n")
    counted, said = {}, {}
    for order in ("file", "auto"):
        with FakeServer(4, gate=8, total=90, lengths=true) as server:
            words = ["--slots", "4", "--in-flight", "8", "--order", order, "--overwrite"]
            assert main(run_words(batch, server, *words)) == 0
            counted[order] = server.iterations
        said[order] = capsys.readouterr()
    assert "2 kinds of prompts" in said["auto"].err
    assert json.loads(said["auto"].out)["order"] == "file order, adapted to lengths seen"
    assert "kinds" not in said["file"].err
    # Longest first would take the bound's iterations.
    bound = json.loads(said["auto"].out)["bound_iterations"]
    assert counted["file"] - counted["auto"] >= 0.5 * (counted["file"] - bound)


def test_the_end_screen_offers_a_second_run_whose_lengths_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # On two slots, 1 1 1 1 8 takes 10 iterations in file order, and 8 with the longest first.
    true = {"r0": 1, "r1": 1, "r2": 1, "r3": 1, "r4": 8}
    batch = write_batch(tmp_path / "in.jsonl", [9] * 5, temperature=0)
    words = [word for word in run_words(batch, FakeServer(2)) if word != "--json"]
    for overwrite in ([], ["--overwrite"]):
        with FakeServer(2, gate=5, total=5, lengths=true) as server:
            words[words.index("--server") + 1] = server.url
            assert main([*words, "--slots", "2", "--in-flight", "5", *overwrite]) == 0
        said = capsys.readouterr()
        lines = said.out.splitlines()
        assert max(map(len, lines[:5])) <= 80
        assert lines[0] == f"5 requests, 2 at a time, {server.url}, iterations"
        assert lines[1] == "  first come, first served        10    simulated, same lengths"
        assert lines[3].startswith("  lengths known beforehand         8    ")
        assert lines[4].startswith("  least possible                   8    proven; this run is ")
        if overwrite:
            assert "lengths are those of the earlier run" in said.err
            assert lines[2].startswith("  this run                         8    ")
            assert "next time" not in said.out
        else:
            assert lines[2].startswith("  this run                        10    ")
            assert lines[3].endswith("20% fewer than this run")
            assert "next time: batchbound run" in said.out
            assert "--overwrite" in said.out


@pytest.mark.parametrize(
    ("second", "line"),
    [
        ({"r1": 9}, "  lengths changed in 1 of 5 rows: r1 1 -> 9 tokens"),
        ({"r1": 9, "r4": 7, "r0": 2}, "  lengths changed in 3 of 5 rows: r1 1 -> 9, r0 1 -> 2 tokens, ..."),
        # Nothing is named where the run takes no longer than predicted.
        ({"r4": 7}, None),
        ({}, None),
    ],
)
def test_lengths_that_did_not_repeat_are_named_where_the_run_took_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], second: dict[str, int], line: str | None
) -> None:
    first = {"r0": 1, "r1": 1, "r2": 1, "r3": 1, "r4": 8}
    batch = write_batch(tmp_path / "in.jsonl", [9] * 5, temperature=0)
    words = [word for word in run_words(batch, FakeServer(2)) if word != "--json"]
    said = list[str]()
    for lengths, overwrite in ((first, []), (first | second, ["--overwrite"])):
        with FakeServer(2, gate=5, total=5, lengths=lengths) as server:
            words[words.index("--server") + 1] = server.url
            assert main([*words, "--slots", "2", "--in-flight", "5", *overwrite]) == 0
        said.append(capsys.readouterr().out)
    assert "lengths changed" not in said[0]
    assert [text for text in said[1].splitlines() if "lengths changed" in text] == ([line] if line else [])


@pytest.mark.parametrize(
    ("words", "extra"),
    [(["--order", "file"], {"temperature": 0}), (["--lengths", "cap"], {"temperature": 0}), ([], {})],
)
def test_no_second_run_is_offered_where_it_would_know_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], extra: dict[str, int]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [9] * 5, **extra)
    with FakeServer(2, gate=5, total=5, lengths={"r0": 1, "r1": 1, "r2": 1, "r3": 1, "r4": 8}) as server:
        asked = [word for word in run_words(batch, server, *words) if word != "--json"]
        assert main([*asked, "--slots", "2", "--in-flight", "5"]) == 0
    said = capsys.readouterr().out
    assert "20% fewer, if lengths repeat" in said
    assert "next time" not in said


def test_bodies_pass_through_untouched(tmp_path: Path) -> None:
    extra = {
        "n": 3,
        "logprobs": None,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_object"},
        "guided_regex": "a+",
    }
    batch = write_batch(tmp_path / "in.jsonl", [4, 2], **extra)
    with FakeServer(8) as server:
        assert main(run_words(batch, server, "--slots", "8")) == 0
    sent = {name: body for name, body in server.bodies.items()}
    expected = {"model": "fake", "prompt": "r0", "max_tokens": 4, **extra}
    assert sent["r0"] == expected
    assert len(rows_of(batch)["r0"]["response"]["body"]["choices"]) == 3


def test_a_misspelt_field_is_told_and_one_of_the_server_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [4, 2], max_tokns=3, chat_template_kwargs={}, top_n=2)
    words = ["--slots", "8", "--longest-completion", "9"]
    with FakeServer(8) as server:
        assert main(run_words(batch, server, *words)) == 0
    told = capsys.readouterr().err
    assert "line 1, field 'body.max_tokns': sent as it is; did you mean max_tokens?" in told
    assert told.count("did you mean") == 1
    assert "--longest-completion 9 has no effect: each request has a cap of its own" in told


def test_chat_requests_and_a_missing_model_are_served(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    batch = tmp_path / "in.jsonl"
    batch.write_text(json.dumps({"custom_id": "a", "body": body}) + "\n")
    with FakeServer(2, model="only-one") as server:
        assert main(run_words(batch, server, "--slots", "2")) == 0
    assert server.bodies["hello"]["model"] == "only-one"
    assert rows_of(batch)["a"]["response"]["body"]["choices"][0]["message"]["content"] == "hello"


def test_failures_that_pass_are_retried_and_those_that_do_not_become_error_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3] * 12)
    faults: dict[str, list[int | str]] = {
        "r0": [429, 429],
        "r1": [500, 503],
        "r2": ["drop", "drop"],
        "r3": ["garbage"],
        "r4": [400],
        "r5": [500] * 8,
        "r6": ["no choices"],
        "r7": ["hang"],
        "r8": ["no gzip"],
        "r9": ["error"],
    }
    with FakeServer(4, faults=faults, retry_after="0.01") as server:
        assert main(run_words(batch, server, "--slots", "4", "--timeout", "1.5")) == 1
    rows = rows_of(batch)
    failed = {name for name, row in rows.items() if (row["response"] or {}).get("status_code") != 200}
    assert failed == {"r4", "r5", "r6", "r9"}
    assert rows["r4"]["response"]["status_code"] == 400
    assert rows["r4"]["error"] is None
    assert rows["r5"]["response"]["body"]["error"]["message"] == "fault 500"
    assert rows["r6"]["response"] is None
    assert "no completion" in rows["r6"]["error"]["message"]
    assert rows["r9"]["error"]["message"] == "the response holds no completion: out of blocks"
    assert server.attempts["r0"] == 3
    assert server.attempts["r5"] == 8
    assert server.attempts["r4"] == 1
    said = json.loads(capsys.readouterr().out)
    assert said["failed"] == 4
    assert said["retries"] == 2 + 2 + 2 + 1 + 7 + 1 + 1


def test_a_mistake_of_ours_ends_the_run_instead_of_stopping_it_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchbound.executor.server.client import ServerClient

    async def send(*_: object) -> None:
        raise ArithmeticError("a mistake")

    monkeypatch.setattr(ServerClient, "send", send)
    batch = write_batch(tmp_path / "in.jsonl", [2] * 3)
    with FakeServer(4) as server, pytest.raises(ArithmeticError, match="a mistake"):
        main(run_words(batch, server, "--slots", "4"))


def test_a_server_that_ignores_a_field_is_found_out(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2, 2], n=2)
    with FakeServer(4, faults={"r1": ["ignore n"]}) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 1
    assert "ignored the field 'n'" in rows_of(batch)["r1"]["error"]["message"]


@pytest.mark.parametrize("step", ["trace", "completions", "removal"])
def test_the_same_command_finishes_wherever_the_end_of_a_run_was_cut_off(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    batch = write_batch(tmp_path / "in.jsonl", [2] * 6)
    with FakeServer(4) as server, monkeypatch.context() as patched:
        if step == "trace":
            patched.setattr(ServerRun, "save", cut_off)
        elif step == "completions":
            patched.setattr("batchbound.run_job.on_servers.write_completions", cut_off)
        else:
            patched.setattr(Journal, "remove", cut_off)
        assert main(run_words(batch, server, "--slots", "4")) == 130
        patched.undo()
        assert main(run_words(batch, server, "--slots", "4")) == 0
        assert sum(server.attempts.values()) == 6
    assert len(rows_of(batch)) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "in.jsonl", "trace.jsonl"]


def test_a_finished_run_typed_again_says_so_and_asks_no_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 6, n=2)
    with FakeServer(4) as server:
        words = run_words(batch, server, "--slots", "4")
        assert main(words) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    figures = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    said = capsys.readouterr()
    assert "this job is finished; --overwrite would serve it again" in said.err
    assert "predicted_iterations" not in figures, "equal caps are no lengths"
    assert json.loads(said.out) == figures
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    options = ServerOptions((server.url,))
    again = run(batch, options, output=tmp_path / "answers.jsonl", trace=tmp_path / "trace.jsonl")
    assert (again.finished_before, again.failed, len(again.run)) == (True, 0, 6)
    assert again.figures()["requests"] == 6


def test_a_run_of_requests_without_a_model_goes_on_with_the_model_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 6, model=None)
    with FakeServer(4, model="one") as one, FakeServer(4, model="other") as other:
        assert main(run_words(batch, one, "--slots", "4", "--server", other.url)) == 2
        assert "requests name no model, and the servers have one, other. Give --model" in (
            capsys.readouterr().err
        )
        one.on_completion = lambda done: os.kill(os.getpid(), signal.SIGINT) if done == 3 else None
        assert main(run_words(batch, one, "--slots", "1", "--in-flight", "1")) == 130
        assert "completions are in" in capsys.readouterr().err
        assert main(run_words(batch, other, "--slots", "4")) == 2
        assert "belongs to another run (differs in: served)" in capsys.readouterr().err
        assert main(run_words(batch, one, "--slots", "4")) == 0
    assert not other.attempts
    assert {body["model"] for body in one.bodies.values()} == {"one"}


def test_outputs_of_another_run_are_not_taken_for_this_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 6)
    with FakeServer(4) as server:
        words = run_words(batch, server, "--slots", "4")
        assert main(words) == 0
        for changed in (["--model", "fake"], []):
            if not changed:
                write_batch(batch, [2] * 5 + [3])
            assert main([*words, *changed]) == 2
            said = "exists already" if changed else "row 'r5' had another body when it was finished"
            assert f"answers.jsonl: {said}" in capsys.readouterr().err
        assert main([*words, "--overwrite"]) == 0


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_whatever_a_response_holds_is_written_and_ends_no_run(tmp_path: Path, suffix: str) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * (len(ODD) + 1))
    odd: dict[str, list[int | str]] = {f"r{k}": [what] for k, what in enumerate(ODD)}
    output = batch.with_name(f"answers{suffix}")
    with FakeServer(4, faults=odd) as server:
        assert main(run_words(batch, server, "--slots", "4", "-o", str(output))) == 0
    rows = {one.custom_id: one for one in read_completions(output)}
    assert list(rows) == [f"r{k}" for k in range(len(ODD) + 1)]
    assert all(one.error is None for one in rows.values())
    assert json.loads(rows["r0"].details or "") == {"logprobs": {"token_logprobs": [None, 1e-5]}}
    assert rows["r1"].completion == "x \N{REPLACEMENT CHARACTER}"
    assert not (tmp_path / f"answers{suffix}.journal").exists()


@pytest.mark.parametrize("body", ['{"a":' * 10**5 + "1" + "}" * 10**5, '{"n": ' + "9" * 5000 + "}"])
def test_a_response_that_cannot_be_parsed_is_tried_again(
    tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, answers = write_batch(tmp_path / "in.jsonl", [2] * 3), [body]
    own = server_client._parsed

    def parsed(response: Any) -> Any:
        if answers:
            response = Response(200, body=answers.pop().encode())
        return own(response)

    monkeypatch.setattr(server_client, "_parsed", parsed)
    with FakeServer(4) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 0
    assert len(rows_of(batch)) == 3


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), ("-1", 0.0), ("inf", None), ("soon", None)])
def test_a_wait_that_a_server_asks_for_ends(header: str, seconds: float | None) -> None:
    assert server_client._retry_after(header) == seconds


def test_a_long_wait_that_a_server_asks_for_is_told(tmp_path: Path) -> None:
    requests = read_server_batch(write_batch(tmp_path / "in.jsonl", [2] * 6))
    said: list[str] = []
    with FakeServer(4, faults={"r0": [429]}, retry_after="0.2") as server:
        params = RunParams(patience=Patience(longest_backoff_seconds=0.1))
        job = ServerJob(requests, range(6), [server.url], 4, params=params)
        with Journal(tmp_path / "journal", {}) as journal:
            assert job.run(journal, job.probe(), remark=said.append).failed == 0
    assert said == [f"{server.url}: HTTP 429: fault 429; it asks to wait 0 s, and the run does"]


def test_all_that_a_server_asks_to_wait_at_once_is_told_once() -> None:
    told: list[float] = []
    busy, params = Reply(Kind.BUSY, 429), RunParams(patience=Patience(longest_backoff_seconds=60.0))
    dispatch = Dispatch([], 1, 1, params, random.Random(0), on_wait=lambda k, reply, wait: told.append(wait))
    for now, wait in ((0.0, 3600.0), (2.0, 3599.0), (3.0, 59.0), (3600.0, 1800.0)):
        dispatch._tell_wait(0, busy, now, wait)
    assert told == [3600.0, 1800.0]


def test_the_run_ends_at_once_where_every_request_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [50] * 60)
    with FakeServer(4, faults={f"r{k}": [404] * 9 for k in range(60)}) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 1
        assert sum(server.attempts.values()) < 16
    assert "to /v1/completions are all refused: HTTP 404" in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl.journal").exists()


def test_failures_of_the_last_requests_do_not_stop_a_job_that_was_under_way(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 40)
    faults: dict[str, list[int | str]] = {f"r{k}": [404] for k in range(10, 40)}
    journal = Journal(
        tmp_path / "answers.jsonl.journal",
        {"server": "OpenAI", "model": None},
    )
    line_id = read_server_batch(batch).line_id
    with journal:
        for k in range(10):
            line = {"id": line_id(k), "custom_id": f"r{k}", "response": {"status_code": 200}}
            journal.append(f"r{k}", line)
    with FakeServer(4, faults=faults) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 1
        assert server.attempts.total() == 30
    rows = rows_of(batch)
    assert sum(row["response"]["status_code"] == 404 for row in rows.values()) == 30


def test_a_server_that_dies_and_comes_back_serves_every_request_once(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", heavy_tailed(80, seed=1))
    rng = random.Random(2)
    deaths = sorted(rng.sample(range(1, 79), 20))
    with FakeServer(6, die_after=deaths) as server:
        assert main(run_words(batch, server, "--slots", "6")) == 0
        assert server.deaths == 20
    ran = ServerRun.load(tmp_path / "trace.jsonl")
    assert 0 < ran.unreachable < ran.makespan
    # What a server counted before it started anew is lost, so that nothing is counted at all.
    assert ran.servers[0].iterations is None
    rows = rows_of(batch)
    assert len(rows) == 80
    assert all(row["response"]["status_code"] == 200 for row in rows.values())


def test_a_request_that_kills_its_server_is_given_up_and_the_others_are_served(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3] * 10)
    with FakeServer(4, faults={"r3": ["drop"] * 99}) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 1
    rows = rows_of(batch)
    failed = [name for name, row in rows.items() if row["response"] is None]
    assert failed == ["r3"]
    assert rows["r3"]["error"]["code"] == "broken"


@pytest.mark.parametrize(
    ("fault", "status", "tokens", "remark"),
    [
        ("no counts", 0, None, "no bound: the servers did not say how many tokens each request had"),
        (400, 1, 0, "no bound: no request has a completion"),
    ],
)
def test_tokens_that_nobody_counted_are_unknown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: int | str,
    status: int,
    tokens: int | None,
    remark: str,
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 3)
    faults = {f"r{k}": [fault] for k in range(3 if status else 1)}
    with FakeServer(4, faults=faults) as server:
        assert main(run_words(batch, server, "--slots", "4")) == status
    said = capsys.readouterr()
    assert json.loads(said.out)["output_tokens"] == tokens
    assert json.loads(said.out)["output_tokens_per_s"] == tokens
    assert remark in said.err


def test_several_servers_share_the_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = write_batch(tmp_path / "in.jsonl", heavy_tailed(40))
    with FakeServer(3) as one, FakeServer(3) as other:
        words = ["--server", other.url, "--slots", "3", "--in-flight", "7"]
        assert main(run_words(batch, one, *words)) == 0
        assert sum(one.completions.values()) + sum(other.completions.values()) == 40
        assert min(sum(one.completions.values()), sum(other.completions.values())) > 0
        assert max(one.most_in_flight, other.most_in_flight) <= 7
    said = json.loads(capsys.readouterr().out)
    assert said["bound_iterations"] <= said["iterations"]
    assert len(rows_of(batch)) == 40


@pytest.mark.parametrize(("words", "most"), [([], 32), (["--in-flight", "8"], 8)])
def test_more_is_kept_in_flight_where_the_queue_runs_empty_and_nobody_said_how_much(
    tmp_path: Path, words: list[str], most: int
) -> None:
    params = tmp_path / "params.toml"
    params.write_text("[run]\nmetrics_seconds = 0.01\n")
    words = [*words, "--params", str(params)]
    batch = write_batch(tmp_path / "in.jsonl", [50] * 200)
    # It has more slots than it is taken to have, so that nothing ever waits.
    with FakeServer(99) as server:
        assert main(run_words(batch, server, "--slots", "4", *words)) == 0
        assert server.most_in_flight <= most
    assert 8 <= ServerRun.load(tmp_path / "trace.jsonl").in_flight <= most


def check_killed(tmp_path: Path, kills: int, seed: int, deaths: int = 0) -> None:
    """Kill the command with SIGKILL a few completions after each of its starts, then let it end."""
    code = (
        "import sys; from batchbound.executor.jobs import params as d; w = d.Patience.wait;"
        " d.Patience.wait = lambda *a: w(*a) / 50; from batchbound.cli import main;"
        " sys.exit(main(sys.argv[1:]))"
    )
    rng = random.Random(seed)
    batch = write_batch(tmp_path / "in.jsonl", heavy_tailed(90, seed))
    die_after = sorted(rng.sample(range(1, 3 * kills + 60), deaths))
    with FakeServer(5, die_after=die_after) as server:
        words = [sys.executable, "-c", code, *run_words(batch, server, "--slots", "5")]
        for kill in range(kills + 1):
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=os.environ)
            # Requests of a killed client are completed for nobody, and served again.
            moment = server.completions.total() + rng.randint(0, 6)
            while kill < kills and server.completions.total() < moment:
                time.sleep(0.001)
            if kill < kills:
                process.send_signal(signal.SIGKILL)
            assert process.wait(60) == (-signal.SIGKILL if kill < kills else 0)
    rows = rows_of(batch)
    assert list(rows) == [f"r{number}" for number in range(90)]
    assert all(text_of(row) == name for name, row in rows.items())
    assert server.deaths == deaths
    assert not (tmp_path / "answers.jsonl.journal").exists()


@pytest.mark.slow
def test_kills_of_the_client_and_of_the_server_lose_and_repeat_nothing(tmp_path: Path) -> None:
    check_killed(tmp_path, 3, seed=2, deaths=3)


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path) -> None:
    check_killed(tmp_path, 3, seed=1)


def test_a_plan_is_followed_and_completions_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", heavy_tailed(30))
    plan = str(tmp_path / "plan.json")
    planning = ["plan", str(batch), "--slots", "4", "--tokenizer", "bytes", "--time-limit", "0.1", "-o", plan]
    assert main(planning) == 0
    with FakeServer(4) as server:
        words = run_words(batch, server, "--slots", "2")
        words[1] = plan
        assert main([*words, "--order", "plan", "--in-flight", "8"]) == 0
        assert server.most_in_flight <= 8
        # All of them: there is nothing left to send.
        assert len(server.arrivals) == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pinned"], "--pinned has no effect with --server"),
        (["--top-p", "0.5"], "--top-p has no effect with --server"),
        (["--model", "other"], "does not serve 'other', only fake"),
        (["--order", "plan"], "--order plan needs a plan"),
        ([], "max_num_seqs of the server is unknown"),
    ],
)
def test_what_a_server_cannot_heed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2])
    with FakeServer(4) as server:
        slots = ["--slots", "4"] if words else []
        assert main(run_words(batch, server, *slots, *words)) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2])
    server = FakeServer(4, port=9)
    assert main(run_words(batch, server, "--slots", "4")) == 2
    assert "--server http://127.0.0.1:9: the server cannot be reached" in capsys.readouterr().err
    for odd in ("127.0.0.1:9", "http://127.0.0.1:99999", "http://[::1", "http://:9", "http://"):
        words = run_words(batch, server, "--slots", "4")
        words[words.index(server.url)] = odd
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"--server {odd}: it is not an http:// or https:// address. Write http" in said
    # Its slots would be counted twice, and the bound be of two servers.
    assert main(run_words(batch, server, "--slots", "4", "--server", f"{server.url}/v1/")) == 2
    assert f"--server {server.url}/v1/: it is named twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"body": {"prompt": "a"}}, "field 'custom_id': is missing"),
        ({"custom_id": "a"}, "field 'body': is missing"),
        ({"custom_id": "a", "body": {"prompt": "a", "stream": True}}, "field 'body.stream': a streamed"),
        ({"custom_id": "a", "body": {"prompt": "a", "top_p": float("nan")}}, "field 'body': holds NaN"),
        ({"custom_id": "a", "body": {"prompt": "a", "n": 0}}, "field 'body.n': 0 is not a whole number"),
        ({"custom_id": "a", "url": "/v1/embedding", "body": {}}, "field 'url': '/v1/embedding' is no"),
    ],
)
def test_a_line_that_cannot_be_sent_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, object], message: str
) -> None:
    batch = tmp_path / "in.jsonl"
    batch.write_text(json.dumps(line) + "\n")
    server = FakeServer(4, port=9)
    assert main(run_words(batch, server, "--slots", "4")) == 2
    assert f"in.jsonl, line 1, {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffprompt,cap\r\nHello.,5\r\n",
        "prompt;cap\nHello.;5\n",
        '"prompt"\t"cap"\nHello.\t5\n',
        '{"prompt": "Hello."}\n' * 2,
    ],
)
def test_a_table_of_prompts_without_its_column_is_told_of_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    table, server = tmp_path / "in.txt", FakeServer(4, port=9)
    table.write_text(text, encoding="utf-8", newline="")
    for where in (["--server", server.url, "--slots", "4"], ["--model", "tiny:llama"]):
        outputs = ["-o", str(tmp_path / "answers.jsonl"), "--trace", str(tmp_path / "trace.jsonl")]
        assert main(["run", str(table), *where, *outputs]) == 2
        assert "For a table of prompts say --prompt-column prompt" in capsys.readouterr().err


def test_options_of_servers_are_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "plan.json", "--model", "tiny:llama", "--in-flight", "4"]) == 2
    assert "--in-flight has no effect without --server" in capsys.readouterr().err
    assert main(["run", "plan.json"]) == 2
    assert "--server" in capsys.readouterr().err


@pytest.mark.parametrize(("lengths", "order"), [([5, 5, 5], "file order"), ([2, 9, 4], "larger caps first")])
def test_caps_predict_no_iterations_and_order_only_where_they_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lengths: list[int], order: str
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", lengths)
    with FakeServer(2) as server:
        assert main(run_words(batch, server, "--slots", "2")) == 0
    said = capsys.readouterr()
    assert f"order: {order}; lengths are unknown, so no iterations are predicted" in said.err
    assert "predicted_iterations" not in json.loads(said.out)


@pytest.mark.parametrize("finished", [False, True])
def test_a_server_needs_no_torch(tmp_path: Path, finished: bool) -> None:
    batch = write_batch(tmp_path / "batch.jsonl", [3, 2])
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from batchbound.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    with FakeServer(slots=2) as server:
        words = run_words(batch, server, "--slots", "2")
        for _ in range(1 + finished):
            done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True)
            assert done.returncode == 0, done.stderr.decode()
