"""Replicas as Ray actors: the answers of one engine, also when an actor dies; skipped without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripts import COMMAND, begun

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.expectation import Tail
from batchbound.data.fleet import Fleet
from batchbound.data.lengths.prediction_error import MeasuredError
from batchbound.data.lengths.remaining import RemainingLengths
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.models.faults import RunStoppedError
from batchbound.executor.processes.engine_spec import EngineSpec
from batchbound.executor.processes.ray_fleet import FleetLostError, FleetOutcome, RayFleet
from batchbound.executor.reports.perfetto import save_perfetto
from batchbound.heuristics.fleet.policy import FleetPolicy
from batchbound.heuristics.loop import schedule_of
from batchbound.planning.fleet import make_fleet_plan
from batchbound.solvers.result import Limits

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.slow,
]

RUNS = int(os.environ.get("BATCHBOUND_RAY_RUNS", "1"))
"""How many times an actor is killed."""

SPEC = EngineSpec("tiny:llama", dtype="float64", device="cpu", tier="window")


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """One local Ray for all fleets of these tests; runs in processes of their own start theirs."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (extra 'ray')")
    ray.init(num_cpus=5, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def alive(node: None) -> Iterator[list[Any]]:
    """Actors that earlier tests left alive: to start one takes nine CPU seconds."""
    pool: list[Any] = []
    yield pool
    RayFleet.close(SimpleNamespace(actors=pool, _ours=False))  # type: ignore[arg-type]


@pytest.fixture
def fleet(alive: list[Any], request: pytest.FixtureRequest) -> Iterator[RayFleet]:
    """Three patient replicas, or as a parameter says; those that die are replaced for the next test."""
    import ray

    count, patience = getattr(request, "param", (3, None))
    made = RayFleet(SPEC, max(0, count - len(alive)), patience=patience)
    made.actors += [alive.pop() for _ in range(count - len(made.actors))]
    yield made
    calls = [actor.pid.remote() for actor in made.actors]
    for actor, call in zip(made.actors, calls, strict=True):
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(call)
            alive.append(actor)


def job(count: int, seed: int = 0) -> tuple[Problem, list[list[int]]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 200, size).tolist() for size in rng.integers(2, 12, count)]
    work = Workload.from_lengths([len(prompt) for prompt in prompts], rng.integers(1, 24, count))
    return Problem(work, CostModel.paper(), 4, prefill_emits_first_token=True), prompts


def alone(problem: Problem, prompts: list[list[int]]) -> list[list[int]]:
    from batchbound.executor.engines.huggingface import HuggingFaceEngine
    from batchbound.executor.engines.tiers import choose_tier
    from batchbound.executor.models.source import load_model
    from batchbound.heuristics.fleet.simulation import longest_first_policy
    from batchbound.heuristics.loop import execute

    model = load_model(SPEC.model, dtype="float64", device="cpu")
    engine = HuggingFaceEngine(
        problem, model, prompts, problem.workload.output_tokens, tier=choose_tier(model, "window")
    )
    execute(problem, longest_first_policy(problem), engine)
    return engine.answers


def planned(problem: Problem, replicas: int) -> Plan:
    return make_fleet_plan(Fleet.of(problem, replicas), limits=Limits(work=1))


def served(
    fleet: RayFleet,
    problem: Problem,
    prompts: list[list[int]],
    kill_after: int | None = None,
    victim: int = 0,
    plan: Plan | None = None,
    backoff: bool = True,
    policy: FleetPolicy | None = None,
) -> tuple[dict[int, list[int]], FleetOutcome]:
    answers: dict[int, list[int]] = {}
    pids: list[int] = []
    if kill_after is not None:
        import ray

        pids = ray.get([actor.pid.remote() for actor in fleet.actors])

    def keep(request: int, tokens: list[int]) -> None:
        assert request not in answers
        answers[request] = tokens
        if len(answers) == kill_after:
            os.kill(pids[victim], signal.SIGKILL)

    plan, most = plan or planned(problem, len(fleet.actors)), problem.workload.output_tokens
    return answers, fleet.serve(plan.fleet, plan.shares, prompts, most, keep, backoff=backoff, policy=policy)


def decode_tokens(outcome: FleetOutcome) -> int:
    stages = [stage for trace in outcome.traces for stage in trace.stages]
    return sum(stage.tokens for stage in stages if stage.kind == "decode")


