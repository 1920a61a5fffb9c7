"""Execution configurations carried out: RRA on one batch, WAA on two processes, answers as `generate`'s."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.configuration import PlannedConfiguration
from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.plan import Maker, Plan
from batchbound.data.problem import Problem
from batchbound.data.trace import Stage, Trace
from batchbound.data.workload import Workload
from batchbound.executor.jobs.configuration_run import run_configuration
from batchbound.executor.jobs.job import Job
from batchbound.executor.jobs.journal import Journal
from batchbound.executor.models.faults import RunStoppedError
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.models.tokenizers import load_tokenizer
from batchbound.executor.processes.engine_spec import EngineSpec
from batchbound.executor.reports.steady_state import reached, steady_state
from batchbound.heuristics.exegpt.adaptive_configuration import AdaptiveConfiguration
from batchbound.heuristics.exegpt.dynamic_batch import DynamicBatch
from batchbound.heuristics.exegpt.round_robin import RoundRobinAllocation
from batchbound.heuristics.exegpt.workload_aware import WorkloadAwareAllocation
from batchbound.heuristics.loop import execute, schedule_of
from batchbound.heuristics.policy import State, Step
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.simulator import Simulator
from batchbound.models.exegpt.length_drift import LengthDrift
from batchbound.screen.run import say_reached

RRA = PlannedConfiguration("RRA", 3, 4, 6.0, 0, 12.0, 6.0, 7.0, 4.0, None, 1.0, 10.0)
WAA = replace(RRA, strategy="WAA-C", encode_batch=2, decode_steps=1, decode_batch=0.0, lead=2)
WORKER = EngineSpec("tiny:llama", dtype="float64", device="cpu")

pytestmark = pytest.mark.usefixtures("processes_with_torch")


@pytest.fixture(scope="module")
def job() -> Job:
    import torch

    from batchbound.executor.engines.huggingface import vocabulary_of
    from batchbound.executor.models.sampling import Sampler
    from batchbound.executor.models.source import load_model

    torch.set_num_threads(1)
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    rng = np.random.default_rng(3)
    workload = Workload.from_lengths(rng.integers(1, 25, 24), rng.integers(1, 16, 24))
    problem = Problem(workload, CostModel.paper(), 10, prefill_emits_first_token=True)
    schedule = schedule_of(simulate(problem, RoundRobinAllocation.of(RRA)))
    maker = Maker("test", "0", "FEASIBLE", "search", 0.0, 0)
    plan = Plan.of(problem, schedule, None, maker, configuration=RRA)
    prompts = Prompts.random(workload, vocabulary_of(model), seed=1)
    return Job(plan, prompts, model, load_tokenizer("tiny:llama"), Sampler(), pinned=True)


@pytest.fixture(scope="module")
def alone(job: Job) -> dict[str, dict[str, object]]:
    """The answer line of each request as the model alone gives it."""
    import torch

    lines = {}
    problem = job.plan.problem
    for row, name in enumerate(problem.workload.ids.tolist()):
        ids, count = torch.tensor([job.prompts.tokens[row]]), int(problem.workload.output_tokens[row])
        tokens = job.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        lines[name] = job.answer(row, tokens[0, ids.shape[1] :].tolist())
    return lines


def test_completions_are_written_without_another_look_at_every_module(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchbound.executor.models import wrapped

    looks: list[Any] = []
    unpinned = replace(job, pinned=False)
    monkeypatch.setattr(wrapped, "_check_whole", looks.append)
    lines = [unpinned.answer(row, [5, 6, 7]) for row in range(4)]
    assert len(lines) == 4
    assert len(looks) == 1


def test_slots_hold_twice_the_batch_or_what_can_join_while_an_answer_is_decoded() -> None:
    assert RRA.slots == 2 * (6 + 3)
    assert replace(RRA, strategy="WAA-C", decode_batch=0.0).slots == 2 * (3 * 7 + 3)


def test_a_plan_keeps_its_configuration(job: Job, tmp_path: Path) -> None:
    job.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").configuration == RRA
    replace(job.plan, configuration=None).save(tmp_path / "other.json")
    assert Plan.load(tmp_path / "other.json").configuration is None


def test_round_robin_answers_are_those_of_the_model_alone(
    job: Job, alone: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    with Journal(tmp_path / "journal", {}) as journal:
        outcome = run_configuration(job, RRA, journal)
        assert journal.finished == alone
    trace = outcome.traces[0]
    assert trace is not None
    assert schedule_of(trace).check(job.plan.problem) is None
    encoded = [stage.active for stage in trace.stages if stage.kind == "prefill"]
    assert len(encoded) > 3
    assert max(encoded) <= RRA.encode_batch * 3


@pytest.mark.slow
def test_two_processes_sample_each_request_as_one_does(job: Job, tmp_path: Path) -> None:
    from batchbound.executor.models.mixed_sampling import MixedSampler
    from batchbound.executor.models.sampling import Sampler

    asked = Sampler(), Sampler(temperature=0.9, seed=4), Sampler(temperature=1.2, top_k=9)
    names = job.plan.problem.workload.ids.tolist()
    mixed = MixedSampler({name: asked[row % 3] for row, name in enumerate(names)})
    with Journal(tmp_path / "one", {}) as one:
        run_configuration(replace(job, sampler=mixed), RRA, one)
        answers = dict(one.finished)
    with Journal(tmp_path / "two", {}) as two:
        worker = replace(WORKER, sampler=mixed)
        run_configuration(replace(job, sampler=mixed), WAA, two, worker=worker)
        assert two.finished == answers


@pytest.mark.slow
def test_two_processes_give_the_answers_of_the_model_alone_even_after_one_died(
    job: Job, alone: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    def kill(_: Stage, done: int) -> None:
        for worker in active_children() if done >= 5 else []:
            if worker.name == "batchbound-encode":
                worker.kill()

    with Journal(tmp_path / "journal", {}) as journal:
        with pytest.raises(RunStoppedError, match=r"encoding worker is gone \(exit status -9\)"):
            run_configuration(job, WAA, journal, worker=WORKER, on_stage=kill)
        finished = dict(journal.finished)
        assert 5 <= len(finished) < len(alone)
    with Journal(tmp_path / "journal", {}) as journal:
        assert journal.finished == finished
        outcome = run_configuration(job, WAA, journal, worker=WORKER)
        assert journal.finished == alone
    assert outcome.resumed == len(finished)
    trace = outcome.traces[0]
    assert trace is not None
    joined = np.array([stage.start for stage in trace.stages])[trace.stage_of]
    assert (trace.prefilled < joined).all()
    # Before the run and after it.
    assert trace.readings.shape == (6,)
    assert (trace.readings > 0).all()


@pytest.mark.slow
def test_what_was_encoded_is_kept_where_the_device_has_no_room_for_it(
    job: Job, alone: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    # Room for three of the longest requests; the others take turns with the host, and blocks are used again.
    few = replace(job, kv_tokens=3 * int((job.plan.problem.prompt_tokens + 16).max()))
    with Journal(tmp_path / "journal", {}) as journal:
        outcome = run_configuration(few, replace(WAA, encode_batch=3), journal, worker=WORKER)
        assert journal.finished == alone
    assert outcome.traces[0] is not None
    assert "moved to the host" in str(outcome.traces[0].engine["memory"])


@pytest.mark.slow
def test_what_a_worker_cannot_load_is_said(job: Job, tmp_path: Path) -> None:
    lost = replace(WORKER, model=str(tmp_path / "no-model"))
    with (
        Journal(tmp_path / "journal", {}) as journal,
        pytest.raises(RunStoppedError, match="no such directory"),
    ):
        run_configuration(job, WAA, journal, worker=lost)


def test_waa_without_a_worker_is_refused(job: Job, tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", {}) as journal, pytest.raises(ValueError, match="needs a worker"):
        run_configuration(job, WAA, journal)


class Slow:
    """Encodes in order; each batch is there after it was asked for so many times."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.under_way: deque[list[int]] = deque()
        self.asked = self.most = 0

    def encode(self, requests: Sequence[int]) -> None:
        self.under_way.append(list(requests))
        self.most = max(self.most, len(self.under_way))

    def encoded(self, *, wait: bool) -> list[list[int]]:
        self.asked += 1
        if self.under_way and (wait or self.asked >= self.delay):
            self.asked = 0
            return [self.under_way.popleft()]
        return []


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=15),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(42, 120)),
)
def test_whatever_joins_when_no_rule_is_broken(
    lengths: list[tuple[int, int]], batch: int, lead: int, delay: int, slots: int, capacity: int | None
) -> None:
    workload = Workload.from_lengths(*zip(*lengths, strict=True))
    problem = Problem(
        workload, CostModel.paper(), slots, kv_capacity=capacity, prefill_emits_first_token=True
    )
    encoding = Slow(delay)
    mean = float(np.mean([tokens for tokens, _ in lengths]))
    policy = WorkloadAwareAllocation(encoding, DynamicBatch(batch, mean, None), lead)
    trace = execute(problem, policy, Simulator(problem))
    assert schedule_of(trace).check(problem) is None
    assert encoding.most <= lead
    assert not encoding.under_way


