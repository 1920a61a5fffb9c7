"""``run --server`` against a real vLLM, where one is installed (``vllm`` on the path, or named by VLLM)."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchbound.cli import main

VLLM = os.environ.get("VLLM") or shutil.which("vllm")
SLOTS, BUDGET = 8, 256


def save_tiny_llama(folder: Path) -> None:
    """Write a random Llama of a million parameters, with a tokenizer of single bytes."""
    transformers = pytest.importorskip("transformers", reason="the engine extra is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    levels = tokenizers.pre_tokenizers.ByteLevel
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *levels.alphabet()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = levels(add_prefix_space=False)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and log of a vLLM server with few slots, which is started for this module."""
    if VLLM is None:
        pytest.skip("no vllm is installed; name one by VLLM")
    folder = tmp_path_factory.mktemp("vllm")
    save_tiny_llama(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [VLLM, "serve", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET), "--max-model-len", "768"]
    words += ["--enforce-eager", "--no-enable-prefix-caching", "--served-model-name", "tiny"]
    words += ["--enable-logging-iteration-details"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
    log = folder / "vllm.log"
    with log.open("w") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream, env=environment)
        try:
            yield wait_for(f"http://127.0.0.1:{port}", process), log
        finally:
            process.terminate()
            process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(600):
        assert process.poll() is None, "vllm ended"
        try:
            opener.open(f"{url}/v1/models", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return url
    raise AssertionError("vllm did not start")


def write_batch(path: Path, count: int) -> None:
    rng = random.Random(0)
    with path.open("w") as stream:
        for number in range(count):
            tokens = min(300, int(rng.lognormvariate(3.2, 1.0)) + 1)
            prompt = [rng.randint(3, 250) for _ in range(rng.randint(4, 30))]
            body = {"prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
            line = {"custom_id": f"r{number}", "body": {"model": "tiny", **body}, "output_tokens": tokens}
            stream.write(json.dumps(line) + "\n")


def ran(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], order: str) -> dict[str, Any]:
    words = ["run", str(tmp_path / "in.jsonl"), "--server", url, "--slots", str(SLOTS), "--order", order]
    words += ["--batched-tokens", str(BUDGET), "-o", str(tmp_path / "out.jsonl")]
    words += ["--trace", str(tmp_path / "trace.jsonl"), "--overwrite", "--json"]
    assert main(words) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


@pytest.mark.slow
def test_the_order_saves_vllm_the_iterations_that_were_predicted(
    vllm: tuple[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    url, log = vllm
    write_batch(tmp_path / "in.jsonl", 80)
    given, best = (ran(tmp_path, url, capsys, order) for order in ("file", "auto"))
    for found in (given, best):
        assert found["bound_iterations"] <= found["iterations"]
        assert found["iterations"] == pytest.approx(found["predicted_iterations"], rel=0.02)
    assert best["iterations"] <= 1.02 * best["bound_iterations"]
    assert best["iterations"] < given["iterations"]
    assert main(["audit", str(log), "--json"]) == 0
    logged = json.loads(capsys.readouterr().out)[f"iterations ({SLOTS} slots)"]
    assert logged["counted"] == given["iterations"] + best["iterations"]
