"""Kinds of requests in a batch, by their text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from ...data.arrays import IntArray
from ...data.readers.openai_batch import PromptRecord
from ...data.readers.server_batch import ServerBatch

LEAST_MEMBERS = 8
"""Fewest requests of a kind; larger finds fewer kinds."""

MOST_KINDS = 8
"""Most kinds of a batch; more have fewer completions each."""

OTHER = "other"


def kinds_of(records: Sequence[PromptRecord]) -> IntArray:
    """Return each request's kind, numbered from zero, shape (requests,).

    Requests of one kind share system prompt, cap and prefix of the id. If all requests share these, the first
    two words of the text separate kinds, or else the first word.
    """
    stated = [(_system(record), record.max_tokens, _id_prefix(record.custom_id)) for record in records]
    return _numbered(stated, [_first_words(_text(record)) for record in records])


def kinds_of_batch(batch: ServerBatch) -> IntArray:
    """Return the kind of each request of a server's batch, as :func:`kinds_of`."""
    stated, words = [], []
    for request, cap in zip(batch, batch.caps.tolist(), strict=True):
        messages = request.body.get("messages")
        turns = (
            [message for message in messages if isinstance(message, dict)]
            if isinstance(messages, list)
            else []
        )
        system = tuple(str(message.get("content")) for message in turns if message.get("role") == "system")
        stated.append((system, cap, _id_prefix(request.custom_id)))
        says = turns[-1].get("content") if turns else request.says
        words.append(_first_words(tuple(says) if isinstance(says, list) else says))
    return _numbered(stated, words)


def _numbered(stated: Sequence[Hashable], words: Sequence[tuple[object, ...]]) -> IntArray:
    labels = _common(stated)
    for count in (2, 1):
        if len(set(labels)) > 1:
            break
        labels = _common([first[:count] for first in words])
    numbers = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    return np.array([numbers[label] for label in labels], dtype=np.int64)


def _common(labels: Sequence[Hashable]) -> list[Hashable]:
    """Replace rare labels by a common one."""
    frequent = [label for label, count in Counter(labels).most_common(MOST_KINDS) if count >= LEAST_MEMBERS]
    return [label if label in frequent else OTHER for label in labels]


def _system(record: PromptRecord) -> str:
    return "\n".join(str(message.content) for message in record.messages if message.role == "system")


def _id_prefix(name: str) -> str:
    return re.split(r"\d", name, maxsplit=1)[0]


def _text(record: PromptRecord) -> object:
    return record.messages[-1].content if record.messages else record.prompt


def _first_words(text: object) -> tuple[object, ...]:
    if isinstance(text, tuple):
        return tuple(str(word) for word in text[:2])
    return tuple(str(text).lower().split()[:2])