def test_encoding_runs_ahead_of_decoding() -> None:
    problem = Problem(
        Workload.from_lengths([5] * 6, [4] * 6), CostModel.paper(), 6, prefill_emits_first_token=True
    )
    policy = WorkloadAwareAllocation(Slow(1), DynamicBatch(2, 5.0, None), 2)
    trace = execute(problem, policy, Simulator(problem))
    # Two requests join before each of the first iterations; three decode steps later they are done.
    assert [(stage.kind, stage.active) for stage in trace.stages] == [
        ("prefill", 2),
        ("decode", 2),
        ("prefill", 2),
        ("decode", 4),
        ("prefill", 2),
        ("decode", 6),
        ("decode", 4),
        ("decode", 2),
    ]


def test_the_other_worker_is_asked_for_more_as_soon_as_a_batch_joins() -> None:
    problem = Problem(
        Workload.from_lengths([5] * 12, [9] * 12), CostModel.paper(), 12, prefill_emits_first_token=True
    )
    encoding = Slow(1)
    policy = WorkloadAwareAllocation(encoding, DynamicBatch(2, 5.0, None), 2)
    under_way = []

    def watched(state: State) -> Step:
        step = policy(state)
        under_way.append(len(encoding.under_way))
        return step

    execute(problem, watched, Simulator(problem))
    # Six batches: one joins before each of the first six iterations, and two are under way while there are.
    assert under_way[:6] == [2, 2, 2, 2, 1, 0]


