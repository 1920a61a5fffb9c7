"""Sampling of a request's completions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from numbers import Real
from operator import index
from typing import Any, Literal, get_args

import numpy as np

from ..workload import LONGEST

MOST_LOGPROBS = 20
"""Most alternatives returned with a token, OpenAI's limit."""

LogprobsMode = Literal["raw", "temperature", "processed"]
"""Distribution of log-probabilities.

``raw`` is the model's own, ``temperature`` the same after division by the temperature, as trainers compare,
and ``processed`` the one that tokens are drawn from: after edits of logits, temperature and truncation.
"""


StopFunction = Callable[[Sequence[int]], bool]
"""Function of a completion's tokens: True ends it after the last one."""

LogitsProcessor = Callable[[tuple[int, ...], Any], Any]
"""Function of a completion's tokens and the next one's logits, shape (vocabulary,), that returns logits."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure that a completion's text must have.

    kind: ``json`` for a value of a JSON schema, ``regex`` for a match, ``choice`` for one of several texts.
    text: The schema or the list of texts as JSON, or the regular expression.
    field: Field of a request that states it.
    """

    kind: Literal["json", "regex", "choice"]
    text: str
    field: str = field(default="structured_outputs", compare=False)

    @classmethod
    def of(cls, given: Any, field: str = "structured_outputs") -> Structure | None:
        """Return the structure that vLLM's ``structured_outputs`` states."""
        if given is None or isinstance(given, Structure):
            return given
        stated = {name: value for name, value in dict(given).items() if value not in (None, False)}
        if len(stated) != 1:
            raise TypeError
        name, value = next(iter(stated.items()))
        if name == "json_object" and value is True:
            return cls("json", '{"type": "object"}', field)
        if name == "json":
            value = json.loads(value) if isinstance(value, str) else value
            if isinstance(value, dict | bool):
                return cls("json", json.dumps(value), field)
        if name == "regex" and isinstance(value, str) and value:
            return cls("regex", value, field)
        if name == "choice" and not isinstance(value, str) and all(isinstance(one, str) for one in value):
            return cls("choice", json.dumps(list(value)), field)
        raise TypeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling of a request's completions, with the names of vLLM's ``SamplingParams``.

    Fields for several texts or tokens also accept a list, a single text, or biases by token.

    The logits are changed in transformers' order: ``logit_bias``, ``repetition_penalty``,
    ``frequency_penalty``, ``presence_penalty``, ``bad_words``, ``min_tokens``, ``logits_processor``, then
    ``temperature``, ``top_k``, ``top_p`` and ``min_p``.

    n: Independent completions of the prompt.
    temperature: Divisor of the logits; at 0 decoding is greedy without ``top_k``, ``top_p`` and ``min_p``.
    top_k: Keep only the ``top_k`` likeliest tokens; 0 or -1 keeps all.
    top_p: Keep the smallest set of likeliest tokens with a probability of ``top_p``.
    min_p: Keep tokens at least ``min_p`` times as likely as the likeliest.
    repetition_penalty: Divisor of positive logits, and factor of negative ones, of tokens in prompt or
        completion.
    presence_penalty: Number subtracted from the logit of each token in the completion.
    frequency_penalty: The same for each occurrence in the completion.
    logit_bias: Numbers to add to the logits, by token.
    bad_words: Forbidden texts, encoded as in vLLM with and without a leading space.
    seed: Seed of the random streams, in combination with the request. Without one, ``run`` takes 0, and each
        call of :meth:`LLM.generate` draws one.
    stop: Texts that end a completion.
    include_stop_str_in_output: Keep the text that ended a completion in it.
    stop_token_ids: Tokens that end a completion besides the model's own end tokens.
    min_tokens: Least tokens of a completion.
    ignore_eos: Treat the model's end tokens as ordinary tokens.
    logprobs: Number of likeliest tokens with log-probabilities, in addition to the chosen one; None for none.
    logprobs_mode: Distribution of the log-probabilities, a :data:`LogprobsMode`.
    structured_outputs: Structure of the text: ``{"json": SCHEMA}``, ``{"regex": PATTERN}``, ``{"choice":
        [TEXT, ...]}`` or ``{"json_object": True}``; needs the extra ``grammar``.
    stop_when: Function of a completion's tokens that returns True to end it; called after each token.
    logits_processor: Function of a completion's tokens and the next one's logits that returns other logits.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    structured_outputs: Structure | None = None
    stop_when: StopFunction | None = None
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        for name, (kind, what) in _KINDS.items():
            value = getattr(self, name)
            # Most fields have their defaults, so checking only the others is faster.
            if value is _USUAL[name]:
                continue
            try:
                object.__setattr__(self, name, kind(value))
            except (TypeError, ValueError):
                self._within(name, False, what)
        self._within("n", self.n >= 1, "be 1 or more")
        self._within("temperature", 0.0 <= self.temperature < math.inf, "be 0 or more and finite")
        self._within("top_k", self.top_k >= -1, "be 0 (off) or more")
        self._within("top_p", 0.0 < self.top_p <= 1.0, "lie in (0, 1]")
        self._within("min_p", 0.0 <= self.min_p <= 1.0, "lie in [0, 1]")
        self._within("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "be above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._within(name, -2.0 <= getattr(self, name) <= 2.0, "lie in [-2, 2]")
        self._within(
            "logit_bias", all(abs(bias) <= 100.0 for _, bias in self.logit_bias), "lie in [-100, 100]"
        )
        self._within("bad_words", all(word.strip() for word in self.bad_words), "hold a text each")
        self._within("stop", all(self.stop), "hold a text each")
        self._within("min_tokens", 0 <= self.min_tokens <= LONGEST, f"lie in [0, {LONGEST}]")
        if self.logprobs is not None:
            self._within("logprobs", 0 <= self.logprobs <= MOST_LOGPROBS, f"lie in [0, {MOST_LOGPROBS}]")
        structure = self.structured_outputs
        if structure is not None and (self.ignore_eos or self.min_tokens):
            other = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(f"{structure.field} must end where its text does: leave out {other}")
        modes = get_args(LogprobsMode)
        self._within("logprobs_mode", self.logprobs_mode in modes, f"be one of {', '.join(modes)}")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """True if logits are changed before the temperature applies."""
        return bool(
            self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    def _within(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{name} must {what}, got {getattr(self, name)!r}")


_OFF: Mapping[str, tuple[float, ...]] = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,)}
"""Fields for drawn tokens, with the values that switch them off."""


def refuse_unknown(function: str, stated: Iterable[str], arguments: Iterable[str] = ()) -> None:
    """Refuse names that are no fields of :class:`Sampling`, by TypeError.

    function: Function that the user called with them.
    arguments: Its other arguments, one of which may be meant.
    """
    known = [entry.name for entry in fields(Sampling)]
    wrong = next((name for name in stated if name not in known), None)
    if wrong is not None:
        near = get_close_matches(wrong, [*known, *arguments], n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {wrong!r}{meant}")


def refuse_unused(given: Mapping[str, Any], asked: Iterable[Sampling]) -> None:
    """Refuse drawing options with greedy decoding, by ValueError."""
    named = [name for name, off in _OFF.items() if given.get(name) not in (None, *off)]
    if named and all(one.greedy for one in asked):
        raise ValueError(f"{named[0]} has no effect at temperature 0, where the likeliest token is taken")


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return value


def _function(value: Any) -> Any:
    if value is not None and not callable(value):
        raise TypeError
    return value


def _texts(value: str | Iterable[Any]) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return texts


def _biases(value: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((_whole(token), _number(bias)) for token, bias in pairs)


_KINDS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), (_whole, "be a whole number")),
    **dict.fromkeys(
        ("logprobs", "seed"), (lambda value: None if value is None else _whole(value), "be a whole number")
    ),
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ),
        (_number, "be a number"),
    ),
    **dict.fromkeys(("stop", "bad_words"), (_texts, "hold texts")),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos"), (_flag, "be true or false")),
    **dict.fromkeys(("stop_when", "logits_processor"), (_function, "be a function")),
    "stop_token_ids": (lambda value: tuple(map(_whole, value)), "hold whole numbers"),
    "logit_bias": (_biases, "hold a number for each token"),
    "structured_outputs": (Structure.of, "hold a JSON schema, a regex or a choice of texts, and one alone"),
}
"""Converters of values, and names of the expected kind, by field."""

_USUAL: Mapping[str, Any] = {each.name: each.default for each in fields(Sampling)}
