"""
What would cost a GPU its speed, seen without one.

Two modes watch torch while a batch runs on the CPU: one the functions that Python calls, for those that wait
for a device or copy to it; one the operations that they come to, each a launch on a GPU unless it is a view.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers = pytest.importorskip("transformers", reason="the engine extra is not installed")

from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.sampling import LogprobsMode
from batchbound.data.workload import Workload
from batchbound.executor.engines.huggingface import DecodeOptions, HuggingFaceEngine, _within
from batchbound.executor.engines.tiers import Tier
from batchbound.executor.kv.captured import CapturedSteps, DecodeStep
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.models.mixed_sampling import MixedSampler
from batchbound.executor.models.recording import Recorder
from batchbound.executor.models.sampling import Sampler
from batchbound.executor.models.source import build_random
from batchbound.heuristics.loop import execute
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.solvers.search.constructive import ski_rental_schedule

pytestmark = pytest.mark.usefixtures("one_thread")

WAITS = {
    *(
        "item",
        "tolist",
        "numpy",
        "cpu",
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "is_nonzero",
        "equal",
    ),
    *("__bool__", "__int__", "__float__", "__index__", "__len__of_data", "allclose", "where_without_values"),
}
"""Functions of torch that wait until a GPU has computed what they return."""

SHAPED_BY_DATA = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "_local_scalar_dense",
}
"""Operations whose result has a shape, or is a number, that only the device knows: no graph can hold them."""


class Waits(TorchFunctionMode):
    """Counts the lines of ours that wait for the device, and those that copy to it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (resolve_name(function) or getattr(function, "__name__", "")).rsplit(".", 1)[-1]
        if name in WAITS:
            self.waits[_place(name)] += 1
        elif name in ("tensor", "as_tensor"):
            self.uploads[_place(name)] += 1
        return function(*args, **(kwargs or {}))


def _place(name: str) -> str:
    frames = [frame for frame in traceback.extract_stack() if "/executor/" in frame.filename]
    frames = [frame for frame in frames if "/tests/" not in frame.filename]
    return f"{Path(frames[-1].filename).name} {frames[-1].name}: {name}" if frames else name


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that a GPU would launch, and fails on those that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        masks = [
            part for part in tree_leaves(args) if isinstance(part, torch.Tensor) and part.dtype == torch.bool
        ]
        hidden = name in ("index", "index_put", "index_put_") and any(part is not args[0] for part in masks)
        hidden = hidden or name in SHAPED_BY_DATA
        assert not hidden, f"{name} depends on what is on the device"
        returns = function._schema.returns
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        self.count += not view
        return function(*args, **(kwargs or {}))


def model_of(layers: int) -> Any:
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    return build_random(config, seed=0).eval()


@pytest.fixture(scope="module")
def models() -> dict[int, Any]:
    return {layers: model_of(layers) for layers in (2, 4)}


def again(step: DecodeStep) -> DecodeStep:
    return step


def recorded() -> Any:
    asked = {str(slot): Sampler(temperature=0.8, top_p=0.9) for slot in range(8)}
    streams: dict[int, LogprobsMode] = {sampler.stream(name): "raw" for name, sampler in asked.items()}
    return MixedSampler(asked, None, Recorder(streams, likeliest=2))


RULES: dict[str, Callable[[], Any]] = {
    "greedy": lambda: None,
    "sampled": lambda: Sampler(temperature=0.8),
    "top-p": lambda: Sampler(temperature=0.8, top_p=0.9),
    "log-probabilities": recorded,
}
MOST_LAUNCHES = {"greedy": 40, "sampled": 66, "top-p": 73, "log-probabilities": 98}
"""Of a captured decode step besides its layers."""
MOST_A_LAYER = 42
"""Launches of a layer in a captured decode step of a Llama, with attention by masked sdpa."""


def running(model: Any, rule: str, slots: int = 8, tokens: int = 12) -> RaggedBatch:
    batch = RaggedBatch(model, slots, 200, capture=again, sampler=RULES[rule]())
    fill(batch, range(slots), tokens)
    batch.decode(2)
    return batch


def fill(batch: RaggedBatch, slots: Any, tokens: int) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, tokens).tolist() for _ in slots]
    batch.prefill(list(slots), prompts, request_ids=[str(slot) for slot in slots])


@contextmanager
def no_waits() -> Iterator[None]:
    with Waits() as seen:
        yield
    assert not seen.waits, dict(seen.waits)
    assert not seen.uploads, dict(seen.uploads)


def test_the_watch_sees_what_waits(models: dict[int, Any]) -> None:
    for wait in (bool, int, float, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.nonzero):
        with Waits() as seen:
            wait(torch.ones(1))
        assert sum(seen.waits.values()) == 1, wait
    with pytest.raises(AssertionError, match="index depends"), Launches():
        torch.ones(3)[torch.tensor([True, False, True])]
    # Decode steps that Python runs look after each whether a row has ended.
    batch = RaggedBatch(models[2], 4, 100)
    fill(batch, range(4), 5)
    told = []
    for decode_steps in (3, 9):
        with Waits() as seen:
            batch.decode(decode_steps, until=frozenset({10**6}))
        told.append(sum(seen.waits.values()))
    assert told[1] - told[0] == 6


