"""What a claim relies on is named: sampled lengths, assumptions of a bound, costs of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.cli import main
from batchbound.data.plan import Plan
from batchbound.executor.jobs.digests import DIGEST, digest_of

LENGTHS = {"a": 5, "b": 3, "c": 9}


def written(folder: Path, **body: Any) -> Path:
    """Write three requests, and earlier completions of them."""
    rows = [
        {"custom_id": name, "body": {"prompt": f"say {name}", "max_tokens": 12, **body}} for name in LENGTHS
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    usage: dict[str, int] = {"prompt_tokens": 5, "total_tokens": 9}
    lines = [
        {
            "custom_id": name,
            "response": {
                "status_code": 200,
                "body": {
                    "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
                    "usage": usage | {"completion_tokens": tokens},
                },
            },
            "error": None,
        }
        for name, tokens in LENGTHS.items()
    ]
    (folder / "earlier.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("body", "sampled"),
    [({"temperature": 1.0}, True), ({"temperature": 1.0, "seed": 3}, False), ({}, False)],
)
def test_lengths_of_sampled_completions_are_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: dict[str, Any], sampled: bool
) -> None:
    prompts, plan = written(tmp_path, **body), str(tmp_path / "plan.json")
    words = [
        "plan",
        str(prompts),
        "--model",
        "tiny:llama",
        "--slots",
        "2",
        "--work",
        "1",
        "--cost",
        "paper",
        "-o",
        plan,
    ]
    assert main([*words, "--lengths", f"completions:{tmp_path / 'earlier.jsonl'}"]) == 0
    said = capsys.readouterr().out
    assert ("bound, if they hold" in said) is sampled
    assert ("expected: those of earlier completions, which are sampled" in said) is sampled
    assert main(["verify", plan]) == 0
    assert ("if completions are as long as expected" in capsys.readouterr().out) is sampled
    assert Plan.load(plan).provenance.expects is sampled


@pytest.mark.parametrize("edit", ["none", "one", "checked"])
def test_a_bound_for_servers_names_what_it_relies_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: str
) -> None:
    prompts, path = written(tmp_path), tmp_path / "plan.json"
    words = ["plan", str(prompts), "--model", "tiny:llama", "--slots", "2", "--for", "vllm", "-o", str(path)]
    assert main([*words, "--lengths", f"completions:{tmp_path / 'earlier.jsonl'}"]) == 0
    assert main(["verify", str(path)]) == 0
    said = capsys.readouterr().out
    assert "assuming: one token a sequence and iteration" in said
    assert "stated: " in said
    plan = json.loads(path.read_text())
    if edit == "none":
        plan["assumptions"] = []
    elif edit == "one":
        plan["assumptions"] = [one for one in plan["assumptions"] if not one["name"].startswith("one token")]
    else:
        plan["assumptions"] = [{**one, "basis": "checked"} for one in plan["assumptions"]]
    path.write_text(json.dumps(plan))
    assert main(["verify", str(path)]) == 1
    error = capsys.readouterr().err
    assert "the plan does not hold: assumptions: " in error
    assert ("which the plan does not name" in error) is (edit != "checked")


def test_the_plan_of_a_first_run_is_verified_by_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "prompts.jsonl", "--model", "tiny:llama", "--threads", "1", "--slots", "2"]) == 0
    capsys.readouterr()
    assert main(["verify", "answers.plan.json"]) == 0
    said = capsys.readouterr().out
    assert "of the completions of trace.jsonl:\nby the" in said
    assert ", no schedule takes less than" in said
    with monkeypatch.context() as patch:
        patch.setattr("batchbound.checking.costs_of", lambda trace: None)
        patch.setattr("batchbound.checking.KEPT", "no gain")
        assert main(["verify", "answers.plan.json"]) == 0
    assert "by the plan's costs, as its stages fit none, no schedule" in capsys.readouterr().out
    assert main(["verify", "answers.plan.json", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["verified"]
    # Bound and makespan are the same sums in another order.
    assert figures["bound_s"] <= figures["makespan_s"] * (1 + 1e-12)
    Path("trace.jsonl").unlink()
    assert main(["verify", "answers.plan.json"]) == 0
    assert "so the plan claims no bound" in capsys.readouterr().out


def test_a_digest_does_not_depend_on_the_order_of_rows() -> None:
    lines = [{"custom_id": name, DIGEST: name * 3, "error": None} for name in "abc"]
    assert digest_of(lines) == digest_of(lines[::-1])
    assert digest_of(lines) != digest_of([*lines[:2], {**lines[2], DIGEST: "d"}])


def test_the_run_of_prompts_that_share_a_beginning_is_verified_with_what_was_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [f"{'shared ' * 10}{k}" for k in range(6)]
    bodies = [{"prompt": text, "max_tokens": 3 + k} for k, text in enumerate(texts)]
    lines = [json.dumps({"custom_id": f"q{k}", "body": body}) for k, body in enumerate(bodies)]
    Path("prompts.jsonl").write_text("\n".join(lines))
    assert main(["run", "prompts.jsonl", "--model", "tiny:llama", "--threads", "1", "--slots", "2"]) == 0
    capsys.readouterr()
    assert main(["verify", "answers.plan.json", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    tree = Plan.load("answers.plan.json").workload.tree
    assert tree is not None
    assert tree.distinct_tokens < sum(map(len, texts))
    assert 0 < figures["bound_s"] <= figures["makespan_s"] * (1 + 1e-9)
