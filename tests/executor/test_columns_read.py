"""What a trace says attention read, against a log of every attention call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from builders import mostly_slow

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.trace import Stage
from batchbound.data.workload import Workload
from batchbound.executor.attention.host_kernels import HostKernels, built
from batchbound.executor.engines.huggingface import HuggingFaceEngine
from batchbound.executor.engines.tiers import Tier
from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.models.families import layer_windows
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tiny import tiny_config
from batchbound.heuristics.loop import execute
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.solvers.search.constructive import ski_rental_schedule

pytestmark = pytest.mark.usefixtures("one_thread")

Layout = Callable[..., RunningBatch]


def captured(*arguments: Any, **options: Any) -> RaggedBatch:
    """A decode step that is captured by running it again: its calls of attention are the replay's."""
    return RaggedBatch(*arguments, capture=lambda step: step, **options)


def limited(*arguments: Any, **options: Any) -> RaggedBatch:
    return RaggedBatch(*arguments, kv_tokens=600, **options)


def by_torch(layout: Layout) -> Layout:
    """Let torch attend, in one call a layer, as it does where there is no compiler."""

    def make(*arguments: Any, **options: Any) -> RunningBatch:
        batch = layout(*arguments, **options)
        assert isinstance(batch, RaggedBatch)
        batch._host = batch._store.kernels = None
        return batch

    return make


LAYOUTS: dict[str, Layout] = {
    "window": WindowBatch,
    "ragged": RaggedBatch,
    "ragged by torch": by_torch(RaggedBatch),
    "limited": limited,
    "limited by torch": by_torch(limited),
    "captured": captured,
}


class Log:
    """Columns of every call of attention by one token a row."""

    def __init__(self) -> None:
        self.decoding = False
        self.columns = 0

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        attend = torch.nn.functional.scaled_dot_product_attention

        def watched(query: Any, key: Any, value: Any, *others: Any, **more: Any) -> Any:
            self.columns += self.decoding * key.shape[0] * key.shape[2]
            return attend(query, key, value, *others, **more)

        own = HostKernels.attend

        def watched_own(
            kernels: HostKernels, query: Any, keys: Any, values: Any, rows: Any, **more: Any
        ) -> Any:
            # It reads each row to its own length: tests/executor/test_host_kernels.py hides NaN beyond.
            held = rows.positions + 1
            self.columns += int(held.clamp(max=more["window"] or 10**9).sum())
            return own(kernels, query, keys, values, rows, **more)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
            patch.setattr(HostKernels, "attend", watched_own)
            yield


def run_logged(family: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Stage, int, int]]:
    """
    Run a long-tailed job.

    Return its decode stages, with the columns of each that the calls of all layers read, and those that the
    rows of all layers needed.
    """
    model = load_model(f"tiny:{family}", dtype="float32", device="cpu")
    _, windows = layer_windows(model.config)
    rng = np.random.default_rng(3)
    answers = np.minimum(60, np.exp(rng.normal(1.8, 1.1, 24)).astype(int) + 2)
    workload = Workload.from_lengths(rng.integers(2, 40, 24).tolist(), answers.tolist())
    problem = Problem(workload, CostModel.paper(), slots=6, prefill_emits_first_token=True)
    prompts = Prompts.random(workload, 200, seed=0)
    tier = cast(Tier, SimpleNamespace(batch=layout, name="", reason="", check=""))
    engine = HuggingFaceEngine(problem, model, prompts.tokens, workload.output_tokens, tier=tier)
    log, logged, decode = Log(), [], engine.decode

    def logging_decode(decode_steps: int, until: float) -> tuple[Stage, list[int]]:
        held = [len(prompts.tokens[i]) + len(engine.answers[i]) for i in engine._slot_of]
        log.decoding, log.columns = True, 0
        stage, finished = decode(decode_steps, until)
        log.decoding = False
        needed = sum(
            min(tokens + done, window or tokens + done)
            for window in windows
            for tokens in held
            for done in range(stage.decode_steps)
        )
        logged.append((stage, log.columns, needed))
        return stage, finished

    monkeypatch.setattr(engine, "decode", logging_decode)
    with log.watching(monkeypatch):
        execute(problem, Replay(ski_rental_schedule(problem), problem), engine)
    return logged


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, fast=("ragged", "limited")))
def test_the_columns_counted_are_those_of_the_calls(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = run_logged("llama", LAYOUTS[layout], monkeypatch)
    layers = tiny_config("llama").num_hidden_layers
    for stage, read, needed in logged:
        assert layers * stage.padded_kv_tokens == read
        assert layers * stage.kv_tokens == needed
    padding = sum(stage.padded_kv_tokens - stage.kv_tokens for stage, _, _ in logged)
    alone = built() is not None and not layout.endswith("by torch")
    assert (padding == 0) == (layout.startswith(("ragged", "limited")) and alone)


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, fast=("ragged", "captured")))
def test_a_layer_with_a_sliding_window_needs_no_more_than_its_window(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = run_logged("gemma3", LAYOUTS[layout], monkeypatch)
    layers = tiny_config("gemma3").num_hidden_layers
    for stage, read, needed in logged:
        assert stage.padded_kv_tokens - stage.kv_tokens == round((read - needed) / layers)
    assert any(layers * stage.kv_tokens > needed for stage, _, needed in logged)


def test_steps_launched_beyond_an_end_are_read_for_the_rows_that_go_on(llama: Any) -> None:
    # The third round is launched before the second is known to end, and its tokens count. Two rows of 4 and 3
    # tokens are read over all columns of their buffers.
    batch = captured(llama, 2, 32)
    batch.prefill([0, 1], [[1, 2, 3], [4, 5]])
    whole = batch.decode(4)
    other = captured(llama, 2, 32)
    other.prefill([0, 1], [[1, 2, 3], [4, 5]])
    assert other._capture is not None
    other._captured_steps(other._capture)._lag = 1
    end = int(whole[1, 0])
    assert end not in whole[0]
    assert other.decode(10, until=frozenset({end})).tolist() == whole[:3].tolist()
    assert other.padding_read == 3 * 2 * other._store.columns - (4 + 3) - (5 + 4) - (6 + 5)
