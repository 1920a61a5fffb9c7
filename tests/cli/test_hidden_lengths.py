"""``simulate --hidden-lengths``: what is printed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound import hidden_lengths
from batchbound.cli import main
from batchbound.planning.history import History

HEADER = "step,group,id,input_tokens,output_tokens\n"


def table(
    folder: Path, name: str, seed: int, *, share: float = 0.9, steps: int = 1, most: int = 10**6
) -> str:
    """Write a table of 12 groups of 4 a step, alike within groups by an intraclass correlation."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(steps):
        for group in range(12):
            effect = rng.standard_normal()
            for sample in range(4):
                score = np.sqrt(share) * effect + np.sqrt(1 - share) * rng.standard_normal()
                tokens = min(most, max(1, int(np.exp(4.5 + 0.7 * score))))
                rows.append(f"s{step},s{step}g{group},s{step}g{group}-{sample},20,{tokens}")
    path = folder / name
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample as few sets of lengths as for large jobs."""
    monkeypatch.setattr(hidden_lengths, "SAMPLES", {})


def test_a_table_without_groups_has_no_correlation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "20,9\n20,3\n" * 4)
    words = (str(path), "--slots", "2", "--hidden-lengths")
    assert printed(capsys, *words)["intraclass_correlation"] is None
    assert main(["simulate", *words]) == 0
    assert "unknown" in next(line for line in capsys.readouterr().out.splitlines() if "(ICC)" in line)


def test_a_hidden_job_stands_between_first_come_and_the_bound_that_knows_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = table(tmp_path, "one.csv", 1)
    found = printed(capsys, one, "--slots", "12", "--hidden-lengths")
    assert found["bound_s"] <= found["makespan_s"]
    assert found["policy"] == "learned"
    assert found["intraclass_correlation"] > 0.6
    plain = printed(capsys, one, "--slots", "12", "--hidden-lengths", "--policy", "fcfs")
    assert plain["makespan_s"] == plain["fcfs_s"] == found["fcfs_s"]
    assert plain["recovered"] == 0
    loss = found["fcfs_s"] - found["bound_s"]
    assert found["recovered"] == pytest.approx((found["fcfs_s"] - found["makespan_s"]) / loss)


def test_the_trace_of_a_hidden_job_is_written_with_every_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = table(tmp_path, "one.csv", 1)
    trace = tmp_path / "trace.jsonl"
    words = ["simulate", one, "--slots", "12", "--hidden-lengths", "--cost", "paper", "--trace", str(trace)]
    assert main(words) == 0
    assert "makespan" in capsys.readouterr().out
    assert trace.read_text().count('"finished"') >= 48


@pytest.mark.slow
@pytest.mark.usefixtures("few_sets")
def test_earlier_steps_give_an_interval_and_earlier_epochs_an_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = table(tmp_path, "one.csv", 1), table(tmp_path, "other.csv", 2)
    words = (one, "--slots", "12", "--hidden-lengths")
    found = printed(capsys, *words, "--history", table(tmp_path, "past.csv", 3, steps=2))
    assert found["expected_low_s"] <= found["expected_mean_s"] <= found["expected_high_s"]
    assert found["coverage"] == 0.9
    # The same requests, known to the token: longest first from the start, near the bound.
    told = printed(capsys, *words, "--history", one)
    untold = printed(capsys, *words)
    assert told["makespan_s"] < untold["makespan_s"]
    assert told["expected_low_s"] <= told["makespan_s"] <= told["expected_high_s"]
    assert Path(other).exists()


def test_a_history_that_is_named_again_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def simulated(args: object, problem: object, history: History, *_: object) -> tuple[None, dict[str, Any]]:
        counted.append(len(history.workloads))
        return None, {}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hidden_lengths, "_one", simulated)
    past = table(tmp_path, "past.csv", 3)
    words = ["simulate", past, "--hidden-lengths", "--json", "--history", past]
    assert main([*words, "past.csv", "--history", "./past.csv", table(tmp_path, "other.csv", 4)]) == 0
    assert counted == [2]


def test_moving_kv_caches_costs_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = table(tmp_path, "one.csv", 4, most=100)
    words = (one, "--slots", "24", "--hidden-lengths", "--longest-completion", "100")
    cheap = printed(capsys, *words, "--swap", "1e-7")
    assert cheap["evictions"] > 0
    dear = printed(capsys, *words, "--swap", "1")
    assert dear["evictions"] == 0
    assert dear["gap"] >= 0


def test_the_bound_of_runs_in_which_requests_give_way_is_of_such_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two slots share five completions of 1,000 tokens two and a half each, where they may give way; else one
    # slot has three of them, and no schedule takes less than 88 s.
    rows = [f"g{row // 2},{row},5,{10 if row in (1, 2, 3) else 1000}" for row in range(8)]
    path = tmp_path / "one.csv"
    path.write_text("group,id,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    words = (str(path), "--slots", "2", "--hidden-lengths", "--longest-completion", "1000")
    whole = printed(capsys, *words)
    assert whole["bound_s"] > 88
    moved = printed(capsys, *words, "--swap", "0")
    assert moved["evictions"] > 0
    assert 73 < moved["bound_s"] <= moved["makespan_s"] < 76
    assert moved["gap"] == pytest.approx(moved["makespan_s"] / moved["bound_s"] - 1)
    assert whole["recovered"] <= 1
    assert 0 < moved["recovered"] <= 1


def test_moving_kv_caches_is_refused_where_no_group_has_two_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(name: str, *groups: str) -> str:
        path = tmp_path / name
        rows = [f"{group},{row},20,{9 + row}" for row, group in enumerate(groups)]
        path.write_text("group,id,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
        return str(path)

    words = ("--slots", "2", "--hidden-lengths", "--swap", "1e-7")
    alone = of("alone.csv", "a", "b", "c", "d")
    for history in ((), ("--history", alone)):
        assert main(["simulate", alone, *words, *history]) == 2
        assert "--swap has no effect" in (message := capsys.readouterr().err)
        assert "no group has two requests" in message
        assert len(message.strip().splitlines()) <= 2
    assert main(["simulate", of("mixed.csv", "a", "a", "b", "c"), *words]) == 0


def test_steps_that_go_on_take_less_than_a_barrier_and_say_how_stale_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (table(tmp_path, "steps.csv", 5, steps=3), "--slots", "12", "--hidden-lengths", "--steps", "step")
    barrier = printed(capsys, *words, "--policy", "fcfs")
    assert barrier["saved"] == 0
    assert barrier["stale_share"] == barrier["kept_length_bias"] == 0
    ahead = printed(capsys, *words, "--ahead", "0.5", "--keep-kv")
    assert ahead["saved"] > 0.03
    assert ahead["stale_share"] > 0
    assert main(["simulate", *words, "--ahead", "0.5"]) == 0
    table_printed = capsys.readouterr().out
    assert "age of a completion in steps" in table_printed
    assert "kept completions longer by" in table_printed
    kept = printed(capsys, *words, "--keep", "3")
    assert kept["kept"] == 3 * 12 * 3
    assert kept["kept_length_bias"] < 0
    assert kept["lost_tokens"] > 0
    assert printed(capsys, *words, "--ahead", "0.5", "--restart")["stale_share"] == 0


def test_the_figures_of_a_log_say_what_would_shorten_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two steps of four groups of one, all lengths known; a decode step of all costs the same.
    path = tmp_path / "steps.csv"
    lengths = [[11, 21, 31, 101], [11, 21, 31, 81]]
    rows = [
        f"{step},{step}-{k},5,{tokens},{40 + step},{7 * step}"
        for step, of_step in enumerate(lengths)
        for k, tokens in enumerate(of_step)
    ]
    header = "step,group,input_tokens,output_tokens,generation_seconds,seconds_before\n"
    path.write_text(header + "\n".join(rows) + "\n")
    seconds = {"prefill_base": 1.0, "prefill_per_token": 0.0, "decode_base": 1.0, "decode_per_slot": 0.0}
    cost = tmp_path / "costs.json"
    cost.write_text(json.dumps({"batchbound_cost": 2, "cost": seconds}))
    words = (str(path), "--slots", "4", "--hidden-lengths", "--steps", "step", "--cost", str(cost))
    figures = printed(capsys, *words, "--policy", "fcfs")
    changes = {change["change"]: change for change in figures["changes"]}
    assert figures["measured_s"] == 81
    assert figures["training_s"] == 7
    # All four begin together, and the step takes as long as its longest.
    run = figures["makespan_s"]
    assert run == pytest.approx(2 + 101 + 81, abs=2)
    assert changes["8 slots"]["saved"] == changes["lengths known"]["saved"] == 0
    cut = changes["3 of 4 groups"]
    assert cut["makespan_s"] == pytest.approx(2 + 31 + 31, abs=2)
    # Whole steps count generation as measured.
    scale = np.median(np.array([40, 41]) / figures["step_s"])
    assert figures["measured_over_simulated"] == pytest.approx(scale)
    assert cut["saved_of_steps"] == pytest.approx(1 - (scale * cut["makespan_s"] + 14) / (scale * run + 14))
    kept, every = (11 + 21 + 31) / 3, (11 + 21 + 31 + 91) / 4
    assert cut["kept_length_bias"] == pytest.approx(kept / every - 1, abs=0.02)
    stale = changes["1 step staler"]
    assert stale["saved"] > 0
    assert sum(stale["staleness_counts"]) == 8
    assert stale["staleness_counts"][1] >= 1
    assert figures["most_steps_per_hour"] == pytest.approx(3600 * 2 / figures["bound_s"])
    assert figures["bound_s"] <= min(run, changes["1 step staler"]["makespan_s"])
    assert printed(capsys, *words, "--keep-groups", "0.75")["makespan_s"] == pytest.approx(cut["makespan_s"])
    assert printed(capsys, *words, "--training", "3")["training_s"] == 3
    assert main(["simulate", *words]) == 0
    screen = capsys.readouterr().out
    assert "3 of 4 groups" in screen
    assert "of whole steps" in screen
    assert "measured over simulated seconds" in screen
    assert "steps an hour at most" in screen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hidden-lengths", "--steps", "step", "--keep-groups", "1.5"], "a share above 0 and below 1"),
        (["--swap", "1e-5"], "--swap has no effect without --hidden-lengths"),
        (["--steps", "step", "--ahead", "0.5"], "--steps has no effect without --hidden-lengths"),
        (["--hidden-lengths", "--keep", "2"], "--keep has no effect without --steps"),
        (["--hidden-lengths", "--policy", "lpt"], "--policy lpt needs lengths"),
        (["--hidden-lengths", "--policy", "fcfs", "--swap", "1"], "--swap has no effect on the policy fcfs"),
        (["--hidden-lengths", "--steps", "no"], "has no column 'no'"),
        (["--hidden-lengths", "--steps", "step", "--keep", "4"], "it has no effect"),
        (["--hidden-lengths", "--steps", "step", "--restart"], "restart has no effect"),
        (["--hidden-lengths", "--steps", "id"], "a group has requests in several steps"),
        (["--hidden-lengths", "--history", "none.csv"], "none.csv"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", table(tmp_path, "one.csv", 1), "--slots", "4", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--swap", "nan"], "--swap: 'nan' is not a number of at least 0"),
        (["--steps", "step", "--ahead", "-1"], "--ahead: '-1' is not a number of at least 0"),
        (["--steps", "step", "--keep", "0"], "--keep: 0 is not at least 1"),
    ],
)
def test_a_number_out_of_range_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", table(tmp_path, "one.csv", 1), "--hidden-lengths", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_hidden_lengths_of_replicas_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", table(tmp_path, "one.csv", 1), "--hidden-lengths", "--replicas", "2"]) == 2
    assert "--replicas has no effect with --hidden-lengths" in capsys.readouterr().err


@pytest.mark.usefixtures("few_sets")
def test_no_longer_completions_are_expected_than_requests_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    past, prompts = table(tmp_path, "past.csv", 2), tmp_path / "prompts.csv"
    prompts.write_text("text,most\n" + "".join(f"p{k // 4},7\n" for k in range(12)))
    words = [str(prompts), "--prompt-column", "text", "--slots", "4", "--hidden-lengths", "--history", past]
    words += ["--lengths", "constant:7"]
    free, stated, said = (
        printed(capsys, *words, *more)
        for more in ([], ["--max-tokens-column", "most"], ["--longest-completion", "7"])
    )
    assert stated | {"seconds": 0} == said | {"seconds": 0}
    assert stated["expected_high_s"] < free["expected_low_s"]
