"""
Captured decode steps: what is replayed is right, whatever the host has learned since.

On a CPU a tape stands in for a CUDA graph: it records every operation of one step and replays those alone,
on the same memory; Python is not run again, and an operation that would wait for the device is refused.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from builders import mostly_slow
from gpu_decode import compiled
from tier_cases import (
    FAST,
    RAGGED,
    Request,
    answers_of_generate,
    cut_short,
    draw_requests,
    generate_alone,
    run_at_random,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchbound.data.readers.sampling import Sampling
from batchbound.executor.attention.kernels import KERNELS, Held, fastest, masked
from batchbound.executor.engines.offloading import OffloadingBatch
from batchbound.executor.kv import captured as captured_module
from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.captured import DecodeStep, cuda_graph
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.models.faults import NotFiniteError, OutOfMemoryError
from batchbound.executor.models.logit_edits import Edit, LogitEdits
from batchbound.executor.models.mixed_sampling import MixedSampler
from batchbound.executor.models.recording import Recorder
from batchbound.executor.models.sampling import Sampler
from batchbound.executor.models.source import load_model

# GPT-BigCode in transformers 5.17 scripts a function, which newer torch deprecates.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    # What inductor tells of float32 on a GPU.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations with their operands and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for kept, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def taped(step: DecodeStep) -> DecodeStep:
    step()
    tape = Tape()
    with tape:
        step()
    return tape.replay


def serve(
    batch: RunningBatch, requests: Sequence[Request], until: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Refill freed slots until all is done; every third time a request moves to the host and back."""
    answers: list[list[int]] = [[] for _ in requests]
    waiting, free, running = list(range(len(requests))), list(range(batch.slots)), dict[int, int]()
    turn = 0
    while waiting or running:
        while waiting and free:
            slot, request = free.pop(), waiting.pop(0)
            answers[request] += batch.prefill([slot], [requests[request][0]], request_ids=[str(request)])
            running[slot] = request
        turn += 1
        if turn % 3 == 0:
            slot = next(iter(running))
            batch.insert(slot, batch.take(slot))
        left = min(requests[request][1] - len(answers[request]) for request in running.values())
        tokens = batch.decode(left, until=until)
        for slot, request in list(running.items()):
            new = tokens[:, slot].tolist()
            # What it gives beyond its end does not count.
            answers[request] += new[: next((at + 1 for at, token in enumerate(new) if token in until), None)]
            if len(answers[request]) == requests[request][1] or answers[request][-1] in until:
                batch.release(slot)
                free.append(slot)
                del running[slot]
    return answers


