"""Every field of a request's body is served as it stands, or refused by name: none is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchbound.data.files.disk import InputError
from batchbound.data.prompts.messages import FieldError
from batchbound.data.readers.openai_batch import PromptRecord, read_batch
from batchbound.data.readers.request_fields import asked_of
from batchbound.data.readers.sampling import Sampling
from batchbound.data.readers.server_batch import read_server_batch

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5)
numbers = st.floats(0.0, 2.0)
SERVED: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 9),
    "temperature": numbers,
    "top_p": st.floats(0.01, 1.0),
    "top_k": st.integers(-1, 100),
    "min_p": st.floats(0.0, 1.0),
    "repetition_penalty": st.floats(0.1, 3.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "logit_bias": st.dictionaries(st.integers(0, 999).map(str), st.floats(-100, 100), min_size=1, max_size=3),
    "bad_words": st.lists(texts.filter(str.strip), min_size=1, max_size=3),
    "seed": st.integers(-(2**63) + 1, 2**63 - 1),
    "stop": st.lists(texts, min_size=1, max_size=3),
    "include_stop_str_in_output": st.just(True),
    "stop_token_ids": st.lists(st.integers(0, 999), min_size=1, max_size=3),
    "min_tokens": st.integers(1, 99),
    "ignore_eos": st.just(True),
}
REFUSED: dict[str, st.SearchStrategy[Any]] = {
    "n": st.sampled_from([0, -1, 2.5, True, 16_385]),
    "tools": st.just([{"type": "function"}]),
    "response_format": st.sampled_from([{"type": "xml"}, "json", {"type": "json_schema"}]),
    "guided_json": st.sampled_from(["{", 3, []]),
    "structured_outputs": st.sampled_from([{"regex": ""}, {}, {"json": {}, "regex": "a"}, 3]),
    "allowed_token_ids": st.just([1]),
    "prompt_logprobs": st.just(1),
    "use_beam_search": st.just(True),
    "lora_request": st.just({"name": "a"}),
    "reasoning_effort": st.just("low"),
    "skip_special_tokens": st.just(False),
    "stream": st.just(True),
    "temprature": numbers,
    "max_new_tokens": st.integers(1, 9),
    "anything": st.none() | numbers,
    "top_p": st.sampled_from([0, 1.5, "0.9", True]),
    "min_p": st.sampled_from([-0.1, 1.1, [0.1]]),
    "logit_bias": st.sampled_from([[1], {"a": 1}, {"1": 101}, {"1": "2"}]),
    "stop": st.sampled_from([[""], 3, [1]]),
    "stop_token_ids": st.sampled_from([3, ["a"], [-1]]),
    "min_tokens": st.sampled_from([-1, 0.5, True]),
    "ignore_eos": st.sampled_from([1, "yes"]),
    "chat_template_kwargs": st.sampled_from([[1], "a"]),
    "logprobs": st.sampled_from([3, "a"]),
    "top_logprobs": st.sampled_from([3, 21]),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[dict[str, Any], str | None]:
    """A chat's body, and the field in it that cannot be served."""
    names = draw(st.lists(st.sampled_from(sorted(SERVED)), unique=True, max_size=6))
    body = {name: draw(SERVED[name]) for name in names}
    wrong = draw(st.none() | st.sampled_from(sorted(REFUSED)))
    if wrong is not None:
        body[wrong] = draw(REFUSED[wrong])
    return body, wrong


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies())
def test_a_field_is_served_as_it_stands_or_refused_by_line_and_name(
    tmp_path: Path, drawn: tuple[dict[str, Any], str | None]
) -> None:
    body, wrong = drawn
    file = tmp_path / "batch.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    file.write_text(json.dumps({"custom_id": "a", "body": {"messages": messages, **body}}))
    if wrong is not None:
        with pytest.raises(InputError, match=rf"batch\.jsonl, line 1, field 'body\.{wrong}"):
            read_batch(file)
        return
    sampling = read_batch(file)[0].sampling()
    for name, value in body.items():
        got = getattr(sampling, name)
        if name == "logit_bias":
            assert {str(token): bias for token, bias in got} == value
        else:
            assert (list(got) if isinstance(value, list) else got) == value
    left = {name: getattr(sampling, name) for name in SERVED if name not in body}
    assert left == {name: getattr(Sampling(), name) for name in left}


def test_log_probabilities_are_asked_for_as_each_endpoint_has_it() -> None:
    assert asked_of({"logprobs": True}, chat=True)[0] == {"logprobs": 0}
    assert asked_of({"logprobs": True, "top_logprobs": 4}, chat=True)[0] == {"logprobs": 4}
    assert asked_of({"logprobs": False, "top_logprobs": 0}, chat=True)[0] == {}
    assert asked_of({"logprobs": 2}, chat=False)[0] == {"logprobs": 2}
    with pytest.raises(FieldError, match="has no effect without logprobs"):
        asked_of({"top_logprobs": 4}, chat=True)
    with pytest.raises(FieldError, match="is for chats"):
        asked_of({"top_logprobs": 4}, chat=False)
    with pytest.raises(FieldError, match="chat_template_kwargs"):
        asked_of({"chat_template_kwargs": {}}, chat=False)


def test_whole_numbers_may_be_written_with_a_point_as_pandas_does(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    body = {"prompt": "a", "max_tokens": 12.0, "n": 2.0, "seed": 7.0}
    path.write_text(json.dumps({"custom_id": "a", "body": body}))
    (record,), batch = read_batch(path), read_server_batch(path)
    assert (record.max_tokens, record.samples, record.asked["seed"]) == (12, 2, 7)
    assert (batch.caps[0], batch.choices[0], batch[0].body) == (12, 2, body)


def test_null_asks_for_nothing_and_what_is_given_beside_takes_precedence() -> None:
    nothing = dict.fromkeys([*SERVED, "tools", "guided_json", "logprobs", "user"])
    assert asked_of(nothing, chat=True) == ({}, {})
    record = PromptRecord("a", "/v1/completions", 1, asked={"temperature": 0.5, "top_k": 3})
    assert record.sampling(temperature=1.0) == Sampling(temperature=1.0, top_k=3)


def test_what_a_chat_template_is_told_is_read_and_its_own_words_are_refused() -> None:
    told = {"enable_thinking": False, "add_generation_prompt": True}
    assert asked_of({"chat_template_kwargs": told}, chat=True) == ({}, told)
    with pytest.raises(FieldError, match=r"chat_template_kwargs\.tokenize"):
        asked_of({"chat_template_kwargs": {"tokenize": True}}, chat=True)
