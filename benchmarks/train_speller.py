"""
Train ``tiny:speller``, the model of ``batchbound demo``: what it writes is readable, and right or wrong.

A Llama of 190 thousand weights over bytes. Its text is made here: seven kinds of prompts (spell a number,
reverse a word, say a word so many times, ...) with one right completion each, of 1 to 90 tokens and an end
token. A tenth of the prompts, by checksum, is never trained on: the bundled prompts are drawn from that
tenth, and so are those of the score.

    python benchmarks/train_speller.py -o executor/models/speller.safetensors

takes some seventeen CPU minutes, and made the weights that come with the package. ``--score`` scores those,
and ``--prompts data/bundled/prompts.jsonl`` writes the bundled prompts anew.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import string
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ONES_TEXT = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen"""
TENS_TEXT = "zero ten twenty thirty forty fifty sixty seventy eighty ninety"
WORDS_TEXT = """apple banana cherry lemon melon orange papaya plum tomato carrot garden river mountain island
ocean desert forest meadow glacier valley winter summer autumn spring morning evening tiger
zebra rabbit salmon falcon beetle spider dolphin monkey violin trumpet guitar piano drum
copper silver marble window ladder hammer pencil lantern planet comet saturn jupiter engine
rocket bridge castle harbor market doctor sailor painter"""
UNSEEN_TEXT = """almond anchor basket blanket bottle bucket button candle carpet cellar chimney circle cottage
cradle curtain donkey drawer feather fiddle finger flower fossil funnel galaxy gravel harvest
helmet hollow insect island jacket jungle kernel kettle kitten lagoon leather legend lizard
locker magnet mantle meteor mirror mitten needle nutmeg oyster parrot pebble pepper pillow
pocket pumpkin puzzle quartz raccoon ribbon saddle shadow shovel signal sister sparrow stable
statue sunset tablet tailor temple thunder ticket timber tunnel turtle velvet walnut whistle
willow wizard yellow zipper"""
"""Real words that training never draws from a list: the bundled prompts' words."""

ONES, TENS, WORDS, UNSEEN = (text.split() for text in (ONES_TEXT, TENS_TEXT, WORDS_TEXT, UNSEEN_TEXT))


def in_words(number: int) -> str:
    """Spell a number below a million."""
    if number < 20:
        return ONES[number]
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            return f"{in_words(number // size)} {name}" + (f" {in_words(rest)}" if rest else "")
    return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")


RULES: dict[str, Callable[..., str]] = {
    r"Is (\d+) even\?": lambda number: "no" if int(number) % 2 else "yes",
    r"What is the last letter of (\w+)\?": lambda word: word[-1],
    r"Spell (\d+)\.": lambda number: in_words(int(number)),
    r"Reverse (\w+)\.": lambda word: word[::-1],
    r"Spell (\w+) with hyphens\.": lambda word: "-".join(word),
    r"Say (\w+) (\d) times\.": lambda word, times: " ".join([word] * int(times)),
    r"Letters from (\w) to (\w)\.": lambda first, last: " ".join(
        chr(code) for code in range(ord(first), ord(last) + 1)
    ),
}
"""A kind of prompt, and its right completion."""


def right_answer(prompt: str) -> str:
    """
    Return the right completion of a prompt.

    Raises
    ------
    ValueError
        If it is of no kind that the model is trained for.
    """
    for pattern, rule in RULES.items():
        found = re.fullmatch(pattern, prompt)
        if found:
            return rule(*found.groups())
    raise ValueError(f"not a prompt of the speller: {prompt!r}")


def drawn_word(rng: np.random.Generator, *, unseen: bool = False) -> str:
    """Return a word, or letters that are none; or a word that training draws from no list."""
    if unseen:
        return str(rng.choice(UNSEEN))
    if rng.random() < 0.2:
        return str(rng.choice(WORDS))
    return "".join(rng.choice(list(string.ascii_lowercase), int(rng.integers(3, 10))))


