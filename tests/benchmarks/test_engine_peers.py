"""The job that peers are compared on, and that a peer which gives something else is not compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_peers
import pytest


def test_a_job_is_the_same_for_all_with_the_longest_completion_first() -> None:
    short, tail = (engine_peers.job_of(kind, 96, 4_096) for kind in ("short", "tail"))
    assert short == engine_peers.job_of("short", 96, 4_096)
    for jobs, prompts, answers in ((short, (16, 128), (8, 64)), (tail, (32, 256), (2, 768))):
        tokens = [job["tokens"] for job in jobs]
        assert tokens == sorted(tokens, reverse=True)
        assert answers[0] <= tokens[-1] <= tokens[0] <= answers[1]
        assert all(prompts[0] <= len(job["prompt"]) <= prompts[1] for job in jobs)
        assert all(0 <= token < 4_096 for job in jobs for token in job["prompt"])


def results(lengths: dict[str, int]) -> Any:
    def run(python: str, peer: str, folder: Path, job: Path, slots: int) -> dict[str, Any]:
        wanted = engine_peers.job_of("short", 96, 4_096)
        answers = [[7] * (one["tokens"] + lengths[peer]) for one in wanted]
        return {"cpu_seconds": 2.0 if peer == "batchbound" else 3.0, "answers": answers}

    return run


def test_peers_are_compared_where_all_give_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7m").mkdir()
    peers = {"batchbound": "python", "static": "python"}
    monkeypatch.setattr(engine_peers, "in_its_own_process", results({"batchbound": 0, "static": 0}))
    found = engine_peers.compare("7m-short-16", peers, 2, tmp_path)
    assert found["cpu_seconds"] == {"batchbound": 2.0, "static": 3.0}
    assert found["same_answers"] == {"batchbound": 96, "static": 96}
    monkeypatch.setattr(engine_peers, "in_its_own_process", results({"batchbound": 0, "static": -1}))
    with pytest.raises(RuntimeError, match="static gave answers of other lengths"):
        engine_peers.compare("7m-short-16", peers, 1, tmp_path)


@pytest.mark.slow
def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    import sys

    job = tmp_path / "job.json"
    job.write_text("[]", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"static failed:\n[\s\S]*Error"):
        engine_peers.in_its_own_process(sys.executable, "static", tmp_path / "nowhere", job, 4)
