"""One request on which the model fails is one line with an error; a checkpoint that lacks weights is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchbound.cli import main

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

SPOILT = "~"
"""The one token whose embedding is NaN."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from batchbound.executor.models.source import load_model

    folder = tmp_path_factory.mktemp("model")
    model = load_model("tiny:llama:1", device="cpu")
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.config.tie_word_embeddings = False
        # The answers never hold it: what it spoils is the prompts alone.
        model.lm_head.weight[ord(SPOILT)] = 0
        model.get_input_embeddings().weight[ord(SPOILT)] = float("nan")
    model.save_pretrained(folder)
    return folder


def planned(model: Path, folder: Path, prompts: dict[str, str]) -> list[str]:
    lines = [{"custom_id": name, "body": {"prompt": text, "max_tokens": 6}} for name, text in prompts.items()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["--model", str(model), "--tokenizer", "bytes"]
    plan = ["plan", str(folder / "prompts.jsonl"), *common, "--slots", "3", "--time-limit", "0.1"]
    assert main([*plan, "-o", str(folder / "plan.json"), "--overwrite"]) == 0
    run = ["run", str(folder / "plan.json"), *common, "--dtype", "float64"]
    return [*run, "-o", str(folder / "answers.jsonl"), "--trace", str(folder / "trace.jsonl")]


def answers(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return {line["custom_id"]: line for line in lines}


def test_requests_with_logits_that_are_not_finite_end_in_an_error_and_the_rest_is_served(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = {f"r{i}": "abc" * (i + 1) for i in range(8)}
    (tmp_path / "sound").mkdir()
    assert main(planned(model, tmp_path / "sound", sound)) == 0
    expected = answers(tmp_path / "sound")
    mixed = {**sound, "r1": "ab" + SPOILT, "r6": SPOILT * 9}
    run = planned(model, tmp_path, mixed)
    assert main(run) == 1
    assert "answers.jsonl: 2 of 8 requests failed; their lines say why" in capsys.readouterr().err
    found = answers(tmp_path)
    assert list(found) == list(mixed)
    for name in ("r1", "r6"):
        assert found[name]["response"] is None
        assert found[name]["error"]["code"] == "model_failed"
        assert f"logits for request '{name}' are not finite" in found[name]["error"]["message"]
    assert {name: line for name, line in found.items() if name not in ("r1", "r6")} == {
        name: line for name, line in expected.items() if name not in ("r1", "r6")
    }
    assert main(run) == 1, "typed again, a finished job with failures says so, too"
    assert "2 of 8 requests failed" in capsys.readouterr().err


def test_a_run_told_to_stop_at_an_error_stops_at_the_first(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = planned(model, tmp_path, {"r0": "abc", "r1": SPOILT, "r2": "abcd"})
    assert main([*run, "--on-error", "stop"]) == 1
    assert "stopped: the model's logits for request 'r1' are not finite" in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_model_that_fails_on_every_request_stops_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = planned(model, tmp_path, {f"r{i}": SPOILT for i in range(40)})
    assert main(run) == 1
    assert "stopped: the model's logits" in capsys.readouterr().err
    journal = (tmp_path / "answers.jsonl.journal").read_text().splitlines()
    assert len(journal) == 16


def test_requests_that_the_model_cannot_serve_end_in_an_error_and_the_rest_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bodies: dict[str, dict[str, Any]] = {
        "sound": {"prompt": "abc"},
        "long": {"prompt": "x" * 600},
        "full": {"prompt": "x" * 512},
        "greedy": {"prompt": "abc", "max_tokens": 999},
        "token": {"prompt": "abc", "logit_bias": {"99999": 1}},
        "other": {"prompt": "abcd"},
    }
    lines = [{"custom_id": name, "body": body} for name, body in bodies.items()]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Planned by the tokenizer alone, which does not know how many positions the model has.
    plan = ["plan", "in.jsonl", "--tokenizer", "bytes", "--lengths", "constant:4", "--slots", "2"]
    assert main([*plan, "--time-limit", "0.1"]) == 0
    run = ["run", "--model", "tiny:llama", "--tokenizer", "bytes"]
    assert main([*run, "--on-error", "stop"]) == 2
    assert "request 'long' may take 602 tokens, the model has 512 positions" in capsys.readouterr().err
    assert not Path("answers.jsonl").exists()
    assert main(run) == 1
    told = capsys.readouterr()
    assert "answers.jsonl: 4 of 6 requests failed; their lines say why" in told.err
    assert told.out.startswith("2 prompts, 2 at a time"), "none of them is from before"
    assert main(["report"]) == 0
    assert "4 more answered before, or failed" in capsys.readouterr().out
    found = answers(tmp_path)
    assert list(found) == list(bodies)
    errors = {name: line["error"] for name, line in found.items() if line["error"]}
    assert {name: error["code"] for name, error in errors.items()} == dict.fromkeys(
        ("long", "full", "greedy", "token"), "invalid_request"
    )
    assert "may take 514 tokens" in errors["full"]["message"]
    assert "may take 1003 tokens" in errors["greedy"]["message"]
    assert "line 5, field 'body.logit_bias': logit_bias names token 99999" in errors["token"]["message"]
    assert main(run) == 1, "typed again, a finished job with failures says so, too"


def test_a_job_of_which_the_model_can_serve_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(json.dumps({"custom_id": "r", "body": {"prompt": "x" * 600}}) + "\n")
    assert main(["plan", "in.jsonl", "--tokenizer", "bytes", "--lengths", "constant:4"]) == 0
    assert main(["run", "--model", "tiny:llama", "--tokenizer", "bytes"]) == 2
    assert "may take 602 tokens, the model has 512 positions" in capsys.readouterr().err
    assert not Path("answers.jsonl").exists()


def test_a_checkpoint_that_lacks_weights_is_refused_unless_they_are_to_be_drawn(
    model: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    from batchbound.executor.models.source import ModelLoadError, load_model

    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers.1." not in name}
    assert len(kept) == len(weights) - 9
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"no weights for model\.layers\.1\.\S+, .* and 6 more; check"):
        load_model(str(tmp_path), device="cpu")
    one, two = (load_model(str(tmp_path), load_format="partial", device="cpu", seed=3) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for (_, a), b in zip(one.named_parameters(), two.parameters(), strict=True)
        if not a.isnan().any()
    )


def test_the_models_own_end_tokens_count_where_its_weights_are_loaded_elsewhere(
    model: Path, tmp_path: Path
) -> None:

    from batchbound.executor.models.source import load_model
    from batchbound.executor.models.tokenizers import ByteTokenizer, end_tokens
    from batchbound.run_job.options import ModelOptions

    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    shape = ModelOptions(str(tmp_path)).shape()
    drawn = load_model(str(tmp_path), load_format="dummy", device="cpu")
    loaded = load_model(str(tmp_path), device="cpu")
    expected = {7, 9, *ByteTokenizer().eos_ids}
    assert [end_tokens(one, ByteTokenizer()) for one in (shape, drawn, loaded)] == [expected] * 3


def test_what_the_models_settings_ask_for_holds_on_every_replica(model: Path, tmp_path: Path) -> None:
    from batchbound.data.plan import Plan
    from batchbound.run_job.load import load_job
    from batchbound.run_job.options import ModelOptions, RunOptions

    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.5}))
    line = {"custom_id": "b", "body": {"prompt": "abc", "max_tokens": 6, "repetition_penalty": 1.25}}
    plain = {"custom_id": "a", "body": {"prompt": "abcd", "max_tokens": 6}}
    (tmp_path / "prompts.jsonl").write_text(f"{json.dumps(plain)}\n{json.dumps(line)}\n")
    for replicas in ("1", "2"):
        plan = tmp_path / f"plan{replicas}.json"
        words = ["plan", str(tmp_path / "prompts.jsonl"), "--tokenizer", "bytes", "--slots", "3"]
        assert main([*words, "--replicas", replicas, "--time-limit", "0.1", "-o", str(plan)]) == 0
        said: list[str] = []
        source = ModelOptions(str(tmp_path), device="cpu")
        job = load_job(Plan.load(plan), plan, source, RunOptions(tokenizer="bytes"), said.append)
        asked = {record.name: record.asked["repetition_penalty"] for record in job.prompts.records}
        assert asked == {"a": 1.5, "b": 1.25}
        assert any("sets repetition_penalty 1.5" in remark for remark in said)
