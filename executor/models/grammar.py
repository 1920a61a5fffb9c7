"""Structured outputs: masks of the tokens allowed next."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.readers.sampling import Structure
from .tokenizers import ByteTokenizer, HubTokenizer, Tokenizer

if TYPE_CHECKING:
    import torch

_JSON: Any = {"whitespace_pattern": r"[\x20\x0A]{0,16}", "whitespace_flexible": True}
"""Options of JSON schemas, which limit white space."""


def require_grammar() -> None:
    """Raise ImportError with a hint if llguidance is missing."""
    if find_spec("llguidance") is None:
        raise ImportError("structured outputs need llguidance: in the clone, run `pip install '.[grammar]'`")


class Grammars:
    """Compiled structures of one tokenizer, each compiled once."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        require_grammar()
        self.ends = frozenset(ends)
        self._tokenizer = _guided(tokenizer, sorted(ends))
        self._compiled: dict[Structure, Any] = {}

    @property
    def vocabulary(self) -> int:
        """Number of tokens that masks are for."""
        return int(self._tokenizer.vocab_size)

    def matcher(self, structure: Structure) -> Any:
        """Return a fresh matcher; raise ValueError for an impossible structure."""
        if structure not in self._compiled:
            self._compiled[structure] = self._compile(structure)
        return self._compiled[structure].deep_copy()

    def _compile(self, structure: Structure) -> Any:
        from llguidance import LLMatcher

        if structure.kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(structure.text, overrides=_JSON)
        elif structure.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(structure.text)
        else:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(structure.text))
            grammar = LLMatcher.grammar_from_lark(f"start: {texts}")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            why = matcher.get_error().splitlines()[0]
            raise ValueError(f"{structure.field} cannot be compiled: {why}")
        return matcher


@dataclass(slots=True)
class _Progress:
    """Matcher of a completion (None after its end), and its tokens."""

    matcher: Any
    tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMasks:
    """Masks of a batch's requests; other rows are unchanged.

    A request is identified by its random stream. A token that is chosen again replaces the earlier one, so
    preempted requests, and repeated decode steps, find their own state.

    grammars: Compiled structures.
    structures: Structures by stream, at least one.
    begun: Earlier tokens of completions by stream.
    """

    grammars: Grammars
    structures: Mapping[int, Structure]
    begun: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    _running: dict[int, _Progress] = field(default_factory=dict, init=False, repr=False)

    def apply(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return logits without forbidden tokens, shape (rows, vocabulary)."""
        import torch

        places: list[int] = []
        masks: list[bytes] = []
        for row, (stream, index) in enumerate(zip(streams.tolist(), indices.tolist(), strict=True)):
            progress = self._at(stream, index)
            if progress is not None and progress.matcher is not None:
                places.append(row)
                masks.append(progress.matcher.compute_bitmask())
        if not places:
            return logits
        bits = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(places), -1)
        allowed = np.zeros((len(places), logits.shape[-1]), dtype=np.bool_)
        known = min(logits.shape[-1], self.grammars.vocabulary)
        allowed[:, :known] = np.unpackbits(bits, axis=1, count=known, bitorder="little")
        forbidden = torch.from_numpy(~allowed).to(logits.device)
        if len(places) == len(logits):
            return logits.masked_fill(forbidden, -torch.inf)
        masked = logits.clone()
        masked[places] = logits[places].masked_fill(forbidden, -torch.inf)
        return masked

    def note(self, chosen: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> None:
        """Advance each request by the token chosen for its row."""
        rows = zip(streams.tolist(), indices.tolist(), chosen.tolist(), strict=True)
        for stream, index, token in rows:
            progress = self._running.get(stream)
            if progress is None or progress.matcher is None or progress.tokens != index:
                continue
            progress.tokens += 1
            # A row without a request may choose any token.
            if token in self.grammars.ends or not progress.matcher.consume_token(token):
                progress.matcher = None

    def _at(self, stream: int, index: int) -> _Progress | None:
        """Return a request's state before a token, or None."""
        if stream not in self.structures:
            return None
        progress = self._running.get(stream)
        if progress is None or (index < progress.tokens and (progress.matcher is None or not index)):
            progress = self._begun(stream, index)
        elif index < progress.tokens:
            progress.matcher.rollback(progress.tokens - index)
            progress.tokens = index
        return progress

    def _begun(self, stream: int, index: int) -> _Progress:
        tokens = self.begun.get(stream, ())[:index]
        progress = _Progress(self.grammars.matcher(self.structures[stream]), index)
        if len(tokens) < index or not progress.matcher.consume_tokens(list(tokens)):
            raise ValueError(f"a completion continues after {index} tokens unknown to its structure")
        self._running[stream] = progress
        return progress


class _ByteVocabulary:
    """Byte tokenizer in llguidance's interface."""

    def __init__(self, end: int, vocabulary: int, bos: int) -> None:
        self.eos_token_id, self.bos_token_id = end, bos
        special = range(256, vocabulary)
        self.special_token_ids = list(special)
        self.tokens = [*(bytes([value]) for value in range(256)), *(f"<{k}>".encode() for k in special)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _guided(tokenizer: Tokenizer, ends: list[int]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    if not ends:
        raise ValueError("structured_outputs need an end token, and the model has none")
    if isinstance(tokenizer, ByteTokenizer):
        vocabulary = _ByteVocabulary(ends[0], tokenizer.vocab_size, tokenizer.bos_id)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=ends)
    if not (isinstance(tokenizer, HubTokenizer) and tokenizer.is_fast):
        raise ValueError(f"structured_outputs need a fast tokenizer, and {tokenizer.name!r} is none")
    return from_tokenizer(tokenizer.transformers, eos_token=ends)
