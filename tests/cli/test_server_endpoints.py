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
