"""Profiling a model layer by layer, and composing from it what a configuration runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.configuration import PlannedConfiguration
from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.layer_profile import LayerProfile
from batchbound.data.costs.reference_time import ReferenceTime
from batchbound.data.files.disk import InputError
from batchbound.data.files.record import plain, record
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.executor.jobs.journal import Journal
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.processes.encode_worker import EncodeWorker
from batchbound.executor.processes.engine_spec import EngineSpec
from batchbound.executor.processes.workload_aware import DecodeEngine
from batchbound.executor.profiling.calibrate import calibrate_to_profile
from batchbound.executor.profiling.layer_composition import REFERENCE, Measurements, at, composed
from batchbound.executor.profiling.layer_profiling import ProfiledModel, profile_layers
from batchbound.executor.profiling.profile_grid import STEPS_BEFORE, Grid, decoding
from batchbound.executor.profiling.worker_pair import WorkerPair
from batchbound.models.exegpt.run_profile import can_hand_over
from batchbound.models.exegpt.whole_model_profile import whole_model_profile
from batchbound.models.iterations.layer_cost import LayerCost

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("processes_with_torch")

GRID = Grid((1, 4), (8, 40), decode_steps=3, repeats=2)
POINTS = GRID.points
WORKER = EngineSpec("tiny:llama", dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    import torch

    from batchbound.executor.models.source import load_model

    torch.set_num_threads(1)
    return load_model("tiny:llama", dtype="float64", device="cpu")


def measured(model: Any, path: Path, **options: Any) -> tuple[LayerProfile, dict[str, Any]]:
    from batchbound.executor.engines.tiers import choose_tier

    with Journal(path, {"model": "tiny:llama"}) as journal:
        as_run = ProfiledModel(model, choose_tier(model), pinned=True)
        profile = profile_layers(as_run, GRID, journal, **options)
        return profile, dict(journal.finished)


@pytest.fixture(scope="module")
def profiled(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerProfile, dict[str, Any]]:
    return measured(model, tmp_path_factory.mktemp("profile") / "points")


def held(batch: int, length: int) -> float:
    """Return the mean tokens a request of a point holds in the decode steps that are timed together."""
    return float(np.mean(decoding(length, batch))) + STEPS_BEFORE + (GRID.decode_steps + 1) / 2


def passes_of(
    found: dict[str, Any], changed: Callable[[tuple[int, int], int, str, float], float]
) -> dict[str, dict[str, float]]:
    """Return three passes like the first one, with each value as ``changed`` has it."""
    made: dict[str, dict[str, float]] = {}
    for point in POINTS:
        for what in ("calls", "layers", "job"):
            for name, value in found.get(at(*point, what, 0), {}).items():
                for number in range(3):
                    entry = made.setdefault(at(*point, what, number), {})
                    entry[name] = 1.0 if name == REFERENCE else changed(point, number, name, value)
    return made


@pytest.mark.slow
def test_a_killed_profile_goes_on_where_it_stopped(model: Any, tmp_path: Path) -> None:
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        assert total == GRID.measurements(paired=False)
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(model, tmp_path / "points", on_point=stop)
    kept = (tmp_path / "points").read_text().splitlines()
    assert len(kept) == 1 + 5
    profile, found = measured(model, tmp_path / "points", on_point=lambda done, _: seen.append(done))
    assert seen[0] == 5
    assert seen[-1] == GRID.measurements(paired=False) == len(found)
    assert (tmp_path / "points").read_text().splitlines()[: len(kept)] == kept
    assert profile.operation("layer") is not None
    # There was no second worker.
    assert not can_hand_over(profile)


@pytest.mark.slow
def test_a_composed_profile_gives_what_was_measured(profiled: tuple[LayerProfile, dict[str, Any]]) -> None:
    profile, found = profiled
    cost, layers = LayerCost(profile), profile.shape.layers
    assert profile.reference == ReferenceTime.of([each[REFERENCE] for each in found.values()])
    for batch in GRID.batches:
        for length in GRID.lengths:
            repeats = [
                found[f"{batch} x {length} tokens, calls, pass {repeat}"] for repeat in range(GRID.repeats)
            ]
            per_layer, once = cost.decode(batch, held(batch, length))
            composed = layers * per_layer + once
            # Noise can make a layer seem to take more than the whole: what is left over is never negative.
            assert composed >= 0.99 * np.median([each["decode"] for each in repeats])
    attention = [operation for operation in profile.operations if operation.name == "attention"]
    assert [operation.phase for operation in attention] == ["encode", "decode"]
    assert all((operation.seconds > 0).all() and operation.per_layer for operation in attention)


@pytest.mark.slow
def test_a_measured_profile_survives_its_file(
    profiled: tuple[LayerProfile, dict[str, Any]], tmp_path: Path
) -> None:
    profile = profiled[0]
    profile.save(tmp_path / "profile.json")
    loaded = LayerProfile.load(tmp_path / "profile.json")
    assert plain(loaded) == plain(profile)
    assert loaded.kv_tokens > 1000
    assert loaded.versions["lengths"] == "pinned"
    assert (loaded.shape.layers, loaded.shape.bytes_per_value, loaded.measured) == (2, 8, True)


@pytest.mark.slow
def test_what_two_workers_cost_each_other_is_measured(model: Any, tmp_path: Path) -> None:
    profile, found = measured(model, tmp_path / "points", worker=WORKER)
    assert len(found) == GRID.measurements(paired=True)
    own = {operation.name: operation for operation in profile.operations if operation.phase == "run"}
    assert own["join"].points.tolist() == [[1, 8], [1, 40], [4, 8], [4, 40]]
    assert (own["join"].seconds > own["loop"].seconds[0]).all()
    assert (own["send"].points == own["join"].points).all()
    assert own["crowding"].points.ravel().tolist() == list(GRID.batches)
    assert (own["crowding"].seconds < 1).all()


def test_a_cost_model_is_drawn_through_a_profile() -> None:
    cost = CostModel(0.025, 0.00013, 0.029, 0.00021, decode_per_kv_token=1e-7)
    fitted = calibrate_to_profile(whole_model_profile(cost, "test")).cost
    for name, value in plain(cost).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-3), name


def test_attention_is_told_apart_in_models_of_any_family(model: Any) -> None:
    import torch

    from batchbound.executor.models.source import load_model
    from batchbound.executor.profiling.layer_shares import LayerShares

    for family in ("gpt2", "gpt-neo", "bloom", "falcon", "gpt-neox"):
        other = load_model(f"tiny:{family}", device="cpu")
        with LayerShares(other) as shares, torch.inference_mode():
            other(input_ids=torch.zeros(2, 8, dtype=torch.int64))
            layers, attention = shares.take()
            assert 0 < attention < layers, family
            assert shares.take() == (0, 0)
    with pytest.raises(ValueError, match="no list of 2 layers"):
        LayerShares(_without_layers(model))


def _without_layers(model: Any) -> Any:
    import torch

    class Flat(torch.nn.Module):
        config, device = model.config, model.device

    return Flat()


@pytest.mark.parametrize(("batches", "lengths"), [((1,), (8, 16)), ((1, 2), (8,)), ((0, 2), (8, 16))])
def test_a_grid_that_cannot_tell_sizes_apart_is_refused(
    batches: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="grid"):
        Grid(batches, lengths)


@pytest.mark.slow
def test_from_profile_to_search_to_run(
    profiled: tuple[LayerProfile, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    rows = [f"r{i},{rng.integers(2, 30)},{rng.integers(2, 12)}" for i in range(160)]
    (tmp_path / "jobs.csv").write_text("\n".join(["id,input_tokens,output_tokens", *rows]))
    profiled[0].save(tmp_path / "profile.json")
    plan, answers, trace = (str(tmp_path / name) for name in ("plan.json", "answers.jsonl", "trace.jsonl"))
    words = ["search", str(tmp_path / "jobs.csv"), "--profile", str(tmp_path / "profile.json"), "-o", plan]
    assert main([*words, "--latency-bound", "5", "--most-encode-batch", "3"]) == 0
    configuration = Plan.load(plan).configuration
    assert configuration is not None
    assert configuration.strategy == "RRA"
    assert configuration.latency <= 5
    model = ["--model", "tiny:llama", "--dtype", "float64", "--device", "cpu", "--threads", "1"]
    assert main(["run", plan, *model, "--pinned", "-o", answers, "--trace", trace]) == 0
    said = capsys.readouterr().err
    assert "requests/s in the steady state" in said
    assert "times slower than while it was profiled" in said
    assert "another machine" not in said
    assert "not measured" not in said
    first = Path(answers).read_text().splitlines()
    assert len(first) == 160

    # The same answers, which turn out twice as long as a plan has it.
    short = replace(configuration, iterations=configuration.iterations / 2)
    replace(Plan.load(plan), configuration=short).save(plan)
    again = ["run", plan, *model, "--pinned", "-o", str(tmp_path / "again.jsonl"), "--trace", trace]
    assert main([*again, "--overwrite", "--replan", str(tmp_path / "profile.json")]) == 0
    said = capsys.readouterr().err
    assert f"from B_E {short.encode_batch}, N_D {short.decode_steps}" in said
    assert (tmp_path / "again.jsonl").read_text().splitlines() == first


def test_medians_of_passes_are_scaled_to_what_all_points_take_on_average(
    profiled: tuple[LayerProfile, dict[str, Any]],
) -> None:
    whole_and_parts = {"decode": 1.0, "decode_layers": 0.8, "decode_attention": 0.3}
    found = passes_of(profiled[1], lambda _, __, name, value: whole_and_parts.get(name, value))
    # A busy moment makes one of twelve measurements a second and a fifth longer.
    found[at(4, 8, "calls", 1)]["decode"] = 2.2
    cost = LayerCost(composed(profiled[0].shape, Measurements(POINTS, [], replace(GRID, repeats=3), found)))
    for point in POINTS:
        per_layer, once = cost.decode(point[0], held(*point))
        assert cost.profile.shape.layers * per_layer + once == pytest.approx(1.1)


def test_what_a_job_takes_longer_than_calls_in_a_row_is_shared_out_over_its_calls(
    profiled: tuple[LayerProfile, dict[str, Any]],
) -> None:
    # Steps of a second, calls that take two as a request is done in each, and half a second for its leaving;
    # encodings leave nothing behind.
    calls = {"decode": 1.0, "change": 2.5, "start": 3.0, "warming": 14.0, "warm": 6.0}
    calls |= {"decode_layers": 0.5, "decode_attention": 0.25}
    job = {
        "calls": 10.0,
        "encodings": 2.0,
        "decode_steps": 30.0,
        "done": 12.0,
        "active": 3.0,
        "context": 20.0,
    }
    # 30 decode steps, eight changes and twelve that leave, what is left of two first calls, and 4 s besides.
    whole = {"decode": 30.0 + 8 * 2.0 + 12 * 0.5 + 2 * 2.0 + 4.0}

    def changed(_: tuple[int, int], __: int, name: str, value: float) -> float:
        return calls.get(name, value)

    found = passes_of(profiled[1], changed)
    for number in range(3):
        found[at(4, 40, "calls", number)]["leave"] = 0.5
        found[at(4, 40, "job", number)] |= job | whole
    profile = composed(profiled[0].shape, Measurements(POINTS, [], replace(GRID, repeats=3), found))
    longer = profile.operation("interrupted")
    assert longer is not None
    assert longer.points.tolist() == [[3.0]]
    assert longer.seconds == pytest.approx(0.4, rel=1e-6)


def test_a_batch_that_has_decoded_is_spread_as_a_running_one() -> None:
    tokens = np.array(decoding(100, 96, decode_steps=10)) + 10
    assert tokens.mean() == pytest.approx(110, rel=0.02)
    assert tokens.std() / tokens.mean() == pytest.approx(0.45, abs=0.03)
    # No prompt has less than a token, however many rounds it is to decode.
    assert min(decoding(2, 96, decode_steps=20)) == 1


@pytest.mark.slow
def test_batches_that_join_are_timed_even_where_nothing_else_decodes(model: Any) -> None:
    from batchbound.executor.engines.tiers import choose_tier

    def engine(worker: EncodeWorker, problem: Problem) -> DecodeEngine:
        prompts = Prompts.random(problem.workload, 100, seed=0)
        most = problem.workload.output_tokens
        return DecodeEngine(worker, problem, model, prompts.tokens, most_tokens=most, tier=choose_tier(model))

    with WorkerPair(WORKER, engine, 4, 40, time.perf_counter) as pair:
        for prompts, running in ((4, 4), (1, 6)):
            found = pair.join(prompts, 8, running)
            assert 0 < found["active"] <= running
            assert found["decode"] > 0
            assert found["context"] >= 8


@pytest.mark.slow
def test_a_layer_profile_is_measured_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    words = ["profile", "--model", "tiny:llama", "--device", "cpu", "--threads", "1", "--layers"]
    words += ["--slots", "2", "--prompt-tokens", "16", "--points", "2", "--repeats", "1", "-o", str(path)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "attention" in said
    lines = (tmp_path / "profile.json.points").read_text().splitlines()
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    # A larger grid measures only what is new of it.
    words[words.index("--slots") + 1] = "4"
    assert main([*words, "--extend"]) == 0
    more = (tmp_path / "profile.json.points").read_text().splitlines()
    assert more[: len(lines)] == lines
    assert len(more) > len(lines)
    assert LayerProfile.load(path).versions["lengths"] == "free"


@pytest.mark.parametrize(
    ("field", "value"), [("strategy", "FIFO"), ("encode_batch", None), ("latency", "soon"), ("lead", True)]
)
def test_a_damaged_configuration_names_the_field(field: str, value: object) -> None:
    whole = PlannedConfiguration("RRA", 4, 8, 12.0, 0, 30.0, 5.0, 20.0, 6.0, None, 1.5, 3.0)
    assert record(PlannedConfiguration, json.loads(json.dumps(plain(whole)))) == whole
    with pytest.raises(InputError, match=field):
        record(PlannedConfiguration, plain(whole) | {field: value}, file="plan.json")
