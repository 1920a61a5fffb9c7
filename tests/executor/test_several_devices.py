"""Runs on several devices, replayed: replicas alone, replicas in step, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.costs.layer_profile import LayerProfile, Operation
from batchbound.data.costs.link import Link
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.files.disk import InputError
from batchbound.data.readers.measured_run import MeasuredRun
from batchbound.data.readers.profile_readers import read_layer_profiles
from batchbound.data.workload import Workload
from batchbound.heuristics.iterations.replay import mismatches, replay_run

LINK = Link("free", 1e30, 0.0, "made up")
DENSE = ModelShape("m", 1, 8, 2, 2, 4, 16, 32)
EXPERTS = replace(DENSE, experts=4, active_experts=1, expert_intermediate=8)


def profile(shape: ModelShape = DENSE, degree: int = 1) -> LayerProfile:
    points = np.array([[1.0], [1000.0]])
    one = [Operation("dense", "both", ("tokens",), points, np.array([1.0, 1.0]))]
    if shape.experts:
        # A second for each thousand tokens of the whole group.
        one.append(Operation("moe", "both", ("tokens",), points, points[:, 0] / 1000))
    return LayerProfile(shape, "toy", 0.0, degree, tuple(one), "made up")


def run(output: list[int], **how: object) -> MeasuredRun:
    requests = Workload.from_lengths([10] * len(output), output)
    zeros = np.zeros(len(output))
    made = MeasuredRun(requests, zeros, zeros, 8, 64, None, 16, (), False, False, "m", "toy")
    return replace(made, **how)  # type: ignore[arg-type]


def test_dense_replicas_serve_their_share_without_each_other() -> None:
    served = replay_run(run([2, 5, 2, 5], data_parallel=2), profile())
    # Requests 0 and 2 are on one replica, 1 and 3 on the other; an iteration takes a second.
    assert served.finished.tolist() == [2.0, 5.0, 2.0, 5.0]


def test_replicas_that_share_experts_go_in_step_and_compute_all_their_tokens_together() -> None:
    together = run([2, 3], data_parallel=2, expert_parallel=True)
    served = replay_run(together, profile(EXPERTS), LINK)
    # 20 prompt tokens together, then two decodes, then one replica's decode alone.
    first, second, third = 1.02, 1.002, 1.001
    assert served.first_token == pytest.approx([first, first])
    assert served.finished == pytest.approx([first + second, first + second + third])


def test_a_replica_joins_the_first_iteration_that_begins_after_its_request_came() -> None:
    late = run([3, 1], data_parallel=2, expert_parallel=True)
    late = replace(late, workload=replace(late.workload, arrival=np.array([0.0, 0.5])))
    served = replay_run(late, profile(EXPERTS), LINK)
    # The first replica's prompt takes 1.01 s; the second's runs beside its decode, 11 tokens together.
    assert served.finished[1] == pytest.approx(1.01 + 1.011)


@pytest.mark.parametrize(
    ("how", "shape", "degree", "named"),
    [
        ({}, DENSE, 2, "the link of toy is not known"),
        ({"data_parallel": 2, "expert_parallel": True}, EXPERTS, 1, "the link of toy is not known"),
    ],
)
def test_devices_without_a_known_link_are_refused(
    how: dict[str, object], shape: ModelShape, degree: int, named: str
) -> None:
    with pytest.raises(InputError, match=named):
        replay_run(run([2, 2], **how), profile(shape, degree))


def test_experts_cut_in_parts_over_replicas_are_refused() -> None:
    with pytest.raises(InputError, match="cut every expert in parts"):
        replay_run(run([2, 2], data_parallel=2), profile(EXPERTS), LINK)


def test_a_profile_of_something_else_is_said_to_be() -> None:
    other = run([2], model="org/Other-7B", device="H100", tensor_parallel=2)
    assert mismatches(run([2]), profile()) == []
    assert [said.split(",")[0] for said in mismatches(other, profile())] == [
        "the run is of the model Other-7B",
        "the run is on H100",
        "the run shares a layer among 2 devices",
    ]


def _folder(tmp_path: Path, columns: str, rows: list[str]) -> Path:
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 32}
    config |= {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    (tmp_path / "m.json").write_text(json.dumps(config))
    folder = tmp_path / "toy-m-tp1"
    folder.mkdir()
    (folder / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,5\nqkv_proj,64,5\n")
    (folder / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,7\n")
    grid = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,0,0,1\n0,0,1,16,1\n16,0,1,16,1\n"
    (folder / "attention.csv").write_text(grid)
    (folder / "moe.csv").write_text("\n".join([columns, *rows]) + "\n")
    return folder


def test_experts_cost_what_as_many_tokens_read(tmp_path: Path) -> None:
    rows = ["1,1,1,10", "1,2,1,10", "1,2,2,20", "1,4,1,10", "1,4,4,40", "2,4,2,30"]
    folder = _folder(tmp_path, "ep,tokens,activated_experts,time_us", rows)
    moe = read_layer_profiles(folder).operation("moe")
    assert moe is not None
    at = dict(zip(moe.points[:, 0].tolist(), moe.seconds.tolist(), strict=True))
    # A token reads one of four experts, two read 1.75 and four 2.734 on average.
    assert at[1.0] == pytest.approx(10e-6)
    assert at[2.0] == pytest.approx(17.5e-6)
    assert at[4.0] == pytest.approx((10 + 30 * (4 * (1 - 0.75**4) - 1) / 3) * 1e-6)
    shared = read_layer_profiles(folder, expert_parallel=2).operation("moe")
    assert shared is not None
    assert shared.seconds.tolist()[-1] == pytest.approx(30e-6)


def test_replicas_that_replay_graphs_compute_as_many_tokens_each() -> None:
    graphs = run([2, 3], data_parallel=2, expert_parallel=True, graph_tokens=(1, 2, 4, 32))
    served = replay_run(graphs, profile(EXPERTS), LINK)
    # Of 10 prompt tokens each 32 are computed; of a decode one, by the replica that is done, too.
    assert served.finished == pytest.approx([1.064 + 1.002, 1.064 + 1.002 + 1.002])


def test_a_replica_waits_for_the_tokens_of_all_others() -> None:
    slow = Link("slow", 100.0, 0.0, "made up")
    alone = run([1], data_parallel=2, expert_parallel=True)
    served = replay_run(alone, profile(EXPERTS), slow)
    # Ten tokens of eight values there and back, with a route of eight bytes each.
    assert served.finished == pytest.approx([1.01 + 10 * (8 * 2 + 8 + 8 * 2) / 100])


def test_devices_that_share_layers_and_experts_split_the_tokens_around_the_experts() -> None:
    slow = Link("slow", 100.0, 0.0, "made up")
    alone = run([1], data_parallel=2, tensor_parallel=2, expert_parallel=True)
    served = replay_run(alone, profile(EXPERTS, 2), slow)
    # Ten tokens of 16 bytes: added up after the embedding and the attention, gathered after the experts; 64
    # bytes of logits; five tokens of each device of one replica, none of the other's, told to all.
    told = 160 + 160 + 160 / 2 + 64 / 2 + 10 * (8 * 2 + 8 + 8 * 2)
    assert served.finished == pytest.approx([1.01 + told / 100])


def test_experts_that_devices_share_out_whole_may_be_timed_on_one(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "ep,tokens,activated_experts,time_us", ["1,1,1,10", "2,1,1,6"])
    shared = tmp_path / "toy-m-tp2"
    shared.mkdir()
    for name in ("dense", "per_sequence", "attention"):
        (shared / f"{name}.csv").write_text((folder / f"{name}.csv").read_text())
    moe = read_layer_profiles(shared, expert_parallel=2).operation("moe")
    assert moe is not None
    assert moe.seconds.tolist() == [6e-6]
    with pytest.raises(InputError, match=r"moe\.csv"):
        read_layer_profiles(shared)


@pytest.mark.parametrize("config", ["configs/model/maker/m.json", "profiler/perf/toy/maker/m/bf16/m.json"])
def test_a_profile_is_read_where_the_tool_that_measured_it_left_it(tmp_path: Path, config: str) -> None:
    flat = _folder(tmp_path, "ep,tokens,activated_experts,time_us", ["1,1,1,10", "2,1,1,6"])
    tree = tmp_path / "profiler" / "perf" / "toy" / "maker" / "m" / "bf16"
    tree.mkdir(parents=True)
    (tree / "tp2").mkdir()
    for name in ("dense", "per_sequence", "attention"):
        (tree / "tp2" / f"{name}.csv").write_text((flat / f"{name}.csv").read_text())
    flat.rename(tree / "tp1")
    (tmp_path / config).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "m.json").rename(tmp_path / config)
    read = read_layer_profiles(tree / "tp2", expert_parallel=2)
    assert (read.device, read.shape.name, read.tensor_parallel) == ("toy", "m", 2)
    moe = read.operation("moe")
    assert moe is not None
    assert moe.seconds.tolist() == [6e-6]


def test_keys_of_a_prompt_count_half_of_its_own_in_later_tables(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "ep,tokens,activated_experts,time_us", ["1,1,1,10"])
    before = read_layer_profiles(folder).operation("encode_attention")
    grid = "prefill_chunk,prefill_key,n_decode,kv_decode,time_us\n16,8,0,0,1\n0,0,1,16,1\n"
    (folder / "attention.csv").write_text(grid)
    after = read_layer_profiles(folder).operation("encode_attention")
    assert before is not None
    assert after is not None
    assert before.points.tolist() == after.points.tolist()


def test_a_degree_of_expert_parallelism_that_nobody_timed_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "ep,tokens,activated_experts,time_us", ["1,1,1,10"])
    with pytest.raises(InputError, match=r"that 4 devices share out.*Known are 1"):
        read_layer_profiles(folder, expert_parallel=4)


def test_attention_over_an_index_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "ep,tokens,activated_experts,time_us", ["1,1,1,10"])
    grid = "layer,prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\nindexer,16,0,0,0,1\n"
    (folder / "attention.csv").write_text(grid)
    with pytest.raises(InputError, match="indexer cannot be costed"):
        read_layer_profiles(folder)


def test_a_warning_stands_in_the_first_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "toy-m"
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps({"model": "another", "engine_kwargs": {"max_num_seqs": 4}}))
    times = {"queued_ts": 0.0, "first_token_ts": 1.0, "last_token_ts": 2.0}
    (folder / "requests.jsonl").write_text(json.dumps({"input_toks": 4, "output_toks": 2} | times) + "\n")
    profile().save(tmp_path / "p.json")
    assert main(["validate", str(folder), "--profile", str(tmp_path / "p.json")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "WARNING: the run is of the model another, the profile of m"
    )
    ran = {"model": "m", "hardware": {"device_name": "NVIDIA H100"}}
    (folder / "meta.json").write_text(json.dumps(ran))
    assert main(["validate", str(folder), "--profile", str(tmp_path / "p.json")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "WARNING: the run is on NVIDIA H100, the profile of toy"
    )
    words = ["validate", str(folder), "--profile", str(tmp_path / "p.json"), "--link", "pcie4"]
    assert main(words) == 2
    assert "--link has no effect on one device" in capsys.readouterr().err
