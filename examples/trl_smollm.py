"""
GRPO on a real model: ``python examples/trl_smollm.py MODEL [--seed N] [--generate] [--out FOLDER]``.

SmolLM2-135M-Instruct learns to answer sums with the bare number, in nine CPU minutes of one thread.
``--generate`` trains with TRL's own generation instead, for comparison. ``FOLDER`` receives the curve, as
``curve.csv`` and ``curve.png``. ``pip install 'batchbound[trl]'`` first.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from batchbound import LLM, rollout_function

GROUP, SLOTS, LONGEST = 8, 16, 32
BRIEF = 120
"""Characters of a completion that earns nothing for brevity."""


def sums(count: int, seed: int) -> Dataset:
    """Return prompts that ask for the sum of two small numbers."""
    draw = random.Random(seed)
    pairs = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(count)]
    asked = [[{"role": "user", "content": f"What is {one} + {other}?"}] for one, other in pairs]
    return Dataset.from_dict({"prompt": asked, "sum": [one + other for one, other in pairs]})


def short_and_right(completions: Sequence[Any], sum: Sequence[int], **_: Any) -> list[float]:
    """Return 1 for the right last number, and up to 1 for brevity."""
    rewards = []
    for completion, right in zip(completions, sum, strict=True):
        text = completion[0]["content"]
        numbers = re.findall(r"\d+", text)
        correct = bool(numbers) and int(numbers[-1]) == right
        rewards.append(float(correct) + max(0.0, 1 - len(text) / BRIEF))
    return rewards


class CpuSeconds:
    """Sum of the CPU seconds of a function's calls."""

    def __init__(self) -> None:
        self.total = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its seconds counted."""

        def counted(*given: Any, **named: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*given, **named)
            finally:
                self.total += time.process_time() - begun

        return counted


def train(name: str, seed: int, steps: int, *, generate: bool) -> list[dict[str, float]]:
    """Train, and return each step's reward, mean length and CPU seconds of generation and in all."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    generation = CpuSeconds()
    rollout = None if generate else generation.around(rollout_function(LLM(model, tokenizer, slots=SLOTS)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward_funcs=short_and_right,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=2 * GROUP,
                num_generations=GROUP,
                max_completion_length=LONGEST,
                learning_rate=2e-5,
                lr_scheduler_type="constant",
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                seed=seed,
            ),
            train_dataset=sums(2 * steps, seed),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        if generate:
            trainer._generate_single_turn = generation.around(trainer._generate_single_turn)
        begun = time.process_time()
        trainer.train()
        total = time.process_time() - begun
    share = generation.total / total
    print(f"generation: {generation.total:.0f} of {total:.0f} CPU seconds, {share:.0%} of the training")
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def save(curve: Sequence[dict[str, float]], folder: Path) -> None:
    """Write the curve of rewards as a table and a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "curve.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("step", "reward", "mean_length"))
        for at, entry in enumerate(curve, start=1):
            table.writerow((at, entry["reward"], entry["completions/mean_length"]))
    figure, (reward, length) = pyplot.subplots(2, 1, sharex=True, figsize=(6, 5))
    steps = range(1, len(curve) + 1)
    reward.plot(steps, [entry["reward"] for entry in curve])
    reward.set_ylabel("mean reward (at most 2)")
    length.plot(steps, [entry["completions/mean_length"] for entry in curve])
    length.set_ylabel("mean completion (tokens)")
    length.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(folder / "curve.png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Train as the command line says, and write the curve."""
    parser = argparse.ArgumentParser(description="GRPO on a real model with rollouts of batchbound")
    parser.add_argument("model", help="Hub name or folder of SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--generate", action="store_true", help="TRL's own generation, for comparison")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for curve.csv and curve.png")
    asked = parser.parse_args()
    curve = train(asked.model, asked.seed, asked.steps, generate=asked.generate)
    save(curve, asked.out)
    tail = max(1, len(curve) // 4)
    first, last = (sum(entry["reward"] for entry in part) / tail for part in (curve[:tail], curve[-tail:]))
    print(f"mean reward of the first and the last {tail} steps: {first:.2f}, {last:.2f}")


if __name__ == "__main__":
    main()
