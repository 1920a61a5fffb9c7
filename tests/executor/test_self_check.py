"""The self-check of tokens refuses a batch that answers otherwise than the model alone, however it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.executor.engines.self_check import check_tier, greedy_shortfall, near_tie
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.models.families import UnsupportedModelError
from batchbound.executor.models.source import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def single() -> Any:
    return load_model("tiny:llama", dtype="float32", device="cpu")


def batch_with(change: Callable[[Any], Any], of: str = "scores") -> type[WindowBatch]:
    """Return a kind of batch whose scores, or decoded tokens, are changed once they are computed."""

    class Changed(WindowBatch):
        @property
        def scores(self) -> NDArray[np.float64]:
            return change(super().scores) if of == "scores" else super().scores

        def decode(self, *args: Any, **kwargs: Any) -> NDArray[np.int64]:
            tokens = super().decode(*args, **kwargs)
            return change(tokens) if of == "decode" else tokens

    return Changed


def test_a_batch_that_is_right_passes(single: Any) -> None:
    check_tier(single, WindowBatch)
    check_tier(single, batch_with(lambda scores: scores))


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_the_prompts_are(single: Any, seed: int) -> None:
    check_tier(single, WindowBatch, seed=seed)


def wrong_token(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    changed = tokens.copy()
    changed[-1] = np.where(changed[-1] >= 0, (changed[-1] + 1) % 256, changed[-1])
    return changed


@pytest.mark.parametrize(
    ("change", "of"),
    [
        (wrong_token, "decode"),
        (lambda scores: scores + 0.5, "scores"),
        (lambda scores: scores - 0.5, "scores"),
        (lambda scores: np.where(np.isnan(scores), scores, np.nan), "scores"),
    ],
)
def test_tokens_and_logits_that_differ_are_refused(single: Any, change: Any, of: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"differ from its own on the window tier .*times as far"):
        check_tier(single, batch_with(change, of))


def test_the_last_round_of_one_request_is_enough(single: Any) -> None:
    def last(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        changed = scores.copy()
        changed[-1, 1] += 0.5
        return changed

    with pytest.raises(UnsupportedModelError, match="its answers in a padded batch differ"):
        check_tier(single, batch_with(last))


def test_rounding_of_the_number_format_is_let_pass(single: Any) -> None:
    assert near_tie(single) == pytest.approx(4 * 2**-11.5)
    deviation = 1.0
    with torch.inference_mode():
        deviation = float(single(torch.tensor([[1, 2, 3]])).logits.double().std())
    # A tenth of a near-tie is let pass, ten times as much is not.
    check_tier(single, batch_with(lambda scores: scores + 0.1 * near_tie(single) * deviation))
    with pytest.raises(UnsupportedModelError, match="differ"):
        check_tier(single, batch_with(lambda scores: scores + 10 * near_tie(single) * deviation))


def failing(error: Exception) -> type[WindowBatch]:
    class Failing(WindowBatch):
        def decode(self, *args: Any, **kwargs: Any) -> NDArray[np.int64]:
            raise error

    return Failing


def test_what_a_model_raises_is_said_in_one_line(single: Any) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"fails on the window tier \(ValueError: no such mask\)"
    ) as said:
        check_tier(single, failing(ValueError("no such mask\nand more")))
    assert "\n" not in str(said.value)
    with pytest.raises(UnsupportedModelError, match=r"\(ValueError: \)"):
        check_tier(single, failing(ValueError()))


def test_a_refusal_and_a_lack_of_memory_pass_as_they_are(single: Any) -> None:
    refusal = UnsupportedModelError("llama", "of a reason of its own", "hint")
    with pytest.raises(UnsupportedModelError, match="of a reason of its own"):
        check_tier(single, failing(refusal))
    with pytest.raises(torch.OutOfMemoryError):
        check_tier(single, failing(torch.OutOfMemoryError("out of memory")))


def test_the_shortfall_is_in_deviations_of_the_logits(llama: Any) -> None:
    prompt, answer = [5, 6, 7], [9, 4]
    with torch.inference_mode():
        logits = llama(torch.tensor([prompt + answer])).logits[0].double().numpy()
    expected = [
        (logits[at].max() - logits[at][token]) / logits[at].std(ddof=1) for at, token in ((2, 9), (3, 4))
    ]
    assert greedy_shortfall(llama, prompt, answer) == pytest.approx(expected)


def test_answers_are_compared_with_the_model_they_are_said_to_be_of(single: Any) -> None:
    class Shifted:
        """The same answers, and other logits."""

        device = single.device

        def __call__(self, **given: Any) -> Any:
            output = single(**given)
            output.logits = output.logits + 1.0
            return output

    check_tier(single, WindowBatch, alone=single)
    with pytest.raises(UnsupportedModelError, match="differ from its own") as said:
        check_tier(single, WindowBatch, alone=Shifted())
    assert "llama" in str(said.value)
    assert "use another tier or another model, and report this one" in str(said.value)


def test_mixed_precision_ties_as_coarsely_as_its_logits(single: Any) -> None:
    handle = single.get_output_embeddings().register_forward_hook(lambda _, __, output: output.bfloat16())
    try:
        assert near_tie(single) == pytest.approx(4 * 2**-3.5)
    finally:
        handle.remove()
    assert near_tie(single) == pytest.approx(4 * 2**-11.5)
