"""Rows for every endpoint, without caps, with defaults and under a deadline, on a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer

from batchbound.cli import main
from batchbound.data.readers.server_run import ServerRun


class AnyEndpoint(FakeServer):
    """Also embeds, and completes requests of the Responses API."""

    async def _complete(self, path: str, data: bytes) -> tuple[int, str, str]:
        body = json.loads(data)
        if path.endswith(("/completions", "/chat/completions")):
            return await super()._complete(path, data)
        self.arrivals.append(path)
        self.bodies[body["input"]] = body
        usage = {"input_tokens": 3, "output_tokens": 2} if path == "/v1/responses" else {"prompt_tokens": 3}
        return 200, json.dumps({"error": None, "said": body["input"], "usage": usage}), ""


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(batch: Path, server: FakeServer, *more: str) -> tuple[int, list[dict[str, Any]]]:
    output = batch.parent / "out.jsonl"
    words = ["run", str(batch), "--server", server.url, "--slots", "4", "-o", str(output)]
    words += ["--trace", str(batch.parent / "trace.jsonl"), "--quiet", *more]
    status = main(words)
    return status, [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


def test_rows_go_to_the_endpoints_that_they_name(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "e", "url": "/v1/embeddings", "body": {"model": "fake", "input": "to embed"}},
        {"custom_id": "r", "url": "/v1/responses", "body": {"model": "fake", "input": "to answer"}},
        {"custom_id": "c", "body": {"model": "fake", "prompt": "to complete", "max_tokens": 3}},
    ]
    with AnyEndpoint(4) as server:
        status, lines = run(write(tmp_path / "in.jsonl", rows), server)
    assert status == 0
    assert [line["custom_id"] for line in lines] == ["e", "r", "c"]
    assert [line["response"]["body"].get("said") for line in lines] == ["to embed", "to answer", None]
    assert server.arrivals.count("/v1/embeddings") == server.arrivals.count("/v1/responses") == 1


def test_an_unknown_endpoint_is_refused_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write(tmp_path / "in.jsonl", [{"custom_id": "e", "url": "/v1/embedding", "body": {"input": "x"}}])
    assert main(["run", str(batch), "--server", "http://127.0.0.1:1", "-o", str(tmp_path / "o.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "line 1, field 'url': '/v1/embedding' is no endpoint" in said
    assert "/v1/embeddings" in said


def test_rows_without_a_cap_are_sent_in_the_order_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"custom_id": f"r{k}", "body": {"model": "fake", "prompt": f"r{k}"}} for k in range(9)]
    batch = write(tmp_path / "in.jsonl", rows)
    with FakeServer(4) as server:
        words = ["run", str(batch), "--server", server.url, "--slots", "4", "-o", str(tmp_path / "out.jsonl")]
        assert main([*words, "--trace", str(tmp_path / "trace.jsonl")]) == 0
    assert ServerRun.load(tmp_path / "trace.jsonl").ids == tuple(f"r{k}" for k in range(9))
    assert "9 requests have no max_tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("context", "room"), [(2048, "take up to 2,048 tokens"), (None, "take as many tokens as the model")]
)
def test_a_chat_without_a_cap_is_told_how_long_it_may_get(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], context: int | None, room: str
) -> None:
    messages = [{"role": "user", "content": "a"}]
    chat: dict[str, Any] = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": messages}}
    raw: dict[str, Any] = {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "b"}}
    words = ["run", "--slots", "4", "-o", str(tmp_path / "out.jsonl"), "--server"]
    batch = write(tmp_path / "in.jsonl", [chat, raw])
    with FakeServer(4, context=context) as server:
        assert main([*words, server.url, str(batch)]) == 0
        said = capsys.readouterr().err
        assert main([*words, server.url, str(batch), "--overwrite", "--longest-completion", "9"]) == 0
    # The completions endpoint has a cap of its own.
    assert f"no max_tokens in 1 of 2 requests: a {'prompt and its ' if context else ''}completion may" in said
    assert room in said
    assert "no max_tokens in" not in capsys.readouterr().err


def test_defaults_are_merged_under_each_row(tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text('{"model": "fake", "temperature": 0.5, "max_tokens": 3}')
    rows = [{"custom_id": name, "body": {"prompt": name}} for name in "ab"]
    rows[1]["body"]["temperature"] = 1.0  # type: ignore[index]
    with FakeServer(4) as server:
        status, _ = run(write(tmp_path / "in.jsonl", rows), server, "--body", str(tmp_path / "body.json"))
    assert status == 0
    assert [server.bodies[name]["temperature"] for name in "ab"] == [0.5, 1.0]
    assert server.bodies["a"]["max_tokens"] == 3


def test_a_deadline_keeps_what_is_finished_and_marks_the_rest(tmp_path: Path) -> None:
    rows = [
        {"custom_id": name, "body": {"model": "fake", "prompt": name, "max_tokens": 1}}
        for name in ("done", "late")
    ]
    with FakeServer(4, faults={"late": ["hang"]}) as server:
        status, lines = run(write(tmp_path / "in.jsonl", rows), server, "--deadline", "1")
    assert status == 1
    assert lines[0]["response"]["status_code"] == 200
    assert lines[1]["error"]["code"] == "batch_expired"
    failed = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in failed] == ["late"]
    assert ServerRun.load(tmp_path / "trace.jsonl").abandoned == 1


def test_a_cap_and_a_temperature_fill_the_bodies_that_lack_them(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "bare", "body": {"model": "fake", "prompt": "bare"}},
        {"custom_id": "own", "body": {"model": "fake", "prompt": "own", "max_tokens": 2, "temperature": 1.0}},
        {"custom_id": "new", "body": {"model": "fake", "prompt": "new", "max_completion_tokens": 3}},
    ]
    batch = write(tmp_path / "in.jsonl", rows)
    with FakeServer(4) as server:
        status, lines = run(batch, server, "--longest-completion", "5", "--temperature", "0")
    assert status == 0
    assert [server.bodies[name].get("max_tokens") for name in ("bare", "own", "new")] == [5, 2, None]
    assert [server.bodies[name]["temperature"] for name in ("bare", "own", "new")] == [0, 1.0, 0]
    assert lines[0]["response"]["body"]["usage"]["completion_tokens"] == 5


def test_a_table_is_sent_with_the_cap_and_the_temperature_of_the_command(tmp_path: Path) -> None:
    table = tmp_path / "in.csv"
    table.write_text("id,question\na,how\nb,why\n")
    with FakeServer(4) as server:
        words = ["--prompt-column", "question", "--raw", "--longest-completion", "3", "--temperature", "0.5"]
        status, lines = run(table, server, "--id-column", "id", *words)
    assert status == 0
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    assert {(body["max_tokens"], body["temperature"]) for body in server.bodies.values()} == {(3, 0.5)}


def test_two_temperatures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = write(tmp_path / "in.jsonl", [{"custom_id": "a", "body": {"prompt": "a", "max_tokens": 1}}])
    (tmp_path / "body.json").write_text('{"temperature": 0.5}')
    words = ["run", str(batch), "--server", "http://127.0.0.1:1", "--temperature", "1"]
    assert main([*words, "--body", str(tmp_path / "body.json")]) == 2
    assert "--temperature and --body both state a temperature" in capsys.readouterr().err


def test_rows_that_score_their_prompt_are_sent_and_take_an_iteration(tmp_path: Path) -> None:
    body = {"model": "fake", "prompt": "scored", "max_tokens": 0, "echo": True}
    batch = write(tmp_path / "in.jsonl", [{"custom_id": "a", "body": body}])
    with FakeServer(4) as server:
        status, lines = run(batch, server)
    assert status == 0
    assert server.bodies["scored"]["max_tokens"] == 0
    assert lines[0]["response"]["body"]["choices"][0]["text"] == "scored"
