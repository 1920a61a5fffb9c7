"""Plans of several steps on a model: in one process or one a step, as in the simulator, with nothing lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.fleet import Fleet
from batchbound.data.lengths.steps_plan import BARRIER, Interval, StepsExpectation, StepsPlan, Way
from batchbound.data.lengths.steps_progress import StepsProgress
from batchbound.data.problem import Problem
from batchbound.data.readers.sampling import Sampling
from batchbound.data.workload import Workload
from batchbound.executor.llm import LLM
from batchbound.executor.models.faults import RunStoppedError
from batchbound.executor.planned_steps import PlannedSteps, ServedStep, planned_rollout_function
from batchbound.executor.runs.steps_job import Ended, LiveSteps, StepsJob
from batchbound.heuristics.simulator import Progress, Simulator
from batchbound.heuristics.unknown_lengths.registry import hidden_policy, without_lengths, without_sharing
from batchbound.heuristics.unknown_lengths.steps import StepsRun, StepsServing

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS, SAMPLES, SLOTS, MOST, END = 8, 4, 6, 60, 7
STEP = np.repeat(np.arange(4), GROUPS * SAMPLES // 4)
WAYS = {
    "barrier": ("fcfs", BARRIER),
    "KV kept": ("fcfs-ski", Way(ahead=1.0, keep_kv=True)),
    "KV anew": ("learned", Way(ahead=1.0)),
    "starts again": ("fcfs", Way(ahead=1.0, restart=True)),
    "three of four": ("learned", Way(keep=3)),
    "three of four, KV anew": ("scouts", Way(ahead=0.5, keep=3)),
}
NOBODY_KNOWS = Interval(1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def model() -> LLM:
    made = LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu")
    made.model.generation_config.eos_token_id = END
    return made


def prompts() -> list[tuple[int, ...]]:
    return [(5 + group,) * (3 + group % 3) for group in range(GROUPS) for _ in range(SAMPLES)]


def samplings(logprobs: int | None = None) -> list[Sampling]:
    """Return a sampling for each completion: the end of a sequence is likelier for some prompts."""
    return [
        Sampling(temperature=1.0, seed=100 * group + sample, logit_bias=((END, bias),), logprobs=logprobs)
        for group, bias in enumerate((1.0, 4.5, 2.5, 0.0, 4.0, 1.5, 3.5, 0.5))
        for sample in range(SAMPLES)
    ]


def planned(way: Way, policy: str) -> StepsPlan:
    group = np.repeat(np.arange(GROUPS), SAMPLES)
    workload = Workload.from_lengths([len(prompt) for prompt in prompts()], [1] * len(group))
    workload = replace(workload, group=group).with_shared_prompts()
    problem = Problem(workload, CostModel.paper(), SLOTS, prefill_emits_first_token=True, prefix_cache=20)
    expected = StepsExpectation(NOBODY_KNOWS, (), NOBODY_KNOWS, NOBODY_KNOWS, 0.0, 0.0, 0.0, 0.0, 1)
    nothing = np.zeros(len(group), dtype=np.int64)
    return StepsPlan(
        Fleet.of(without_lengths(problem), 1), STEP, way, way, policy, MOST, nothing, expected, 0
    )


def job(model: LLM, name: str, asked: list[Sampling] | None = None) -> StepsJob:
    policy, way = WAYS[name]
    most = np.full(GROUPS * SAMPLES, MOST)
    return StepsJob(planned(way, policy), prompts(), asked or samplings(), most, model.model, model.tokenizer)


def events(serving: StepsServing) -> list[tuple[str, int, int, int]]:
    return [(one.kind, one.rounds, one.active, one.tokens) for one in serving._execution.stages]


def simulated(name: str, lengths: np.ndarray) -> tuple[StepsRun, list[tuple[str, int, int, int]]]:
    policy, way = WAYS[name]
    problem = planned(way, policy).problem
    simulator = Simulator(problem, progress=Progress.none(problem, lengths))
    serving = StepsServing(problem, STEP, way, hidden_policy(policy, without_sharing(problem)), simulator)
    while serving.advance():
        pass
    return serving.run, events(serving)


@pytest.fixture(scope="module")
def lengths(model: LLM) -> np.ndarray:
    """Return the lengths that all completions have, served at once: each draws from a stream of its own."""
    done = model.generate(prompts(), samplings(), max_tokens=MOST)
    found = np.array([len(one.completion_ids) for one in sorted(done, key=lambda one: one.index)])
    assert len(set(found.tolist())) > 10
    return found


def assert_same(ran: StepsRun, expected: StepsRun) -> None:
    assert ran.seconds == pytest.approx(expected.seconds)
    for name in ("begun", "ended", "tokens"):
        assert getattr(ran, name).tolist() == getattr(expected, name).tolist()
    assert ran.lost == expected.lost


@pytest.mark.parametrize("name", WAYS)
def test_a_model_goes_the_planned_way_event_by_event_as_the_simulator(
    name: str, model: LLM, lengths: np.ndarray
) -> None:
    steps, told = LiveSteps(job(model, name)), list[Ended]()
    while steps.advance(told.append):
        pass
    expected, stages = simulated(name, lengths)
    assert_same(steps.run, expected)
    assert [one[:3] for one in events(steps._serving)] == [one[:3] for one in stages]
    kept = {one.request: one for one in told if steps.run.kept[one.request]}
    for request, one in kept.items():
        assert len(one.tokens) == lengths[request]
        assert sum(count for _, count in one.versions) == len(one.tokens)
        assert one.versions[0][0] == steps.run.begun[request]
        assert one.versions[-1][0] == steps.run.ended[request]
    if name in ("KV kept", "KV anew"):
        assert steps.run.stale_share > 0
    if name == "starts again":
        assert steps.run.lost > 0


ANEW = [name for name, (_, way) in WAYS.items() if not way.keep_kv]


def one_a_process(model: LLM, name: str, path: Path) -> tuple[LiveSteps, list[Ended]]:
    """Serve each step by objects of its own, which know of those before what a file says."""
    told: list[Ended] = []
    made = job(model, name)
    StepsProgress(made.plan.digest()).save(path)
    while True:
        steps = LiveSteps(made, StepsProgress.load(path))
        if not steps.advance(told.append):
            return steps, told
        StepsProgress(made.plan.digest(), steps.ends, steps.unfinished).save(path)


@pytest.mark.parametrize("name", ANEW)
def test_a_process_for_each_step_does_the_same(
    name: str, model: LLM, lengths: np.ndarray, tmp_path: Path
) -> None:
    whole, of_whole = LiveSteps(job(model, name)), list[Ended]()
    while whole.advance(of_whole.append):
        pass
    parts, of_parts = one_a_process(model, name, tmp_path / "progress.json")
    assert of_parts == of_whole
    assert_same(parts.run, whole.run)


def test_log_probabilities_are_those_of_the_weights_that_drew_the_tokens(model: LLM, tmp_path: Path) -> None:
    asked = samplings(logprobs=0)
    steps, told = LiveSteps(job(model, "KV anew", asked)), list[Ended]()
    weight = model.model.lm_head.weight
    before = weight.detach().clone()
    try:
        steps.advance(told.append)
        halves = {one.request: one for one in steps.unfinished}
        assert halves
        with torch.no_grad():
            weight.mul_(0.5)
        while steps.advance(told.append):
            pass
    finally:
        with torch.no_grad():
            weight.copy_(before)
    over = [one for one in told if one.request in halves]
    assert over
    for one in over:
        half, told_now = halves[one.request], one.told
        assert told_now is not None
        assert half.told is not None
        assert len(told_now) == len(one.tokens)
        assert one.tokens[: len(half.tokens)] == half.tokens
        assert [each.value for each in told_now[: len(half.tokens)]] == [value for value, _ in half.told]
        # A token of probability one would be the trace of a choice that was settled.
        assert all(each.value < 0 for each in told_now)
    assert any(len(one.tokens) > len(halves[one.request].tokens) for one in over)


@pytest.mark.parametrize("name", ["barrier", "KV kept"])
def test_weights_changed_by_a_fused_optimizer_draw_the_tokens_of_the_next_step(name: str) -> None:
    # In float32 some weights are packed, and torch does not count what a fused optimizer writes.
    engine = LLM.from_pretrained("tiny:llama", dtype="float32", device="cpu", slots=SLOTS)
    policy, way = WAYS[name]
    steps = PlannedSteps(engine, planned(way, policy), prompts(), log_probabilities=True)
    next(steps)
    weight = engine.model.lm_head.weight
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    torch.optim.AdamW([weight], lr=0.3, fused=True).step()
    served = next(steps).completions
    assert served
    now = [one for one in served if one.versions[0][0] == 1]
    assert now
    for one in now:
        told, ids = one.log_probabilities, torch.tensor([[*one.prompt_ids, *one.completion_ids]])
        with torch.no_grad():
            every = engine.model(ids).logits[0, len(one.prompt_ids) - 1 : -1].double().log_softmax(-1)
        expected = every.gather(1, torch.tensor(one.completion_ids)[:, None])[:, 0].tolist()
        assert told == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ANEW)
def test_a_step_that_broke_off_goes_on_with_all_that_had_ended(
    name: str, model: LLM, lengths: np.ndarray, tmp_path: Path
) -> None:
    made, first = job(model, name), list[Ended]()

    def stop(one: Ended) -> None:
        first.append(one)
        if len(first) == 5:
            raise KeyboardInterrupt

    broken = LiveSteps(made)
    with pytest.raises(KeyboardInterrupt):
        broken.advance(stop)
    there = {one.request: len(one.tokens) for one in first}
    steps, rest = LiveSteps(made), list[Ended]()
    assert steps.advance(rest.append, there)
    assert not {one.request for one in rest} & set(there)
    assert steps.ends[0].before == 5
    progress = StepsProgress(made.plan.digest(), steps.ends, steps.unfinished)
    # What comes after goes by the step as it was, in two parts.
    later = LiveSteps(made, progress)
    while later.advance(rest.append):
        pass
    while steps.advance(lambda one: None):
        pass
    assert_same(later.run, steps.run)
    kept = later.run.kept
    assert later.run.tokens[kept].tolist() == lengths[kept].tolist()
    assert kept.sum() == (GROUPS * 3 if "three" in name else GROUPS * SAMPLES)
    assert all(kept[request] for request in there) or "three" in name or "again" in name


def test_progress_that_does_not_fit_the_plan_is_refused(model: LLM) -> None:
    made, steps = job(model, "KV anew"), LiveSteps(job(model, "KV anew"))
    steps.advance(lambda one: None)
    digest = made.plan.digest()
    for ends, unfinished in (
        (steps.ends, ()),
        ((replace(steps.ends[0], requests=(99, *steps.ends[0].requests[1:])),), steps.unfinished),
        ((replace(steps.ends[0], tokens=(1, *steps.ends[0].tokens[1:])),), steps.unfinished),
    ):
        with pytest.raises(InputError, match="what it says of the steps before"):
            LiveSteps(made, StepsProgress(digest, ends, unfinished))


def engine_for_training(slots: int = SLOTS) -> LLM:
    made = LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=slots)
    made.model.generation_config.eos_token_id = END
    return made


def test_planned_steps_tell_each_request_as_many_likeliest_tokens_as_it_asks_for() -> None:
    asked = [replace(one, logprobs=1 + index % 2) for index, one in enumerate(samplings())]
    policy, way = WAYS["barrier"]
    for one in next(PlannedSteps(engine_for_training(), planned(way, policy), prompts(), asked)).completions:
        assert one.likeliest is not None
        assert {len(each) for each in one.likeliest} == {1 + one.index % 2}


@pytest.mark.parametrize("name", ["KV kept", "three of four, KV anew", "starts again"])
def test_planned_steps_hand_out_each_completion_once_as_its_group_is_complete(
    name: str, lengths: np.ndarray
) -> None:
    policy, way = WAYS[name]
    seen: list[int] = []
    steps = PlannedSteps(
        engine_for_training(),
        planned(way, policy),
        prompts(),
        samplings(),
        log_probabilities=True,
        on_completion=lambda one: seen.append(one.index),
    )
    served = list(steps)
    assert_same(steps.run, simulated(name, lengths)[0])
    assert [one.step for one in served] == list(range(len(served)))
    assert sum(one.seconds for one in served) == pytest.approx(steps.run.makespan)
    completions = [one for each in served for one in each.completions]
    assert sorted(one.index for one in completions) == np.flatnonzero(steps.run.kept).tolist()
    assert {one.index: len(one.completion_ids) for one in completions} == {
        int(name.removeprefix("request-")): tokens for name, tokens in steps.kept.items()
    }
    for one in completions:
        assert one.log_probabilities is not None
        assert len(one.log_probabilities) == len(one.completion_ids)
        assert one.prompt_ids == prompts()[one.index]
    for each in served:
        groups = [one.index // SAMPLES for one in each.completions]
        size = SAMPLES if way.keep is None else way.keep
        assert all(len(set(groups[at : at + size])) == 1 for at in range(0, len(groups), size))
    assert set(seen) >= {one.index for one in completions}
    assert (served[1].staleness > 0) == (name != "starts again")
    assert served[-1].unfinished == 0


def test_a_trainer_gets_whole_groups_of_the_plan_with_their_own_rows() -> None:
    engine, plan = engine_for_training(), planned(Way(ahead=1.0, keep=3), "learned")
    rewarded = [f"row of {index}" for index in range(len(prompts()))]
    rollout = planned_rollout_function(
        engine, plan, prompts(), columns={"answer": rewarded}, logit_bias=((END, 2.0),)
    )
    asked = [prompts()[0]] * 6
    found: list[str] = []
    for _ in range(4):
        got = rollout(asked, None)
        assert len(got["completion_ids"]) == 6
        rows = [int(row.split()[-1]) for row in got["answer"]]
        assert [list(prompts()[row]) for row in rows] == got["prompt_ids"]
        assert [len(each) for each in got["logprobs"]] == [len(each) for each in got["completion_ids"]]
        assert len({row // SAMPLES for row in rows[:3]}) == 1
        found += got["answer"]
    assert len(set(found)) == 4 * 6
    with pytest.raises(ValueError, match="all 4 steps of the plan are served"):
        rollout(asked, None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("name", ["barrier", "three of four, KV anew", "starts again"])
def test_a_step_that_broke_off_raises_what_did_and_is_served_again(
    model: LLM, name: str, error: type[BaseException]
) -> None:
    breaks, told = {3, 10, 18}, [0]

    def fail(_: object) -> None:
        told[0] += 1
        if told[0] in breaks:
            raise error

    engine = LLM(model.model, model.tokenizer, slots=SLOTS)
    policy, way = WAYS[name]
    made = planned(way, policy), prompts(), samplings()
    whole, steps = PlannedSteps(engine, *made), PlannedSteps(engine, *made, on_completion=fail)
    served: list[ServedStep] = []
    for _ in breaks:
        with pytest.raises(error):
            served.extend(steps)
    served.extend(steps)
    assert [(one.step, one.completions, one.unfinished, one.seconds) for one in served] == [
        (one.step, one.completions, one.unfinished, one.seconds) for one in whole
    ]
    assert_same(steps.run, whole.run)


def test_steps_whose_kv_caches_are_kept_end_with_a_step_that_broke_off(model: LLM) -> None:
    policy, way = WAYS["KV kept"]

    def fail(_: object) -> None:
        if failing:
            raise ZeroDivisionError

    engine, failing = LLM(model.model, model.tokenizer, slots=SLOTS), True
    steps = PlannedSteps(engine, planned(way, policy), prompts(), samplings(), on_completion=fail)
    with pytest.raises(ZeroDivisionError):
        next(steps)
    failing = False
    assert next(steps).unfinished > 0
    failing = True
    with pytest.raises(ZeroDivisionError):
        next(steps)
    failing = False
    with pytest.raises(RunStoppedError, match=r"KV cache .* is lost: begin anew, or plan without --keep-kv"):
        next(steps)


def test_a_model_that_was_wrapped_since_is_refused() -> None:
    engine = engine_for_training()
    steps = PlannedSteps(engine, planned(BARRIER, "fcfs"), prompts(), samplings())
    assert next(steps).completions
    forward = engine.model.forward
    engine.model.forward = lambda *given, **named: forward(*given, **named)
    with pytest.raises(ValueError, match="make PlannedSteps after it is wrapped"):
        next(steps)


def test_what_contradicts_the_plan_is_refused() -> None:
    engine, plan = engine_for_training(), planned(Way(ahead=1.0), "learned")
    with pytest.raises(ValueError, match="the plan is for 6 slots, the engine has 5"):
        PlannedSteps(engine_for_training(slots=5), plan, prompts())
    with pytest.raises(ValueError, match="max_tokens is 9, and the plan's longest completion has 60"):
        PlannedSteps(engine, plan, prompts(), max_tokens=9)
    with pytest.raises(ValueError, match="n has no effect here"):
        PlannedSteps(engine, plan, prompts(), Sampling(n=2))
    with pytest.raises(InputError, match="31 prompts were given for the plan's 32 requests"):
        PlannedSteps(engine, plan, prompts()[1:])
    with pytest.raises(InputError, match="has 4 tokens, the plan counts 3"):
        PlannedSteps(engine, plan, [(5,) * 4, *prompts()[1:]])
    with pytest.raises(ValueError, match="the column 'answer' has 1 values"):
        planned_rollout_function(engine, plan, prompts(), columns={"answer": [1]})
    with pytest.raises(ValueError, match="the column 'logprobs' has the name of what a rollout returns"):
        planned_rollout_function(engine, plan, prompts(), columns={"logprobs": [1] * 32})
    wrong: list[tuple[Any, Any, str]] = [
        ("steps.json", samplings(), "plan is 'steps.json': give StepsPlan.load of its file"),
        (plan, {"temperature": 1.0}, "sampling is {'temperature': 1.0}: give Sampling, one for all"),
    ]
    for given, sampling, message in wrong:
        with pytest.raises(TypeError, match=message):
            PlannedSteps(engine, given, prompts(), sampling)


def test_completions_asked_for_by_no_whole_groups_are_there_for_the_next_call() -> None:
    engine = engine_for_training()
    rollout = planned_rollout_function(engine, planned(BARRIER, "fcfs"), prompts())
    with pytest.raises(ValueError, match="3 completions are asked for, which are no whole groups"):
        rollout(prompts()[:3], None)
    alone = planned_rollout_function(engine, planned(BARRIER, "fcfs"), prompts())
    assert rollout(prompts()[:4], None)["completion_ids"] == alone(prompts()[:4], None)["completion_ids"]
