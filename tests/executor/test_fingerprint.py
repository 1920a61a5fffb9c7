from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from batchbound.cli import main
from batchbound.executor.jobs.journal import Journal
from batchbound.executor.models.fingerprint import files_fingerprint

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")


def save(spec: str, folder: Path) -> Any:
    from batchbound.executor.models.source import load_model

    model = load_model(spec, device="cpu")
    model.save_pretrained(folder)
    return model


def test_a_copy_has_the_fingerprint_of_its_original(tmp_path: Path) -> None:
    save("tiny:llama:0", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert files_fingerprint(str(tmp_path / "one")) == files_fingerprint(str(tmp_path / "two")) != ""


def test_a_step_of_training_on_any_one_tensor_changes_the_fingerprint(tmp_path: Path) -> None:
    model = save("tiny:llama:0", tmp_path / "model")
    seen = {files_fingerprint(str(tmp_path / "model"))}
    parameters = list(model.parameters())
    for parameter in parameters:
        with torch.no_grad():
            parameter += 0.001
        model.save_pretrained(tmp_path / "model")
        seen.add(files_fingerprint(str(tmp_path / "model")))
    assert len(seen) == len(parameters) + 1


def test_settings_count_with_every_byte_and_weights_only_where_asked(tmp_path: Path) -> None:
    save("tiny:llama:0", tmp_path / "model")
    whole, settings = (files_fingerprint(str(tmp_path / "model"), weights=on) for on in (True, False))
    save("tiny:llama:1", tmp_path / "model")
    assert files_fingerprint(str(tmp_path / "model")) != whole
    assert files_fingerprint(str(tmp_path / "model"), weights=False) == settings
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("}", " }", 1))
    assert files_fingerprint(str(tmp_path / "model"), weights=False) != settings


def test_an_adapter_counts_with_its_base_and_one_that_names_itself_ends(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save("tiny:llama:0", base)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    before = files_fingerprint(str(adapter))
    save("tiny:llama:1", base)
    assert files_fingerprint(str(adapter)) != before
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(adapter)}))
    assert len(files_fingerprint(str(adapter))) == 32


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{]", b"[" * 100])
def test_damaged_weights_have_a_fingerprint_of_their_own(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)
    one = files_fingerprint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(damage + b"x")
    assert files_fingerprint(str(tmp_path)) != one


def test_a_run_is_not_gone_on_with_by_other_weights_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plan, answers = tmp_path / "model", str(tmp_path / "plan.json"), tmp_path / "answers.jsonl"
    save("tiny:llama:0", model)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"custom_id": f"r{i}", "body": {"prompt": "abc" * i, "max_tokens": 4}} for i in range(1, 7)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["--model", str(model), "--tokenizer", "bytes"]
    assert main(["plan", str(prompts), *common, "--slots", "2", "--time-limit", "0.1", "-o", plan]) == 0
    append = Journal.append

    def interrupted(journal: Journal, name: str, answer: Any) -> None:
        if len(journal.finished) == 3:
            raise KeyboardInterrupt
        append(journal, name, answer)

    words = ["run", plan, *common, "-o", str(answers), "--trace", str(tmp_path / "trace.jsonl")]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", interrupted)
        assert main(words) == 130
    shutil.move(model, tmp_path / "old")
    save("tiny:llama:1", model)
    assert main(words) == 2
    assert "belongs to another run (differs in: weights)" in capsys.readouterr().err
    shutil.rmtree(model)
    shutil.copytree(tmp_path / "old", model)
    assert main(words) == 0
    assert "after 3 from before" in capsys.readouterr().out