@pytest.mark.parametrize("family", mostly_slow(RAGGED, FAST))
def test_replayed_steps_give_the_answers_of_generate_alone(family: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    requests = draw_requests(9, seed=1)
    batch = RaggedBatch(model, slots=5, capacity=1, capture=taped)
    assert serve(batch, requests) == answers_of_generate(family, requests)
    assert batch._kernel == "masked sdpa"


# That all families decode on pages, and that all are captured, is tested apart.
@pytest.mark.parametrize("family", FAST)
def test_replayed_steps_on_rows_in_pages_give_the_answers_of_generate_alone(family: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    requests = draw_requests(9, seed=1)
    need = max(len(prompt) + tokens for prompt, tokens in requests)
    # Rows that only fill a captured size up hold no pages: what they write must be nobody's.
    batch = RaggedBatch(model, slots=5, capacity=1, kv_tokens=4 * need, capture=taped)
    ends, expected = cut_short(answers_of_generate(family, requests))
    assert run_at_random(batch, requests, seed=3, until=ends) == expected
    assert sorted(batch._store._free) == list(range(batch._store.pages))


def test_a_burst_is_as_long_as_the_pages_allow(llama: Any) -> None:
    batch = RaggedBatch(llama, slots=2, capacity=64, kv_tokens=62, capture=taped)
    # 64 pages, of which the prompts and their coming tokens take 18: each row can grow by 23 tokens.
    prompts = [[1] * 9, [2] * 7]
    first = batch.prefill([0, 1], prompts)
    tokens = batch.decode(24)
    assert batch._capture is taped, "captured to the end"
    for slot, prompt in enumerate(prompts):
        given = [first[slot], *tokens[:, slot].tolist()]
        assert given == generate_alone(llama, prompt, len(given))
    with pytest.raises(OutOfMemoryError, match="the 64 tokens of the KV capacity"):
        batch.decode(1)


@pytest.mark.parametrize("lag", mostly_slow([0, 1, 3], fast=[1]))
def test_steps_launched_beyond_an_end_count_for_all_but_the_row_that_ended(
    llama: Any, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = draw_requests(9, seed=2, most=24)
    until = frozenset(range(0, 256, 5))
    batch = RaggedBatch(llama, slots=4, capacity=64, capture=taped)
    batch.prefill([0], [[1, 2, 3]])
    batch.decode(1)
    assert batch._captured is not None
    monkeypatch.setattr(batch._captured, "_lag", lag)
    batch.release(0)
    expected = serve(RaggedBatch(llama, slots=4, capacity=64), requests, until)
    assert serve(batch, requests, until) == expected
    alone = answers_of_generate("llama", requests)
    for answer, whole in zip(expected, alone, strict=True):
        # The first token comes from the prefill, where nobody looked for an end.
        end = next((at for at in range(1, len(whole)) if whole[at] in until), len(whole) - 1)
        assert answer == whole[: len(answer)]
        assert len(answer) == end + 1


@pytest.mark.parametrize("tier", [WindowBatch, RaggedBatch])
def test_a_call_returns_after_the_first_step_with_an_end(llama: Any, tier: type[RunningBatch]) -> None:
    batch = tier(llama, 2, 64)
    batch.prefill([0, 1], [[1, 2, 3], [4, 5]])
    whole = batch.decode(20)
    token = int(whole[7, 1])
    at = min(int((whole[:, slot] == token).argmax()) for slot in (0, 1) if token in whole[:, slot])
    other = tier(llama, 2, 64)
    other.prefill([0, 1], [[1, 2, 3], [4, 5]])
    assert other.decode(20, until=frozenset({token})).tolist() == whole[: at + 1].tolist()
    assert other.decode(19 - at).tolist() == whole[at + 1 :].tolist()


def test_memory_that_runs_out_on_the_way_to_an_end_costs_no_token(llama: Any) -> None:
    failures = [True]

    class Flaky(RaggedBatch):
        def decode(self, decode_steps: int = 1, *, until: frozenset[int] = frozenset()) -> Any:
            if failures and decode_steps > 2:
                failures.pop()
                raise OutOfMemoryError("no memory", super().decode(2))
            return super().decode(decode_steps, until=until)

    prompts = [[1, 2, 3], [4, 5], [6] * 9, [7, 8]]
    alone = [generate_alone(llama, prompt, 20) for prompt in prompts]
    early = {token for whole in alone for token in whole[:5]}
    token = next(token for token in alone[1] if token not in early)
    until = frozenset({token})
    residence = OffloadingBatch(lambda slots: Flaky(llama, slots, 64), 4, list("abcd"), host_tokens=0)
    answers = [[token] for token in residence.prefill(range(4), prompts, [0] * 4)]
    while not any(answer[-1] in until for answer in answers):
        tokens = residence.decode(19, lambda request: len(answers[request]), until=until)
        assert len({len(each) for each in tokens.values()}) == 1
        for request, each in tokens.items():
            answers[request] += each
    assert not failures
    assert residence.slots < 4
    end = min(whole.index(token) for whole in alone if token in whole)
    assert answers == [whole[: end + 1] for whole in alone]


def test_bursts_longer_than_the_ring_are_run_in_parts(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (captured_module, __import__("batchbound.executor.kv.ragged", fromlist=["ragged"])):
        monkeypatch.setattr(module, "MOST_STEPS", 7)
    requests = draw_requests(5, seed=3)
    assert serve(RaggedBatch(llama, 3, 64, capture=taped), requests) == answers_of_generate("llama", requests)


def test_steps_are_captured_once_for_the_whole_a_half_and_a_quarter_of_the_slots(llama: Any) -> None:
    captures: list[int] = []

    def counting(step: DecodeStep) -> DecodeStep:
        captures.append(1)
        return taped(step)

    batch = RaggedBatch(llama, slots=8, capacity=300, capture=counting)
    batch.prefill(list(range(8)), [[i + 1, 2] for i in range(8)])
    for slot in range(8):
        batch.decode(3)
        batch.release(slot)
    assert len(captures) == 3
    batch.prefill([0], [[7] * 250])
    batch.decode(60)
    assert len(captures) == 4, "a wider buffer is captured anew"


def test_a_warm_batch_has_captured_all_it_needs(llama: Any) -> None:
    captures: list[DecodeStep] = []

    def noting(step: DecodeStep) -> DecodeStep:
        captures.append(step)
        return taped(step)

    batch = RaggedBatch(llama, slots=8, capacity=64, capture=noting)
    batch.warm_up()
    assert len(captures) == 3
    requests = draw_requests(12, seed=4)
    assert serve(batch, requests) == answers_of_generate("llama", requests)
    assert len(captures) == 3


def test_sampled_answers_are_those_of_steps_that_are_not_captured(llama: Any) -> None:
    requests = draw_requests(6, seed=5)
    sampler = Sampler(temperature=0.9, top_p=0.95, seed=11)
    plain = serve(RaggedBatch(llama, 3, 64, sampler=sampler), requests)
    assert serve(RaggedBatch(llama, 3, 64, sampler=sampler, capture=taped), requests) == plain


def test_requests_that_ask_for_different_sampling_share_captured_steps(llama: Any) -> None:
    requests = draw_requests(6, seed=5)
    asked = [Sampler(), Sampler(temperature=0.9, top_p=0.95), Sampler(temperature=1.5, top_k=9, seed=2)]
    mixed = MixedSampler({str(i): asked[i % 3] for i in range(len(requests))})
    served = serve(RaggedBatch(llama, 3, 64, sampler=mixed, capture=taped), requests)
    for i, sampler in enumerate(asked):
        assert served[i::3] == serve(RaggedBatch(llama, 2, 64, sampler=sampler), requests)[i::3]


@pytest.mark.parametrize(
    "modes", [("raw", "raw"), ("processed", "processed"), ("raw", "processed"), ("temperature", "processed")]
)
def test_log_probabilities_of_captured_steps_are_those_of_others(llama: Any, modes: tuple[Any, Any]) -> None:
    requests = draw_requests(7, seed=5)
    asked = [Sampler(temperature=0.9, top_p=0.95), Sampler(temperature=1.5, top_k=9, seed=2)]
    captures: list[DecodeStep] = []

    def noting(step: DecodeStep) -> DecodeStep:
        captures.append(step)
        return taped(step)

    told = []
    for capture in (None, noting):
        samplers = {str(i): asked[i % 2] for i in range(len(requests))}
        streams = {name: sampler.stream(name) for name, sampler in samplers.items()}
        recorder = Recorder(
            {stream: modes[int(name) % 2] for name, stream in streams.items()},
            likeliest=2,
            temperatures={streams["0"]: 0.9} if "temperature" in modes else {},
        )
        edit = Edit(Sampling(repetition_penalty=1.3), tuple(requests[0][0]), requests[0][1])
        mixed = MixedSampler(samplers, LogitEdits({streams["0"]: edit}), recorder)
        batch = RaggedBatch(llama, 3, 64, sampler=mixed, capture=capture)
        answers = serve(batch, requests)
        assert batch._capture is capture, "captured to the end"
        read = [recorder.read(streams[str(i)], len(answer)) for i, answer in enumerate(answers)]
        told.append((answers, read))
    assert captures
    assert told[0][0] == told[1][0]
    for plain, captured in zip(told[0][1], told[1][1], strict=True):
        assert [one.value for one in captured] == pytest.approx([one.value for one in plain], abs=1e-9)
        assert [[token for token, _ in one.likeliest] for one in captured] == [
            [token for token, _ in one.likeliest] for one in plain
        ]


def test_a_model_that_cannot_be_captured_runs_uncaptured(
    llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: DecodeStep) -> DecodeStep:
        raise RuntimeError("operation not permitted when stream is capturing")

    requests = draw_requests(5, seed=8)
    with caplog.at_level("WARNING"):
        answers = serve(RaggedBatch(llama, 3, 64, capture=failing), requests)
    assert answers == answers_of_generate("llama", requests)
    assert "not captured: RuntimeError: operation not permitted" in caplog.text


def test_nan_is_told_from_captured_steps(llama: Any) -> None:
    batch = RaggedBatch(llama, 2, 64, capture=taped)
    batch.prefill([0, 1], [[1] * 20, [2] * 7])
    batch.decode(2)
    keys, _ = batch._store.attending.buffers
    with torch.inference_mode():
        keys[batch._store.table[batch._row_of_slot[1], 3]] = float("nan")
    with pytest.raises(NotFiniteError, match="slot 1 are not finite after 0 decode steps"):
        batch.decode(3)


@pytest.mark.slow
def test_a_whole_step_traces_to_one_graph(llama: Any) -> None:
    prompts = [[1, 2, 3, 4], [5, 6]]
    plain = RaggedBatch(llama, 2, 64)
    graphs: list[Any] = []

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    traced = RaggedBatch(llama, 2, 64, capture=compiled(lambda step: step, backend=note))
    for batch in (plain, traced):
        batch.prefill([0, 1], prompts)
    assert traced.decode(6).tolist() == plain.decode(6).tolist()
    traced.release(0)
    plain.release(0)
    traced.prefill([0], [[9] * 30])
    plain.prefill([0], [[9] * 30])
    assert traced.decode(6).tolist() == plain.decode(6).tolist()
    assert len(graphs) == 1, "lengths and what was prefilled since are no other case"


def test_the_fastest_kernel_that_is_right_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(*arguments: Any) -> Any:
        return masked(*arguments) + 1

    def failing(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    kernels: dict[str, Any] = {"wrong": wrong, "failing": failing, "slow": masked, "quick": masked}
    times = iter([3.0] * 3 + [1.0] * 3)

    def seconds_of(call: Callable[[], object], _: Any) -> float:
        call()
        return next(times)

    states = torch.zeros(3, 2, 10, 8)
    with caplog.at_level("INFO"):
        name = fastest(
            torch.zeros(3, 4, 8), held_of(states), windows={None, 3}, kernels=kernels, seconds_of=seconds_of
        )
    assert name == "quick"
    assert "wrong is left out: ValueError: its output is wrong" in caplog.text
    assert "failing is left out: RuntimeError: no such instruction" in caplog.text
    assert fastest(torch.zeros(3, 4, 8).double(), held_of(states.double()), windows={None}) in KERNELS
    table = torch.zeros(3, 3, dtype=torch.int64)
    pool = torch.zeros(20, 2, 8)
    blocks = Held(pool, pool, torch.zeros(3).long(), None, None, table, 4)
    assert fastest(torch.zeros(3, 4, 8), blocks, windows={None}) in KERNELS


def test_a_kernel_is_timed_as_captured_calls_run_it(caplog: pytest.LogCaptureFixture) -> None:
    capturing, replayed = [False], [0]

    def waiting(*arguments: Any) -> Any:
        if capturing[0]:
            raise RuntimeError("it waits for the device")
        return masked(*arguments)

    def capture(calls: Callable[[], object]) -> Callable[[], object]:
        capturing[0] = True
        try:
            calls()
        finally:
            capturing[0] = False

        def replay() -> None:
            replayed[0] += 1

        return replay

    def seconds_of(call: Callable[[], object], _: Any) -> float:
        before = replayed[0]
        call()
        return float(replayed[0] - before)

    states, kernels = torch.zeros(3, 2, 10, 8), {"waiting": waiting, "other": masked}
    with caplog.at_level("INFO"):
        name = fastest(
            torch.zeros(3, 4, 8),
            held_of(states),
            windows={None},
            kernels=kernels,
            capture=capture,
            seconds_of=seconds_of,
        )
    assert name == "other"
    assert replayed[0] == 3, "what a capture returned is timed"
    assert "waiting is left out: RuntimeError: it waits for the device" in caplog.text


def held_of(states: Any) -> Held:
    return Held(states, states, torch.zeros(len(states)).long(), None, None)


def test_a_batch_of_the_past_is_freed_with_its_last_use(llama: Any) -> None:
    def served() -> Any:
        batch = RaggedBatch(llama, 2, 64, capture=taped)
        batch.prefill([0], [[1, 2]])
        batch.decode(3)
        return weakref.ref(batch)

    gc.collect()
    gc.disable()
    try:
        assert served()() is None, "its keys and values stay until garbage is collected"
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [cuda_graph, compiled()])
@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_gpu_replays_the_tokens_of_steps_that_are_not_captured(
    kernel: str, capture: Any, request: pytest.FixtureRequest
) -> None:
    # float16: flash attention takes no wider numbers. Near-ties may fall either way there.
    model = load_model("tiny:llama", dtype="float16", device="cuda")
    requests = draw_requests(20, seed=9)
    plain = RaggedBatch(model, 8, 80)
    plain._capture = None
    expected = serve(plain, requests)
    batch = RaggedBatch(model, 8, 80, capture=capture, kernel=kernel)
    answers = serve(batch, requests)
    assert batch._capture is not None, "the capture failed"
    same = sum(a == b for a, b in zip(answers, expected, strict=True))
    assert same >= 0.9 * len(requests)


@pytest.mark.gpu
def test_a_gpu_stops_at_ends_with_a_lag() -> None:
    model = load_model("tiny:llama", dtype="float32", device="cuda")
    requests = draw_requests(20, seed=10)
    until = frozenset(range(0, 256, 5))
    plain = RaggedBatch(model, 8, 80)
    plain._capture = None
    expected = serve(plain, requests, until)
    answers = serve(RaggedBatch(model, 8, 80), requests, until)
    assert sum(a == b for a, b in zip(answers, expected, strict=True)) >= 0.9 * len(requests)


@pytest.mark.gpu
def test_a_gpu_goes_on_where_a_capture_fails() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cuda")
    requests = draw_requests(6, seed=11)

    def waiting(step: DecodeStep) -> DecodeStep:
        def waits() -> None:
            step()
            torch.zeros(1, device="cuda").item()

        return cuda_graph(waits)

    stream = torch.cuda.current_stream()
    batch = RaggedBatch(model, 3, 80, capture=waiting)
    assert serve(batch, requests) == [generate_alone(model, *each) for each in requests]
    assert batch._capture is None
    assert torch.cuda.current_stream() == stream
    assert torch.randn(3, device="cuda").isfinite().all(), "random numbers are drawn as before"
    after = RaggedBatch(model, 3, 80)
    assert serve(after, requests) == [generate_alone(model, *each) for each in requests]
    assert after._capture is not None, "the next capture succeeds"


@pytest.mark.gpu
def test_a_gpu_captures_while_graphs_of_the_past_are_garbage() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cuda")
    requests = draw_requests(6, seed=12)
    expected = [generate_alone(model, *each) for each in requests]
    thresholds = gc.get_threshold()
    try:
        for _ in range(3):
            gc.set_threshold(10**6)
            past: list[Any] = [RaggedBatch(model, 3, 80)]
            assert serve(past[0], requests) == expected
            past.append(past)
            del past
            batch = RaggedBatch(model, 3, 80)
            gc.set_threshold(1, 1, 1)
            assert serve(batch, requests) == expected
            assert batch._capture is not None, "the capture failed"
    finally:
        gc.set_threshold(*thresholds)
