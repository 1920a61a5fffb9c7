"""The self-check of tokens refuses a batch that answers otherwise than the model alone, however it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

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


def test_the_last_step_of_one_request_is_enough(single: Any) -> None:
    def last(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        changed = scores.copy()
        changed[-1, 1] += 0.5
        return changed

    with pytest.raises(UnsupportedModelError, match="its completions in a padded batch differ"):
        check_tier(single, batch_with(last))


@pytest.mark.parametrize(
    ("call", "slot"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 2), (3, 0), (3, 1), (3, 2)]
)
def test_every_request_is_judged_in_every_burst(single: Any, call: int, slot: int) -> None:
    class Wrong(WindowBatch):
        calls = -1

        def decode(self, *args: Any, **kwargs: Any) -> NDArray[np.int64]:
            self.calls += 1
            return super().decode(*args, **kwargs)

        @property
        def scores(self) -> NDArray[np.float64]:
            scores = super().scores
            if self.calls == call:
                scores[-1, slot] += 0.5
            return scores

    with pytest.raises(UnsupportedModelError, match="differ"):
        check_tier(single, Wrong)


class Recomputing:
    """A batch without a cache: it computes every sequence anew, and takes the token of a rank."""

    tier = "recomputing"
    rank, off = 0, 0.0

    def __init__(self, model: Any, slots: int, capacity: int) -> None:
        self.model, self.slots = model, slots
        self.held: dict[int, list[int]] = {}
        self.scores = np.full((0, slots), np.nan)

    def prefill(self, slots: list[int], prompts: list[list[int]]) -> NDArray[np.int64]:
        self.held |= dict(zip(slots, prompts, strict=True))
        return self._drawn(slots, 1)[0, slots]

    def decode(self, decode_steps: int) -> NDArray[np.int64]:
        return self._drawn(list(self.held), decode_steps)

    def release(self, slot: int) -> None:
        del self.held[slot]

    def take(self, slot: int) -> list[int]:
        return self.held.pop(slot)

    def insert(self, slot: int, suspended: list[int]) -> None:
        self.held[slot] = suspended

    def _drawn(self, slots: list[int], decode_steps: int) -> NDArray[np.int64]:
        tokens = np.zeros((decode_steps, self.slots), dtype=np.int64)
        self.scores = np.full((decode_steps, self.slots), np.nan)
        for at in range(decode_steps):
            for slot in slots:
                with torch.inference_mode():
                    logits = self.model(torch.tensor([self.held[slot]])).logits[0, -1].double()
                token = int(logits.argsort(descending=True)[self.rank])
                tokens[at, slot] = token
                self.scores[at, slot] = float(logits[token]) + self.off * float(logits.std())
                self.held[slot] = [*self.held[slot], token]
        return tokens


def recomputing(*, rank: int = 0, off: float = 0.0) -> Any:
    return type("Changed", (Recomputing,), {"rank": rank, "off": off})


def test_the_second_likeliest_token_is_refused_though_its_logit_is_right(single: Any) -> None:
    check_tier(single, recomputing())
    with pytest.raises(UnsupportedModelError, match="differ from its own on the recomputing tier"):
        check_tier(single, recomputing(rank=1))


def test_a_logit_may_be_off_by_a_near_tie_and_no_more(single: Any) -> None:
    check_tier(single, recomputing(off=0.9 * near_tie(single)))
    check_tier(single, recomputing(off=-0.9 * near_tie(single)))
    with pytest.raises(UnsupportedModelError, match=r"\(1\.1 times as far"):
        check_tier(single, recomputing(off=1.1 * near_tie(single)))


def test_prompts_are_drawn_from_the_whole_vocabulary_by_the_seed(single: Any) -> None:
    seen: list[list[int]] = []

    class Noting(Recomputing):
        def prefill(self, slots: list[int], prompts: list[list[int]]) -> NDArray[np.int64]:
            seen.extend(prompts)
            return super().prefill(slots, prompts)

    check_tier(single, Noting)  # type: ignore[arg-type]
    check_tier(single, Noting, seed=1)  # type: ignore[arg-type]
    rng, other = random.Random(0), random.Random(1)
    vocabulary = single.get_input_embeddings().weight.shape[0]
    expected = [[source.randrange(vocabulary) for _ in range(n)] for source in (rng, other) for n in LENGTHS]
    assert seen == expected
    assert max(max(prompt) for prompt in seen) >= vocabulary // 2


LENGTHS = (9, 3, 17, 6)


def test_the_model_alone_is_called_without_a_cache_and_where_it_is(single: Any) -> None:
    class Watched:
        device = single.device
        dtype = single.dtype
        get_output_embeddings = single.get_output_embeddings
        caches: ClassVar[list[bool]] = []

        def __call__(self, *, input_ids: Any, use_cache: bool) -> Any:
            assert input_ids.device == self.device
            assert len(input_ids) == 1
            self.caches.append(use_cache)
            return single(input_ids=input_ids, use_cache=use_cache)

    watched = Watched()
    with torch.device("meta"):
        greedy_shortfall(watched, [5, 6, 7], [9, 4])
        near_tie(watched)
    assert watched.caches == [False, False]


def test_a_model_without_a_head_ties_as_finely_as_its_weights() -> None:
    class Headless:
        dtype = torch.bfloat16

        def get_output_embeddings(self) -> None:
            return None

    assert near_tie(Headless()) == pytest.approx(4 * 2**-3.5)


def test_a_model_that_does_not_call_its_head_ties_as_finely_as_its_weights(single: Any) -> None:
    class Fused:
        dtype = torch.bfloat16
        device = single.device
        head = torch.nn.Linear(2, 2)

        def get_output_embeddings(self) -> Any:
            return self.head

        def __call__(self, *, input_ids: Any, use_cache: bool) -> Any:
            return single(input_ids=input_ids, use_cache=use_cache)

    assert near_tie(Fused()) == pytest.approx(4 * 2**-3.5)


def test_rounding_of_the_number_format_is_that_of_float32(single: Any) -> None:
    assert near_tie(single) == pytest.approx(4 * 2**-11.5)


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
    assert "llama" in str(said.value)
    assert "use another tier or another model, and report this one" in str(said.value)
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
