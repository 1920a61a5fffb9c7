"""Structured outputs: every text is what its request asks for, and no token differs from ``generate``'s."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from batchbound import LLM
from batchbound.cli import main
from batchbound.data.prompts.messages import FieldError
from batchbound.data.readers.request_fields import asked_of
from batchbound.data.readers.sampling import Sampling, Structure
from batchbound.executor.models import grammar
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tokenizers import ByteTokenizer, end_tokens

needs_llguidance = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="needs llguidance: pip install 'batchbound[grammar]'"
)
MOST = 400
"""Tokens of a completion, at most."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of nested objects, arrays, enums and patterns whose values have a bounded length."""
    kinds = ["object", "array", "enum", "pattern", "boolean", "integer"]
    kind = rng.choice((kinds[:2], kinds, kinds[2:])[depth])
    if kind == "object":
        names = rng.sample(["id", "kind", "tags", "size", "note"], rng.randint(1, 3))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": names[: rng.randint(1, len(names))],
            "additionalProperties": False,
        }
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": 2}
    if kind == "enum":
        return {"enum": rng.sample(["red", "blue", 7, None, True, "a b", 2.5], rng.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^x-[0-9]{3}$", "^(yes|no)$"])}
    return {"type": kind} if kind == "boolean" else {"type": "integer", "minimum": 0, "maximum": 99}


def structures(count: int, seed: int) -> list[Structure]:
    rng = random.Random(seed)
    found = [Structure.of({"json": random_schema(rng)}) for _ in range(count - 2)]
    found += [Structure.of({"regex": "[a-z]{3}-[0-9]{2}"}), Structure.of({"choice": ["maybe", 'it\'s "so"']})]
    return [one for one in found if one is not None]


def valid(structure: Structure, text: str) -> bool:
    if structure.kind == "regex":
        return re.fullmatch(structure.text, text) is not None
    if structure.kind == "choice":
        return text in json.loads(structure.text)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(text), json.loads(structure.text))
    return True


class Masked:
    """The same masks as a logits processor of transformers, for a padded batch."""

    def __init__(self, matchers: list[Any], prompt: int, vocabulary: int, ends: Collection[int]) -> None:
        self.matchers, self.read, self.vocabulary, self.ends = (
            dict(enumerate(matchers)),
            prompt,
            vocabulary,
            ends,
        )

    def __call__(self, ids: Any, scores: Any) -> Any:
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        for row, matcher in list(self.matchers.items()):
            for token in ids[row, self.read :].tolist():
                assert matcher.consume_token(token)
                if token in self.ends:
                    del self.matchers[row]
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(bits, count=self.vocabulary, bitorder="little")
            allowed[row, : self.vocabulary] = torch.from_numpy(bits).bool()
        for row in set(range(len(scores))) - self.matchers.keys():
            allowed[row] = True
        self.read = ids.shape[1]
        return scores.masked_fill(~allowed, -torch.inf)


def by_generate(model: Any, prompts: list[list[int]], matchers: list[Any], ends: Collection[int]) -> Any:
    """Return the completions of transformers under the same masks, by the tokens up to their ends."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    whole = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=MOST,
        do_sample=False,
        logits_processor=[Masked(matchers, width, ByteTokenizer().vocab_size, ends)],
        eos_token_id=sorted(ends),
        pad_token_id=0,
    )
    found = whole[:, width:].tolist()
    return [row[: min((row.index(end) + 1 for end in ends if end in row), default=MOST)] for row in found]


def check_against_generate(count: int, slots: int) -> None:
    model, tokenizer = load_model("tiny:speller", dtype="float32"), ByteTokenizer()
    asked = structures(count, seed=count)
    prompts = [tokenizer.encode(f"Spell {17 * k}.") for k in range(count)]
    ends = end_tokens(model, tokenizer)
    compiled = grammar.Grammars(tokenizer, ends)
    theirs: list[list[int]] = []
    for begin in range(0, count, 25):
        matchers = [compiled.matcher(one) for one in asked[begin : begin + 25]]
        theirs += by_generate(model, prompts[begin : begin + 25], matchers, ends)
    llm = LLM(model, tokenizer, slots=slots)
    sampling = [Sampling(structured_outputs=one) for one in asked]

    done = list(llm.generate(prompts, sampling, max_tokens=MOST))

    assert all(list(one.completion_ids) == theirs[one.index] for one in done)
    capped = [one.index for one in done if one.finish_reason == "length"]
    assert all(valid(asked[one.index], one.text) for one in done if one.index not in capped)
    assert len(capped) <= count // 50


@needs_llguidance
def test_texts_are_valid_and_tokens_are_those_of_generate_with_the_same_masks() -> None:
    check_against_generate(6, slots=3)


@needs_llguidance
@pytest.mark.slow
def test_fifty_random_schemas() -> None:
    check_against_generate(50, slots=16)


@needs_llguidance
def test_requests_with_and_without_a_structure_share_a_batch() -> None:
    llm = LLM.from_pretrained("tiny:speller", slots=2)
    asked = [Sampling(), Sampling(structured_outputs=Structure.of({"json": PERSON})), Sampling()]

    done = {one.index: one for one in llm.generate(["Spell 7."] * 3, asked, max_tokens=200)}

    alone = next(iter(llm.generate(["Spell 7."], max_tokens=200)))
    assert done[0].completion_ids == done[2].completion_ids == alone.completion_ids
    assert set(json.loads(done[1].text)) == {"name", "age"}


@needs_llguidance
def test_a_drawn_text_is_valid_too_and_drawn_again_by_its_seed() -> None:
    llm = LLM.from_pretrained("tiny:llama", slots=4)
    pattern = {"regex": "(ab|cd){2}[0-9]"}
    asked: dict[str, Any] = {"temperature": 1.5, "n": 4, "seed": 0, "structured_outputs": pattern}

    texts = sorted(one.text for one in llm.generate(["x"], **asked, max_tokens=9))

    assert all(re.fullmatch("(ab|cd){2}[0-9]", text) for text in texts)
    assert len(set(texts)) > 1
    assert texts == sorted(one.text for one in llm.generate(["x"], **asked, max_tokens=9))


@needs_llguidance
def test_a_token_chosen_again_replaces_the_earlier_one() -> None:
    masks = grammar.GrammarMasks(
        grammar.Grammars(ByteTokenizer(), [257]), {5: Structure("regex", "a[bc]d|b")}
    )

    def allowed(index: int) -> list[int]:
        logits = masks.apply(torch.zeros(1, 259), torch.tensor([5]), torch.tensor([index]))
        found: list[int] = torch.nonzero(logits[0] == 0).ravel().tolist()
        return found

    def chosen(index: int, token: str) -> None:
        masks.note(torch.tensor([ord(token)]), torch.tensor([5]), torch.tensor([index]))

    assert allowed(0) == [ord("a"), ord("b")]
    chosen(0, "a")
    assert allowed(1) == [ord("b"), ord("c")]
    chosen(1, "b")
    assert allowed(2) == [ord("d")]
    assert allowed(1) == [ord("b"), ord("c")]
    assert allowed(0) == [ord("a"), ord("b")]
    chosen(0, "b")
    assert allowed(1) == [257]


SPELLINGS: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    "structured_outputs": {"json": PERSON},
    "guided_json": json.dumps(PERSON),
    "json_schema": json.dumps(PERSON),
}


@pytest.mark.parametrize("field", SPELLINGS)
def test_each_spelling_means_the_same(field: str) -> None:
    asked, _ = asked_of({field: SPELLINGS[field], "messages": []}, chat=True)

    assert asked == {"structured_outputs": Structure("json", json.dumps(PERSON))}
    assert asked["structured_outputs"].field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_regex": 7}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "min_tokens": 3}, "guided_regex"),
        ({"guided_grammar": "root ::= 'a'"}, "guided_grammar"),
    ],
)
def test_what_states_no_structure_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as bad:
        asked_of(body, chat=False)

    assert bad.value.field == field


def write_rows(folder: Path, **fields: Any) -> str:
    body = {"prompt": "Spell 7.", "max_tokens": 200, **fields}
    rows = [{"custom_id": f"r{k}", "body": body} for k in range(3)]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "p.jsonl")


@needs_llguidance
def test_a_batch_file_asks_for_structures(tmp_path: Path) -> None:
    rows, out = write_rows(tmp_path, guided_json=PERSON), tmp_path / "a.jsonl"

    assert main(["run", rows, "--model", "tiny:speller", "-o", str(out), "--quiet"]) == 0

    for line in out.read_text().splitlines():
        text = json.loads(line)["response"]["body"]["choices"][0]["text"]
        assert set(json.loads(text)) == {"name", "age"}


@needs_llguidance
def test_a_faulty_schema_is_refused_by_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path, guided_regex="(ab")

    assert main(["run", rows, "--model", "tiny:speller", "-o", str(tmp_path / "a.jsonl")]) == 2
    assert "line 1, field 'body.guided_regex'" in capsys.readouterr().err


def test_without_the_extra_one_error_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "find_spec", lambda name: None)
    rows = write_rows(tmp_path, response_format={"type": "json_object"})

    assert main(["run", rows, "--model", "tiny:speller", "-o", str(tmp_path / "a.jsonl")]) == 2

    said = capsys.readouterr().err
    assert "run `pip install '.[grammar]'`" in said
    assert "field 'body.response_format'" in said
