"""What the tests of the tiers share: families, requests and schedules drawn at random, and what is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from batchbound.executor.running import RunningBatch
from batchbound.executor.tiny import FAMILIES

NOT_SLAB = {"gpt-neo": "index of a column"}
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
# XGLM's own masks overflow in float64.
SLAB = sorted(set(FAMILIES) - set(NOT_SLAB) - {"xglm"})
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


def run_at_random(batch: RunningBatch, requests: Sequence[Request], seed: int) -> list[list[int]]:
    """Serve requests on a schedule drawn at random; some are evicted, some move to the host and back."""
    rng = random.Random(seed)
    answers: list[list[int]] = [[] for _ in requests]
    waiting, free, running = list(range(len(requests))), list(range(batch.slots)), dict[int, int]()
    suspended: dict[int, Any] = {}
    while waiting or running:
        joining = [
            waiting.pop(0)
            for _ in range(min(len(waiting), len(free), rng.randint(0 if running else 1, batch.slots)))
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
        left = [requests[i][1] - len(answers[i]) for i in running.values()]
        tokens = batch.decode(rng.randint(0, min(left)))
        for slot, i in list(running.items()):
            answers[i] += tokens[:, slot].tolist()
            done = len(answers[i]) == requests[i][1]
            if done or rng.random() < 0.2:
                if not done and rng.random() < 0.6:
                    suspended[i] = batch.take(slot)
                else:
                    batch.release(slot)
                free.append(slot)
                del running[slot]
                if not done:
                    waiting.append(i)
    return answers
