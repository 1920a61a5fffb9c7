"""Servers that end completions early, refuse every row alike, or stand behind gateways and proxies."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from functools import partial
from pathlib import Path

import pytest
from fake_server import Connection, FakeServer
from killing import Killed, kill_at
from server_batches import rows_of, run_words, write_batch

import batchbound
from batchbound.cli import main
from batchbound.executor.jobs.params import Patience
from batchbound.executor.server.connection import Address


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait milliseconds where a user would wait seconds."""
    waits = Patience.wait
    monkeypatch.setattr(Patience, "wait", lambda *given: waits(*given) / 50)


def refused(count: int, fault: int | str) -> dict[str, list[int | str]]:
    return {f"r{k}": [fault] * 99 for k in range(count)}


@pytest.mark.parametrize("fault", ["abort", "choice 429", "choice 500", "body 429", "body 502", "body 503"])
def test_half_a_completion_is_sent_again(tmp_path: Path, fault: str) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3] * 6, n=2)
    with FakeServer(4, faults={"r1": [fault, fault], "r4": [fault]}) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 0
    choices = {name: row["response"]["body"]["choices"] for name, row in rows_of(batch).items()}
    assert {choice["finish_reason"] for row in choices.values() for choice in row} == {"length"}
    assert {len(row) for row in choices.values()} == {2}
    assert [server.attempts[f"r{k}"] for k in range(6)] == [1, 3, 1, 1, 2, 1]


@pytest.mark.parametrize(("fault", "attempts"), [("abort", 8), ("choice 400", 1), ("body 400", 1)])
def test_a_completion_that_is_never_whole_is_an_error_row(tmp_path: Path, fault: str, attempts: int) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3] * 3)
    with FakeServer(4, faults={"r1": [fault] * 99}) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 1
    assert server.attempts["r1"] == attempts
    row = rows_of(batch)["r1"]
    assert (row["response"] or {}).get("status_code") != 200
    assert "r1" in (tmp_path / "answers.errors.jsonl").read_text()


@pytest.mark.parametrize(
    ("fault", "mend"),
    [
        (401, "OPENAI_API_KEY"),
        (403, "--header"),
        (404, "--server"),
        (402, "account"),
        ("sign in", "sign-in page"),
    ],
)
def test_refusals_that_all_rows_share_stop_the_job_and_leave_its_rows_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: int | str, mend: str
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [50] * 30)
    with FakeServer(4, faults=refused(30, fault)) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 1
        assert sum(server.attempts.values()) <= 16
        said = " ".join(capsys.readouterr().err.split())
        assert "requests of model 'fake' to /v1/completions are all refused" in said
        assert mend in said
        server.faults.clear()
        assert main(run_words(batch, server, "--slots", "4")) == 0
    assert len(rows_of(batch)) == 30
    assert not (tmp_path / "answers.errors.jsonl").exists()


def test_a_rate_limit_that_speaks_of_billing_is_waited_for(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3] * 12)
    with FakeServer(4, faults={f"r{k}": [429] for k in range(12)}, retry_after="0.01") as server:
        assert main(run_words(batch, server, "--slots", "4")) == 0


def test_rows_of_another_model_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3] * 24)
    lines = [json.loads(line) for line in batch.read_text().splitlines()]
    for line in lines[::2]:
        del line["body"]["model"]
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    faults: dict[str, list[int | str]] = {f"r{k}": [404] * 9 for k in range(0, 24, 2)}
    with FakeServer(4, faults=faults) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 1
        assert sum(server.completions.values()) == 12
        capsys.readouterr()
        server.faults.clear()
        assert main(run_words(batch, server, "--slots", "4")) == 0
        # Rows that were finished are not sent again.
        assert set(server.completions.values()) == {1}
    assert len(rows_of(batch)) == 24


def test_a_header_is_sent_and_never_written(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3] * 2)
    (tmp_path / "headers").write_text("X-Project=secret-a\n\nAuthorization=Bearer secret-b\n")
    words = ["--slots", "2", "--header", "X-Team=secret-c", "--header", f"@{tmp_path / 'headers'}"]
    with FakeServer(2) as server:
        assert main(run_words(batch, server, *words)) == 0
    for name, value in {
        "X-Project": "secret-a",
        "Authorization": "Bearer secret-b",
        "X-Team": "secret-c",
    }.items():
        assert all(f"{name}: {value}" in head for head in server.heads if head.startswith("POST"))
    written = [path.read_text() for path in tmp_path.iterdir() if path.name != "headers"]
    assert not any("secret-" in text for text in written)


@pytest.mark.parametrize("header", ["nothing", "=x", "a b=c", "X-Empty="])
def test_a_header_without_name_or_value_is_refused_unseen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3])
    with FakeServer(1) as server:
        assert main(run_words(batch, server, "--slots", "1", "--header", header)) == 2
    said = capsys.readouterr().err
    assert "--header" in said
    assert header not in said.replace("NAME=VALUE", "").replace("X-Project=evaluation", "")


