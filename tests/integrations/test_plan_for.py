"""``plan --for``: what engines take of a plan has their sign, their first number and their limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchbound.cli import main
from batchbound.integrations.handover import ENGINES

LENGTHS = [5, 40, 7, 30, 6, 20]
LONGEST = [1, 3, 5, 2, 4, 0]


def write_batch(folder: Path, **extra: object) -> Path:
    path = folder / "in.jsonl"
    with path.open("w") as stream:
        for k, tokens in enumerate(LENGTHS):
            body = {"model": "m", "prompt": f"prompt {k}", "max_tokens": tokens, "logprobs": 2, **extra}
            stream.write(json.dumps({"custom_id": f"r{k}", "body": body, "output_tokens": tokens}) + "\n")
    return path


def planned(folder: Path, capsys: pytest.CaptureFixture[str], engine: str, *words: str) -> dict[str, Any]:
    batch, out = folder / "in.jsonl", folder / "plan.json"
    command = ["plan", str(batch), "--slots", "2", "--time-limit", "0.1"]
    if '"body"' in batch.read_text():
        command += ["--tokenizer", "bytes"]
    assert main([*command, "-o", str(out), "--for", engine, "--json", *words]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize(("engine", "sign"), [("vllm", 1), ("sglang", -1)])
def test_a_server_gets_the_batch_with_priorities_of_its_own_sign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, sign: int
) -> None:
    write_batch(tmp_path)
    said = planned(tmp_path, capsys, engine)
    (path,) = said["files"]
    rows = lines_of(path)
    assert path.endswith(f"plan.{engine}.jsonl")
    assert sorted(row["custom_id"] for row in rows) == [f"r{k}" for k in range(6)]
    # The lines stand in the order of the priorities, all of which differ.
    values = [sign * row["body"]["priority"] for row in rows]
    assert values == sorted(set(values))
    # Nothing else of a line has changed.
    given = {row["custom_id"]: row for row in lines_of(str(tmp_path / "in.jsonl"))}
    for row in rows:
        del row["body"]["priority"]
        assert row == given[row["custom_id"]]
    assert said["predicted_iterations"] == [said["iterations"]]
    assert said["bound_iterations"] <= said["iterations"] <= 1.05 * said["bound_iterations"]


def test_the_command_has_the_flags_without_which_priorities_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_batch(tmp_path)
    limits = ["--token-budget", "512", "--max-position", "900", "--overwrite"]
    words = planned(tmp_path, capsys, "vllm", *limits)["command"].split()
    assert words[:3] == ["vllm", "serve", "MODEL"]
    pairs = dict(zip(words[3::2], words[4::2], strict=True))
    assert pairs == {
        "--max-num-seqs": "2",
        "--scheduling-policy": "priority",
        "--max-num-batched-tokens": "512",
        "--max-model-len": "900",
    }
    words = planned(tmp_path, capsys, "sglang", *limits)["command"].split()
    assert "--enable-priority-scheduling" in words
    assert words[words.index("--schedule-policy") + 1] == "fcfs"
    assert int(words[words.index("--priority-scheduling-preemption-threshold") + 1]) > len(LENGTHS)


def test_the_command_keeps_to_what_the_bound_relies_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_batch(tmp_path)
    stated = ["--kv-capacity", "256", "--block-tokens", "8", "--no-prefix-caching", "--overwrite"]
    words = planned(tmp_path, capsys, "vllm", *stated)["command"].split()
    assert words[words.index("--block-size") + 1] == "8"
    assert "--no-enable-prefix-caching" in words
    words = planned(tmp_path, capsys, "sglang", *stated)["command"].split()
    assert words[words.index("--page-size") + 1] == "8"
    assert "--disable-radix-cache" in words
    unstated = planned(tmp_path, capsys, "vllm", "--kv-capacity", "256", "--overwrite")["command"]
    assert "--block-size" not in unstated
    assert "prefix" not in unstated


def test_each_replica_has_a_batch_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_batch(tmp_path)
    said = planned(tmp_path, capsys, "vllm", "--replicas", "2")
    assert [Path(path).name for path in said["files"]] == ["plan.vllm.0.jsonl", "plan.vllm.1.jsonl"]
    names = [row["custom_id"] for path in said["files"] for row in lines_of(path)]
    assert sorted(names) == [f"r{k}" for k in range(6)]
    shares = json.loads((tmp_path / "plan.json").read_text())["shares"]
    for share, path in zip(shares, said["files"], strict=True):
        assert [int(row["custom_id"][1:]) for row in lines_of(path)] == share["requests"]


def test_verl_counts_priorities_from_one_in_the_order_of_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_batch(tmp_path)
    said = planned(tmp_path, capsys, "verl")
    value = json.loads(Path(said["files"][0]).read_text())
    assert sorted(value["priority"]) == [1, 2, 3, 4, 5, 6]
    assert value["ids"] == [f"r{k}" for k in range(6)]
    assert [value["priority"][i] for i in value["order"]] == [1, 2, 3, 4, 5, 6]
    assert value["settings"]["actor_rollout_ref.rollout.max_num_seqs"] == "2"


@pytest.mark.parametrize("engine", ["openrlhf", "trl"])
def test_trainers_that_keep_the_order_of_a_list_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    write_batch(tmp_path)
    value = json.loads(Path(planned(tmp_path, capsys, engine)["files"][0]).read_text())
    assert "priority" not in value
    assert sorted(value["order"]) == list(range(6))
    # Two slots: the two longest begin.
    assert set(value["order"][:2]) == {1, 3}


def test_a_job_of_lengths_gets_priorities_by_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "in.jsonl"
    rows = [{"id": f"r{k}", "input_tokens": 3, "output_tokens": tokens} for k, tokens in enumerate(LENGTHS)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = lines_of(planned(tmp_path, capsys, "vllm")["files"][0])
    assert [row["priority"] for row in rows] == list(range(6))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_handover_that_is_there_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    write_batch(tmp_path)
    (path,) = planned(tmp_path, capsys, engine)["files"]
    (tmp_path / "plan.json").unlink()
    words = ["plan", str(tmp_path / "in.jsonl"), "--tokenizer", "bytes", "-o", str(tmp_path / "plan.json")]
    assert main([*words, "--for", engine]) == 2
    assert f"{path}: exists already" in capsys.readouterr().err


def test_the_table_says_what_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_batch(tmp_path)
    words = ["plan", str(tmp_path / "in.jsonl"), "--tokenizer", "bytes", "--time-limit", "0.1"]
    assert main([*words, "-o", str(tmp_path / "plan.json"), "--for", "vllm"]) == 0
    said = capsys.readouterr()
    assert "vllm serve MODEL --max-num-seqs" in said.out
    assert "iterations" in said.out
    assert "ignores it in silence" in said.err
