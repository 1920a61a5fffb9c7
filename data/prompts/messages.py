"""Messages of a conversation, with every field that they state."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..files.disk import shown

_WRITTEN = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
"""Beginning of a conversation written as text, as in CSV."""

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip
"""Roles of messages by their names in ShareGPT's files."""


class FieldError(ValueError):
    """A field that cannot be served as it stands."""

    def __init__(self, field: str, reason: str, hint: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason, self.hint = field, reason, hint


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    role: ``system``, ``user``, ``assistant``, ``tool``, or another that the chat template knows.
    content: A text, or a list of text parts; None where the message only calls tools.
    fields: Other fields of the message, such as ``tool_calls``, ``tool_call_id``, ``name``.
    """

    role: str
    content: str | list[dict[str, Any]] | None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the message as a chat template takes it."""
        return {"role": self.role, "content": self.content, **self.fields}

    @property
    def text(self) -> str:
        """The content as one text, its parts joined by line breaks."""
        if isinstance(self.content, list):
            return "\n".join(str(part["text"]) for part in self.content)
        return self.content or ""


def read_messages(given: object, field: str) -> tuple[Message, ...]:
    """Check a conversation's messages; raise FieldError if one cannot be served."""
    if not isinstance(given, list) or not given:
        hint = 'Give a list such as [{"role": "user", "content": "..."}].'
        raise FieldError(field, f"{shown(given)} is not a list of messages", hint)
    return tuple(_message(message, f"{field}[{i}]") for i, message in enumerate(given))


def _message(given: object, field: str) -> Message:
    if not isinstance(given, dict):
        raise FieldError(field, f"{shown(given)} is not an object", "Give it a role and a content.")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not role:
        raise FieldError(f"{field}.role", f"{shown(role)} is not a role", "Give system, user or assistant.")
    # A null says the same as no field; tables hold one for each field that another row states.
    rest = {
        name: value for name, value in given.items() if name not in ("role", "content") and value is not None
    }
    if "function_call" in rest:
        hint = "Write it as tool_calls."
        raise FieldError(f"{field}.function_call", "is a field no chat template takes", hint)
    if isinstance(rest.get("tool_calls"), str):
        rest["tool_calls"] = _parsed_list(rest["tool_calls"])
    for name in ("audio", "refusal"):
        if name in rest and content is None:
            raise FieldError(f"{field}.{name}", "cannot be served as text", "Give the message a content.")
    if isinstance(content, list):
        content = [_part(part, f"{field}.content[{i}]") for i, part in enumerate(content)]
    elif content is None and not (role == "assistant" and rest.get("tool_calls")):
        hint = (
            "Give the content as text, or as a list of text parts; only a message with tool_calls needs none."
        )
        raise FieldError(f"{field}.content", f"{shown(content)} is not text", hint)
    elif content is not None and not isinstance(content, str):
        hint = "Give the content as text, or as a list of text parts."
        raise FieldError(f"{field}.content", f"{shown(content)} is not text", hint)
    return Message(role, content, rest)


def _part(given: object, field: str) -> dict[str, Any]:
    if isinstance(given, dict) and given.get("type") == "text" and isinstance(given.get("text"), str):
        return {name: value for name, value in given.items() if value is not None}
    kind = given.get("type") if isinstance(given, dict) else given
    raise FieldError(field, f"{shown(kind)} is not a text part", "Only text can be served.")


def _parsed_list(text: str) -> Any:
    """Return a text's JSON list, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list) else text


def written_conversation(text: str) -> list[Any] | None:
    """Return the conversation that a text holds, or None.

    The text is JSON or a Python literal.
    """
    if not _WRITTEN.match(text):
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, list):
            return value
    raise ValueError("begins as a conversation and is none")


def without_nulls(value: Any) -> Any:
    """Drop the fields that only other rows of an Arrow table have."""
    if isinstance(value, dict):
        return {
            name: without_nulls(entry)
            for name, entry in value.items()
            if entry is not None or (name == "content" and "role" in value)
        }
    if not isinstance(value, list):
        return value
    # The entries of an Arrow list are of one type.
    first = next((entry for entry in value if entry is not None), None)
    return [without_nulls(entry) for entry in value] if isinstance(first, dict | list) else value


class TokenIds(list[int]):
    """Token ids of a table's column of integers, which need no look at each."""

    __slots__ = ()


def is_ids(prompt: object) -> bool:
    """Return whether a prompt is a list of token ids."""
    if isinstance(prompt, TokenIds):
        return bool(prompt)
    # A million prompts of 400 tokens take seconds this way, and minutes token by token.
    return isinstance(prompt, list) and set(map(type, prompt)) == {int}


def is_sharegpt(given: object) -> bool:
    """Return whether a value is a ShareGPT conversation."""
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in given)
    )


def sharegpt_prompt(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a ShareGPT conversation's system message and first human turn."""
    prompt: list[dict[str, Any]] = []
    for turn in turns:
        role = _SHAREGPT_ROLES.get(str(turn["from"]))
        if role is None:
            raise ValueError(f"{shown(turn['from'])} is not a role of ShareGPT")
        if role == "assistant":
            break
        prompt.append({"role": role, "content": turn["value"]})
        if role == "user":
            return prompt
    raise ValueError("has no human turn before its first reply")
