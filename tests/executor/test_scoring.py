"""Log-likelihoods with shared beginnings, against one plain forward call for each sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest
from builders import mostly_slow

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from tier_cases import FAST, RAGGED

from batchbound.executor.models.source import load_model
from batchbound.executor.scoring import Scored, Scoring

# GPT-BigCode in transformers 5.17 scripts a function, which newer torch deprecates.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


def alone(model: Any, sequence: Scored) -> tuple[float, bool]:
    """Return log-likelihood and greedy flag by a forward call over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([sequence.prompt])).logits[0, -sequence.scored :]
    given = torch.tensor(sequence.tokens[-sequence.scored :])
    value = logits.log_softmax(-1).gather(-1, given[:, None]).sum()
    return float(value), bool((logits.argmax(-1) == given).all())


def questions(seed: int) -> list[Scored]:
    """Contexts under common examples, each with endings of which some begin alike or come twice."""
    rng = random.Random(seed)

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(rng.randint(least, most)))

    examples, sequences = some(20, 40), []
    for _ in range(5):
        context, stem = examples + some(1, 9), some(1, 3)
        for ending in (stem, stem + some(1, 2), stem + some(1, 4), some(1, 1), stem):
            sequences.append(Scored(context + ending, len(ending)))
    # A context of one token, and sequences that are scored from the second token on.
    sequences += [Scored(some(2, 2), 1), *(Scored(whole := some(5, 30), len(whole) - 1) for _ in range(3))]
    rng.shuffle(sequences)
    return sequences


@pytest.mark.parametrize("family", mostly_slow(RAGGED, FAST))
@pytest.mark.parametrize("slots", mostly_slow([1, 4, 64], fast=[4]))
def test_scores_are_those_of_each_sequence_alone(family: str, slots: int) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    sequences = questions(slots)
    expected = [alone(model, sequence) for sequence in sequences]
    scoring = Scoring(model, sequences, slots=slots, dtype=torch.float64)
    scores = {index: (value, greedy) for index, value, greedy in scoring.run()}
    assert sorted(scores) == list(range(len(sequences)))
    for index, (value, greedy) in enumerate(expected):
        assert scores[index][0] == pytest.approx(value, abs=1e-5)
        assert scores[index][1] == greedy


def test_greedy_endings_are_told_from_others(llama: Any) -> None:
    context = (5, 9, 200)
    with torch.no_grad():
        likeliest = int(llama(torch.tensor([context])).logits[0, -1].argmax())
    sequences = [Scored((*context, token), 1) for token in (likeliest, (likeliest + 1) % 256)]
    assert {index: greedy for index, _, greedy in Scoring(llama, sequences, slots=2).run()} == {
        0: True,
        1: False,
    }
