"""Reader of the OpenAI batch format."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..files.disk import InputError, shown
from ..files.record import whole
from ..prompts.columns import PromptColumns
from ..prompts.messages import FieldError, Message, read_messages
from ..prompts.table import batch_entries
from ..workload import LONGEST
from .request_fields import asked_of
from .sampling import Sampling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_OLD_CAP, _NEW_CAP = "max_tokens", "max_completion_tokens"


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One line of a batch file.

    custom_id: User's name of the request, unique in its file.
    url: :data:`CHAT` or :data:`COMPLETIONS`.
    line: Number of its line, from one.
    messages: Conversation of a chat request; empty for a completion.
    prompt: Text or token ids of a completion request; None for a chat.
    prompts: All prompts of a completion request with several; else empty.
    max_tokens: Most tokens of the completion (``max_completion_tokens`` or ``max_tokens``), or None.
    max_tokens_field: Name of the field with ``max_tokens``.
    output_tokens: Length of the completion if ``output_tokens`` next to ``body`` states it, or None.
    each_output_tokens: Lengths of its completions if the line states a list of ``n``; else empty.
    model: Model in the request's body, or None.
    asked: Sampling fields of the body, by the names of :class:`~.sampling.Sampling`.
    template: Options of a chat's template: ``chat_template_kwargs``, ``tools``, ``documents`` and the like.
    sample: Index of this completion among those of the request; see :func:`each_sample`.
    """

    custom_id: str
    url: str
    line: int
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    max_tokens_field: str = _OLD_CAP
    output_tokens: int | None = None
    model: str | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    each_output_tokens: tuple[int, ...] = ()
    sample: int = 0
    prompts: tuple[str | tuple[int, ...], ...] = ()

    @property
    def samples(self) -> int:
        """Completions of each prompt (``n``)."""
        asked: int = self.asked.get("n", 1)
        return asked

    @property
    def repeats(self) -> bool:
        """True if its completion is greedy or has a seed, so that its length repeats."""
        return not self.sampling().temperature or "seed" in self.asked

    @property
    def completions(self) -> int:
        """Completions of the request: ``n`` of each prompt."""
        return self.samples * max(1, len(self.prompts))

    @property
    def name(self) -> str:
        """Request's name, with a number if it has several completions."""
        return self.custom_id if self.completions == 1 else f"{self.custom_id}#{self.sample}"

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """Conversation as a tokenizer's chat template takes it."""
        return [message.to_json() for message in self.messages]

    @property
    def says(self) -> str | tuple[int, ...] | list[dict[str, Any]]:
        """Prompt as given: text, token ids, or messages."""
        if self.prompt is not None:
            return self.prompt
        return self.chat_messages

    def sampling(self, **given: Any) -> Sampling:
        """Return the request's sampling; values given here come first."""
        return Sampling(**{**self.asked, **given})


def read_batch(
    path: str | os.PathLike[str], columns: PromptColumns | None = None
) -> tuple[PromptRecord, ...]:
    """Read the requests of a batch file or a table.

    A line may leave out ``method`` and ``url``; then ``messages`` or ``prompt`` decides. InputError names the
    line, the field, the value and the hint.
    """
    records = [
        (number, _Line(path, number, entry).record()) for number, entry in batch_entries(path, columns)
    ]
    refuse_repeated(((number, record.custom_id) for number, record in records), path)
    return tuple(record for _, record in records)


def refuse_repeated(ids: Iterable[tuple[int, str]], path: str | os.PathLike[str]) -> None:
    """Refuse a ``custom_id`` that names two requests."""
    line_of: dict[str, int] = {}
    for number, custom_id in ids:
        first = line_of.setdefault(custom_id, number)
        if first != number:
            raise repeated_name(custom_id, first, number, path)


def repeated_name(custom_id: str, first: int, number: int, path: str | os.PathLike[str] | None) -> InputError:
    """Return the error for a ``custom_id`` of two lines."""
    return InputError(
        f"{custom_id!r} already names the request of line {first}",
        file=path,
        where=f"line {number}, field 'custom_id'",
        hint="Give every request its own custom_id.",
    )