def test_each_actor_follows_its_schedule_to_the_step(fleet: RayFleet) -> None:
    problem, prompts = job(60, seed=7)
    plan = planned(problem, 3)
    answers, outcome = served(fleet, problem, prompts, plan=plan, backoff=False)
    assert len(answers) == 60
    assert outcome.moved == 0
    for k, (trace, schedule) in enumerate(zip(outcome.traces, plan.shares.schedules, strict=True)):
        assert schedule is not None
        done = schedule_of(trace)
        assert done.decode_steps.tolist() == schedule.decode_steps.tolist()
        assert done.bin_of.tolist() == schedule.bin_of.tolist()
        members = plan.shares.members(k)
        assert trace.ids == tuple(problem.workload.ids[members].tolist())


def test_actors_whose_requests_give_way_near_the_end_give_the_answers_of_one_engine(fleet: RayFleet) -> None:
    problem, prompts = job(60)
    lengths = problem.workload.output_tokens
    # All are predicted alike, so what runs on has more left than what is about to start.
    remaining = RemainingLengths.of(MeasuredError(np.full(60, 20), lengths), np.full(60, 20))
    policy = FleetPolicy("shortest-first", 0.0, Tail(100.0, 1, remaining))
    answers, outcome = served(fleet, problem, prompts, policy=policy)
    assert [answers[i] for i in range(60)] == alone(problem, prompts)
    assert sum(trace.evictions for trace in outcome.traces) > 0
    for trace in outcome.traces:
        assert (trace.prefilled < trace.first_token).all()
        assert (trace.first_token <= trace.finished).all()


def test_three_actors_give_the_answers_of_one_engine(fleet: RayFleet, tmp_path: Path) -> None:
    problem, prompts = job(60)
    answers, outcome = served(fleet, problem, prompts)
    expected = alone(problem, prompts)
    assert [answers[i] for i in range(60)] == expected
    assert not outcome.lost
    assert all(len(trace) for trace in outcome.traces)
    # Every token after a prompt's first comes of a decode step: the merged trace holds the replicas' work.
    assert decode_tokens(outcome) == int(problem.decode_steps.sum())
    save_perfetto(tmp_path / "trace.json", outcome.traces)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    requests = [event["name"] for event in events if event.get("cat") == "request"]
    assert sorted(requests) == sorted(problem.workload.ids.tolist())


@pytest.mark.parametrize("run", range(RUNS))
def test_a_killed_actor_loses_no_answer(run: int, fleet: RayFleet) -> None:
    problem, prompts = job(300, seed=run)
    rng = np.random.default_rng(run)
    answers, outcome = served(fleet, problem, prompts, int(rng.integers(1, 200)), int(rng.integers(3)))
    assert sorted(answers) == list(range(300))
    assert [answers[i] for i in range(300)] == alone(problem, prompts)
    assert len(outcome.lost) == 1
    finished = [name for trace in outcome.traces for name in trace.ids]
    assert sorted(finished) == sorted(problem.workload.ids.tolist())
    # The dead actor's unfinished work was done again elsewhere, so all stages hold at least the job's steps.
    assert decode_tokens(outcome) >= int(problem.decode_steps.sum())


@pytest.mark.parametrize("fleet", [(2, None)], indirect=True)
def test_an_actor_that_dies_with_nothing_left_to_do_is_counted_as_lost(fleet: RayFleet) -> None:
    problem, prompts = job(30)
    answers, outcome = served(fleet, problem, prompts, kill_after=30, victim=1)
    assert len(answers) == 30
    assert list(outcome.lost) == [1]
    assert outcome.traces[1].engine["lost"] == outcome.lost[1]


@pytest.mark.parametrize("fleet", [(1, None)], indirect=True)
def test_a_fleet_without_replicas_left_says_so(fleet: RayFleet) -> None:
    # So many that some are left when the kill arrives, however late.
    problem, prompts = job(1_000)
    with pytest.raises(FleetLostError, match="all 1 replicas died"):
        served(fleet, problem, prompts, kill_after=3)


@pytest.mark.parametrize("fleet", [(2, 5.0)], indirect=True)
def test_what_a_hung_replica_holds_is_served_by_one_that_lives(fleet: RayFleet) -> None:
    import ray

    problem, prompts = job(120)
    answers: dict[int, list[int]] = {}
    pids = ray.get([actor.pid.remote() for actor in fleet.actors])

    def keep(request: int, tokens: list[int]) -> None:
        assert request not in answers
        answers[request] = tokens
        if len(answers) == 3:
            os.kill(pids[0], signal.SIGSTOP)

    try:
        plan = planned(problem, 2)
        outcome = fleet.serve(plan.fleet, plan.shares, prompts, problem.workload.output_tokens, keep)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
    assert [answers[i] for i in range(120)] == alone(problem, prompts)
    assert outcome.lost == {0: "no report for 5 s"}


