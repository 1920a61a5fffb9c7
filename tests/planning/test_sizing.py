"""``batchbound size``: what it estimates, chooses, refuses to promise, and tells to type."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import deployments
import numpy as np
import pytest

import batchbound
from batchbound import drawing
from batchbound.cli import main, whole_parser
from batchbound.data.arrays import FloatArray
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.files.disk import InputError
from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.heuristics.iterations.replay import ComposedDevice
from batchbound.heuristics.serving.release import predict
from batchbound.models.exegpt.roofline import ROOFLINE_DEVICES, Roofline
from batchbound.models.iterations.layer_cost import LayerCost
from batchbound.models.sizing.load import OFF, REACHED, Load, ProfiledSeconds, kv_tokens
from batchbound.options.size import SizeOptions

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072, "_name_or_path": "meta-llama/Llama-3.1-8B",
}  # fmt: skip
VLLM = os.environ.get("VLLM") or shutil.which("vllm")


class OneSecond:
    """Iterations of one second, whatever is in them."""

    def decode_steps(self, sequences: FloatArray, contexts: FloatArray) -> FloatArray:
        return np.ones_like(sequences)

    def prompt_seconds(
        self, sequences: float, length: float, *, reused: float = 0.0, together: float = 1.0
    ) -> float:
        return 0.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model's configuration, prices, prompts and two tables of lengths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "prices.toml").write_text("[h100-80gb]\nprice = 2.5\nmost = 4\n[l40s]\nprice = 1.0\n")
    for name, count in (("small.csv", 400), ("large.csv", 6000)):
        rows = "".join(f"{100 + k % 900},{1 + k % 400}\n" for k in range(count))
        (tmp_path / name).write_text("input_tokens,output_tokens\n" + rows)
    bodies = [
        {"messages": [{"role": "user", "content": "Be brief. " * 40 + f"Number {k}?"}], "max_tokens": 9}
        for k in range(50)
    ]
    lines = [json.dumps({"custom_id": f"r{k}", "body": body}) for k, body in enumerate(bodies)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def sized(*files: str, **options: Any) -> batchbound.Sizing:
    """Return the sizing of jobs within a day, with the fixture's model and prices."""
    stated: dict[str, Any] = {"model": "config.json", "prices": "prices.toml", "within": ("1d",)} | options
    return batchbound.size(files[0], files[1:], **stated)


def test_a_text_is_one_window_and_not_its_letters(folder: Path) -> None:
    assert sized("small.csv", within="1d").windows == (86400.0,)


@pytest.mark.parametrize(
    ("prices", "what"),
    [("", "names no device"), ("[mine]\nflops = 989\nbandwidth = 3.35e12\nmemory = 80e9\n", "flops is 989")],
)
def test_prices_without_a_device_or_in_other_units_are_refused(folder: Path, prices: str, what: str) -> None:
    (folder / "prices.toml").write_text(prices)
    with pytest.raises(InputError, match=what):
        sized("small.csv")


def test_rows_beyond_the_model_s_positions_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 1000}))
    words = ["--model", "config.json", "--prices", "prices.toml", "--within", "1d"]
    assert main(["size", "small.csv", *words]) == 0
    # Prompts of 100 to 499 tokens, completions of 1 to 400: none is longer than 899.
    assert "positions" not in capsys.readouterr().out
    assert main(["size", "large.csv", *words]) == 0
    assert "of them exceed the model's 1,000 positions" in capsys.readouterr().out


def test_equal_requests_take_their_tokens_over_the_slots() -> None:
    load = Load.of(Sequences(np.full(800, 10), np.full(800, 64)))
    # All at once: 64 iterations. Four at a time: 800 x 64 / 4, and a little more at the end.
    assert load.seconds(cast("Roofline", OneSecond()), 800.0, 2048) == pytest.approx(64)
    assert load.seconds(cast("Roofline", OneSecond()), 800.0, 2048, replicas=2) == pytest.approx(64)
    assert load.seconds(cast("Roofline", OneSecond()), 4.0, 2048) == pytest.approx(12_800, rel=0.003)
    assert load.seconds(cast("Roofline", OneSecond()), 4.0, 2048, replicas=4) == pytest.approx(3200, rel=0.01)


