"""Token ids of prompts, by the server that will compute them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...data.arrays import IntArray
from ...data.files.disk import InputError
from ...data.prefix_tree import PrefixTree
from ...data.readers.openai_batch import CHAT, COMPLETIONS
from ...data.readers.server_batch import ServerBatch, ServerRequest, encoded, prompt_ids
from .client import ServerClient

_LOG = logging.getLogger(__name__)

_PATH = "/tokenize"

_AT_ONCE = 32
"""Prompts that the server tokenizes at a time."""

_TORN = 4
"""Times that messages share what their tokens share, from which the template tears prompts apart."""

MOST_ASKED = 50_000
"""Most distinct prompts to ask a server about; a larger job takes minutes."""

_TEMPLATED = (
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
"""Fields of a chat request that change its prompt's tokens."""

_SALTS = ("cache_salt",)
"""Fields that keep equal tokens apart in a server's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptTokens:
    """Token ids of each request's prompt, and what keeps equal ones apart."""

    ids: list[IntArray]
    identities: list[Hashable]


async def prompt_tokens(client: ServerClient, batch: ServerBatch, model: str | None) -> PromptTokens | None:
    """Return the token ids of each request's prompt.

    Prompts given as token ids are taken as they are. Others are tokenized by the server, each distinct one
    once. Returns None for requests with several prompts or other endpoints, for too many distinct prompts,
    and if the server does not tokenize.

    model: Replaces each body's model; None leaves it.
    """
    if batch.several.any():
        return None
    asked: dict[bytes, int] = {}
    places, given, identities = list[int](), list[IntArray | None](), list[Hashable]()
    for request in batch:
        ids = _given(request)
        question = None if ids is not None else _question(request, model)
        if ids is None and question is None:
            return None
        given.append(ids)
        places.append(-1 if question is None else asked.setdefault(encoded(question), len(asked)))
        identities.append(_identity(request, model))
        if len(asked) > MOST_ASKED:
            return None
    answers = await _answers(client, list(asked))
    if answers is None:
        return None
    found = [answers[place] if ids is None else ids for ids, place in zip(given, places, strict=True)]
    return PromptTokens(found, identities)


def local_prompt_tokens(batch: ServerBatch, model: str) -> PromptTokens | None:
    """Return the token ids of each request's prompt by the tokenizer in a model's folder.

    They are those of a server of this model unless it has a template of its own. Returns None without a
    tokenizer, and if a prompt needs more than it.
    """
    if batch.several.any() or len(batch) > MOST_ASKED or not Path(model).is_dir():
        return None
    try:
        from ..models.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(model)
        ids = [prompt_ids(request, tokenizer) for request in batch]
    except (ImportError, InputError, ValueError) as error:
        # No tokenizer is needed: beginnings are then estimated.
        _LOG.info("%s does not tokenize these prompts: %s", model, error)
        return None
    known = [np.asarray(tokens, dtype=np.int64) for tokens in ids if tokens]
    if len(known) < len(batch):
        return None
    return PromptTokens(known, [_identity(request, model) for request in batch])


def torn_apart(guess: PrefixTree, prompts: PromptTokens) -> tuple[int, int, int] | None:
    """Return two requests whose messages begin alike, and the first token in which their prompts differ.

    Returns None unless the most that messages share is at least :data:`_TORN` times what the tokens share.

    guess: Tree of the messages' bytes, in estimated tokens.
    """
    if not len(guess.parent):
        return None
    node = int(np.argmax(guess.tokens * (guess.requests_below - 1)))
    below = (request for request in range(len(guess)) if _is_below(guess, request, node))
    one, other = next(below), next(below)
    if prompts.identities[one] != prompts.identities[other]:
        return None
    least = min(len(prompts.ids[one]), len(prompts.ids[other]))
    differ = np.flatnonzero(prompts.ids[one][:least] != prompts.ids[other][:least])
    place = int(differ[0]) if differ.size else least
    return (one, other, place) if place * _TORN < int(guess.through[node]) else None


def _is_below(tree: PrefixTree, request: int, node: int) -> bool:
    place = int(tree.leaf[request])
    while place > node:
        place = int(tree.parent[place])
    return place == node


async def _answers(client: ServerClient, bodies: list[bytes]) -> list[IntArray] | None:
    """Return the token ids of each body; None as soon as one has none."""
    answers: list[IntArray] = []
    for first in range(0, len(bodies), _AT_ONCE):
        replies = await asyncio.gather(
            *(client.ask(_PATH, body) for body in bodies[first : first + _AT_ONCE])
        )
        for reply in replies:
            tokens = reply.get("tokens") if isinstance(reply, Mapping) else None
            if not _is_ids(tokens):
                return None
            answers.append(np.array(tokens, dtype=np.int64))
    return answers


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def _given(request: ServerRequest) -> IntArray | None:
    """Return the token ids that a request states itself."""
    prompt = request.body.get("prompt")
    if request.url != COMPLETIONS or not _is_ids(prompt):
        return None
    return np.array(prompt, dtype=np.int64)


def _question(request: ServerRequest, model: str | None) -> dict[str, object] | None:
    """Return the body that asks for a prompt's tokens; None where there is none."""
    body = request.body
    named = model or body.get("model")
    if any(part.get("type") != "text" for part in _parts(body.get("messages"))):
        # Pictures keep prompts apart from their place on, which the token ids do not tell.
        return None
    question: dict[str, object] = {} if named is None else {"model": named}
    if request.url == COMPLETIONS and isinstance(body.get("prompt"), str):
        special = body.get("add_special_tokens", True)
        return question | {"prompt": body["prompt"], "add_special_tokens": special}
    if request.url == CHAT and isinstance(body.get("messages"), list):
        fields = {name: body[name] for name in _TEMPLATED if name in body}
        return question | {"messages": body["messages"]} | fields
    return None


def _identity(request: ServerRequest, model: str | None) -> Hashable:
    """Return what must agree, beside the tokens, for two prompts to share KV cache."""
    body = request.body
    salts = {name: body[name] for name in _SALTS if name in body}
    return encoded([str(model or body.get("model") or ""), salts], "sorted")


def _parts(messages: Any) -> list[Mapping[str, Any]]:
    """Return the parts of messages that are lists of parts."""
    contents = [one.get("content") for one in messages or () if isinstance(one, Mapping)]
    lists = [content for content in contents if isinstance(content, list)]
    return [part for content in lists for part in content if isinstance(part, Mapping)]
