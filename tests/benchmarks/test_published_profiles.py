"""Whole-model times that others published: the traps in them, and how cost models fit them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from published_profiles import WholeModelTimes, error_of_fit, read_distserve, read_splitwise

from batchbound.data.arrays import FloatArray
from batchbound.data.files.disk import InputError
from batchbound.models.iterations.layer_cost import LayerCost


def _splitwise(path: Path, *, copied: bool) -> Path:
    rows = ["model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time"]
    for batch in (1, 2, 4, 8, 64):
        seconds = 100.0 * batch if batch < 64 else 50.0
        rows.append(f"m,a,2,512,{batch},128,{seconds},{20 + batch}")
        made_up = 1.3 * seconds if copied else 1.3 * seconds + 5 * (batch % 3)
        rows.append(f"m,b,2,512,{batch},128,{made_up},{20 + batch}")
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_batch_faster_than_a_smaller_one_is_left_out(tmp_path: Path) -> None:
    first, second = read_splitwise(_splitwise(tmp_path / "perf.csv", copied=True))
    assert first.prompts[:, 0].tolist() == [1, 2, 4, 8]
    assert first.traps == (
        "prefill of 64 prompts of 512 tokens takes 50 ms, a smaller batch 800 ms: left out",
    )
    assert second.traps[0] == "prefill times of b are those of a times 1.300: not a measurement"
    assert len(first.decodes) == 5


def test_a_device_that_is_only_slower_is_no_copy(tmp_path: Path) -> None:
    _, second = read_splitwise(_splitwise(tmp_path / "perf.csv", copied=False))
    assert not any("not a measurement" in trap for trap in second.traps)


def test_distserves_coefficients_are_evaluated(tmp_path: Path) -> None:
    fit = {"decoding_large_small_bs_threshold": 4, "prefill": [10, 0.1, 0.001]}
    fit |= {"decoding_smallbs": [5, 0.01, 1], "decoding_largebs": [20, 0.01, 2]}
    path = tmp_path / "profiler.json"
    path.write_text(json.dumps({"m": {"2": fit}}))
    (times,) = read_distserve(path, sequences=(1, 8), lengths=(100,))
    assert times.prompt_seconds.tolist() == pytest.approx([0.03, 0.17])
    assert times.decode_seconds.tolist() == pytest.approx([0.007, 0.044])
    assert "jumps" in times.traps[0]
    assert LayerCost(times.profile()).encode(1, 100)[0] == pytest.approx(0.03)


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "perf.csv").write_text("model,hardware\na,b\n")
    with pytest.raises(InputError, match="column 'tensor_parallel'"):
        read_splitwise(tmp_path / "perf.csv")


@pytest.mark.slow
def test_cost_models_fit_the_published_times(public_data: Path) -> None:
    found = read_splitwise(public_data / "splitwise" / "perf_model.csv")
    assert sum("left out" in trap for each in found for trap in each.traps) == 3
    assert {each.device for each in found if any("not a meas" in trap for trap in each.traps)} == {
        "h100-80gb-pcap"
    }
    for each in found:
        error = error_of_fit(each)
        assert error.prefill_mape < 0.13
        assert error.decode_mape < 0.05
    evaluated = read_distserve(public_data / "distserve" / "profiler-a100-80g.distserve.json")
    assert len(evaluated) == 7
    for each in evaluated:
        error = error_of_fit(each)
        assert error.prefill_mape < 0.09
        assert error.decode_mape < 0.10


def test_a_table_of_published_times_foretells_a_prefill_that_it_lacks(public_data: Path) -> None:
    def seconds(times: WholeModelTimes, at: FloatArray) -> float:
        return sum(LayerCost(times.profile()).encode(*at))

    for each in read_splitwise(public_data / "splitwise" / "perf_model.csv"):
        errors = []
        for point, measured in zip(each.prompts, each.prompt_seconds, strict=True):
            assert seconds(each, point) == pytest.approx(measured)
            others = (each.prompts != point).any(axis=1)
            lacking = replace(each, prompts=each.prompts[others], prompt_seconds=each.prompt_seconds[others])
            errors.append(abs(seconds(lacking, point) / measured - 1))
        # What a floor and a line through all of them miss by: 3 to 13 %.
        assert np.mean(errors) < 0.13, (each.model, each.device, each.tensor_parallel)