def test_a_request_that_the_model_fails_on_stops_a_fleet_by_name(tmp_path: Path) -> None:
    import torch

    from batchbound.executor.models.source import load_model

    model = load_model("tiny:llama", dtype="float64", device="cpu")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    spec = EngineSpec(str(tmp_path), dtype="float64", device="cpu", tier="window")
    problem, prompts = job(8)
    fails = r"the model's logits for request 'request-\d+' are not finite"
    with contextlib.closing(RayFleet(spec, 1)) as fleet, pytest.raises(RunStoppedError, match=fails):
        served(fleet, problem, prompts)


def test_a_request_that_the_model_fails_on_is_an_error_where_a_fleet_is_to_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from batchbound.executor.models.source import load_model

    monkeypatch.chdir(tmp_path)
    model = load_model("tiny:llama", device="cpu")
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.config.tie_word_embeddings = False
        # No completion holds it: what it spoils is the prompts alone.
        model.lm_head.weight[ord("~")] = 0
        model.get_input_embeddings().weight[ord("~")] = float("nan")
    model.save_pretrained("model")
    prompts = {f"r{i}": "ab~" if i in (2, 3, 9) else "ab" * (1 + i % 5) for i in range(16)}
    prompts["long"] = "x" * 600
    bodies = {name: {"prompt": text, "max_tokens": 5} for name, text in prompts.items()}
    rows = [{"custom_id": name, "body": body} for name, body in bodies.items()]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = ["plan", "in.jsonl", "--tokenizer", "bytes", "--slots", "2", "--time-limit", "0.2"]
    run = ["run", "--model", str(tmp_path / "model"), "--tokenizer", "bytes", "--dtype", "float64"]
    found = []
    for replicas in ("1", "2"):
        out = ["-o", f"{replicas}.jsonl", "--trace", f"{replicas}.trace"]
        shared = [] if replicas == "1" else ["--replicas", replicas]
        assert main([*plan, *shared, "--overwrite"]) == 0
        assert main([*run, *out]) == 1
        assert f"{replicas}.jsonl: 4 of 17 requests failed" in capsys.readouterr().err
        lines = [json.loads(line) for line in Path(f"{replicas}.jsonl").read_text().splitlines()]
        failed = {line["custom_id"]: line["error"]["code"] for line in lines if line["error"]}
        assert failed == dict.fromkeys(("r2", "r3", "r9"), "model_failed") | {"long": "invalid_request"}
        found.append([line["response"] and line["response"]["body"]["choices"] for line in lines])
    assert found[0] == found[1]


@pytest.mark.parametrize(("sent", "stall"), [("SIGTERM to the run", 600), ("SIGSTOP to the replicas", 60)])
def test_a_run_on_replicas_stops_cleanly_with_every_finished_completion_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str, stall: int
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [{"custom_id": f"r{i}", "body": {"prompt": f"Hi {i}", "max_tokens": 150}} for i in range(400)]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = ["--model", "tiny:llama"]
    assert main(["plan", "in.jsonl", *model, "--slots", "2", "--replicas", "2", "--time-limit", "0.2"]) == 0
    journal = Path("answers.jsonl.journal")
    with begun(COMMAND, ["run", *model, "--pinned", "--stall-seconds", str(stall)], tmp_path) as (run, logs):
        while run.is_alive() and (not journal.exists() or journal.read_text().count("\n") < 5):
            time.sleep(0.2)
        stopped = []
        assert run.pid is not None
        if sent.startswith("SIGTERM"):
            os.kill(run.pid, signal.SIGTERM)
        else:
            # Both: one that runs on would take over what the other has not begun.
            stopped = [one for one in descendants(run.pid) if "ReplicaActor" in one.read_text()]
            assert len(stopped) == 2
            for one in stopped:
                os.kill(int(one.parent.name), signal.SIGSTOP)
        run.join(180)
        said = (logs / "stderr").read_text(encoding="utf-8")
    for one in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(one.parent.name), signal.SIGKILL)
    assert run.exitcode == 1
    why = "the system asked the process to end (SIGTERM)" if not stopped else f"no stage ended for {stall} s"
    assert f"stopped: {why}" in said
    kept = journal.read_text().count("\n") - 1
    assert f"{kept} finished completions are in answers.jsonl.journal; the same command resumes" in said


def descendants(pid: int) -> list[Path]:
    """Return the command lines of a process's children and theirs."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listed.read_text().split():
            found += [Path(f"/proc/{child}/cmdline"), *descendants(int(child))]
    return found