@pytest.mark.parametrize("rule", RULES)
def test_a_captured_step_never_waits_and_launches_no_more_than_it_did(
    models: dict[int, Any], rule: str
) -> None:
    counts = {}
    for layers, model in models.items():
        batch = running(model, rule)
        assert batch._captured is not None
        step = batch._captured._replays[8]
        with (
            torch.inference_mode(),
            batch._sampler.in_place(batch.slots, 4),
            batch_attending(batch),
            no_waits(),
            Launches() as launches,
        ):
            step()
        counts[layers] = launches.count
    a_layer = (counts[4] - counts[2]) / 2
    assert a_layer <= MOST_A_LAYER
    assert counts[4] - 4 * a_layer <= MOST_LAUNCHES[rule]


def batch_attending(batch: RaggedBatch) -> Any:
    from batchbound.executor.attention.functions import attending
    from batchbound.executor.kv.ragged import _CAPTURED_NAME

    return attending(batch._decoder.model, _CAPTURED_NAME, batch._attend_held)


@pytest.mark.parametrize("rule", RULES)
def test_a_burst_is_read_back_as_often_however_long_it_is(models: dict[int, Any], rule: str) -> None:
    batch = running(models[2], rule)
    told = []
    for decode_steps in (4, 40):
        with Waits() as seen:
            batch.decode(decode_steps)
        told.append(seen.waits)
    assert told[0] == told[1]
    assert sum(told[0].values()) <= 6, dict(told[0])


@pytest.mark.parametrize("rule", ["greedy", "sampled", "top-p"])
def test_a_prefill_waits_as_often_for_many_prompts_as_for_one(models: dict[int, Any], rule: str) -> None:
    told = []
    for layers, count in ((2, 1), (2, 8), (4, 8)):
        batch = RaggedBatch(models[layers], 8, 200, capture=again, sampler=RULES[rule]())
        with Waits() as seen:
            fill(batch, range(count), 12)
        told.append((seen.waits, seen.uploads))
    assert told[0] == told[1] == told[2]
    assert sum(told[0][0].values()) <= 4, dict(told[0][0])
    assert sum(told[0][1].values()) <= 4, dict(told[0][1])


@pytest.mark.parametrize("paged", [False, True])
def test_a_finished_completion_costs_few_launches(models: dict[int, Any], paged: bool) -> None:
    counts = {}
    for layers, model in models.items():
        batch = RaggedBatch(model, 8, 200, kv_tokens=1600 if paged else None)
        fill(batch, range(8), 12)
        with torch.inference_mode(), Launches() as launches:
            batch.release(2)
            batch._pack()
        counts[layers] = launches.count
    # The freed keys and the freed values of a layer are zeroed.
    assert (counts[4] - counts[2]) / 2 <= 2


def test_an_end_costs_the_other_rows_no_step(models: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = CapturedSteps.__init__

    def lagging(decode_steps: CapturedSteps, *arguments: Any) -> None:
        made(decode_steps, *arguments)
        decode_steps._lag = 2

    computed: list[int] = []
    launch = CapturedSteps._launch

    def counting(decode_steps: CapturedSteps, *arguments: Any) -> int:
        computed.append(launch(decode_steps, *arguments))
        return computed[-1]

    monkeypatch.setattr(CapturedSteps, "__init__", lagging)
    monkeypatch.setattr(CapturedSteps, "_launch", counting)
    answers, used, launched = {}, {}, {}
    for name, capture in (("captured", again), ("plain", None)):
        engine = serving(models[2], capture)
        computed.clear()
        trace = execute(engine.problem, Replay(ski_rental_schedule(engine.problem), engine.problem), engine)
        answers[name] = engine.answers
        used[name] = sum(stage.decode_steps for stage in trace.stages if stage.kind == "decode")
        launched[name] = sum(computed)
    assert answers["captured"] == answers["plain"]
    assert any(len(answer) < 60 for answer in answers["plain"]), "some end early"
    assert used["captured"] == launched["captured"], "every decode step launched is one of the schedule"


class Serving(HuggingFaceEngine):
    problem: Problem


def serving(model: Any, capture: Any) -> Serving:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 256, int(tokens)).tolist() for tokens in rng.integers(3, 20, 12)]
    workload = Workload.from_lengths([len(prompt) for prompt in prompts], [60] * 12)
    problem = Problem(workload, CostModel.paper(), slots=4, prefill_emits_first_token=True)

    class Batch(RaggedBatch):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, capture=capture, **options)

    class Layout(Tier):
        @property
        def batch(self) -> Any:
            return Batch

    options = DecodeOptions(eos_ids=frozenset(range(0, 256, 40)))
    engine = Serving(
        problem, model, prompts, workload.output_tokens, decoding=options, tier=Layout("ragged", "", "")
    )
    engine.problem = problem
    return engine


@pytest.mark.parametrize(
    ("capacity", "slots", "longest"), [(1200, 8, 858), (200_000, 128, 7_979), (900, 4, 200)]
)
def test_a_plan_under_a_kv_capacity_allocates_it(capacity: int, slots: int, longest: int) -> None:
    allocated = _within(capacity, Tier("ragged", "", ""), slots, (longest, longest))["kv_tokens"]
    assert allocated == min(capacity, slots * longest), "as planned for, and no more than the slots can hold"


def test_memory_that_is_kept_for_results_does_not_grow_with_the_vocabulary(models: dict[int, Any]) -> None:
    batch = running(models[2], "greedy")
    decode_steps = batch._captured
    assert decode_steps is not None
    held = sum(part.nbytes for part in vars(decode_steps).values() if isinstance(part, torch.Tensor))
    assert held < 64 * 1024
