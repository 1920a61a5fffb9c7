"""
``run --server`` against real servers, where they are installed.

vLLM is taken from the path, or as VLLM names it; ``transformers serve`` needs fastapi, uvicorn and openai.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_server import VllmServer, free_port, save_tiny_llama

from batchbound.cli import main

VLLM = os.environ.get("VLLM") or shutil.which("vllm")
SLOTS, BUDGET = 8, 256


OPTIONS = ("--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes longer to compute an iteration than a client its way to the server and back."""
    pytest.importorskip("transformers", reason="the engine extra is not installed")
    folder = tmp_path_factory.mktemp("model")
    save_tiny_llama(folder, 512)
    return folder


@contextmanager
def served(model: Path, log: Path, *options: str) -> Iterator[VllmServer]:
    if VLLM is None:
        pytest.skip("no vllm is installed; name one by VLLM")
    with VllmServer(VLLM, model, log, (*OPTIONS, *options)) as server:
        yield server


def write_batch(path: Path, count: int) -> None:
    rng = random.Random(0)
    with path.open("w") as stream:
        for number in range(count):
            tokens = min(300, int(rng.lognormvariate(3.2, 1.0)) + 1)
            prompt = [rng.randint(3, 250) for _ in range(rng.randint(4, 30))]
            body = {"prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
            line = {"custom_id": f"r{number}", "body": {"model": "tiny", **body}, "output_tokens": tokens}
            stream.write(json.dumps(line) + "\n")


def ran(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], order: str, *more: str
) -> dict[str, Any]:
    words = ["run", str(tmp_path / "in.jsonl"), "--server", url, "--slots", str(SLOTS), "--order", order]
    words += ["--batched-tokens", str(BUDGET), "-o", str(tmp_path / "out.jsonl")]
    words += ["--trace", str(tmp_path / "trace.jsonl"), "--overwrite", "--json"]
    assert main([*words, *more]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


@contextmanager
def transformers_serving(model: Path, log: Path) -> Iterator[str]:
    """Start ``transformers serve`` with continuous batching, and yield where it listens."""
    for name in ("accelerate", "fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason="transformers serve is not installed")
    port = free_port()
    words = [str(Path(sys.executable).parent / "transformers"), "serve", str(model), "--continuous-batching"]
    words += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
    with log.open("wb") as stream:
        server = subprocess.Popen(words, stdout=stream, stderr=stream, env=environment)
    try:
        for _ in range(1200):
            assert server.poll() is None, log.read_text()
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.slow
def test_transformers_serve_completes_a_batch_and_what_it_ignores_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="the engine extra is not installed")
    monkeypatch.setenv("NO_PROXY", "*")
    save_tiny_llama(tmp_path / "model")
    batch = tmp_path / "in.jsonl"
    with batch.open("w") as stream:
        for number in range(12):
            body = {"prompt": f"request {number}", "max_tokens": 3 + number}
            extra = {"n": 2} if number == 11 else {}
            stream.write(json.dumps({"custom_id": f"r{number}", "body": body | extra}) + "\n")
    with transformers_serving(tmp_path / "model", tmp_path / "log") as url:
        words = ["run", str(batch), "--server", url, "--slots", "4", "--model", str(tmp_path / "model")]
        outputs = ["-o", str(tmp_path / "out.jsonl"), "--trace", str(tmp_path / "trace.jsonl")]
        # One request fails: it asks for two completions, and this server gives one without a word.
        assert main([*words, *outputs, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["requests"], said["failed"]) == (12, 1)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"r{number}" for number in range(12)]
    for number, row in enumerate(rows[:11]):
        usage = row["response"]["body"]["usage"]
        assert 1 <= usage["completion_tokens"] <= 3 + number
    assert rows[11]["response"] is None
    # It counts no iterations; what its completions needed is bounded all the same.
    assert said["iterations"] is None
    assert said["bound_iterations"] >= max(
        row["response"]["body"]["usage"]["completion_tokens"] for row in rows[:11]
    )


@pytest.mark.slow
def test_the_order_saves_vllm_the_iterations_that_were_predicted(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    write_batch(tmp_path / "in.jsonl", 80)
    log = tmp_path / "vllm.log"
    with served(model, log) as server:
        given, best = (ran(tmp_path, server.url, capsys, order) for order in ("file", "auto"))
        counted = server.iterations()
    for found in (given, best):
        assert found["bound_iterations"] <= found["iterations"]
        assert found["iterations"] == pytest.approx(found["predicted_iterations"], rel=0.02)
    assert best["iterations"] <= 1.02 * best["bound_iterations"]
    assert best["iterations"] < given["iterations"]
    assert main(["audit", str(log), "--json"]) == 0
    logged = json.loads(capsys.readouterr().out)[f"iterations ({SLOTS} slots)"]
    assert logged["counted"] == counted == given["iterations"] + best["iterations"]


@pytest.mark.slow
def test_vllm_begins_the_longest_first_by_our_scheduler_whatever_the_client_sends(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    write_batch(tmp_path / "in.jsonl", 80)
    scheduler = ("--scheduler-cls", "batchbound.integrations.vllm.LongestFirst")
    with served(model, tmp_path / "vllm.log", *scheduler) as server:
        found = ran(tmp_path, server.url, capsys, "file", "--in-flight", "80")
    least, longest = found["bound_iterations"], found["simulated_iterations"]["longest first"]
    assert least <= found["iterations"] <= 1.02 * longest
    assert found["iterations"] < 0.95 * found["predicted_iterations"]