SHARES = (0.03, 0.03, 0.34, 0.2, 0.1, 0.22, 0.08)
"""Of the kinds, in the order of the rules."""


def drawn_prompt(rng: np.random.Generator, kind: int | None = None, *, unseen: bool = False) -> str:
    """Return a prompt at random, of one kind where it is given."""
    kind = int(rng.choice(len(SHARES), p=SHARES)) if kind is None else kind
    if kind in (0, 2):
        number = int(rng.integers(10 ** int(rng.integers(1, 5))))
        return f"Is {number} even?" if kind == 0 else f"Spell {number}."
    if kind in (1, 3, 4):
        word = drawn_word(rng, unseen=unseen)
        return (f"What is the last letter of {word}?", f"Reverse {word}.", f"Spell {word} with hyphens.")[
            (1, 3, 4).index(kind)
        ]
    if kind == 5:
        return f"Say {drawn_word(rng, unseen=unseen)} {int(rng.integers(2, 10))} times."
    first, last = sorted(rng.choice(26, 2, replace=False).tolist())
    return f"Letters from {chr(97 + first)} to {chr(97 + last)}."


def is_held_out(prompt: str) -> bool:
    """Return whether a prompt is in the tenth that is never trained on; numbers below a hundred all are."""
    return not re.fullmatch(r"Spell \d\d?\.", prompt) and zlib.crc32(prompt.encode()) % 10 == 0


def draw(rng: np.random.Generator, *, held_out: bool, kind: int | None = None, unseen: bool = False) -> str:
    """Return a prompt of the trained part or of the one held out."""
    while is_held_out(prompt := drawn_prompt(rng, kind, unseen=unseen)) != held_out:
        continue
    return prompt


