"""What the tests of the tiers share: families, requests and schedules drawn at random, and what is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.models.tiny import FAMILIES

NOT_RAGGED = {
    "bloom": "do not call",
    "codegen": "do not call",
    "deepseek-v3": "latent attention",
    "falcon": "do not call",
    "falcon-alibi": "do not call",
    "gemma2": "scores are capped",
    "gpt-neo": "do not call",
    "gpt-oss": "sinks",
    "gptj": "do not call",
    "mpt": "do not call",
    "stablelm": "do not call",
    "xglm": "do not call",
}
RAGGED = sorted(set(FAMILIES) - set(NOT_RAGGED))
Request = tuple[list[int], int]
"""Token ids of a prompt, and the tokens to answer with."""


def draw_requests(count: int, seed: int, longest: int = 40, most: int = 24) -> list[Request]:
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
    rng = random.Random(seed)
    answers: list[list[int]] = [[] for _ in requests]
    waiting, free, running = list(range(len(requests))), list(range(batch.slots)), dict[int, int]()
    suspended: dict[int, Any] = {}
    room = batch.slots

    def left(i: int) -> int:
        ended = answers[i] and answers[i][-1] in until
        return 0 if ended else requests[i][1] - len(answers[i])

    def leave(slot: int, keep: bool) -> None:
        i = running.pop(slot)
        free.append(slot)
        if keep:
            suspended[i] = batch.take(slot)
        else:
            batch.release(slot)
        if left(i):
            waiting.append(i)

    while waiting or running:
        if rng.random() < 0.2:
            room = rng.randint(1, batch.slots)
        for slot in rng.sample(sorted(running), max(0, len(running) - room)):
            leave(slot, keep=True)
        joining = [
            waiting.pop(0)
            for _ in range(
                min(len(waiting), room - len(running), rng.randint(0 if running else 1, batch.slots))
            )
        ]
        rng.shuffle(free)
        for i in [i for i in joining if i in suspended]:
            slot = free.pop()
            batch.insert(slot, suspended.pop(i))
            running[slot] = i
            joining.remove(i)
        slots = [free.pop() for _ in joining]
        first = batch.prefill(
            slots,
            [requests[i][0] + answers[i] for i in joining],
            request_ids=[str(i) for i in joining],
            emitted=[len(answers[i]) for i in joining],
        )
        for slot, i, token in zip(slots, joining, first, strict=True):
            running[slot] = i
            answers[i].append(token)
        tokens = batch.decode(rng.randint(0, min(left(i) for i in running.values())), until=until)
        for slot, i in list(running.items()):
            answers[i] += tokens[:, slot].tolist()
            if not left(i):
                leave(slot, keep=False)
            elif rng.random() < 0.2:
                leave(slot, keep=rng.random() < 0.6)
    return answers