def each_sample(
    records: Sequence[PromptRecord], path: str | os.PathLike[str] | None = None
) -> tuple[PromptRecord, ...]:
    """Return a record for each completion; raise InputError for equal names."""
    if all(record.completions == 1 for record in records):
        return tuple(records)
    answers = [answer for record in records for answer in _each(record)]
    line_of: dict[str, int] = {}
    for answer in answers:
        if answer.name in line_of:
            raise InputError(
                f"{answer.name!r} also names one of the completions of line {line_of[answer.name]}",
                file=path,
                where=f"line {answer.line}, field 'custom_id'",
                hint="Choose another custom_id.",
            )
        line_of[answer.name] = answer.line
    return tuple(answers)


def _each(record: PromptRecord) -> Iterator[PromptRecord]:
    lengths = record.each_output_tokens or (record.output_tokens,) * record.completions
    for sample, tokens in enumerate(lengths):
        prompt = record.prompts[sample // record.samples] if record.prompts else record.prompt
        yield replace(record, sample=sample, output_tokens=tokens, prompt=prompt)


def model_names(spec: str) -> tuple[str, ...]:
    """Return the names that requests may use for a loaded model."""
    last = os.path.basename(os.path.normpath(spec)).removeprefix("tiny:")
    return tuple(dict.fromkeys((spec, last)))


def other_model(records: Sequence[PromptRecord], served: Sequence[str]) -> PromptRecord | None:
    """Return the first request for another model, or None."""
    return next((one for one in records if one.model is not None and one.model not in served), None)


def refuse_other_models(
    records: Sequence[PromptRecord], served: Sequence[str], path: str | os.PathLike[str] | None = None
) -> None:
    """Raise InputError at the first request for another model."""
    other = other_model(records, served)
    if other is None:
        return
    hint = "Correct it, leave it out, or complete every request by the loaded model with --any-model."
    raise InputError(
        f"{shown(other.model)} is not loaded; served: {', '.join(map(repr, served))}",
        file=path,
        where=f"line {other.line}, field 'body.model'",
        hint=hint,
    )


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Line of a batch file, with its place for error messages."""

    path: str | os.PathLike[str]
    number: int

    def error(self, field: str, message: str, hint: str) -> InputError:
        """Return the error of a field of the line."""
        return InputError(message, file=self.path, where=f"line {self.number}, field '{field}'", hint=hint)

    def named_body(self, entry: Mapping[str, object]) -> tuple[str, dict[str, object]]:
        """Return the name and the body of a line."""
        custom_id, body, method = entry.get("custom_id"), entry.get("body"), entry.get("method", "POST")
        if custom_id is None:
            raise self.error("custom_id", "is missing", "Give every request its own custom_id.")
        if not isinstance(custom_id, str) or not custom_id.strip():
            message = f"{custom_id!r} is not a name" if custom_id == "" else f"{custom_id!r} is not a text"
            raise self.error("custom_id", message, "Give every request its own custom_id, in quotes.")
        if "\0" in custom_id:
            raise self.error("custom_id", f"{shown(custom_id)} holds a zero character", "Leave it out.")
        if "response" in entry and "body" not in entry:
            hint = (
                "Give the batch input file; completions are a source of lengths: --lengths completions:FILE."
            )
            raise self.error("response", "is a completion, not a request", hint)
        if not isinstance(body, dict):
            what = "is missing" if body is None else f"{shown(body)} is not an object"
            raise self.error("body", what, "Put messages or prompt into a body object.")
        if method != "POST":
            raise self.error("method", f"{shown(method)} is not POST", "Write POST, or leave it out.")
        return custom_id, body

    def url(self, given: object, body: Mapping[str, object]) -> str:
        """Return the endpoint of a line, by default from ``messages`` or ``prompt``."""
        needed = {CHAT: "messages", COMPLETIONS: "prompt"}
        if given is None:
            given = next((url for url, field in needed.items() if field in body), None)
            if given is None:
                raise self.error("body", "has neither messages nor prompt", "Give one of them.")
        if not isinstance(given, str) or given not in needed:
            hint = f"Use {CHAT} or {COMPLETIONS}, which are served."
            raise self.error("url", f"{shown(given)} is not an endpoint that generates text here", hint)
        if needed[given] not in body:
            raise self.error(f"body.{needed[given]}", "is missing", f"{given} needs {needed[given]}.")
        return given


@dataclass(frozen=True, slots=True)
class _Line(BatchLine):
    entry: dict[str, object]

    def record(self) -> PromptRecord:
        entry = self.entry
        custom_id, body = self.named_body(entry)
        url = self.url(entry.get("url"), body)
        try:
            asked, template = asked_of(body, chat=url == CHAT)
            messages = read_messages(body["messages"], "messages") if url == CHAT else ()
        except FieldError as error:
            raise self.error(f"body.{error.field}", error.reason, error.hint) from None
        self.check_last(messages, template)
        prompts = self.prompts(body) if url == COMPLETIONS else (None,)
        pinned = self.each_output_tokens(asked.get("n", 1) * len(prompts))
        return PromptRecord(
            custom_id=custom_id,
            url=url,
            line=self.number,
            messages=messages,
            prompt=prompts[0],
            prompts=prompts if len(prompts) > 1 else (),
            max_tokens=self.max_tokens(body),
            max_tokens_field=_NEW_CAP if body.get(_NEW_CAP) is not None else _OLD_CAP,
            output_tokens=pinned[0] if pinned else self.tokens(entry, "output_tokens", ""),
            model=self.text(body, "model"),
            asked=asked,
            template=template,
            each_output_tokens=pinned,
        )

    def check_last(self, messages: Sequence[Message], template: Mapping[str, Any]) -> None:
        """Raise InputError if the last message does not fit the template."""
        continued = template.get("continue_final_message", False)
        if not messages or continued == (messages[-1].role == "assistant"):
            return
        if continued:
            what = f"True, but the last message is of the {messages[-1].role}"
            raise self.error("body.continue_final_message", what, "Leave it out.")
        hint = (
            "Set continue_final_message to true to continue it, or remove it; of a table,"
            " --drop-last-assistant removes it in every row."
        )
        field = f"body.messages[{len(messages) - 1}]"
        raise self.error(field, "the last message is the assistant's", hint)

    def prompts(self, body: dict[str, object]) -> tuple[str | tuple[int, ...], ...]:
        given = body["prompt"]
        if isinstance(given, list) and given and all(isinstance(one, str | list) for one in given):
            return tuple(self.prompt(one, f"body.prompt[{k}]") for k, one in enumerate(given))
        return (self.prompt(given, "body.prompt"),)

    def prompt(self, given: object, field: str) -> str | tuple[int, ...]:
        if isinstance(given, str) and given:
            return given
        if (
            isinstance(given, list)
            and given
            and all(type(one) is int and 0 <= one <= LONGEST for one in given)
        ):
            return tuple(given)
        hint = "Give a text, a list of token ids, or a list of several of one kind."
        raise self.error(field, f"{shown(given)} is not a prompt", hint)

    def max_tokens(self, body: dict[str, object]) -> int | None:
        old, new = (self.tokens(body, name, "body.") for name in (_OLD_CAP, _NEW_CAP))
        if old is not None and new is not None and old != new:
            message = f"{new} contradicts max_tokens {old}"
            raise self.error("body.max_completion_tokens", message, "Give one of the two.")
        return old if new is None else new

    def each_output_tokens(self, completions: int) -> tuple[int, ...]:
        given, name = self.entry.get("output_tokens"), "output_tokens"
        if not isinstance(given, list):
            return ()
        if len(given) != completions:
            what = f"{len(given)} lengths for the {completions} completions that the line asks for"
            raise self.error(name, what, "Give one number, or one for each completion.")
        lengths = []
        for k, one in enumerate(given):
            tokens = self.tokens({f"{name}[{k}]": one}, f"{name}[{k}]", "")
            if tokens is None:
                raise self.error(f"{name}[{k}]", "is missing", "Give each completion its length.")
            lengths.append(tokens)
        return tuple(lengths)

    def tokens(self, values: dict[str, object], name: str, prefix: str) -> int | None:
        value = values.get(name)
        if value is None:
            return None
        field, hint, number = prefix + name, f"Give a whole number from 1 to {LONGEST}.", whole(value)
        if number is None:
            raise self.error(field, f"{shown(value)} is not a whole number", hint)
        if not 1 <= number <= LONGEST:
            what = "less than one token" if number < 1 else "beyond any model"
            raise self.error(field, f"{shown(value)} is {what}", hint)
        return number

    def text(self, body: dict[str, object], name: str) -> str | None:
        value = body.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.error(f"body.{name}", f"{shown(value)} is not text", f"Give {name} in quotes.")
