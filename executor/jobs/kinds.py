"""Kinds of requests in a batch, by their text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from ...data.arrays import IntArray
from ...data.readers.openai_batch import PromptRecord

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
    stated = [(_system(one), one.max_tokens, _id_prefix(one.custom_id)) for one in records]
    labels = _common(stated)
    for words in (2, 1):
        if len(set(labels)) > 1:
            break
        labels = _common([_first_words(one, words) for one in records])
    numbers = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    return np.array([numbers[label] for label in labels], dtype=np.int64)


def _common(labels: Sequence[Hashable]) -> list[Hashable]:
    """Replace rare labels by a common one."""
    frequent = [label for label, count in Counter(labels).most_common(MOST_KINDS) if count >= LEAST_MEMBERS]
    return [label if label in frequent else OTHER for label in labels]


def _system(record: PromptRecord) -> str:
    return "\n".join(str(one.content) for one in record.messages if one.role == "system")


def _id_prefix(name: str) -> str:
    return re.split(r"\d", name, maxsplit=1)[0]


def _first_words(record: PromptRecord, words: int) -> Hashable:
    text = record.messages[-1].content if record.messages else record.prompt
    if isinstance(text, tuple):
        return text[:words]
    return tuple(str(text).lower().split()[:words])
