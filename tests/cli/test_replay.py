"""Instances replayed on a server with forced lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import tree_of
from fake_server import FakeServer

import batchbound
from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.data.readers.replayed import Replayed
from batchbound.executor.server.forced import forced_prompts
from batchbound.screen.terminal import WRONG_BOUND


class ForcedServer(FakeServer):
    """Names requests by their user, and keeps the prompts' token ids."""

    async def _complete(self, path: str, data: bytes) -> tuple[int, str, str]:
        body = json.loads(data)
        body["ids"], body["prompt"] = body["prompt"], body["user"]
        return await super()._complete(path, json.dumps(body).encode())

    def _prompt_tokens(self, body: Any) -> int:
        return len(body["ids"])


LENGTHS = "input_tokens,output_tokens\n10,20\n30,5\n5,40\n8,12\n9,9\n70,3\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text(LENGTHS, encoding="utf-8")
    return path


def replayed(table: Path, *words: str, slots: int = 2, **server: Any) -> tuple[int, FakeServer]:
    output = str(table.with_name("replay.json"))
    with ForcedServer(slots, **server) as engine:
        asked = ["replay", str(table), "--server", engine.url, "-o", output, "--overwrite", *words]
        return main(asked), engine


def test_a_table_is_replayed_with_forced_lengths_and_verified(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--slots", "2", "--policy", "shortest-first", "--objective", "total")
    status, engine = replayed(table, *words, gate=6, total=6)
    assert status == 0
    bodies = list(engine.bodies.values())
    assert sorted(body["max_tokens"] for body in bodies) == [3, 5, 9, 12, 20, 40]
    assert all(body["min_tokens"] == body["max_tokens"] and body["ignore_eos"] for body in bodies)
    assert sorted(len(body["ids"]) for body in bodies) == [5, 8, 9, 10, 30, 70]
    # 3 and 5 begin, 9 follows the 3, 12 the 5, 20 the 12 and 40 the 17.
    assert engine.iterations == 57
    assert "least" in capsys.readouterr().out
    assert main(["verify", str(table.with_name("replay.json")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["iterations"], found["simulated_iterations"]) == (57, 57)
    assert (found["simulated"], found["least"]) == (126, 126)
    assert found["completion_tokens"] == 89


def test_a_plan_is_replayed_in_its_own_order(table: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    batchbound.plan_for_engine(table, slots=2, engine="vllm", output=plan, work=50)
    status, engine = replayed(plan, gate=6, total=6)
    assert status == 0
    run = Replayed.load(tmp_path / "replay.json")
    assert run.iterations == run.simulated == engine.iterations == 45
    assert run.error == 0
    assert batchbound.verify(run.plan) is None


def test_a_server_that_ends_early_or_beats_the_bound_is_refused(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = {f"request-{k}": 1 for k in range(6)}
    status, engine = replayed(table, "--slots", "2", lengths=lengths)
    assert status == 1
    assert "lengths are forced" in capsys.readouterr().err
    # Twice the slots that were stated.
    status, engine = replayed(table, "--slots", "2", slots=6, gate=6, total=6)
    assert engine.iterations < 45
    assert status == WRONG_BOUND
    assert "an assumption is broken" in capsys.readouterr().err
    with pytest.raises(InputError, match="below the bound"):
        Replayed.load(table.with_name("replay.json"))


def test_a_refused_request_is_named(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = replayed(table, "--slots", "2", faults={"request-0": [400]})
    assert status == 2
    assert "has no completion" in capsys.readouterr().err


def test_slots_and_a_server_are_needed(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = replayed(table)
    assert status == 2
    assert "slots of the server are unknown" in capsys.readouterr().err
    assert main(["replay", str(table), "--server", "http://127.0.0.1:9", "--slots", "2"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_a_forged_replay_is_refused(table: Path, tmp_path: Path) -> None:
    replayed(table, "--slots", "2", gate=6, total=6)
    run = Replayed.load(tmp_path / "replay.json")
    assert run.check() is None
    for forged in (
        replace(run, finished=run.sent),
        replace(run, completion_tokens=run.completion_tokens + 1),
        replace(run, prompt_tokens=run.prompt_tokens + 1),
        replace(run, read_iterations=run.read_iterations[::-1]),
        replace(run, sent=run.sent[:-1]),
    ):
        assert forged.check() is not None


def test_prompts_share_what_the_tree_says() -> None:
    tree = tree_of([-1, 0], [16, 16], [0, 1, 1, -1], [4, 5, 5, 7])
    prompts = forced_prompts(tree.prompt_tokens.tolist(), tree)
    assert [len(prompt) for prompt in prompts] == tree.prompt_tokens.tolist()
    assert prompts[0][:16] == prompts[1][:16] == prompts[2][:16] != prompts[3][:16]
    assert prompts[1][:32] == prompts[2][:32]
    assert prompts[1][32:] != prompts[2][32:]
