"""Columns of a table of prompts."""

from __future__ import annotations

import codecs
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..files.disk import InputError

_LIKELY = (
    "prompt",
    "messages",
    "conversations",
    "conversation",
    "question",
    "instruction",
    "problem",
    "query",
    "text",
    "input",
)
"""Usual names of columns of prompts, the likeliest first."""

_COMPLETIONS = (
    "answer", "chosen", "completion", "generated_text", "gold", "ground_truth", "label", "output",
    "rejected", "response", "resps", "filtered_resps", "solution", "target",
)  # fmt: skip
"""Columns of completions, never proposed as prompts."""

TEMPLATE_COLUMNS = ("tools", "documents", "chat_template_kwargs", "continue_final_message")
"""Columns that belong to a conversation in the same row."""

CAP_COLUMNS = ("max_tokens", "max_completion_tokens")
"""Usual columns with the most tokens of a completion."""


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """Columns of a table of prompts.

    prompt: A text or a list of token ids to complete, or a conversation: a list of messages with role and
        content.
    id: Column of request names; numbered in order if left out.
    max_tokens: Most tokens of each completion; by default a column named as in the batch format.
    drop_last_assistant: True to leave out a conversation's last message if it is the assistant's.
    chat: True to read a text as a user's message of a conversation, False to complete it as it is.
    """

    prompt: str
    id: str | None = None
    max_tokens: str | None = None
    drop_last_assistant: bool = False
    chat: bool = False

    def names(self) -> Iterator[str]:
        """Yield the columns that are read."""
        yield from (name for name in (self.prompt, self.id, self.max_tokens) if name is not None)

    def cap(self, found: Sequence[str]) -> str | None:
        """Return the column of the most tokens, or None."""
        return self.max_tokens or next((name for name in CAP_COLUMNS if name in found), None)

    def check(self, found: Sequence[str], file: str | os.PathLike[str]) -> None:
        """Raise InputError with the nearest column if one is missing."""
        for name in self.names():
            if name not in found:
                near = _nearest(name, found)
                meant = f"; did you mean {near}?" if near else "."
                raise InputError(
                    f"there is no column {name!r}", file=file, hint=f"Found {listed(found)}{meant}"
                )


def asking_for_prompts(found: Sequence[str]) -> str:
    """Return the hint for a table without a named prompt column."""
    names = [name for name in found if str(name).lower() not in _COMPLETIONS]
    likely = next((near for word in _LIKELY if (near := _nearest(word, names))), "NAME")
    return f"For a table of prompts say --prompt-column {likely}"


def listed(found: Sequence[str]) -> str:
    """Return column names, separated by commas."""
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")


def is_header(line: bytes) -> bool:
    """Return whether a line is the header of a table."""
    name = rb'"?[\w .\x80-\xff-]+"?'
    return re.fullmatch(name + rb"([,;\t]" + name + rb")+\r?", line.removeprefix(codecs.BOM_UTF8)) is not None


def separator(text: str) -> str:
    """Return the commonest separator of a header, or a comma."""
    return max(",;\t", key=text[: text.find("\n")].count)


def _nearest(word: str, found: Sequence[str]) -> str | None:
    lower = {str(name).lower(): str(name) for name in reversed(found)}
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return lower[near[0]] if near else None
