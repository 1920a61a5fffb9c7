"""``audit``: what finished runs lost, of every kind that can be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.readers.server_metrics import parse_metrics
from batchbound.data.readers.server_run import ServerCount, ServerRun
from batchbound.executor.reports.iteration_audit import OPEN, ORDER, OTHER, TOGETHER, sequences_of
from batchbound.executor.server.server_job import lengths_of

LINE = (
    "(APIServer pid=1) INFO 11-23 06:47:57 [loggers.py:199] Engine 000: Iteration({}): {} context requests,"
    " {} context tokens, {} generation requests, {} generation tokens, iteration elapsed time: {} ms, CPU KV"
    " cache usage: 2.6%\n"
)


def audited(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["audit", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def server_run(tokens: list[int], *, iterations: int | None, slots: int = 2, **count: Any) -> ServerRun:
    number = len(tokens)
    ones, times = np.ones(number, dtype=np.int64), np.arange(number, dtype=np.float64)
    known: dict[str, Any] = {"prefix_caching": False, "cached_tokens": 0} | count
    return ServerRun(
        ids=tuple(f"r{k}" for k in range(number)),
        choices=ones,
        prompt_tokens=ones * 3,
        completion_tokens=np.array(tokens),
        position=np.arange(number),
        sent=times,
        finished=times + 1,
        server_of=ones * 0,
        failed=ones * 0,
        slots=slots,
        in_flight=slots + 4,
        order="file order",
        retries=0,
        servers=(ServerCount("http://x", "vllm", iterations=iterations, **known),),
    )


def test_the_losses_of_a_run_add_up_to_what_is_above_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two slots, 2 2 4 in file order: 6 iterations; 4 first: 4 iterations, the bound; 7 were counted.
    server_run([2, 2, 4], iterations=7).save(tmp_path / "trace.jsonl")
    found = audited(capsys, str(tmp_path / "trace.jsonl"))
    assert found["iterations"] == {
        "counted by the server": 7,
        "least, if assumptions hold, by slots": 4,
        f"lost: {OTHER}": 1,
        f"lost: {ORDER}": 2,
        f"lost: {OPEN}": 0,
    }
    assert found["by the order of the requests (simulated)"]["longest first"] == 4


def test_completions_of_a_request_are_simulated_by_their_share_of_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two completions with 8 tokens: 7 and 1 by their text, so 7 iterations; the bound knows the sum alone.
    body = {"choices": [{"text": "abcdefghijklm"}, {"message": {"role": "assistant", "content": "n"}}]}
    assert lengths_of(body, 8) == (7, 1)
    run = server_run([8], iterations=7)
    replace(run, choices=np.array([2]), lengths={0: (7, 1)}).save(tmp_path / "trace.jsonl")
    found = audited(capsys, str(tmp_path / "trace.jsonl"))
    assert found["iterations"]["least, if assumptions hold, by slots"] == 4
    assert found["by the order of the requests (simulated)"]["as sent"] == 7


def test_completions_that_were_cut_have_their_cap() -> None:
    texts = (("aaaaaaaaa", "length"), ("b", "length"), ("cc", "stop"), ("c", "stop"))
    body = {"choices": [{"text": text, "finish_reason": reason} for text, reason in texts]}
    assert lengths_of(body, 21, 8) == (8, 8, 3, 2)
    assert lengths_of({"choices": body["choices"][:2]}, 16, 8) == (8, 8)
    # Counts that contradict the cap, and an unknown cap, leave the estimate by text.
    assert sum(lengths_of(body, 10, 8)) == 10
    assert lengths_of(body, 17)[0] == 10


def test_the_picture_shows_what_was_lost_and_the_requests_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = tmp_path / "<trace>.jsonl", tmp_path / "audit.html"
    server_run([2, 2, 4], iterations=7).save(trace)
    audited(capsys, str(trace), "--html", str(page))
    text = page.read_text()
    assert "7 iterations, 4 of them needed whatever the order" in text
    # Bars of the bound, three causes and the sum.
    assert text.count("<rect ") == 5
    assert "&lt;trace&gt;.jsonl" in text
    assert "<trace>" not in text
    begin = text.index("<svg")
    assert ElementTree.fromstring(text[begin : text.index("</svg>") + 6]).get("role") == "img"
    assert main(["audit", str(trace), "--html", str(trace)]) == 2
    assert "is read by this command" in capsys.readouterr().err


def test_the_picture_of_lengths_shows_orders_and_that_of_a_log_its_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, log, page = tmp_path / "lengths.csv", tmp_path / "vllm.log", tmp_path / "audit.html"
    table.write_text("input_tokens,output_tokens\n3,2\n3,2\n3,4\n")
    audited(capsys, str(table), "--slots", "2", "--html", str(page))
    text = page.read_text()
    assert [name in text for name in ("as sent, simulated: 6", "longest first, simulated: 4")] == [True, True]
    log.write_text("'max_num_seqs': 4\n" + LINE.format(0, 2, 20, 0, 0, 4.0) + LINE.format(1, 0, 0, 2, 2, 2.0))
    audited(capsys, str(log), "--html", str(page), "--overwrite")
    assert "the run: 2" in page.read_text()


def test_a_run_nobody_counted_is_audited_by_its_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server_run([2, 2, 4], iterations=None).save(tmp_path / "trace.jsonl")
    found = audited(capsys, str(tmp_path / "trace.jsonl"))["iterations"]
    assert found["counted by the server"] is None
    assert found[f"lost: {ORDER}"] == 2


def test_prompts_that_may_have_been_cached_are_not_counted_as_work() -> None:
    run = server_run([2], iterations=1, prefix_caching=True, cached_tokens=None)
    assert sequences_of(run).cached.tolist() == [2]
    run = server_run([2], iterations=1, prefix_caching=True, cached_tokens=0)
    assert sequences_of(run).cached.tolist() == [0]


def test_a_server_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = server_run([2, 5], iterations=9, preemptions=1, kv_tokens=64, block_tokens=16)
    run.save(tmp_path / "trace.jsonl")
    again = ServerRun.load(tmp_path / "trace.jsonl")
    assert again.servers == run.servers
    assert (again.ids, again.slots, again.order) == (run.ids, run.slots, run.order)
    assert again.completion_tokens.tolist() == [2, 5]
    assert again.makespan == run.makespan == 2.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"slots": 2', '"slots": 0', "line 1, field 'slots': 0 is not at least 1"),
        ('"requests": 3', '"requests": 4', "the file ends before the run does"),
        (
            '"batchbound_server_run": 1',
            '"batchbound_server_run": 2',
            "a batchbound server run of version 2, not 1",
        ),
        ('"completion_tokens": 4', '"completion_tokens": "4"', "line 4, field 'completion_tokens'"),
        ('"url"', '"uri"', "field 'servers.0.url': the field is missing"),
    ],
)
def test_a_damaged_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    server_run([2, 2, 4], iterations=7).save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert main(["audit", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_the_empty_slots_of_a_log_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "vllm.log"
    rows = [(2, 20, 0, 0, 4.0), (0, 0, 2, 2, 2.0), (1, 9, 1, 1, 3.0), (0, 0, 1, 1, 1.0), (0, 0, 0, 0, 9.0)]
    lines = [LINE.format(number, *row) for number, row in enumerate(rows)]
    log.write_text("INFO non-default args: {'max_num_seqs': 4}\n" + "".join(lines))
    found = audited(capsys, str(log))
    parts = found["iterations (4 slots)"]
    assert parts.pop("counted") == 4
    assert parts == {
        "full iterations of the same work": 7 / 4,
        "empty slots while prompts were still to come": 3 * 2 / 4,
        "empty slots after the last prompt": 3 / 4,
    }
    assert list(found["seconds of the engine"].values()) == pytest.approx([0.007, 0.002, 0.001])
    assert audited(capsys, str(log), "--iterations", "2:3")["iterations (4 slots)"]["counted"] == 2
    assert main(["audit", str(log), "--slots", "1"]) == 2
    assert "2 requests ran in an iteration, more than 1" in capsys.readouterr().err


def test_lengths_alone_tell_what_an_order_would_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("input_tokens,output_tokens\n3,2\n3,2\n3,4\n")
    found = audited(capsys, str(table), "--slots", "2")["iterations, all requests there at the start"]
    assert found == {
        "least, if assumptions hold, by slots": 4,
        "simulated, as sent": 6,
        "simulated, longest first": 4,
        "simulated, shortest first": 6,
    }
    assert main(["audit", str(table)]) == 2
    assert "does not say the slots" in capsys.readouterr().err


def timed(path: Path, count: int, each: float = 0.5) -> str:
    """Write requests of ten tokens that one slot serves, ``each`` seconds a token."""
    rows = ["id,prompt_tokens,completion_tokens,start,first,last"]
    for number in range(count):
        begin = 10 * each * number
        rows.append(f"r{number},3,10,0,{begin + each},{begin + 10 * each}")
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_seconds_of_timed_requests_are_an_estimate_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", timed(tmp_path / "times.csv", 20), "--slots", "1", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["seconds"]
    assert found["measured"] == pytest.approx(100.0)
    assert found["least, estimated"] == pytest.approx(100.0, rel=0.01)
    assert 0 <= found["error of the estimate (share)"] < 0.01
    assert found["simulated, all there at the start, longest first"] == pytest.approx(100.0, rel=0.01)
    assert not [name for name in found if "proven" in name or "lost" in name]
    assert "seconds are estimated" in captured.err


def test_a_job_too_short_to_test_a_fit_on_has_no_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", timed(tmp_path / "times.csv", 3), "--slots", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "no seconds: the times are too few" in captured.err
    assert "seconds" not in json.loads(captured.out)


def test_a_run_below_its_bound_names_the_assumptions_and_claims_no_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two slots, 2 2 4: 4 iterations are needed at a token each; 3 were counted, as drafts would do.
    server_run([2, 2, 4], iterations=3).save(tmp_path / "trace.jsonl")
    assert main(["audit", str(tmp_path / "trace.jsonl"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "fewer than its bound of 4: broken assumption: one token a sequence and iteration" in captured.err
    found = json.loads(captured.out)["iterations"]
    assert found == {"counted by the server": 3, "bound that the run broke, by slots": 4}


def test_no_loss_is_negative_where_the_simulation_takes_more_than_was_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As sent the simulation takes 6; 5 were counted.
    server_run([2, 2, 4], iterations=5).save(tmp_path / "trace.jsonl")
    found = audited(capsys, str(tmp_path / "trace.jsonl"))["iterations"]
    assert {name: value for name, value in found.items() if name.startswith("lost")} == {
        f"lost: {TOGETHER}": 1
    }


def test_a_log_whose_iterations_fit_no_linear_cost_has_no_fitted_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Forty equal iterations; ten of them take a hundred times as long, as other work ran there.
    log, cost = tmp_path / "vllm.log", tmp_path / "cost.json"
    each = [1.0 if 10 <= number < 30 else 100.0 for number in range(40)]
    lines = [LINE.format(number, 0, 0, 2, 2, milliseconds) for number, milliseconds in enumerate(each)]
    log.write_text("'max_num_seqs': 4\n" + "".join(lines))
    assert main(["audit", str(log), "--json"]) == 0
    captured = capsys.readouterr()
    assert "the iterations do not fit a linear cost" in captured.err
    assert "seconds of an iteration, fitted" not in json.loads(captured.out)
    assert main(["audit", str(log), "--save-cost", str(cost)]) == 2
    assert not cost.exists()


def test_a_bound_is_of_single_tokens_where_nobody_says_the_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Four requests of a token each: two blocks of 16 hold two of them, 32 tokens all.
    lengths, times = tmp_path / "lengths.csv", tmp_path / "times.csv"
    lengths.write_text("id,input_tokens,output_tokens\n" + "".join(f"r{k},1,1\n" for k in range(4)))
    rows = "".join(f"r{k},1,1,0,1,1\n" for k in range(4))
    times.write_text(f"id,prompt_tokens,completion_tokens,start,first,last\n{rows}")
    for run in (lengths, times):
        words = [str(run), "--slots", "4", "--kv-tokens", "32"]
        for least, more in ((1, []), (2, ["--block-tokens", "16"])):
            found = audited(capsys, *words, *more)["iterations, all requests there at the start"]
            assert next(iter(found.values())) == least


def test_a_job_that_took_no_time_has_no_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"r{k},1,1,0,0,0\n" for k in range(30))
    (tmp_path / "run.csv").write_text(f"id,prompt_tokens,completion_tokens,start,first,last\n{rows}")
    assert main(["audit", str(tmp_path / "run.csv"), "--slots", "30", "--json"]) == 0
    captured = capsys.readouterr()
    assert "or all equal" in captured.err
    assert "seconds" not in json.loads(captured.out)


def test_a_machine_whose_pace_changed_has_no_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One slot, requests of ten tokens: a hundredth of a second a token, for a while ten times as long.
    table, rows, now = tmp_path / "times.csv", ["id,prompt_tokens,completion_tokens,start,first,last"], 0.0
    for number in range(30):
        each = 0.1 if 10 <= number < 20 else 0.01
        rows.append(f"r{number},3,10,0,{now + each},{now + 10 * each}")
        now += 10 * each
    table.write_text("\n".join(rows) + "\n")
    assert main(["audit", str(table), "--slots", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "no seconds: the iterations do not fit a linear cost" in captured.err
    assert "seconds" not in json.loads(captured.out)


def test_the_output_of_a_batch_with_metrics_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(name: str, tokens: int, first: float, status: int = 200) -> str:
        metrics = {"time_to_first_token_ms": first, "generation_time_ms": 500.0 * (tokens - 1)}
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        response = {"status_code": status, "body": {"usage": usage, "metrics": metrics}}
        return json.dumps({"custom_id": name, "response": response}) + "\n"

    output = tmp_path / "out.jsonl"
    lines = [line(f"r{k}", 10, 5000 * k + 500) for k in range(20)]
    output.write_text("".join(lines) + line("d", 9, 1, 500))
    found = audited(capsys, str(output), "--slots", "1")["seconds"]
    assert found["measured"] == pytest.approx(100.0)
    output.write_text(line("a", 2, 500).replace("metrics", "other"))
    assert main(["audit", str(output), "--slots", "2"]) == 2
    assert "line 1, field 'response.body': has no metrics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,3,x,0,1,2", "line 2, column 'completion_tokens': 'x' is not a number"),
        ("a,3,2,0,1", "line 2, column 'last': None is not a number"),
        ("a,3,0,0,1,2", "line 2: tokens must be whole numbers from 1"),
        ("a,3,2,0,3,2", "line 2: tokens must be whole numbers from 1, and start, first and last in that"),
        ("a,3,2,nan,1,2", "line 2: tokens must be"),
    ],
)
def test_times_that_no_request_has_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, message: str
) -> None:
    table = tmp_path / "times.csv"
    table.write_text(f"id,prompt_tokens,completion_tokens,start,first,last\n{row}\n")
    assert main(["audit", str(table), "--slots", "2"]) == 2
    assert f"times.csv, {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_public_runs_are_above_their_bounds(
    public_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    least = [("RTX4090", [], 1021), ("RTX4090", ["--kv-tokens", "41408"], 5723), ("RTXPRO6000", [], 1617)]
    for device, stated, at_least in least:
        run = public_data / "vllm_runs" / f"{device}-Llama-3.1-8B"
        found = audited(capsys, str(run), *stated)["iterations, all requests there at the start"]
        bound = next(value for name, value in found.items() if name.startswith(("proven", "least")))
        assert at_least <= bound <= min(found.values())


@pytest.mark.parametrize(
    "words", [["--profile", "x"], ["--iterations", "1:2"], ["--slots", "4", "--iterations", "0:1"]]
)
def test_options_without_an_effect_are_refused(tmp_path: Path, words: list[str]) -> None:
    server_run([2], iterations=2).save(tmp_path / "trace.jsonl")
    assert main(["audit", str(tmp_path / "trace.jsonl"), *words]) == 2


def test_metrics_pages_are_read_whoever_wrote_them() -> None:
    vllm = parse_metrics(
        "# HELP x\n"
        'vllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:num_requests_running{engine="1"} 4.0\n'
        'vllm:iteration_tokens_total_count{engine="0"} 7.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="11",enable_prefix_caching="True"} 1.0\n'
        "broken line\n"
        "vllm:num_preemptions_total nan\n"
    )
    assert (vllm.engine, vllm.running, vllm.iterations) == ("vllm", 7, 7)
    # One of the eleven blocks of each engine belongs to nobody.
    assert (vllm.kv_tokens, vllm.block_tokens, vllm.prefix_caching) == (2 * 160, 16, True)
    assert vllm.waiting is None
    sglang = parse_metrics("sglang:num_running_reqs 2\nsglang:max_total_num_tokens 512\n")
    assert (sglang.engine, sglang.running, sglang.kv_tokens) == ("sglang", 2, 512)
    assert parse_metrics("<html>").engine == "unknown"


@pytest.mark.parametrize(
    "header", ["id,prompt_tokens,completion_tokens,start,first,last", "id,input_tokens,output_tokens"]
)
def test_a_room_smaller_than_a_block_is_an_error_of_the_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str
) -> None:
    values = ["a", "5", "4", "0", "1", "2"][: header.count(",") + 1]
    (tmp_path / "run.csv").write_text(f"{header}\n{','.join(values)}\n")
    assert main(["audit", str(tmp_path / "run.csv"), "--slots", "4", "--kv-tokens", "3"]) == 2
    assert "3 tokens make no block of 16. Correct --kv-tokens or --block-tokens." in capsys.readouterr().err


def test_seconds_of_file_order_are_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two slots, half a second an iteration. Sent longest first: 180 tokens beside 60 times 3, 90 s. In the
    # file's order the long one begins last: 90 iterations of two short ones, then its own 180, 135 s.
    count, short = 60, 3
    ends = np.array([count * short, *(short * k for k in range(1, count + 1))]) * 0.5
    run = server_run([count * short, *[short] * count], iterations=count * short)
    position = np.array([count, *range(count)])
    replace(run, position=position, sent=ends * 0.0, finished=ends).save(tmp_path / "trace.jsonl")
    seconds = audited(capsys, str(tmp_path / "trace.jsonl"))["seconds"]
    assert seconds["simulated, all there at the start, as sent"] == pytest.approx(90.0, rel=0.01)
    assert seconds["simulated, all there at the start, file order"] == pytest.approx(135.0, rel=0.01)


def test_the_certificate_is_printed_only_with_verbose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    server_run([2, 2, 4], iterations=7).save(trace)
    assert main(["audit", str(trace)]) == 0
    short = capsys.readouterr().out
    assert main(["audit", str(trace), "--verbose"]) == 0
    assert set(capsys.readouterr().out.splitlines()) - set(short.splitlines()) >= {"certificate"}


def test_slots_that_are_not_the_servers_are_told_and_no_orders_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Eight requests of two tokens: two iterations on eight slots, and 16 on the one that the server has.
    server_run([2] * 8, iterations=16, slots=8, plateau=1).save(tmp_path / "trace.jsonl")
    assert main(["audit", str(tmp_path / "trace.jsonl")]) == 0
    said = capsys.readouterr()
    assert "slots or room for KV cache are fewer than --slots 8" in said.err
    assert "takes 2 iterations in the simulation and took 16: orders are not compared" in said.err
    assert "by the order of the requests" not in said.out
    assert f"lost: {TOGETHER}" in said.out
    assert main(["audit", str(tmp_path / "trace.jsonl"), "--slots", "1"]) == 0
    said = capsys.readouterr()
    assert "fewer than --slots" not in said.err
    assert "by the order of the requests" in said.out
