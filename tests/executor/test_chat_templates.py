"""Conversations through chat templates: every field reaches the template, and an ignored one is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchbound.data.files.disk import InputError
from batchbound.data.readers.openai_batch import PromptRecord, read_batch
from batchbound.executor.models.prompts import encoded, ignored_fields
from batchbound.executor.models.tokenizers import ByteTokenizer, HubTokenizer, TemplateError

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "name": "bob", "content": "2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
ADDED = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
FULL = (
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{{ m.name }}{{ m.tool_call_id }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
JOINED = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ '(' + c.function.arguments + ')' }}"
    "{% endfor %}{% endfor %}"
)
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from transformers import GPT2Tokenizer

    (tmp_path / "vocab.json").write_text('{"h": 0, "i": 1, "<|endoftext|>": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    return GPT2Tokenizer.from_pretrained(str(tmp_path))


def with_template(tokenizer: Any, template: str) -> HubTokenizer:
    tokenizer.chat_template = template
    return HubTokenizer("own", tokenizer)


def record(tmp_path: Path, messages: list[dict[str, Any]], **body: Any) -> PromptRecord:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"custom_id": "r", "body": {"messages": messages, **body}}))
    return read_batch(path)[0]


def text(tokenizer: HubTokenizer, one: PromptRecord) -> str:
    return tokenizer.chat_text(one.chat_messages, **one.template)


def test_every_field_reaches_the_template(tokenizer: Any, tmp_path: Path) -> None:
    own, one = with_template(tokenizer, FULL), record(tmp_path, TURNS, tools=[TOOL])
    assert text(own, one) == 'add<userbob>2+2?<assistant>add{"a": 2}<toolc1>4'
    assert ignored_fields([one], own) == []


def test_a_field_that_the_template_ignores_is_noticed_once(tokenizer: Any, tmp_path: Path) -> None:
    own, one = with_template(tokenizer, ADDED), record(tmp_path, TURNS, tools=[TOOL])
    assert text(own, one) == "<user>2+2?<assistant><tool>4"
    said = ignored_fields([one, one], own)
    assert said == [
        f"the chat template of 'own' ignores {field}, first stated in line 1"
        for field in (
            "name of user messages",
            "tool_calls of assistant messages",
            "tool_call_id of tool messages",
            "tools",
        )
    ]


@pytest.mark.parametrize("template", [PLAIN, ADDED])
def test_a_content_that_is_missing_is_no_word(tokenizer: Any, tmp_path: Path, template: str) -> None:
    assert text(with_template(tokenizer, template), record(tmp_path, TURNS)) == "<user>2+2?<assistant><tool>4"


def test_arguments_are_text_for_a_template_that_joins_them(tokenizer: Any, tmp_path: Path) -> None:
    assert text(with_template(tokenizer, JOINED), record(tmp_path, TURNS)) == '({"a": 2})'


def test_parts_reach_a_template_that_reads_them_and_are_joined_for_others(
    tokenizer: Any, tmp_path: Path
) -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    one = record(tmp_path, [{"role": "user", "content": parts}])
    assert text(with_template(tokenizer, PARTS), one) == "[One.][Two.]"
    assert text(with_template(tokenizer, PLAIN), one) == "<user>One.\nTwo."
    assert ByteTokenizer().chat_text(one.chat_messages) == "user: One.\nTwo.\nassistant:"


def test_the_last_message_is_continued(tokenizer: Any, tmp_path: Path) -> None:
    template = PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure,"}]
    own = with_template(tokenizer, template)
    assert text(own, record(tmp_path, said, continue_final_message=True)) == "<user>Hi<assistant>Sure,"
    assert text(own, record(tmp_path, said[:1])) == "<user>Hi<assistant>"
    assert text(own, record(tmp_path, said[:1], add_generation_prompt=False)) == "<user>Hi"


def test_a_conversation_without_a_template_ends_as_it_states(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure,"}]
    one = record(tmp_path, said, continue_final_message=True)
    assert ByteTokenizer().chat_text(one.chat_messages, **one.template) == "user: Hi\nassistant: Sure,"
    one = record(tmp_path, said[:1], add_generation_prompt=False)
    assert ByteTokenizer().chat_text(one.chat_messages, **one.template) == "user: Hi\n"


def test_a_model_without_a_template_refuses_its_options(tmp_path: Path) -> None:
    one = record(tmp_path, TURNS[:1], tools=[TOOL])
    with pytest.raises(InputError, match=r"line 1, field 'body.tools': .*no chat template that takes tools"):
        list(encoded([one], ByteTokenizer()))
    with pytest.raises(TemplateError, match="role and content must be texts"):
        ByteTokenizer().chat_text(record(tmp_path, TURNS).chat_messages)
    assert ignored_fields([record(tmp_path, TURNS[:1])], ByteTokenizer()) == [
        "the chat template of 'bytes' ignores name of user messages, first stated in line 1"
    ]


def test_a_text_that_holds_its_template_gets_no_second_start_token(tmp_path: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    fast: Any = transformers.PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({"<s>": 0, "h": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    own = HubTokenizer("own", fast(tokenizer_object=words, bos_token="<s>"))
    assert own.encode("h h") == [0, 1, 1]
    assert own.encode("<s>h h") == [0, 1, 1]
    assert own.encode("<s><s>h") == [0, 0, 1]
