"""The prompts of a job as token ids: those of a batch file, or drawn at random for a job of lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import IntArray
from ...data.files.disk import InputError
from ...data.readers.openai_batch import CHAT, COMPLETIONS, PromptRecord
from ...data.workload import Workload
from .tokenizers import TemplateError, Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """
    The requests of a job with their token ids, in the job's order.

    Parameters
    ----------
    records
        As the batch file states them.
    tokens
        Token ids of each prompt.
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
        """Return the prompts of ``records`` as this tokenizer counts them."""
        return cls(tuple(records), tuple(encoded(records, tokenizer)))

    @classmethod
    def random(cls, workload: Workload, vocabulary: int, seed: int) -> Prompts:
        """Return random prompts of the workload's lengths, the same where its requests share them."""
        rng = np.random.default_rng(seed)
        drawn = [tuple(rng.integers(vocabulary, size=count).tolist()) for count in workload.input_tokens]
        first: dict[int, tuple[int, ...]] = {}
        for index in np.flatnonzero(workload.shared_tokens).tolist():
            shared, own = int(workload.shared_tokens[index]), drawn[index]
            source = first.setdefault(int(workload.group[index]), own)
            # Shared but for its last token, it is the same prompt.
            rest = source if len(own) == shared + 1 else own
            drawn[index] = source[:shared] + rest[shared : len(own)]
        tokens = tuple(drawn)
        records = tuple(
            PromptRecord(custom_id=str(name), url=COMPLETIONS, line=0, prompt=prompt, max_tokens=int(most))
            for name, prompt, most in zip(workload.ids, tokens, workload.output_tokens, strict=True)
        )
        return cls(records, tokens)


def encoded(records: Sequence[PromptRecord], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of each record's prompt."""
    for record in records:
        if record.url == CHAT:
            try:
                yield tuple(tokenizer.encode_chat(record.chat_messages, **record.template))
            except TemplateError as error:
                where = f"line {record.line}, field 'body.messages'"
                hint = "Write the conversation as the model expects it."
                raise InputError(str(error), where=where, hint=hint) from None
            except ValueError as error:
                where = f"line {record.line}, field 'body.chat_template_kwargs'"
                raise InputError(str(error), where=where, hint="Remove it.") from None
        elif isinstance(record.prompt, str):
            yield tuple(tokenizer.encode(record.prompt))
        else:
            yield tuple(record.prompt or ())
