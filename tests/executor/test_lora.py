"""LoRA adapters by row: tokens are those of ``generate`` with that adapter, and the weights come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", reason="needs peft")

from tiny_checkpoint import tiny_model, write_checkpoint

from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.executor.engines.adapters import Adapter

# What PEFT reads, transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = ["w3 w4 w5", "w10 w11", "w20", "w7 w8 w9 w30", "w41 w42"]
MODELS = ["first", None, "second", "first", "second"]
MOST = 9


def write_adapter(folder: Path, seed: int, **settings: Any) -> Path:
    """Write an adapter of random factors for the tiny model, as PEFT saves one."""
    options: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    model = peft.get_peft_model(tiny_model(0), peft.LoraConfig(**{**options, **settings}))
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    write_checkpoint(tmp_path / "model")
    return {
        "first": write_adapter(tmp_path / "a", 1),
        "second": write_adapter(
            tmp_path / "b", 2, use_rslora=True, rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 5}
        ),
    }


def write_rows(folder: Path, models: list[str | None]) -> str:
    rows = []
    for k, (prompt, model) in enumerate(zip(PROMPTS, models, strict=True)):
        body = {"prompt": prompt, "max_tokens": MOST, **({} if model is None else {"model": model})}
        rows.append(json.dumps({"custom_id": f"r{k}", "body": body}) + "\n")
    (folder / "p.jsonl").write_text("".join(rows))
    return str(folder / "p.jsonl")


def command(
    folder: Path, rows: str, folders: dict[str, Path], *words: str, output: str = "a.jsonl"
) -> list[str]:
    adapters = [word for name, path in folders.items() for word in ("--adapter", f"{name}={path}")]
    model = ["--model", str(folder / "model"), "--dtype", "float32", "--slots", "2", "--quiet"]
    return ["run", rows, *model, *adapters, "-o", str(folder / output), *words]


def texts_of(path: Path) -> list[tuple[str, str]]:
    bodies = [json.loads(line)["response"]["body"] for line in path.read_text().splitlines()]
    return [(body["model"], body["choices"][0]["text"]) for body in bodies]


def test_two_adapters_and_the_model_in_one_file_give_the_tokens_of_generate(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    from transformers import AutoTokenizer

    assert main(command(tmp_path, write_rows(tmp_path, MODELS), folders)) == 0

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = peft.PeftModel.from_pretrained(tiny_model(0), folders["first"], adapter_name="first")
    model.load_adapter(folders["second"], adapter_name="second")
    texts = []
    for prompt, name in zip(PROMPTS, MODELS, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        model.set_adapter(name or "first")

        def whole(ids: Any = ids) -> Any:
            return model.generate(input_ids=ids, max_new_tokens=MOST, do_sample=False)

        if name is None:
            with model.disable_adapter():
                found = whole()
        else:
            found = whole()
        texts.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    got = texts_of(tmp_path / "a.jsonl")
    assert [text for _, text in got] == texts
    assert [name for name, _ in got][::2] == ["first", "second", "second"]
    assert len(set(texts)) >= 4


def test_an_interrupted_run_goes_on_with_each_adapter(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchbound.executor.jobs.journal import Journal

    rows = write_rows(tmp_path, MODELS)
    assert main(command(tmp_path, rows, folders)) == 0
    whole = texts_of(tmp_path / "a.jsonl")
    append, kept = Journal.append, []

    def stopping(self: Journal, name: str, line: Any) -> None:
        append(self, name, line)
        kept.append(name)
        if len(kept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", stopping)
    assert main(command(tmp_path, rows, folders, output="b.jsonl")) == 130
    monkeypatch.setattr(Journal, "append", append)

    assert main(command(tmp_path, rows, folders, output="b.jsonl")) == 0

    assert texts_of(tmp_path / "b.jsonl") == whole
    trace = [json.loads(line) for line in (tmp_path / "b.trace.jsonl").read_text().splitlines()]
    assert {line["id"] for line in trace if "id" in line} == {f"r{k}" for k in range(5)} - set(kept)


def test_the_weights_come_back_exactly(folders: dict[str, Path]) -> None:
    model = tiny_model(0)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    adapter = Adapter.read(str(folders["first"]), model)

    changed: list[str] = []

    def interrupted() -> None:
        with adapter.merged(model):
            changed.extend(
                name for name, weight in model.named_parameters() if not weight.equal(before[name])
            )
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert len(changed) == 6
    assert all(weight.equal(before[name]) for name, weight in model.named_parameters())


def test_a_name_that_is_not_served_is_refused_with_those_that_are(
    tmp_path: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path, ["first", "third", None, None, None])

    assert main(command(tmp_path, rows, folders)) == 2

    said = capsys.readouterr().err
    assert "line 2, field 'body.model'" in said
    assert "'model', 'first', 'second'" in said


def test_any_model_maps_the_other_names_to_the_model(tmp_path: Path, folders: dict[str, Path]) -> None:
    rows = write_rows(tmp_path, ["first", "third", None, None, None])

    assert main(command(tmp_path, rows, folders, "--any-model")) == 0

    assert [name == "first" for name, _ in texts_of(tmp_path / "a.jsonl")] == [True, *[False] * 4]


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"use_dora": True}, "field 'use_dora'"), ({"modules_to_save": ["lm_head"]}, "field 'modules_to_save'")],
)
def test_what_is_more_than_products_of_factors_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    folder = write_adapter(tmp_path / "c", 3, **settings)

    with pytest.raises(InputError, match=said):
        Adapter.read(str(folder), tiny_model(0))


def test_an_adapter_of_another_model_is_refused(folders: dict[str, Path]) -> None:
    from batchbound.executor.models.source import load_model

    with pytest.raises(InputError, match="the model"):
        Adapter.read(str(folders["first"]), load_model("tiny:llama"))


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        Adapter.read(str(tmp_path), tiny_model(0))
