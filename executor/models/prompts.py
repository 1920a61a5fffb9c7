"""Prompts of a job as token ids."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...data.arrays import IntArray
from ...data.files.disk import InputError
from ...data.kept_beginnings import path_of
from ...data.prefix_tree import PrefixTree
from ...data.readers.openai_batch import CHAT, COMPLETIONS, PromptRecord
from ...data.readers.request_fields import TEMPLATE_FIELDS
from ...data.workload import Workload
from .tokenizers import TemplateError, Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Requests of a job with their token ids, in the job's order.

    records: Records of the batch file.
    """

    records: tuple[PromptRecord, ...]
    tokens: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each prompt, shape (requests,)."""
        return np.array([len(tokens) for tokens in self.tokens], dtype=np.int64)

    @classmethod
    def encode(cls, records: Sequence[PromptRecord], tokenizer: Tokenizer) -> Prompts:
        """Return the prompts of some records, tokenized."""
        return cls(tuple(records), tuple(encoded(records, tokenizer)))

    @classmethod
    def random(cls, workload: Workload, vocabulary: int, seed: int) -> Prompts:
        """Return random prompts of a workload's lengths.

        Requests that share a beginning get the same.
        """
        rng = np.random.default_rng(seed)
        drawn = [tuple(rng.integers(vocabulary, size=count).tolist()) for count in workload.input_tokens]
        if workload.tree is not None:
            _share(drawn, workload.tree)
        tokens = tuple(drawn)
        records = tuple(
            PromptRecord(custom_id=str(name), url=COMPLETIONS, line=0, prompt=prompt, max_tokens=int(output))
            for name, prompt, output in zip(workload.ids, tokens, workload.output_tokens, strict=True)
        )
        return cls(records, tokens)


def _share(drawn: list[tuple[int, ...]], tree: PrefixTree) -> None:
    """Let prompts begin alike as a tree says."""
    parents, through, own = tree.parent.tolist(), tree.through.tolist(), tree.own.tolist()
    first: dict[int, tuple[int, ...]] = {}
    for index, leaf in enumerate(tree.leaf.tolist()):
        for node in path_of(parents, leaf):
            tokens = drawn[index]
            source, shared = first.setdefault(node, tokens), through[node]
            # Shared but for its last token, it is the same prompt.
            rest = source if node == leaf and own[index] == 1 else tokens
            drawn[index] = source[:shared] + rest[shared : len(tokens)]


def encoded(
    records: Sequence[PromptRecord], tokenizer: Tokenizer, path: str | os.PathLike[str] | None = None
) -> Iterator[tuple[int, ...]]:
    """Yield each record's token ids; errors name the file ``path``."""
    for record in records:
        if record.url == CHAT:
            try:
                yield tuple(tokenizer.encode_chat(record.chat_messages, **record.template))
            except TemplateError as error:
                where = f"line {record.line}, field 'body.messages'"
                hint = "Write the conversation as the model expects it."
                raise InputError(str(error), file=path, where=where, hint=hint) from None
            except ValueError as error:
                field = next((name for name in TEMPLATE_FIELDS if name in record.template), None)
                where = f"line {record.line}, field 'body.{field or 'chat_template_kwargs'}'"
                raise InputError(str(error), file=path, where=where, hint="Remove it.") from None
        elif isinstance(record.prompt, str):
            yield tuple(tokenizer.encode(record.prompt))
        else:
            yield tuple(record.prompt or ())


def ignored_fields(records: Sequence[PromptRecord], tokenizer: Tokenizer) -> list[str]:
    """Return a sentence for each field that the chat template ignores.

    A message field is checked once per role, in the first conversation that has it: its text with the field
    is compared with the text without.
    """
    fields: dict[str, list[str]] = {}
    known = set[tuple[str, str]]()
    for record in records:
        for role, field in _stated(record):
            if (role, field) in known:
                continue
            known.add((role, field))
            with contextlib.suppress(ValueError):  # a field that the template needs, or a faulty message
                text = tokenizer.chat_text(record.chat_messages, **record.template)
                if text == _without(record, role, field, tokenizer):
                    of = f" of {role} messages" if role else ""
                    fields.setdefault(f"{field}{of}", []).append(f"line {record.line}")
    return [
        f"the chat template of {tokenizer.name!r} ignores {field}, first stated in {lines[0]}"
        for field, lines in fields.items()
    ]


def _stated(record: PromptRecord) -> Iterator[tuple[str, str]]:
    """Yield the fields of a chat with their message's role.

    The role is "" for the template's options.
    """
    for message in record.messages:
        yield from ((message.role, name) for name in message.fields)
    yield from (("", name) for name in record.template if name not in _OWN_OPTIONS)


def _without(record: PromptRecord, role: str, field: str, tokenizer: Tokenizer) -> str:
    """Return the text of a conversation without a field."""
    template = {name: value for name, value in record.template.items() if role or name != field}
    messages = [
        {name: value for name, value in message.items() if name != field or message["role"] != role}
        for message in record.chat_messages
    ]
    return tokenizer.chat_text(messages, **template)


_OWN_OPTIONS = ("add_generation_prompt", "continue_final_message")
"""Template options that transformers itself handles."""
