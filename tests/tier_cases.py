"""What the tests of the tiers share: families, requests and schedules drawn at random, and what is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import transformers

from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tiny import FAMILIES

NOT_RAGGED = {
    "bloom": "do not call",
    "deepseek-v3": "latent attention",
    "falcon": "do not call",
    "falcon-alibi": "do not call",
    "gemma2": "scores are capped",
    "gpt-neo": "do not call",
    "gpt-oss": "sinks",
    "mpt": "do not call",
    "stablelm": "do not call",
    "xglm": "do not call",
}
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
    NOT_RAGGED |= dict.fromkeys(("codegen", "gptj"), "do not call")
RAGGED = sorted(set(FAMILIES) - set(NOT_RAGGED))
FAST = ("gemma3", "gpt2", "llama", "mixtral", "phi")
"""Families that stand for all in the fast tests: a window, learned positions, experts, parallel layers."""
Request = tuple[list[int], int]
"""Token ids of a prompt, and the tokens to answer with."""


def draw_requests(count: int, seed: int, longest: int = 40, most: int = 14) -> list[Request]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(256) for _ in range(rng.randint(1, longest))], rng.randint(1, most))
        for _ in range(count)
    ]


def generate_alone(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model.device)
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


@lru_cache(maxsize=2)
def _tiny(family: str) -> Any:
    return load_model(f"tiny:{family}", dtype="float64", device="cpu")


@cache
def _alone(family: str, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    return tuple(generate_alone(_tiny(family), prompt, tokens))


def answers_of_generate(family: str, requests: Sequence[Request]) -> list[list[int]]:
    """Return what ``generate`` makes of each request on the tiny model of a family, computed once."""
    return [list(_alone(family, tuple(prompt), tokens)) for prompt, tokens in requests]


def cut_short(answers: Sequence[list[int]]) -> tuple[frozenset[int], list[list[int]]]:
    """Return tokens that end two of the answers in the middle at the latest, and what all are up to them."""
    ends = frozenset(answer[len(answer) // 2] for answer in sorted(answers, key=len)[-2:])
    return ends, [
        answer[: next((at + 1 for at, token in enumerate(answer) if token in ends), None)]
        for answer in answers
    ]


def run_at_random(
    batch: RunningBatch, requests: Sequence[Request], seed: int, until: frozenset[int] = frozenset()
) -> list[list[int]]:
    """
    Serve requests on a schedule drawn at random.

    Some are evicted, some move to the host and back; now and then fewer rows may be in use, and more again.
    """
    run = _RandomRun(batch, requests, seed, until)
    while run.waiting or run.running:
        run.make_room()
        run.join()
        run.decode()
    return run.answers


class _RandomRun:
    """Requests on a batch, joining and leaving as a random generator has it."""

    def __init__(
        self, batch: RunningBatch, requests: Sequence[Request], seed: int, until: frozenset[int]
    ) -> None:
        self.rng = random.Random(seed)
        self.batch, self.requests, self.until, self.room = batch, requests, until, batch.slots
        self.answers: list[list[int]] = [[] for _ in requests]
        self.waiting, self.free = list(range(len(requests))), list(range(batch.slots))
        self.running: dict[int, int] = {}
        self.suspended: dict[int, Any] = {}

    def left(self, i: int) -> int:
        ended = self.answers[i] and self.answers[i][-1] in self.until
        return 0 if ended else self.requests[i][1] - len(self.answers[i])

    def leave(self, slot: int, keep: bool) -> None:
        i = self.running.pop(slot)
        self.free.append(slot)
        if keep:
            self.suspended[i] = self.batch.take(slot)
        else:
            self.batch.release(slot)
        if self.left(i):
            self.waiting.append(i)

    def make_room(self) -> None:
        if self.rng.random() < 0.2:
            self.room = self.rng.randint(1, self.batch.slots)
        for slot in self.rng.sample(sorted(self.running), max(0, len(self.running) - self.room)):
            self.leave(slot, keep=True)

    def join(self) -> None:
        most = self.rng.randint(0 if self.running else 1, self.batch.slots)
        count = min(len(self.waiting), self.room - len(self.running), most)
        joining = [self.waiting.pop(0) for _ in range(count)]
        self.rng.shuffle(self.free)
        for i in [i for i in joining if i in self.suspended]:
            slot = self.free.pop()
            self.batch.insert(slot, self.suspended.pop(i))
            self.running[slot] = i
            joining.remove(i)
        slots = [self.free.pop() for _ in joining]
        first = self.batch.prefill(
            slots,
            [self.requests[i][0] + self.answers[i] for i in joining],
            request_ids=[str(i) for i in joining],
            emitted=[len(self.answers[i]) for i in joining],
        )
        for slot, i, token in zip(slots, joining, first, strict=True):
            self.running[slot] = i
            self.answers[i].append(token)

    def decode(self) -> None:
        most = min(self.left(i) for i in self.running.values())
        tokens = self.batch.decode(self.rng.randint(0, most), until=self.until)
        for slot, i in list(self.running.items()):
            self.answers[i] += tokens[:, slot].tolist()
            if not self.left(i):
                self.leave(slot, keep=False)
            elif self.rng.random() < 0.2:
                self.leave(slot, keep=self.rng.random() < 0.6)