def test_running_requests_share_their_beginnings_in_the_kv_cache() -> None:
    # Six prompts of 100 common tokens and 20 of their own: 100 are held once, 20 and half of 40 for each.
    prompts = [[7] * 100 + [k] * 20 for k in range(6)]
    rows = Sequences(np.full(6, 120), np.full(6, 40), tree=PrefixTree.of_prompts(prompts))
    load = Load.of(rows)
    assert load.beginnings(6) == pytest.approx(100 + 5 * 100 / 6)
    assert load.running(256, 100 + 3 * 40 + 2 * 100 // 6, 6) == pytest.approx(3, abs=0.05)
    assert load.running(2, 10_000, 6) == 2
    assert load.prompt == 120
    assert load.reused == pytest.approx(500 / 6)


@pytest.mark.parametrize("device", ["h100-80gb", "l4"])
@pytest.mark.parametrize("job", [(300, 200, 1.0, 500), (400, 60, 0.5, 1500), (250, 600, 0.9, 100)])
def test_the_estimate_is_near_the_iterations_simulated_at_the_same_costs(
    device: str, job: tuple[int, int, float, int]
) -> None:
    count, usual, deviation, prompt = job
    rng, rates = np.random.default_rng(0), ROOFLINE_DEVICES[device]
    output = np.minimum(4000, rng.lognormal(np.log(usual), deviation, count)).astype(int) + 1
    rows, shape = (
        Sequences(rng.integers(prompt // 2, 3 * prompt // 2, count), output),
        ModelShape.from_config(LLAMA),
    )
    cost, room, load = Roofline(shape, rates, 1, REACHED), kv_tokens(shape, rates, 1), Load.of(rows)
    prices = ComposedDevice(LayerCost(cost.profile()))
    run = predict(rows, EngineLimits(64, 2048, room), np.arange(count), prices=prices)
    assert run is not None
    for seconds in (cost, ProfiledSeconds(cost.profile())):
        estimate = load.seconds(seconds, load.running(64, room, count), 2048)
        assert estimate == pytest.approx(run.seconds, rel=0.16)


def test_the_cheapest_deployment_that_keeps_the_window_is_chosen(folder: Path) -> None:
    loose, tight = sized("large.csv"), sized("large.csv", within=("6m",))
    assert loose.choice is not None
    assert tight.choice is not None
    for sizing in (loose, tight):
        assert sizing.choice is sizing.kept[0]
        assert all(one.end.sure <= sizing.windows[0] for one in sizing.kept)
        cheaper = [one for one in sizing.tried if one.cost < sizing.kept[0].cost]
        assert all(one.end.sure > sizing.windows[0] for one in cheaper)
        assert sizing.next_cheaper is (cheaper[-1] if cheaper else None)
    assert tight.choice.cost > loose.choice.cost
    assert all(one.end.low < one.end.expected < one.end.sure < one.end.high for one in tight.tried)
    chosen = tight.choice
    hours = chosen.replicas * chosen.replica.degree * chosen.end.expected / 3600
    assert chosen.cost == pytest.approx(hours * (chosen.replica.offer.price or 0))
    assert max(one.replicas * one.replica.degree for one in tight.tried) == 64
    assert all(
        one.replicas * one.replica.degree <= 4 for one in tight.tried if one.replica.offer.name == "h100-80gb"
    )


def test_too_few_devices_are_proven_only_where_lengths_are_known(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["size", "large.csv", "--model", "config.json", "--devices", "l4", "--within", "2m"]
    assert main(words) == 1
    screen = capsys.readouterr().out
    assert "impossible, proven: " in screen
    assert "x l4 or fewer: at least " in screen
    assert "prompts that share no more than the table says" in screen
    known = sized("large.csv", devices=("l4",), prices=None, within=("2m",))
    (count, claim) = known.impossible["l4"]
    assert claim.seconds > 120
    assert all(one.end.low > 120 for one in known.tried if one.replicas * one.replica.degree <= count)
    assert main([*words, "--lengths", "constant:300"]) == 1
    screen = capsys.readouterr().out
    assert "too few, with such lengths: " in screen
    assert "proven" not in screen
    assert "expected" in screen


def test_one_job_of_unknown_lengths_leaves_nothing_proven(folder: Path) -> None:
    rows: list[dict[str, object]] = [
        {"custom_id": f"r{k}", "output_tokens": 5, "body": {"max_tokens": 9, "prompt": [1, 2, 3 + k]}}
        for k in range(9)
    ]
    (folder / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        del row["output_tokens"]
    (folder / "limits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sized("known.jsonl").pooled.proven
    assert not sized("limits.jsonl").pooled.proven
    assert not sized("known.jsonl", "limits.jsonl").pooled.proven


def test_a_window_that_the_start_alone_exceeds_and_a_hub_name_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["size", "small.csv", "--devices", "l4", "--within", "1m", "--model"]
    assert main([*words, "config.json"]) == 1
    # Two minutes, and a second for each of the 16.1 GB of weights.
    assert "its start alone is assumed to take 0:02:16" in capsys.readouterr().out
    assert main([*words, "meta-llama/Llama-3.1-8B"]) == 2
    assert "Give the model's config.json, or its folder; nothing is downloaded." in capsys.readouterr().err


def test_limits_of_completions_are_at_most(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["size", "prompts.jsonl", "--model", "config.json", "--prices", "prices.toml", "--within", "1h"]
    assert main(words) == 0
    screen = capsys.readouterr().out
    assert "9 out each at most" in screen
    assert "four bytes a token" in screen
    assert not {"proven", "predicted"} & set(screen.replace(":", " ").split())
    # 400 of the about 440 bytes of each prompt are the same: 6 blocks of 64.
    assert sized("prompts.jsonl").load.reused == pytest.approx(96 * 49 / 50, abs=8)


def test_lengths_of_a_file_widen_the_interval(folder: Path) -> None:
    (folder / "past.csv").write_text(
        "id,output_tokens\n" + "".join(f"a{k},{5 + 40 * (k % 3)}\n" for k in range(12))
    )
    known = sized("small.csv", lengths="constant:45", devices=("l40s",))
    past = sized("small.csv", lengths="quantile:0.5:past.csv", devices=("l40s",))
    assert known.pooled.spread() == (1.0, 1.0)
    # Of 12 sorted lengths the sixth, and 1.645 x sqrt(12 / 4) = 2.8 places to each side.
    assert past.pooled.spread() == (5 / 45, 45 / 45)
    assert (
        past.tried[0].end.low / past.tried[0].end.expected
        < known.tried[0].end.low / known.tried[0].end.expected
    )
    assert past.pooled.word == "expected"


def test_pooled_jobs_run_in_the_order_of_their_deadlines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = sized("large.csv", "small.csv", within=("2h", "5m"), devices=("h100",))
    assert [(job, kept) for job, _, kept in both.agenda] == [(1, True), (0, True)]
    alone = sized("large.csv", within=("2h",), devices=("h100",))
    # Requests of the next job take the slots that the first one frees.
    assert both.agenda[-1][1].expected < both.agenda[0][1].expected + alone.tried[0].end.expected
    words = ["size", "large.csv", "small.csv", "--model", "config.json", "--devices", "l4"]
    assert main([*words, "--within", "3m", "--within", "2h"]) == 1
    screen = capsys.readouterr().out
    assert "large.csv: " in screen
    assert screen.index("small.csv: ") < screen.index("large.csv: ", screen.index("order of the jobs"))
    assert ": LATE" in screen
    assert "at least" in screen


def test_beginnings_that_two_jobs_share_are_counted_once(folder: Path) -> None:
    shutil.copy("prompts.jsonl", "again.jsonl")
    alone, twice = sized("prompts.jsonl"), sized("prompts.jsonl", "again.jsonl")
    assert len(twice.pooled.rows) == 2 * len(alone.pooled.rows)
    for name, count in (("many.csv", 6), ("few.csv", 2)):
        rows = "".join(f"100,5,{k // 2},80\n" for k in range(count))
        Path(name).write_text("input_tokens,output_tokens,group,shared_tokens\n" + rows)
    # Groups of two tables are different, whatever their numbers: 80 tokens are saved once in each pair.
    assert sized("many.csv", "few.csv").pooled.rows.cached.sum() == 4 * 80
    computed = [int((one.pooled.rows.prompt - one.pooled.rows.cached).sum()) for one in (alone, twice)]
    # Six blocks of 16 tokens begin all prompts.
    assert computed[1] == 2 * computed[0] - 96
    with pytest.raises(InputError, match="cannot be pooled with a table of lengths"):
        sized("prompts.jsonl", "small.csv")


def test_windows_are_times_of_day_dates_or_durations() -> None:
    now = datetime(2026, 11, 30, 23, 0)

    def windows(**stated: Any) -> tuple[float, ...]:
        return SizeOptions("a", ("b",), model="c", **stated).windows(now)

    assert windows(by=("07:00",)) == (8 * 3600.0,) * 2
    assert windows(by=("23:30", "2026-12-01T00:00")) == (1800.0, 3600.0)
    assert windows(within=("90m", "2d")) == (5400.0, 172800.0)
    assert windows(within=("1h30m", "1d2h")) == (5400.0, 93600.0)
    for stated, what in (
        ({"by": ("2026-11-30T22:00",)}, "is over"),
        ({"by": ("7 pm",)}, "'7 pm' is no time: write 07:00"),
        ({"within": ("8",)}, "'8' is no time: write 8h"),
        ({"within": ("0h",)}, "'0h' is no time"),
        ({"within": ("1h30",)}, "'1h30' is no time: write 8h, 1h30m"),
        ({"within": ("1h1h",)}, "'1h1h' is no time"),
        ({"within": ("1h",) * 3}, "3 windows for 2 jobs"),
        ({}, "no window"),
    ):
        with pytest.raises(InputError, match=what):
            windows(**stated)


def test_an_assumed_start_widens_the_interval_and_a_stated_one_does_not(folder: Path) -> None:
    ends = {}
    for text in ("", "startup = 140\n"):
        Path("one.toml").write_text(f"[h100-80gb]\nprice = 2.5\nmost = 1\n{text}")
        (deployment,) = sized("small.csv", prices="one.toml").tried
        ends[text] = (deployment.replica.startup, deployment.end, deployment)
    (start, assumed, _), (_, stated, _) = ends.values()
    assert assumed.high - assumed.expected > stated.high - stated.expected + 0.9 * start
    assert assumed.expected - assumed.low > stated.expected - stated.low + 0.4 * start
    deployment = ends[""][2]
    assert deployment.sure_cost == pytest.approx(2.5 * assumed.sure / 3600)


def test_the_screen_tells_the_time_of_day_and_the_cost_at_90_percent(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizing = replace(sized("small.csv"), now=datetime(2026, 11, 30, 7, 0, 30))
    assert [sizing.time_of(seconds) for seconds in (0, 30, 31, 17 * 3600)] == [
        "07:01",
        "07:01",
        "07:02",
        "2026-12-01 00:01",
    ]
    words = ["size", "small.csv", "--model", "config.json", "--prices", "prices.toml", "--within", "1d"]
    assert main(words) == 0
    screen = capsys.readouterr().out
    assert re.search(r"done by [-0-9 ]*\d\d:\d\d, 90 % sure by [-0-9 ]*\d\d:\d\d \S+, if started now", screen)
    assert f"90 % sure at most {sizing.kept[0].sure_cost:,.2f}" in screen
    assert max(map(len, screen.splitlines())) <= 80


def test_the_picture_has_words_on_its_axes(folder: Path) -> None:
    axes = drawing.deployments(sized("small.csv")).axes[0]
    axes.figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_xticklabels() if label.get_text()]
    assert labels
    assert all(re.fullmatch(r"[\d.]+ (s|min|h)", label) for label in labels)
    assert "unit of the prices" in axes.get_ylabel()


@pytest.mark.parametrize(
    ("prices", "devices", "what"),
    [
        ("[h100]\nprice = -1\n", (), "field 'h100': price is -1"),
        ("[h100]\nprise = 1\n", (), "field 'h100.prise': the field is unknown"),
        ("[h100]\nprice = 'two'\n", (), "field 'h100.price': 'two' is not a number"),
        ("h100 = true\n", (), "field 'h100.price': True is not a number"),
        ("[abacus]\nprice = 1\n", (), "'abacus' names no device with known rates"),
        ("[abacus]\nflops = 1e12\n", (), "field 'abacus': bandwidth of 'abacus' is 0"),
        ("[l40s]\nprice = 1\n[h100]\nmost = 2\n", (), "h100-80gb: has no price, while others have"),
        ("[l40s]\nprice = 1\n", ("a100",), "'a100' names no device with a price. There are l40s"),
        (None, ("a100",), "'a100' names several devices. Did you mean a100-40gb or a100-80gb"),
        (None, (), "no device is named"),
    ],
)
def test_wrong_prices_are_refused(
    folder: Path, prices: str | None, devices: tuple[str, ...], what: str
) -> None:
    if prices is not None:
        (folder / "wrong.toml").write_text(prices)
    with pytest.raises(InputError, match=what):
        sized("small.csv", prices=None if prices is None else "wrong.toml", devices=devices)


def test_a_model_of_32_bits_is_served_in_16(folder: Path) -> None:
    usual = sized("large.csv", devices=("l40s",), within=("2m",))
    (folder / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float32"}))
    wide = sized("large.csv", devices=("l40s",), within=("2m",))
    assert wide.impossible == usual.impossible
    assert wide.tried[0].replica.kv_tokens == usual.tried[0].replica.kv_tokens


def test_a_device_of_ones_own_and_a_start_of_ones_own_are_taken(folder: Path) -> None:
    rates = "flops = 1e15\nbandwidth = 3e12\nmemory = 9e10\nprice = 3.0\nstartup = 10\nmost = 1\n"
    (folder / "own.toml").write_text(f"[mine]\n{rates}")
    sizing = sized("small.csv", prices="own.toml", quantization="fp8")
    assert [one.name for one in sizing.tried] == ["1 x mine"]
    assert sizing.tried[0].replica.startup == 10
    assert "--quantization fp8" in sizing.commands[0]


def test_a_model_that_fits_nowhere_is_refused_or_impossible(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 3200}))
    assert main(["size", "small.csv", "--model", "config.json", "--devices", "l4", "--within", "1h"]) == 1
    screen = capsys.readouterr().out
    assert "no replica of up to 8 devices holds the weights" in screen
    assert "whose memory is less than the weights" in screen
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(InputError, match="--quantization has no effect on a model that is quantised"):
        sized("small.csv", quantization="fp8")


def test_the_screen_has_80_columns_and_the_picture_the_frontier(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["size", "large.csv", "--model", "config.json", "--prices", "prices.toml", "--within", "6m"]
    assert main([*words, "--picture", "cost.svg"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    drawing = (folder / "cost.svg").read_text()
    assert "frontier" in drawing or "<svg" in drawing
    assert main([*words, "--picture", "cost.svg"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["choice"] == values["kept"][0]
    assert values["proven"]
    frontier = [(one["cost"], one["expected"]) for one in values["frontier"]]
    assert frontier == sorted(frontier)
    assert [end for _, end in frontier] == sorted((end for _, end in frontier), reverse=True)


def test_the_run_command_is_one_of_ours(folder: Path) -> None:
    sizing = sized("prompts.jsonl", within=("1h",), longest_completion=5)
    _, run = sizing.commands
    args = whole_parser().parse_args(shlex.split(run)[1:])
    assert args.command == "run"
    assert sizing.choice is not None
    assert (args.plan, args.slots) == ("prompts.jsonl", sizing.choice.replica.slots)
    assert args.longest_completion == 5


def test_it_needs_neither_torch_nor_transformers(folder: Path) -> None:
    words = ["size", "prompts.jsonl", "--model", "config.json", "--devices", "h100", "--within", "1h"]
    code = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
    code += f"from batchbound.cli import main\nraise SystemExit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "vllm serve meta-llama/Llama-3.1-8B" in done.stdout


@pytest.mark.slow
def test_vllms_own_parser_takes_the_serve_command(folder: Path) -> None:
    if VLLM is None:
        pytest.skip("no vllm is installed; name one by VLLM")
    (folder / "prices.toml").write_text("[l4]\nprice = 1.0\nmost = 1\n")
    commands = [
        sized("prompts.jsonl", quantization="fp8").commands[0],
        sized("large.csv", within=("1h",), devices=("l4",)).commands[0],
    ]
    assert "--max-model-len" in commands[1]
    code = (
        "import sys, json\n"
        "from vllm.entrypoints.cli import serve\n"
        "args = serve.make_arg_parser(serve.FlexibleArgumentParser()).parse_args(sys.argv[1:])\n"
        "serve.validate_parsed_serve_args(args)\n"
        "print(json.dumps([args.model_tag, args.max_num_seqs, args.max_num_batched_tokens]))\n"
    )
    python = Path(VLLM).resolve().parent / "python"
    for command in commands:
        words = shlex.split(command)
        assert words[:2] == ["vllm", "serve"]
        done = subprocess.run([python, "-c", code, *words[2:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        tag, slots, budget = json.loads(done.stdout.splitlines()[-1])
        assert (tag, slots) == (words[2], int(words[words.index("--max-num-seqs") + 1]))
        assert budget == int(words[words.index("--max-num-batched-tokens") + 1])


@pytest.mark.slow
def test_intervals_and_ranking_hold_on_measured_points_left_out(public_data: Path) -> None:
    result = deployments.main([str(public_data)])
    assert 0.85 <= result["held"] <= 0.95
    assert result["sure"] >= 0.9
    assert result["near"] >= 0.9
    assert min(result["models"].values()) >= 0.9
    assert list(result["off"].values()) == pytest.approx(list(OFF.values()), abs=0.01)
    fitted = [getattr(REACHED, name) for name in result["efficiency"]]
    assert list(result["efficiency"].values()) == pytest.approx(fitted, rel=0.01)
    for run in result["runs"]:
        assert run["least"] < run["low"] <= run["measured"] <= run["high"]
