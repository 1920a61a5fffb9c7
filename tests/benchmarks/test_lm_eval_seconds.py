"""Tasks of local questions, and what two evaluations of them have in common."""

from __future__ import annotations

import json
from pathlib import Path

import lm_eval_seconds


def test_the_right_number_stands_among_those_of_other_questions(tmp_path: Path) -> None:
    rows = [{"question": f"q{k}", "answer": f"so #### {k}"} for k in range(1_040)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folder = tmp_path / "tasks"
    folder.mkdir()
    lm_eval_seconds.write_tasks(folder, tmp_path, 3)
    tests = [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [test["numbers"] for test in tests] == [
        ["0", "7", "19", "31"],
        ["8", "1", "20", "32"],
        ["9", "21", "2", "33"],
    ]
    assert [test["numbers"][test["right"]] for test in tests] == ["0", "1", "2"]
    assert "num_fewshot: 5" in (folder / "numbers_first.yaml").read_text(encoding="utf-8")


def test_texts_are_compared_whole_and_log_likelihoods_by_their_difference() -> None:
    texts = [{"replies": [["a"], [reply]], "scores": {}} for reply in ("b", "c")]
    assert lm_eval_seconds.compared(*texts) == {"replies": 2, "equal": 1}
    values = [{"replies": [[(-1.0, True), (at, True)]], "scores": {"acc": 1.0}} for at in (-2.0, -2.5)]
    assert lm_eval_seconds.compared(*values) == {
        "replies": 2,
        "equal": 2,
        "largest_difference": 0.5,
        "same_scores": True,
    }
