"""Completion lengths of each prompt, kept from step to step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import IntArray
from ..files.disk import InputError, atomic_write
from ..files.jsonl import json_lines
from .group_lengths import GroupLengths

HISTORY_VERSION = 1

_KEPT = 16
"""Newest lengths kept for each prompt."""

_HINT = "Give a file that a rollout function or LengthHistory.save has written."


class LengthHistory:
    """History of a model's completion lengths by prompt.

    The expected length of a prompt's next completion is the mean of its earlier ones, shrunk towards that of
    all prompts; see :class:`.GroupLengths`. An unseen prompt has the mean of all prompts.
    """

    def __init__(self) -> None:
        self._lengths: dict[str, list[int]] = {}
        self._missed: list[float] = []

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def error(self) -> float | None:
        """Median relative error of expected lengths before each completion."""
        return float(np.median(self._missed)) if self._missed else None

    @property
    def tokens(self) -> list[int]:
        """Tokens of all completions."""
        return [tokens for lengths in self._lengths.values() for tokens in lengths]

    def expected(self, prompts: Sequence[Any]) -> IntArray:
        """Return each prompt's expected tokens, shape (prompts,)."""
        if not self._lengths:
            raise ValueError("the history holds no length yet")
        keys = [prompt_key(prompt) for prompt in prompts]
        number = {key: k for k, key in enumerate(dict.fromkeys((*self._lengths, *keys)))}
        observed = [(number[key], tokens) for key, lengths in self._lengths.items() for tokens in lengths]
        groups = np.array([*(k for k, _ in observed), *(number[key] for key in keys)], dtype=np.int64)
        usual = float(np.exp(np.mean(np.log([tokens for _, tokens in observed]))))
        estimate = GroupLengths(groups, np.full(len(groups), usual))
        for request, (_, tokens) in enumerate(observed):
            estimate.seen(request, tokens)
        predicted: IntArray = np.maximum(1, np.rint(estimate.expected()[len(observed) :])).astype(np.int64)
        return predicted

    def saw(self, completions: Iterable[tuple[Any, int]]) -> None:
        """Note the lengths of completions."""
        pairs = [(prompt_key(prompt), int(tokens)) for prompt, tokens in completions]
        if self._lengths and pairs:
            expected = self.expected([key for key, _ in pairs])
            had = np.array([tokens for _, tokens in pairs], dtype=np.float64)
            missed: list[float] = np.abs(expected / had - 1).tolist()
            self._missed = [*self._missed, *missed][-1000:]
        for key, tokens in pairs:
            # The newest prompts are last.
            lengths = self._lengths.pop(key, [])
            self._lengths[key] = [*lengths, tokens][-_KEPT:]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the history as JSON lines atomically."""
        header = {"batchbound_length_history": HISTORY_VERSION, "prompts": len(self), "missed": self._missed}
        with atomic_write(path) as stream:
            stream.write(json.dumps(header) + "\n")
            for key, lengths in self._lengths.items():
                stream.write(json.dumps({"prompt": key, "lengths": lengths}) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LengthHistory:
        """Return the history that :meth:`save` wrote."""
        rows = list(json_lines(path))
        if not rows or rows[0][1].get("batchbound_length_history") != HISTORY_VERSION:
            what = f"is not a history of lengths of version {HISTORY_VERSION}"
            raise InputError(what, file=path, hint=_HINT)
        (_, header), *lines = rows
        if header.get("prompts") != len(lines):
            raise InputError("the file ends before the history does", file=path, hint="Copy it whole.")
        missed = header.get("missed")
        if not isinstance(missed, list) or not all(type(value) is float and value >= 0 for value in missed):
            raise InputError("is no list of errors", file=path, where="line 1, field 'missed'", hint=_HINT)
        history = cls()
        history._missed = missed
        for number, line in lines:
            key, lengths = line.get("prompt"), line.get("lengths")
            if not isinstance(key, str) or key in history._lengths:
                where = f"line {number}, field 'prompt'"
                raise InputError(f"{key!r} names no prompt of its own", file=path, where=where, hint=_HINT)
            if (
                not isinstance(lengths, list)
                or not lengths
                or not all(type(value) is int and value >= 1 for value in lengths)
            ):
                where = f"line {number}, field 'lengths'"
                raise InputError("are no numbers of tokens", file=path, where=where, hint=_HINT)
            history._lengths[key] = lengths
        return history

    @classmethod
    def joined(cls, histories: Iterable[LengthHistory]) -> LengthHistory:
        """Return one history of all lengths, such as those of several processes."""
        whole = cls()
        for history in histories:
            for key, lengths in history._lengths.items():
                whole._lengths[key] = [*whole._lengths.get(key, []), *lengths]
        return whole

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> LengthHistory:
        """Return the history in a file, which may be missing."""
        return cls.load(path) if Path(path).exists() else cls()


def prompt_key(prompt: Any) -> str:
    """Return the digest of a prompt's text, tokens or messages."""
    if isinstance(prompt, _Key):
        return prompt
    if isinstance(prompt, str):
        content: object = prompt
    elif any(isinstance(message, Mapping) for message in prompt):
        content = [
            {name: message[name] for name in ("role", "content") if name in message} for message in prompt
        ]
    else:
        content = [int(token) for token in prompt]
    return _Key(hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest())


class _Key(str):
    """Digest of a prompt, as its own type."""

    __slots__ = ()
