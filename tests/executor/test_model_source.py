from __future__ import annotations

import builtins
import resource
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.data.files.disk import InputError
from batchbound.data.prompts.messages import Message
from batchbound.data.readers.openai_batch import CHAT as CHAT_URL
from batchbound.data.readers.openai_batch import PromptRecord
from batchbound.executor.models.families import UnsupportedModelError
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.models.source import (
    ModelLoadError,
    load_config,
    load_model,
    position_limit,
    positions_of,
)
from batchbound.executor.models.tokenizers import ByteTokenizer, load_tokenizer, plain_chat

CHAT = [{"role": "user", "content": "Hello"}]


def weights(model: Any) -> Any:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    load_model("tiny:gpt2:3", device="cpu").save_pretrained(directory)
    return directory


def test_a_tiny_model_is_the_same_for_the_same_seed() -> None:
    first, again = (load_model("tiny:llama:7", device="cpu") for _ in range(2))
    other = load_model("tiny:llama:8", device="cpu")
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_the_seed_in_the_name_takes_precedence_zero_included() -> None:
    named = load_model("tiny:gpt2:0", device="cpu", seed=5)
    given = load_model("tiny:gpt2", device="cpu", seed=0)
    assert torch.equal(weights(named), weights(given))


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_model("tiny:gpt2", device="cpu")
    assert torch.equal(torch.rand(3), expected)


def test_a_saved_directory_loads_with_its_weights(saved: Path) -> None:
    model = load_model(str(saved), device="cpu")
    assert torch.equal(weights(model), weights(load_model("tiny:gpt2:3", device="cpu")))
    assert not model.training


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt", "bloom", "falcon"])
def test_a_tiny_model_has_as_many_positions_as_its_configuration(family: str) -> None:
    assert positions_of(f"tiny:{family}") == position_limit(load_config(f"tiny:{family}"))


def test_dummy_weights_need_the_configuration_only(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    first, again = (load_model(str(tmp_path), load_format="dummy", device="cpu", seed=1) for _ in range(2))
    assert torch.equal(weights(first), weights(again))
    with pytest.raises(ModelLoadError, match="check the directory's files"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_number_format_is_as_asked(dtype: str, saved: Path) -> None:
    for spec in ("tiny:llama", str(saved)):
        assert load_model(spec, dtype=dtype, device="cpu").dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tiny:lama", r"no tiny model 'tiny:lama'. Did you mean tiny:llama\?"),
        ("tiny:llama:x", "it is not tiny:FAMILY or tiny:FAMILY:SEED"),
        ("./nowhere", "there is no such directory"),
        ("/nowhere/at/all", "there is no such directory"),
    ],
)
def test_a_name_that_leads_nowhere_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(spec)


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="holds a PEFT adapter, not a model; merge it"):
        load_config(str(tmp_path))


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"the directory has no config\.json; name one written by"):
        load_config(str(tmp_path))


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="check the directory's files"):
        load_config(str(tmp_path))


def test_a_hub_that_cannot_be_reached_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="check the name and the network"):
        load_model("batchbound-test/no-such-model")


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        load_model(str(tmp_path))


def test_an_unknown_number_format_is_named() -> None:
    with pytest.raises(ValueError, match=r"dtype must be auto, float32, .* got 'int3'"):
        load_model("tiny:llama", dtype="int3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(ModelLoadError, match="there is no CUDA device; use --device cpu"):
        load_model("tiny:llama", device="cuda")


@pytest.mark.parametrize(
    ("load_format", "dtype", "takes"),
    [("auto", "float32", "16"), ("auto", "bfloat16", "8"), ("dummy", "bfloat16", "16")],
)
def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(
    load_format: Any, dtype: str, takes: str, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=19, vocab_size=32000, dtype=dtype
    )
    config.save_pretrained(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    try:
        with pytest.raises(
            ModelLoadError, match=rf"its weights take {takes}\.\d GB, and 1\.\d GB of memory are"
        ):
            load_model(str(tmp_path), load_format=load_format, device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(ImportError, match=r"\.\[engine\]"):
        load_model("tiny:llama")


def test_bytes_come_back_as_the_text_they_were() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode("Grüße")
    assert len(ids) == 1 + len("Grüße".encode())
    assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == "Grüße"
    assert max(ids) < tokenizer.vocab_size
    assert len(tokenizer.encode("")) == 1


def test_tiny_models_read_bytes() -> None:
    assert isinstance(load_tokenizer("tiny:llama:3"), ByteTokenizer)
    assert load_config("tiny:llama").eos_token_id in ByteTokenizer.eos_ids


def test_a_conversation_without_a_template_is_written_as_lines() -> None:
    assert plain_chat(CHAT) == "user: Hello\nassistant:"
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode_chat(CHAT) == tokenizer.encode("user: Hello\nassistant:")


@pytest.fixture
def gpt2_files(tmp_path: Path) -> Path:
    (tmp_path / "vocab.json").write_text('{"h": 0, "i": 1, "hi": 2, "<|endoftext|>": 3}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    return tmp_path


def test_gpt2_vocabulary_and_merges_are_a_tokenizer(gpt2_files: Path) -> None:
    tokenizer = load_tokenizer(str(gpt2_files))
    assert tokenizer.encode("hih") == [2, 0]
    assert tokenizer.decode([2, 0, 3]) == "hih"
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((3,), 4)
    assert tokenizer.encode("") == [3]


def test_a_saved_tokenizer_keeps_its_chat_template(gpt2_files: Path, tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    tokenizer = GPT2Tokenizer.from_pretrained(str(gpt2_files))
    tokenizer.chat_template = "{% for m in messages %}h{{ m['content'] }}{% endfor %}i"
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    loaded = load_tokenizer(str(tmp_path / "saved"))
    assert loaded.encode_chat([{"role": "user", "content": "i"}]) == [2, 1]
    assert loaded.eos_ids == (3, 1)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('only users speak') }}", "only users speak"),
        ("{% for message in messages %}{{ message.content", "unexpected end of template"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ],
)
def test_what_a_chat_template_refuses_is_named_by_its_line(
    gpt2_files: Path, tmp_path: Path, template: str, why: str
) -> None:
    from transformers import GPT2Tokenizer

    own = GPT2Tokenizer.from_pretrained(str(gpt2_files))
    own.chat_template = template
    own.save_pretrained(tmp_path)
    said = Message("user", "Hello")
    record = PromptRecord(custom_id="a", url=CHAT_URL, line=7, messages=(said,))
    with pytest.raises(InputError, match=f"line 7, field 'body.messages': the chat template .*{why}"):
        Prompts.encode([record], load_tokenizer(str(tmp_path)))


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="the directory has no tokenizer; name a directory with"):
        load_tokenizer(str(tmp_path))
