"""Tokenizers: a model's own, or plain bytes for models without one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...data.files.disk import shown
from .source import ModelLoadError, first_line, refuse_missing, require_engine
from .wrapped import unwrapped

_BYTES = 256
_SPECIALS = ("<bos>", "<eos>", "<pad>")

Message = Mapping[str, Any]
"""Chat message: ``role``, ``content``, and further fields."""


class TemplateError(ValueError):
    """Error of a conversation that a chat template refuses."""


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
        """Return a conversation's token ids, by the chat template.

        ``options`` go to the chat template, ``tools`` among them. TemplateError if it refuses the
        conversation, another ValueError if there is no template that takes options.
        """

    def chat_text(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of a conversation; errors as in :meth:`encode_chat`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes, for models without one.

    Ids 0 to 255 are bytes; three special tokens follow.
    """

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
        """Return the tokens of the conversation, written as lines."""
        return self.encode(self.chat_text(messages, **options))

    def chat_text(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the conversation written as lines."""
        return plain_chat(messages, _plain_options(options, self.name))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; invalid ones are replaced."""
        return bytes(token for token in ids if token < _BYTES).decode(errors="replace")


class HubTokenizer:
    """A transformers tokenizer."""

    def __init__(self, name: str, tokenizer: Any, eos_ids: Sequence[int] = ()) -> None:
        self.name = name
        self._tokenizer = tokenizer
        end_tokens = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.eos_ids = tuple(dict.fromkeys([*end_tokens, *eos_ids]))
        self.vocab_size = len(tokenizer)

    @property
    def transformers(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    @property
    def is_fast(self) -> bool:
        """True for a tokenizer of the Rust library."""
        return bool(getattr(self._tokenizer, "is_fast", False))

    @property
    def has_template(self) -> bool:
        """True if a chat template writes conversations."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Return a prompt's tokens, with special tokens around it.

        A text that begins with the start token, as chat templates write it, gets no second one.
        """
        ids = [int(token) for token in self._tokenizer(text)["input_ids"]]
        start = self._tokenizer.bos_token_id
        if ids:
            twice = start is not None and ids[:2] == [start, start]
            return ids[1:] if twice and text.startswith(self._tokenizer.bos_token) else ids
        return [start if start is not None else (self.eos_ids or (0,))[0]]

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of ``text`` alone."""
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return a conversation's tokens, by its chat template or as lines."""
        text = self.chat_text(messages, **options)
        if not self._tokenizer.chat_template:
            return self.encode(text)
        # The template has written the special tokens already.
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def chat_text(self, messages: Sequence[Message], **options: Any) -> str:
        """Return a conversation's text, by its chat template or as lines."""
        if not self._tokenizer.chat_template:
            return plain_chat(messages, _plain_options(options, self.name))
        if not self._takes_parts:
            messages = [{**message, "content": joined_parts(message.get("content"))} for message in messages]
        refused: TemplateError | None = None
        for form in _forms(messages):
            try:
                text = self._rendered(form, options)
            except TemplateError as error:
                refused = refused or error
                continue
            # A template that writes a missing content as a word takes an empty text.
            emptied = [{**turn, "content": turn.get("content") or ""} for turn in form]
            if text.count("None") and emptied != form:
                with contextlib.suppress(TemplateError):
                    rendered = self._rendered(emptied, options)
                    text = rendered if rendered.count("None") < text.count("None") else text
            return text
        assert refused is not None
        raise refused

    @functools.cached_property
    def _takes_parts(self) -> bool:
        probe = "a part of a message"
        try:
            text = self._rendered([{"role": "user", "content": [{"type": "text", "text": probe}]}], {})
        except TemplateError:
            return False
        return probe in text and "'type'" not in text and '"type"' not in text

    def _rendered(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                **{"add_generation_prompt": True, **options, "tokenize": False},
            )
        except Exception as error:  # whatever a template raises, of its own will or by a mistake in it
            raise TemplateError(
                f"the chat template of {self.name!r} refuses it: {first_line(error)}"
            ) from error
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def joined_parts(content: Any) -> Any:
    """Join a content's text parts by line breaks."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "\n".join(str(part["text"]) for part in content)
    return content


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation in the forms that chat templates expect.

    Arguments of tool calls are objects, as transformers documents them, or the JSON text that the API has;
    the content of a message that only calls tools is null or empty.
    """
    parsed = [_with_parsed_arguments(message) for message in messages]
    emptied = [
        {**turn, "content": "" if turn.get("content") is None else turn["content"]} for turn in messages
    ]
    yield parsed
    if parsed == list(messages) == emptied:
        return
    yield [_with_parsed_arguments(message) for message in emptied]
    yield list(messages)
    yield list(emptied)


def _with_parsed_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _plain_options(options: Mapping[str, Any], name: str) -> str:
    """Return the ending of a conversation without a template.

    Raises ValueError if an option needs a template.
    """
    stated = sorted(set(options) - {"add_generation_prompt", "continue_final_message"})
    if stated:
        raise ValueError(f"the tokenizer {name!r} has no chat template that takes {', '.join(stated)}")
    if options.get("continue_final_message"):
        return "continue"
    return "prompt" if options.get("add_generation_prompt", True) else ""


def plain_chat(messages: Sequence[Message], ending: str = "prompt") -> str:
    """Return a conversation as lines ``role: content``.

    ``ending`` is ``prompt`` for a last line ``assistant:``, ``continue`` to leave the last line open, or
    empty. TemplateError if a message has no text.
    """
    messages = [{**message, "content": joined_parts(message.get("content"))} for message in messages]
    for message in messages:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise TemplateError(
                f"role and content must be texts where there is no chat template: {shown(message)}"
            )
    lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return lines[:-1] if ending == "continue" else lines + "assistant:" * (ending == "prompt")


def tokenizer_like(given: Any) -> Tokenizer:
    """Return a tokenizer for a run, wrapped if needed."""
    if hasattr(given, "encode_chat"):
        own: Tokenizer = given
        return own
    if not hasattr(given, "eos_token_id"):
        raise TypeError(f"tokenizer is {shown(given)}, no tokenizer of transformers'")
    return HubTokenizer(str(getattr(given, "name_or_path", "") or type(given).__name__), given)


def end_tokens(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a completion, by tokenizer and model."""
    settings = getattr(unwrapped(model), "generation_config", None)
    declared = getattr(settings, "eos_token_id", None)
    tokens = [] if declared is None else np.ravel(declared).tolist()
    return frozenset(tokenizer.eos_ids) | {int(token) for token in tokens}


def load_tokenizer(spec: str) -> Tokenizer:
    """Load a tokenizer."""
    if spec == "bytes" or spec.startswith("tiny:"):
        return ByteTokenizer()
    require_engine(weights=False)
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
        return HubTokenizer(spec, _auto_class(path).from_pretrained(spec), _declared_eos(path))
    except ModelLoadError:
        raise
    except Exception as error:  # whatever the hub client or a damaged file raises
        raise ModelLoadError(
            spec, first_line(error), hint if path.is_dir() else f"check the name and the network, {hint}"
        ) from error


def has_chat_template(spec: str) -> bool:
    """Return whether a tokenizer writes conversations by a template of its own."""
    return isinstance(tokenizer := load_tokenizer(spec), HubTokenizer) and tokenizer.has_template


def counts_alike(one: str, other: str) -> bool:
    """Return whether two names stand for one tokenizer, by name or by files."""
    if one == other or all(name == "bytes" or name.startswith("tiny:") for name in (one, other)):
        return True
    folders = Path(one), Path(other)
    if not all(folder.is_dir() for folder in folders):
        return False
    return os.path.samefile(*folders) or _files_of(folders[0]) == _files_of(folders[1])


def _files_of(folder: Path) -> list[bytes | object]:
    """Return what decides the tokens of a text or conversation."""
    files = [folder / name for name in (*_TOKENIZER_FILES, "merges.txt", "chat_template.jinja")]
    settings = folder / "tokenizer_config.json"
    files.remove(settings)
    template = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        template = json.loads(settings.read_bytes()).get("chat_template")
    return [template, *(file.read_bytes() if file.is_file() else None for file in files)]


def _auto_class(path: Path) -> Any:
    """Return the class that loads a tokenizer without torch if possible."""
    settings, file = path / "tokenizer_config.json", path / "tokenizer.json"
    if settings.is_file() and file.is_file():
        stated = json.loads(settings.read_text(encoding="utf-8"))
        if stated.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in stated:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that add nothing to tokenizer.json."""

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
    file = path / "generation_config.json"
    if not file.is_file():
        return []
    declared = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if declared is None:
        return []
    return [int(token) for token in (declared if isinstance(declared, list) else [declared])]