def test_a_change_leaves_what_is_being_encoded_as_it_is() -> None:
    problem = Problem(
        Workload.from_lengths([5] * 24, [9] * 24), CostModel.paper(), 24, prefill_emits_first_token=True
    )
    # Answers of eight iterations, not four: the batch is halved once the first two are done.
    planned = replace(WAA, input_tokens=5.0, iterations=4.0, iterations_deviation=0.0)

    def halved(running: PlannedConfiguration, *_: object) -> PlannedConfiguration:
        return replace(running, encode_batch=1, iterations=8.0)

    policy = WorkloadAwareAllocation(Slow(1), DynamicBatch.of(planned), planned.lead)
    trace = execute(problem, AdaptiveConfiguration(policy, planned, halved, cohort=2), Simulator(problem))
    assert schedule_of(trace).check(problem) is None
    # One batch joins a step: eight until then, two more that were being encoded, then four single prompts.
    joined = [stage.active for stage in trace.stages if stage.kind == "prefill"]
    assert joined == [2] * 10 + [1] * 4


@pytest.mark.slow
def test_processes_that_share_layers_give_the_answers_of_the_model_alone(
    job: Job, alone: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    plan, answers = str(tmp_path / "plan.json"), tmp_path / "answers.jsonl"
    job.plan.save(plan)
    words = ["run", plan, "--model", "tiny:llama", "--dtype", "float64", "--device", "cpu", "--threads", "1"]
    words += ["--pinned", "-o", str(answers), "--trace", str(tmp_path / "trace.jsonl"), "--seed", "1"]
    assert main([*words, "--tensor-parallel", "2"]) == 0
    assert "RANK" not in os.environ
    single = tmp_path / "single.jsonl"
    words[words.index(str(answers))] = str(single)
    assert main([*words, "--overwrite"]) == 0
    assert answers.read_text() == single.read_text()


def test_what_cannot_be_shared_is_refused_before_anything_runs(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    job.plan.save(plan)
    words = ["run", plan, "--model", "tiny:llama", "-o", str(tmp_path / "answers.jsonl"), "--trace"]
    words += [str(tmp_path / "trace.jsonl"), "--tensor-parallel"]
    assert main([*words, "3"]) == 2
    assert "3 processes cannot share evenly" in capsys.readouterr().err
    assert main([*words, "2", "--replan", "profile.json"]) == 2
    assert "has no effect with --tensor-parallel" in capsys.readouterr().err
    replace(job.plan, configuration=WAA).save(plan)
    assert main([*words, "2"]) == 2
    assert "for an RRA plan" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed on Linux alone")
def test_processes_that_share_layers_listen_on_loopback_alone(job: Job, tmp_path: Path) -> None:
    heard: set[str] = set()

    def look(_: Stage, done: int) -> None:
        peers = [one.pid for one in active_children() if one.name.startswith("batchbound-peer")]
        assert len(peers) == 1
        heard.update(listening({os.getpid(), *[pid for pid in peers if pid is not None]}))

    from batchbound.executor.models.source import load_model

    with socket.socket() as open_to_all:
        open_to_all.bind(("0.0.0.0", 0))
        open_to_all.listen()
        assert "00000000" in listening({os.getpid()}), "such a port would be seen"
    own = replace(job, model=load_model("tiny:llama", dtype="float64", device="cpu"))
    with Journal(tmp_path / "journal", {}) as journal:
        run_configuration(own, RRA, journal, worker=WORKER, tensor_parallel=2, on_stage=look)
    # Written as in /proc/net: 127.0.0.1, and the same in IPv6.
    assert heard <= {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}


def listening(processes: set[int]) -> set[str]:
    """Return the addresses on which processes listen, in hexadecimal."""
    sockets = set()
    for pid in processes:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(entry))
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.slow
def test_a_process_that_shares_layers_and_dies_stops_the_run(job: Job, tmp_path: Path) -> None:
    children = {process.pid for process in active_children()}

    def kill(_: Stage, done: int) -> None:
        for process in active_children():
            if process.pid not in children and process.name.startswith("batchbound-peer"):
                process.kill()

    from batchbound.executor.models.source import load_model

    own = replace(job, model=load_model("tiny:llama", dtype="float64", device="cpu"))
    with (
        Journal(tmp_path / "journal", {}) as journal,
        pytest.raises(RunStoppedError, match=r"shares the model's layers is gone \(exit status -9\)"),
    ):
        run_configuration(own, RRA, journal, worker=WORKER, tensor_parallel=2, on_stage=kill)


def test_waa_needs_a_profile_of_two_workers_to_be_replanned(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, profile = str(tmp_path / "plan.json"), tmp_path / "profile.json"
    replace(job.plan, configuration=WAA).save(plan)
    own = Operation("loop", "run", ("sequences",), np.array([[0.0], [1.0]]), np.zeros(2))
    layer = Operation("layer", "both", ("tokens",), np.array([[0.0], [1.0]]), np.ones(2))
    LayerProfile(ModelShape("tiny", 2, 8, 1, 1, 8, 8, 8), "here", 1e9, 1, (layer, own), "made up").save(
        profile
    )
    words = ["run", plan, "--model", "tiny:llama", "--pinned", "-o", str(tmp_path / "answers.jsonl")]
    assert main([*words, "--trace", str(tmp_path / "trace.jsonl"), "--replan", str(profile)]) == 2
    assert "two workers" in capsys.readouterr().err


@pytest.fixture
def steady_trace() -> Trace:
    # A request of one decode step joins every second; it is done half a second after its encoding began.
    count = 8
    stages = []
    for k in range(count):
        stages += [
            Stage("prefill", k, k + 0.25, 0, 1, 4, 4, 4),
            Stage("decode", k + 0.25, k + 0.5, 1, 1, 1, 5, 5),
        ]
    at = np.arange(count, dtype=np.float64)
    return Trace(
        ids=tuple(map(str, range(count))),
        slots=1,
        stages=tuple(stages),
        stage_of=2 * np.arange(count),
        slot_of=np.zeros(count, dtype=np.int64),
        queued=np.zeros(count),
        prefilled=at,
        first_token=at + 0.25,
        finished=at + 0.5,
        tokens=np.full(count, 2),
    )


def test_the_steady_state_by_hand(steady_trace: Trace) -> None:
    state = steady_state(steady_trace)
    assert state is not None
    # Filled when two steps are run (the longest answer's), at 2 s; the last two batches are not counted on.
    assert state.requests == 4
    assert state.throughput == pytest.approx(1.0)
    assert state.latency == pytest.approx(0.5)
    assert steady_state(replace(steady_trace, stages=steady_trace.stages[:6])) is None


def test_a_run_says_what_it_reached_and_what_has_drifted(
    steady_trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = replace(RRA, throughput=1.1, latency=0.4, latency_bound=0.45, iterations_deviation=0.5)
    say_reached(planned, reached(planned, steady_trace), steady_trace)
    said = capsys.readouterr().err
    assert "1.00 requests/s in the steady state, planned 1.10 (+10.0%)" in said
    assert "bound of 0.45 s is missed" in said
    assert "-86% against the planned 7.0" in said
    assert "--encode-batch 3" in said


def test_answers_that_turn_out_longer_are_noticed() -> None:
    as_planned = np.array([3, 11] * 50)
    assert not LengthDrift.of(RRA, as_planned).drifted
    longer = LengthDrift.of(RRA, as_planned + 2)
    assert longer.drifted
    assert longer.change == pytest.approx(2 / 7)
    assert "+29% against the planned 7.0" in str(longer)
    # So few may be longer by chance.
    assert not LengthDrift.of(RRA, as_planned[:4] + 2).drifted
