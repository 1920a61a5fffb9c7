"""Text to token ids and back: a model's own tokenizer, or plain bytes for models without one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...data.files.disk import shown
from .source import ModelLoadError, first_line, refuse_missing, require_engine
from .wrapped import unwrapped

_BYTES = 256
_SPECIALS = ("<bos>", "<eos>", "<pad>")

Message = Mapping[str, str]
"""A chat message: ``role`` and ``content``."""


class TemplateError(ValueError):
    """A conversation that a chat template refuses, such as one with a system message."""


class Tokenizer(Protocol):
    """Tokenizer of a run."""

    @property
    def name(self) -> str:
        """Name that the user gave."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""

    def tokens_of(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, without special tokens."""

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the token ids of a conversation that the assistant is to completion."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""


class ByteTokenizer:
    """One token per UTF-8 byte, ids 0 to 255, then three special tokens; for models without a tokenizer."""

    name = "bytes"
    vocab_size = _BYTES + len(_SPECIALS)
    bos_id = _BYTES
    eos_ids = (_BYTES + 1,)

    def encode(self, text: str) -> list[int]:
        """Return a start token and the bytes of ``text``."""
        return [self.bos_id, *text.encode()]

    def tokens_of(self, text: str) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the tokens of the conversation written as lines."""
        _refuse_options(options, self.name)
        return self.encode(plain_chat(messages))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes among ``ids``; what is not UTF-8 becomes a replacement character."""
        return bytes(token for token in ids if token < _BYTES).decode(errors="replace")


class HubTokenizer:
    """A transformers tokenizer."""

    def __init__(self, name: str, tokenizer: Any, eos_ids: Sequence[int] = ()) -> None:
        self.name = name
        self._tokenizer = tokenizer
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.eos_ids = tuple(dict.fromkeys([*own, *eos_ids]))
        self.vocab_size = len(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, with the special tokens that the model expects around a prompt."""
        ids = [int(token) for token in self._tokenizer(text)["input_ids"]]
        if ids:
            return ids
        start = self._tokenizer.bos_token_id
        return [start if start is not None else (self.eos_ids or (0,))[0]]

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of ``text`` alone."""
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the tokens of the conversation by the tokenizer's chat template, or written as lines."""
        if not self._tokenizer.chat_template:
            _refuse_options(options, self.name)
            return self.encode(plain_chat(messages))
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                **{"add_generation_prompt": True, **options, "tokenize": False},
            )
        except Exception as error:  # whatever a template raises, of its own will or by a mistake in it
            raise TemplateError(
                f"the chat template of {self.name!r} refuses it: {first_line(error)}"
            ) from error
        # The template has written the special tokens already.
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _refuse_options(options: Mapping[str, Any], name: str) -> None:
    if options:
        told = ", ".join(sorted(options))
        raise ValueError(f"the tokenizer {name!r} has no chat template that could be told {told}")


def plain_chat(messages: Sequence[Message]) -> str:
    """Write a conversation as lines, for models without a chat template."""
    for message in messages:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise TemplateError(
                f"role and content must be texts where there is no chat template: {shown(message)}"
            )
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


def tokenizer_like(given: Any) -> Tokenizer:
    """Return a tokenizer as a run needs it: itself, or around one of transformers' own."""
    if hasattr(given, "encode_chat"):
        own: Tokenizer = given
        return own
    if not hasattr(given, "eos_token_id"):
        raise TypeError(f"tokenizer is {shown(given)}, no tokenizer of transformers'")
    return HubTokenizer(str(getattr(given, "name_or_path", "") or type(given).__name__), given)


def end_tokens(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a completion: the tokenizer's, and the model's generation settings'."""
    settings = getattr(unwrapped(model), "generation_config", None)
    declared = getattr(settings, "eos_token_id", None)
    own = [] if declared is None else np.ravel(declared).tolist()
    return frozenset(tokenizer.eos_ids) | {int(token) for token in own}


def load_tokenizer(spec: str) -> Tokenizer:
    """Load a tokenizer."""
    if spec == "bytes" or spec.startswith("tiny:"):
        return ByteTokenizer()
    require_engine()
    refuse_missing(spec)
    path = Path(spec)
    hint = "name a directory with tokenizer.json, or with vocab.json and merges.txt, or use 'bytes'"
    try:
        if path.is_dir() and _only_gpt2_files(path):
            from transformers import GPT2Tokenizer

            # AutoTokenizer would ask for a config.json as well.
            return HubTokenizer(spec, GPT2Tokenizer.from_pretrained(spec), _declared_eos(path))
        if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelLoadError(spec, "the directory has no tokenizer", hint)
        from transformers import AutoTokenizer

        return HubTokenizer(spec, AutoTokenizer.from_pretrained(spec), _declared_eos(path))
    except ModelLoadError:
        raise
    except Exception as error:  # whatever the hub client or a damaged file raises
        raise ModelLoadError(
            spec, first_line(error), hint if path.is_dir() else f"check the name and the network, {hint}"
        ) from error


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def _only_gpt2_files(path: Path) -> bool:
    needed = (path / "vocab.json").is_file() and (path / "merges.txt").is_file()
    return needed and not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _declared_eos(path: Path) -> list[int]:
    """Return the end tokens that a model directory's generation_config.json names: often several."""
    file = path / "generation_config.json"
    if not file.is_file():
        return []
    declared = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if declared is None:
        return []
    return [int(token) for token in (declared if isinstance(declared, list) else [declared])]