@pytest.mark.parametrize("path", ["", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions"])
def test_addresses_of_servers_and_endpoints_lead_to_the_same_rows(tmp_path: Path, path: str) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3])
    with FakeServer(1) as server:
        words = run_words(batch, server, "--slots", "1")
        words[words.index(server.url)] = f"{server.url}{path}?api-version=2026-01-01"
        assert main(words) == 0
    posts = [head.split()[1] for head in server.heads if head.startswith("POST")]
    assert posts == ["/v1/completions?api-version=2026-01-01"]


@pytest.mark.parametrize(
    ("url", "posted"),
    [
        ("https://gw/openai", "https://gw/openai/v1/completions"),
        ("https://gw/openai/v1/?api-version=preview", "https://gw/openai/v1/completions?api-version=preview"),
        (
            "https://gw/openai/deployments/m/chat/completions?api-version=1",
            "https://gw/openai/deployments/m/completions?api-version=1",
        ),
    ],
)
def test_versions_and_queries_of_addresses_are_kept(url: str, posted: str) -> None:
    assert Address.of(url, None).url("/v1/completions") == posted


@pytest.mark.parametrize(
    ("host", "no_proxy", "proxied"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("[::1]", "", False),
        ("10.1.2.3", "10.0.0.0/8", False),
        ("10.1.2.3", "example.com, 10.1.0.0/16", False),
        ("11.1.2.3", "10.0.0.0/8", True),
        ("model.example", "10.0.0.0/8,other.example", True),
    ],
)
def test_loopback_and_networks_of_no_proxy_are_reached_directly(
    monkeypatch: pytest.MonkeyPatch, host: str, no_proxy: str, proxied: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (Address.of(f"http://{host}:8000", None).proxy is not None) == proxied


def test_an_error_behind_a_proxy_names_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://name:secret@127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    batch = write_batch(tmp_path / "in.jsonl", [3])
    assert main(["run", str(batch), "--server", "http://model.invalid:8000", "--slots", "1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "by the proxy 127.0.0.1:1 of http_proxy; no_proxy=model.invalid avoids it" in said
    assert "secret" not in said


def test_certificates_that_cannot_be_read_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3])
    (tmp_path / "ca.pem").write_text("no certificate")
    words = [
        "run",
        str(batch),
        "--server",
        "https://127.0.0.1:1",
        "--slots",
        "1",
        "--ca",
        str(tmp_path / "ca.pem"),
    ]
    assert main(words) == 2
    assert "PEM file" in capsys.readouterr().err


def test_a_run_within_a_running_event_loop_completes_its_rows(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [3] * 5)

    async def notebook() -> int:
        with FakeServer(2) as server:
            options = batchbound.ServerOptions((server.url,), slots=2)
            files = {"output": tmp_path / "answers.jsonl", "trace": tmp_path / "trace.jsonl"}
            result = batchbound.run(batch, options, **files)  # type: ignore[call-overload]
        return int(result.failed)

    assert asyncio.run(notebook()) == 0
    assert len(rows_of(batch)) == 5


def test_the_facts_that_a_server_does_not_tell_are_for_the_verbose(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeServer, "metrics", lambda _: "no counters")
    batch = write_batch(tmp_path / "in.jsonl", [3])
    with FakeServer(1) as server:
        assert main(run_words(batch, server, "--slots", "1")) == 0
        assert f"{server.url}: vllm, serves fake\n" in capsys.readouterr().err
        assert main(run_words(batch, server, "--slots", "1", "--overwrite", "--verbose")) == 0
    assert "does not tell its slots (max_num_seqs)" in caplog.text


class EncryptedServer(FakeServer):
    """Speaks https by a certificate that no authority signed."""

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(2)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)

    async def _listen(self) -> None:
        factory = partial(Connection, self)
        self._server = await self._loop.create_server(factory, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_of_ones_own_is_named_or_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    words = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *words], check=True, capture_output=True)
    batch = write_batch(tmp_path / "in.jsonl", [2] * 3)
    with EncryptedServer(certificate, key) as server:
        command = run_words(batch, server, "--slots", "2")
        command[command.index(server.url)] = f"https://localhost:{server.port}"
        assert main(command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "trust its certificate with --ca FILE or SSL_CERT_FILE" in said
        assert main([*command, "--ca", str(certificate)]) == 0
    assert len(rows_of(batch)) == 3


def test_the_first_row_of_a_model_that_is_not_served_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 6)
    lines = batch.read_text().splitlines()
    lines[2:4] = [line.replace('"fake"', '"smollm"') for line in lines[2:4]]
    batch.write_text("\n".join(lines))
    with FakeServer(4) as server:
        assert main(run_words(batch, server, "--slots", "4")) == 2
    said = " ".join(capsys.readouterr().err.split())
    asked = f"2 of 6 rows name it, first 'r2' in line 3 of {batch}."
    assert f"does not serve 'smollm', only fake: {asked} Give --model fake" in said


def test_failed_rows_of_a_stopped_run_are_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 6)
    with FakeServer(4, faults={"r1": [400]}) as server:
        with monkeypatch.context() as patch:
            kill_at(1, patch)
            with pytest.raises(Killed):
                main(run_words(batch, server, "--slots", "4"))
        capsys.readouterr()
        assert main(run_words(batch, server, "--slots", "4")) == 0
    said = capsys.readouterr().err
    assert "continuing after 5 finished requests and 1 failed" in said
    assert "--temperature 0 makes those greedy that state none" in said
    assert "tables" not in said
