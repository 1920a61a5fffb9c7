"""``run --server`` against a real vLLM, where one is installed (``vllm`` on the path, or named by VLLM)."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_server import VllmServer, save_tiny_llama

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
