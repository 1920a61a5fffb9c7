"""A plan names the tokenizer that counted its prompts, and runs on no model with another."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.cli import EXAMPLES, main
from batchbound.executor.models.tokenizers import counts_alike


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of its own, and prompts."""
    folder = tmp_path_factory.mktemp("own")
    write_checkpoint(folder / "model")
    rows = [{"custom_id": f"r{k}", "body": {"prompt": "w3 w4", "max_tokens": 2}} for k in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("planned", [[], ["--model", "tiny:llama"]])
def test_a_plan_in_bytes_is_refused_by_a_model_with_its_own_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], planned: list[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["plan", "prompts.jsonl", *planned, "--slots", "2", "-o", "p.json", "--overwrite"]) == 0
    assert main(["run", "p.json", "--model", "model", "-o", "none.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "model has a tokenizer of its own. Plan again with --model model, or insist with --tokeni" in said
    assert not Path("none.jsonl").exists()
    insisting = ["--tokenizer", planned[1] if planned else "bytes", "-o", "bytes.jsonl", "--overwrite"]
    # The vocabulary of 64 tokens has no bytes: insisting reaches the next check.
    assert main(["run", "p.json", "--model", "model", *insisting]) == 2
    assert "the model knows 64" in capsys.readouterr().err


def test_a_plan_of_the_same_tokenizer_elsewhere_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shutil.copytree("model", "copy", dirs_exist_ok=True)
    assert main(["plan", "prompts.jsonl", "--model", "model", "-o", "c.json", "--slots", "2"]) == 0
    assert main(["run", "c.json", "--model", "copy", "-o", "copy.jsonl"]) == 0


@pytest.mark.parametrize("option", ["--model", "--tokenizer"])
def test_a_plan_names_what_it_lacks_where_transformers_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", "prompts.jsonl", option, "model", "--for", "vllm", "-o", "t.json"]) == 2
    said = capsys.readouterr().err
    assert "a model's tokenizer and config need transformers" in said
    assert "torch" not in said
    assert "in the clone, run `pip install '.[engine]'`" in said


def test_a_plan_that_runs_names_what_it_lacks_where_torch_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"custom_id": "a", "body": {"prompt": "x", "max_tokens": 2}}
    Path("prompts.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["plan", "prompts.jsonl", "--tokenizer", "bytes", "-o", "p.json", "--slots", "2"]) == 0
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "batchbound.executor.engines.huggingface", raising=False)
    assert main(["run", "p.json", "--model", "tiny:llama"]) == 2
    assert "in the clone, run `pip install '.[engine]'`" in capsys.readouterr().err


def test_tokenizers_are_alike_by_name_or_by_files(folder: Path, tmp_path: Path) -> None:
    model, copy = str(folder / "model"), shutil.copytree(folder / "model", tmp_path / "copy")
    assert counts_alike(model, str(copy))
    settings = copy / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "other"}))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    assert not counts_alike(model, str(copy))
    assert counts_alike("tiny:llama", "bytes")
    assert not counts_alike("bytes", model)
    assert not counts_alike("org/one", "org/other")


def test_the_example_of_run_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = EXAMPLES["run"].replace("MODEL", "model").split()[1:]
    assert main([*words, "-o", "example.jsonl"]) == 0
