"""Fields of a request's body: served, refused or ignored."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from ..files.disk import shown
from ..files.record import whole
from ..prompts.messages import FieldError
from ..workload import LONGEST
from .sampling import MOST_LOGPROBS, Sampling, Structure

MOST_SAMPLES = 16_384
"""Most completions of one request, as in vLLM."""

_READ_ELSEWHERE = ("messages", "prompt", "model", "max_tokens", "max_completion_tokens")

_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields for a provider's accounting."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "verbosity": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "detokenize": (True,),
    "logits_processors": ([],),
    "guided_grammar": (),
    "ebnf": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "chat_template": (),
    "documents": (),
    "mm_processor_kwargs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "request_id": (),
    "lora_request": (),
    "lora_path": (),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "do_sample": (),
    "num_beams": (1,),
}
"""Fields that are not served, with values that have no effect."""

TEMPLATE_FIELDS = ("tools", "documents", "add_generation_prompt", "continue_final_message")
"""Fields of a chat's body that its chat template uses under the same name."""


def asked_of(body: Mapping[str, Any], *, chat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a body's sampling fields and its template's options.

    A chat has template options, and ``logprobs`` has another meaning there. FieldError names a field that is
    unknown, cannot be served, or is out of its range.
    """
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if name in _SERVED:
            if value is not None:
                fields[name] = _SERVED[name](name, value)
        elif chat and name in TEMPLATE_FIELDS:
            continue
        elif name in _NEUTRAL:
            if value is not None and not any(
                value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]
            ):
                raise FieldError(name, f"{shown(value)} cannot be served", f"Remove {name}.")
        elif name not in _READ_ELSEWHERE + _WITHOUT_EFFECT and not (chat and name == "chat_template_kwargs"):
            raise FieldError(name, "is not a field that can be served", _did_you_mean(name))
    template = _template(body) if chat else {}
    _join_logprobs(fields, chat)
    _join_structures(fields)
    try:
        Sampling(**fields)
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        name = "top_logprobs" if chat and name == "logprobs" else name
        raise FieldError(name, str(error), "Correct it.") from None
    return fields, template


def _join_logprobs(asked: dict[str, Any], chat: bool) -> None:
    wanted, top = asked.pop("logprobs", None), asked.pop("top_logprobs", None)
    if not chat:
        if isinstance(wanted, bool) and wanted:
            raise FieldError("logprobs", "True is not a number", "Give a number of tokens, from 0.")
        if top:
            raise FieldError("top_logprobs", f"{top} is for chats", "Give logprobs the number.")
        wanted = None if wanted is False else wanted
        if wanted is not None:
            asked["logprobs"] = wanted
        return
    if wanted is not None and not isinstance(wanted, bool):
        raise FieldError("logprobs", f"{shown(wanted)} is not true or false", "Give top_logprobs a number.")
    if top and not wanted:
        raise FieldError("top_logprobs", f"{top} has no effect without logprobs", "Set logprobs to true.")
    if wanted:
        asked["logprobs"] = int(top or 0)


def _join_structures(asked: dict[str, Any]) -> None:
    structures = {name: asked.pop(name) for name in _STRUCTURES if name in asked}
    stated = [name for name, value in structures.items() if value is not None]
    if len(stated) > 1:
        raise FieldError(stated[1], f"contradicts {stated[0]}", "Give one of the two.")
    if stated:
        asked["structured_outputs"] = structures[stated[0]]


def _template(body: Mapping[str, Any]) -> dict[str, Any]:
    options = _template_kwargs(body.get("chat_template_kwargs"))
    for name in ("tools", "documents"):
        if body.get(name) not in (None, []):
            options[name] = _objects(name, body[name])
    for name in ("add_generation_prompt", "continue_final_message"):
        if body.get(name) is not None:
            options[name] = _flag(name, body[name])
    if options.get("continue_final_message"):
        if options.setdefault("add_generation_prompt", False):
            what = "True contradicts add_generation_prompt True"
            raise FieldError("continue_final_message", what, "Set add_generation_prompt to false.")
    else:
        # Both then state the default.
        options.pop("continue_final_message", None)
        if body.get("add_generation_prompt"):
            options.pop("add_generation_prompt")
    return options


def _objects(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise FieldError(name, f"{shown(value)} is not a list", "Give a list of objects.")
    for i, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise FieldError(f"{name}[{i}]", f"{shown(entry)} is not an object", "Give a list of objects.")
        function = entry.get("function", entry)
        if name == "tools" and not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            hint = 'Write it as {"type": "function", "function": {"name": ...}}.'
            raise FieldError(f"{name}[{i}]", f"{shown(entry)} is not a function with a name", hint)
    return value


def _template_kwargs(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    name, hint = "chat_template_kwargs", 'Give an object such as {"enable_thinking": false}.'
    if not isinstance(given, dict):
        raise FieldError(name, f"{shown(given)} is not an object", hint)
    taken = next((key for key in ("tokenize", "return_dict", "conversation", "tools") if key in given), None)
    if taken is not None:
        raise FieldError(f"{name}.{taken}", "cannot be served", "Remove it.")
    return dict(given)


def near_field(name: str, cutoff: float = 0.6) -> str | None:
    """Return the known field with nearly this name; None for a known name, or without one."""
    known = [*_SERVED, *_READ_ELSEWHERE, *_WITHOUT_EFFECT, "chat_template_kwargs", *_NEUTRAL]
    near = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else None


def _did_you_mean(name: str) -> str:
    near = near_field(name)
    return f"Did you mean {near}?" if near else "Remove it: it is not known."


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise FieldError(name, f"{shown(value)} is not a number", "Give a number.")
    return float(value)


def _whole(name: str, value: Any) -> int:
    number = whole(value)
    if number is None or abs(number) >= 2**63:
        what = "not a whole number" if number is None else "beyond 64 bits"
        raise FieldError(name, f"{shown(value)} is {what}", "Give a whole number of 64 bits.")
    return number


def _samples(name: str, value: Any) -> int:
    if not 1 <= _whole(name, value) <= MOST_SAMPLES:
        raise FieldError(name, f"{value} is not a number of completions", f"Give 1 to {MOST_SAMPLES:,}.")
    return int(value)


def _length(name: str, value: Any) -> int:
    if not 0 <= _whole(name, value) <= LONGEST:
        raise FieldError(name, f"{value} is not a number of tokens", f"Give 0 to {LONGEST}.")
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(name, f"{shown(value)} is not true or false", "Give true or false.")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in texts):
        raise FieldError(name, f"{shown(value)} is not text", "Give a text or a list of texts.")
    return tuple(texts)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(token) is int and 0 <= token <= LONGEST for token in value
    ):
        raise FieldError(name, f"{shown(value)} is not a list of token ids", "Give a list such as [2, 13].")
    return tuple(value)


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    hint = 'Give an object of token ids and numbers from -100 to 100, such as {"50256": -100}.'
    if not isinstance(value, dict):
        raise FieldError(name, f"{shown(value)} is not an object", hint)
    biases = []
    for token, bias in value.items():
        if not token.isdecimal():
            raise FieldError(f"{name}.{token}", "is not a token id", hint)
        biases.append((int(token), _number(f"{name}.{token}", bias)))
    return tuple(biases)


def _logprobs(name: str, value: Any) -> int | bool:
    if isinstance(value, bool):
        return value
    if not 0 <= _whole(name, value) <= MOST_LOGPROBS:
        raise FieldError(name, f"{value} is out of range", f"Give 0 to {MOST_LOGPROBS}.")
    return int(value)


def _response_format(name: str, value: Any) -> Structure | None:
    hint = 'Give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.of({"json_object": True}, name)
    if kind != "json_schema":
        raise FieldError(name, f"{shown(value)} cannot be served", hint)
    schema = value.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else None
    return _structure({"json": schema}, name, f"{name}.json_schema.schema", hint)


def _structured_outputs(name: str, value: Any) -> Structure | None:
    return _structure(value, name, name, 'Give {"json": SCHEMA}, {"regex": TEXT} or {"choice": [TEXT, ...]}.')


def _guided(kind: str) -> Callable[[str, Any], Structure | None]:
    """Return a reader of one kind of structure's field."""
    hint = {"json": "Give a JSON schema.", "regex": "Give a text.", "choice": "Give a list of texts."}[kind]
    return lambda name, value: _structure({kind: value}, name, name, hint)


def _structure(given: Any, name: str, field: str, hint: str) -> Structure | None:
    try:
        structure = Structure.of(given, name)
    except (TypeError, ValueError):
        shown_value = next(iter(given.values())) if isinstance(given, dict) and len(given) == 1 else given
        raise FieldError(field, f"{shown(shown_value)} cannot be served", hint) from None
    return structure


_STRUCTURES: Mapping[str, Callable[[str, Any], Structure | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _guided("json"),
    "guided_regex": _guided("regex"),
    "guided_choice": _guided("choice"),
    "json_schema": _guided("json"),
    "regex": _guided("regex"),
}
"""Fields that restrict a completion's text, of OpenAI, vLLM and SGLang."""

_SERVED: Mapping[str, Callable[[str, Any], Any]] = {
    "n": _samples,
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _bias,
    "bad_words": _texts,
    "seed": _whole,
    "stop": _texts,
    "include_stop_str_in_output": _flag,
    "stop_token_ids": _tokens,
    "min_tokens": _length,
    "ignore_eos": _flag,
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    **_STRUCTURES,
}