def bundled(seed: int = 1) -> list[dict[str, object]]:
    """Return the 48 prompts of the demo, none of them trained on, as lines of an OpenAI batch."""
    rng = np.random.default_rng(seed)
    caps = {0: 4, 1: 2, 2: 60, 3: 12, 4: 20, 5: 90, 6: 52}
    names = ("even", "last", "spell", "reverse", "hyphens", "repeat", "letters")
    rows: list[dict[str, object]] = []
    taken = set[str]()
    for number in range(48):
        kind = (2, 3, 5, 4, 0, 6, 1, 5)[number % 8]
        prompt = draw(rng, held_out=True, kind=kind, unseen=True)
        while prompt in taken:
            prompt = draw(rng, held_out=True, kind=kind, unseen=True)
        taken.add(prompt)
        body = {
            "model": "tiny:speller",
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": caps[kind],
        }
        rows.append(
            {
                "custom_id": f"{names[kind]}-{number + 1}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
        )
    return rows


BOS, EOS, PAD = 256, 257, 258
"""The byte tokenizer's special tokens."""


def tokens(prompt: str, *, chat: bool) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt, as the byte tokenizer writes it, and of its right completion."""
    asked = f"user: {prompt}\nassistant:" if chat else prompt
    return [BOS, *asked.encode()], [*right_answer(prompt).encode(), EOS]


def batches(rng: np.random.Generator, steps: int, budget: int = 2000) -> Iterator[tuple[Any, Any]]:
    """Yield token ids and labels, shape (rows, tokens), of some ``budget`` tokens; prompts have no label."""
    import torch

    waiting: list[tuple[list[int], list[int]]] = []
    for _ in range(steps):
        if len(waiting) < 64:
            waiting += [
                tokens(draw(rng, held_out=False), chat=bool(rng.random() < 0.75)) for _ in range(1024)
            ]
            waiting.sort(key=lambda pair: sum(map(len, pair)))
        # Rows of like lengths, from anywhere in what waits.
        at = int(rng.integers(len(waiting)))
        longest = sum(map(len, waiting[at]))
        rows: list[tuple[list[int], list[int]]] = []
        while waiting and (len(rows) + 1) * longest <= budget:
            rows.append(waiting.pop(min(at, len(waiting) - 1)))
            longest = max(longest, sum(map(len, rows[-1])))
        ids = torch.full((len(rows), longest), PAD)
        labels = torch.full((len(rows), longest), -100)
        for row, (asked, told) in enumerate(rows):
            ids[row, : len(asked) + len(told)] = torch.tensor(asked + told)
            labels[row, len(asked) : len(asked) + len(told)] = torch.tensor(told)
        yield ids, labels


def weighted_loss(logits: Any, labels: Any, end_weight: float) -> Any:
    """Return the mean loss of the labels, those more that end a completion or go on where it might end."""
    import torch

    told = labels[:, 1:].flatten()
    each = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), told, reduction="none")
    weight = (told >= 0).float()
    for one in (EOS, ord(" ")):
        weight[told == one] = end_weight
    return (each * weight).sum() / weight.sum()


def trained(args: argparse.Namespace) -> Any:
    """Return the model after ``steps`` steps from random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from batchbound.executor.models.tiny import SPELLER, tiny_config

    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(tiny_config(SPELLER))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.peak, betas=(0.9, 0.98), weight_decay=0.01)
    started, sums = time.process_time(), 0.0
    for step, (ids, labels) in enumerate(batches(np.random.default_rng(args.seed), args.steps), start=1):
        share = step / args.steps
        rate = (
            args.peak
            * min(1.0, step / (0.05 * args.steps))
            * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = weighted_loss(model(input_ids=ids).logits, labels, args.end_weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sums += float(loss.detach())
        if step % 100 == 0:
            print(
                f"step {step}: loss {sums / 100:.4f}, {time.process_time() - started:.0f} CPU s", flush=True
            )
            sums = 0.0
    return model.eval()


def score(model: Any, prompts: list[str], slots: int = 32) -> list[bool]:
    """Return which prompts the model completes rightly, in both of its forms."""
    from batchbound.executor.llm import LLM
    from batchbound.executor.models.tokenizers import ByteTokenizer

    asked = [tokens(prompt, chat=chat)[0] for prompt in prompts for chat in (True, False)]
    texts = [""] * len(asked)
    for one in LLM(model, ByteTokenizer(), slots=slots).generate(asked, max_tokens=300, temperature=0.0):
        texts[one.index] = one.text
    return [texts[2 * at] == texts[2 * at + 1] == right_answer(prompt) for at, prompt in enumerate(prompts)]


def report(model: Any, each: int) -> dict[str, float]:
    """Print and return the share of prompts completed rightly, of each kind, over prompts held out."""
    rng, shares = np.random.default_rng(2), {}
    for kind, pattern in enumerate(RULES):
        asked = [draw(rng, held_out=True, kind=kind) for _ in range(each)]
        shares[pattern] = float(np.mean(score(model, asked)))
        print(f"{shares[pattern]:7.1%}  {pattern}")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="write the trained weights here")
    parser.add_argument("--prompts", type=Path, help="write the bundled prompts here, and train nothing")
    parser.add_argument("--score", action="store_true", help="score the shipped weights, and train nothing")
    parser.add_argument("--steps", type=int, default=16000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=4e-3, help="the largest learning rate")
    parser.add_argument("--end-weight", type=float, default=3.0, help="of tokens that end or might")
    parser.add_argument("--each", type=int, default=50, help="prompts of each kind to score")
    args = parser.parse_args()
    if args.prompts:
        args.prompts.write_text("".join(json.dumps(row) + "\n" for row in bundled()), encoding="utf-8")
        return
    if args.score:
        from batchbound.executor.models.source import load_model

        report(load_model("tiny:speller"), args.each)
        return
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    model = trained(args)
    if args.output:
        halves = {name: weight.half().contiguous() for name, weight in model.named_parameters()}
        save_file(halves, args.output, metadata={"steps": str(args.steps), "seed": str(args.seed)})
    report(model, args.each)


if __name__ == "__main__":
    main()
