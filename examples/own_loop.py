"""
Rollouts in a loop of one's own, which trains nothing but runs: ``python examples/own_loop.py``.

With TRL, the same function goes into ``GRPOTrainer(..., rollout_func=rollout)``: ``examples/trl_grpo.py``.
"""

from __future__ import annotations

from statistics import mean

from batchbound.executor.completion import Completion
from batchbound.executor.llm import LLM
from batchbound.executor.rollout import rollout_function

GROUP = 4
PROMPTS = ["Name a prime.", "Spell the word cat.", "Say how many days a week has, and name them all."]


def reward(completion: Completion) -> float:
    """Return what an answer is worth here: its share of letters."""
    return mean(character.isalpha() for character in completion.text) if completion.text else 0.0


def main() -> None:
    """Run two steps of sampling with rewards computed as the answers come in."""
    engine = LLM.from_pretrained("tiny:llama", slots=8, device="cpu")
    rewards: dict[int, float] = {}

    def score(completion: Completion) -> None:
        rewards[completion.index] = reward(completion)

    rollout = rollout_function(engine, max_tokens=24, on_completion=score)
    for step in range(2):
        answers = rollout([prompt for prompt in PROMPTS for _ in range(GROUP)], None)
        tokens = sum(len(ids) for ids in answers["completion_ids"])
        likelihood = mean(value for values in answers["logprobs"] for value in values)
        report = engine.report()
        print(
            f"step {step}: {len(rewards)} answers, {tokens} tokens, mean reward {mean(rewards.values()):.3f},"
            f" mean log-probability {likelihood:.3f}, {report.run_gap:.1%} above the proven bound"
        )
        # Here a trainer would change engine.model's weights in place.


if __name__ == "__main__":
    main()
