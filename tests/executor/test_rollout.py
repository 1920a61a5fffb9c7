"""Rollouts take their settings from the trainer, and say so where they cannot."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.data.lengths.history import LengthHistory
from batchbound.data.readers.requests import read_workload

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.executor.llm import LLM
from batchbound.executor.partial import Until
from batchbound.executor.rollout import Rollout, rollout_function
from batchbound.executor.rollout_files import RolloutFiles

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a", "bb bb", "some longer prompt"]


@pytest.fixture(scope="module")
def engine() -> LLM:
    return LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=3)


def trainer_of(engine: LLM, step: int = 0, **arguments: Any) -> Any:
    args = {
        "max_completion_length": 7,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "seed": 3,
    }
    return SimpleNamespace(
        model=engine.model,
        args=SimpleNamespace(**{**args, **arguments}),
        state=SimpleNamespace(global_step=step),
    )


def forward(engine: LLM, prompt: list[int], completion: list[int]) -> Any:
    with torch.no_grad():
        return engine.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]


def told_of(answer: Rollout) -> Iterator[tuple[list[int], list[int], list[float]]]:
    return zip(answer["prompt_ids"], answer["completion_ids"], answer["logprobs"], strict=True)


@pytest.mark.parametrize("mode", ["temperature", "processed"])
def test_length_temperature_and_truncation_are_the_trainers(engine: LLM, mode: Any) -> None:
    answer = rollout_function(engine, logprobs=mode)(PROMPTS, trainer_of(engine, top_k=5))
    assert max(len(ids) for ids in answer["completion_ids"]) == 7
    for prompt, completion, told in told_of(answer):
        logits = forward(engine, prompt, completion) / 0.7
        kept = logits.masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf)
        assert kept.gather(-1, torch.tensor(completion)[:, None]).isfinite().all()
        kept = kept if mode == "processed" else logits
        expected = kept.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        assert told == pytest.approx(expected.tolist(), abs=1e-9)
        assert all(value > -torch.inf for value in told)


def test_raw_log_probabilities_are_before_temperature(engine: LLM) -> None:
    answer = rollout_function(engine, logprobs="raw")(PROMPTS, trainer_of(engine, top_p=0.5))
    for prompt, completion, told in told_of(answer):
        expected = forward(engine, prompt, completion).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(completion)[:, None])[:, 0]
        assert told == pytest.approx(expected.tolist(), abs=1e-9)


def test_penalties_and_generation_kwargs_of_the_trainer_are_heeded(engine: LLM) -> None:
    trainer = trainer_of(
        engine,
        repetition_penalty=1.9,
        min_p=0.05,
        generation_kwargs='{"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": true,'
        ' "stop_strings": ["a text"]}',
    )
    answer = rollout_function(engine, stop="a text")(PROMPTS, trainer)
    assert [len(ids) for ids in answer["completion_ids"]] == [30] * 3
    repeated = [len(ids) - len(set(ids)) for ids in answer["completion_ids"]]
    plain = rollout_function(engine)(PROMPTS, trainer_of(engine, max_completion_length=30, temperature=0.2))
    assert sum(repeated) < sum(len(ids) - len(set(ids)) for ids in plain["completion_ids"])


def test_processes_steps_and_calls_draw_from_streams_of_their_own(engine: LLM) -> None:
    rollout = rollout_function(engine)
    trainers = [
        trainer_of(engine),
        trainer_of(engine),
        trainer_of(engine, step=1),
        trainer_of(engine, process_index=1),
    ]
    drawn = [rollout_function(engine)(PROMPTS, trainer)["completion_ids"] for trainer in trainers]
    assert drawn[0] == drawn[1], "a run that begins anew is the same run"
    assert drawn[0] != drawn[2]
    assert drawn[0] != drawn[3]
    assert rollout(PROMPTS, trainers[0])["completion_ids"] != rollout(PROMPTS, trainers[0])["completion_ids"]


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ({"temperature": 1.0}, {}, "temperature is 1.0 here and 0.7 in the trainer"),
        ({"max_tokens": 8}, {}, "max_tokens is 8 here and max_completion_length 7 in the trainer"),
        ({}, {"generation_kwargs": {"num_beams": 4}}, "generation_kwargs ask for num_beams=4"),
        ({}, {"generation_kwargs": {"do_sample": False}}, "leave it out; samples are drawn at"),
        ({}, {"top_p": 2.0}, "top_p must lie in"),
        ({"min_p": 0.1}, {"temperature": 0.0}, "min_p has no effect at temperature 0"),
        ({}, {"chat_template_kwargs": {"enable_thinking": False}}, "no chat template that takes"),
    ],
)
def test_what_contradicts_or_cannot_be_served_is_refused(
    engine: LLM, given: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    chat = [[{"role": "user", "content": "hello"}]]
    with pytest.raises(ValueError, match=message):
        rollout_function(engine, **given)(chat, trainer_of(engine, **arguments))


def test_a_trainer_may_have_a_top_p_and_a_top_k_at_temperature_0(engine: LLM) -> None:
    greedy = rollout_function(engine)(PROMPTS, trainer_of(engine, temperature=0.0))
    same = rollout_function(engine)(PROMPTS, trainer_of(engine, temperature=0.0, top_p=0.5, top_k=5))
    assert {**same, "versions": []} == {**greedy, "versions": []}


def test_a_trainer_of_another_model_is_refused(engine: LLM) -> None:
    other = LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=3)
    with pytest.raises(ValueError, match="trains another model"):
        rollout_function(engine)(PROMPTS, trainer_of(other))


@pytest.mark.parametrize(("given", "message"), [({"n": 2}, "n has no effect"), ({"top_p": 3}, "top_p must")])
def test_settings_are_checked_when_they_are_given(engine: LLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollout_function(engine, **given)
    with pytest.raises(TypeError, match="temprature"):
        rollout_function(engine, temprature=1.0)


def test_a_history_puts_the_longest_first_and_is_written_after_each_call(
    engine: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[Any] = []
    generate = LLM.generate

    def noted(llm: LLM, *given: Any, **more: Any) -> Any:
        expected.append(more["expected_tokens"])
        return generate(llm, *given, **more)

    monkeypatch.setattr(LLM, "generate", noted)
    path = tmp_path / "history.jsonl"
    rollout = rollout_function(engine, history=path)
    first = rollout(PROMPTS, trainer_of(engine))
    known = LengthHistory.load(path)
    assert len(known) == len(PROMPTS)
    rollout(PROMPTS, trainer_of(engine, step=1))
    assert expected[0] is None
    assert expected[1] == np.minimum(7, known.expected(PROMPTS)).tolist()
    assert LengthHistory.load(path).error is not None
    assert [len(ids) for ids in first["completion_ids"]]
    with pytest.raises(InputError, match="its folder does not exist"):
        rollout_function(engine, history=tmp_path / "none" / "history.jsonl")


def test_processes_read_the_lengths_of_all_and_write_their_own(engine: LLM, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for process in (0, 1):
        trainer = trainer_of(engine, process_index=process)
        rollout_function(engine, history=path)(PROMPTS[process : process + 1], trainer)
    assert len(LengthHistory.load(path)) == 1
    assert len(LengthHistory.load(tmp_path / "history.jsonl.1")) == 1
    joined = LengthHistory.joined(map(LengthHistory.load, tmp_path.iterdir()))
    assert len(joined) == 2
    expected = np.minimum(7, joined.expected(PROMPTS)).tolist()
    assert RolloutFiles(path, None).expected(PROMPTS, 7) == expected


def test_a_log_of_calls_can_be_simulated(engine: LLM, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    told = [rollout_function(engine, log=path)(prompts, trainer_of(engine, step)) for step in (0, 1)]
    rollout_function(engine, log=path)(prompts, trainer_of(engine, process_index=2))
    assert (tmp_path / "steps.2.csv").is_file()
    workload = read_workload(str(path)).workload
    lengths = [len(ids) for answer in told for ids in answer["completion_ids"]]
    assert workload.output_tokens.tolist() == lengths
    assert len(set(workload.group.tolist())) == 2 * len(PROMPTS)
    with path.open(encoding="utf-8") as stream:
        first, *_, last = csv.DictReader(stream)
    assert float(first["generation_seconds"]) > 0
    assert first["seconds_before"] == ""
    assert float(last["seconds_before"]) >= 0
    assert int(last["shared_tokens"]) == int(last["input_tokens"]) - 1
    asked = ["simulate", str(path), "--slots", "2", "--hidden-lengths", "--steps", "step", "--cost", "paper"]
    assert main([*asked, "--longest-completion", "7", "--json"]) == 0
    path.write_text("other,columns\n")
    with pytest.raises(InputError, match="has the columns other,columns"):
        rollout_function(engine, log=path)


def test_rewards_may_read_why_completions_ended_and_by_which_weights(engine: LLM) -> None:
    answer = rollout_function(engine)(PROMPTS, trainer_of(engine))
    assert answer["log_probabilities"] == answer["logprobs"]
    for ids, reason, versions in zip(
        answer["completion_ids"], answer["finish_reason"], answer["versions"], strict=True
    ):
        assert reason == ("length" if len(ids) == 7 else "stop")
        assert [count for _, count in versions] == [len(ids)]


def test_a_step_ends_with_whole_groups_and_masks_the_others(engine: LLM, tmp_path: Path) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    trainer = trainer_of(engine, max_completion_length=60)
    path = tmp_path / "steps.csv"
    rollout = rollout_function(engine, until=Until(groups=1), log=path)
    answer = rollout(prompts, trainer)
    assert answer["prompt_ids"] == [list(ids) for ids in engine.encoded(prompts, {})]
    # The table has what was drawn of the others, too, as it took time.
    lengths = read_workload(str(path)).workload.output_tokens.tolist()
    drawn = [len(values) for values in answer["logprobs"] if values != [0.0]]
    assert sorted(lengths) == sorted(drawn)
    whole = [set(map(len, answer["completion_ids"][first : first + 4])) for first in (0, 4, 8)]
    assert all(whole)
    masked = [sum(map(sum, answer["env_mask"][first : first + 4])) for first in (0, 4, 8)]
    for group, first in enumerate((0, 4, 8)):
        reasons = answer["finish_reason"][first : first + 4]
        assert ("cut" in reasons) == (masked[group] == 0)
    assert 1 <= sum(tokens > 0 for tokens in masked) < 3
    assert list(map(len, answer["env_mask"])) == list(map(len, answer["logprobs"]))
    assert "env_mask" not in rollout_function(engine)(prompts, trainer)
    with pytest.raises(ValueError, match="oversample has no effect with until"):
        rollout_function(engine, until=Until(groups=1), oversample=1.5)


def test_oversampling_keeps_the_first_to_end(engine: LLM) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    trainer = trainer_of(engine, max_completion_length=60)
    seen: list[int] = []
    rollout = rollout_function(engine, oversample=1.5, on_completion=lambda one: seen.append(one.index))
    answer = rollout(prompts, trainer)
    assert answer["prompt_ids"] == [list(ids) for ids in engine.encoded(prompts, {})]
    assert sorted(seen) == list(range(12))
    # 18 were drawn; the longest were left.
    longest = max(len(ids) for ids in answer["completion_ids"])
    assert engine.unfinished
    assert len(engine.unfinished) <= 6
    plain = rollout_function(engine)(prompts, trainer)
    assert longest <= max(len(ids) for ids in plain["completion_ids"])
    assert engine.report().run_gap is not None
    with pytest.raises(ValueError, match="oversample must be a number of at least 1"):
        rollout_function(engine, oversample=0.5)


def test_settings_that_are_hardly_meant_are_warned_of_once(
    engine: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.csv"
    greedy = trainer_of(engine, temperature=0.0, top_p=1.0)
    rollout = rollout_function(engine, until=Until(groups=3), log=path)
    rollout(PROMPTS[:2] * 2, greedy)
    rollout(PROMPTS[:2] * 2, greedy)
    rollout_function(engine, log=path)
    texts = [
        record.message for record in caplog.records if record.name.startswith("batchbound.executor.rollout")
    ]
    assert [text.split(":")[0] for text in texts[:2]] == [
        "temperature 0",
        "a step has 2 groups, fewer than groups=3",
    ]
    assert texts[2:] == [f"{path} has 2 steps of an earlier training: those of this one are added"]
    caplog.clear()
    rollout_function(engine)(PROMPTS[:2] * 2, trainer_of(engine))
    assert not [record for record in caplog.records if record.name.startswith("batchbound.executor.rollout")]
