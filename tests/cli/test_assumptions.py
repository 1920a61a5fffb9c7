"""A bound on a server's iterations names its assumptions, each checked, stated, assumed or broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.cli import WRONG_BOUND, main
from batchbound.data.claims.assumptions import (
    COLD_CACHE,
    DISTINCT,
    NO_EVICTION,
    ONE_ENGINE,
    ONE_TOKEN,
    REUSE_UNIT,
    WHOLE_CONTEXT,
    Assumption,
    blame,
)
from batchbound.data.costs.model_shape import holds_whole_context
from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.readers.server_metrics import ServerMetrics, parse_metrics
from batchbound.data.readers.server_run import ServerCount, ServerRun
from batchbound.executor.reports.iteration_audit import IterationAudit, audit_iterations, sequences_of
from batchbound.models.bounds.iterations import iteration_bound
from batchbound.models.certificates.iterations import verify_iterations
from batchbound.run_job.server_result import ServerResult
from batchbound.screen.server import server_lines

PAGES = Path(__file__).parent.parent / "data" / "metrics_pages"


def page(name: str) -> ServerMetrics:
    return parse_metrics((PAGES / f"{name}.txt").read_text())


def run_on(metrics: ServerMetrics, lengths: list[int], iterations: int | None, slots: int = 2) -> ServerRun:
    """Return a run as it is recorded between two equal pages, with an iteration count of its own."""
    count = len(lengths)
    none = np.zeros(count, dtype=np.int64)
    server = ServerCount(
        "http://a",
        metrics.engine,
        iterations=iterations,
        preemptions=None if metrics.preemptions is None else 0,
        cached_tokens=None if metrics.cached_tokens is None else 0,
        most_running=slots,
        plateau=slots,
        kv_tokens=metrics.kv_tokens,
        block_tokens=metrics.block_tokens,
        prefix_caching=metrics.prefix_caching,
        speculates=metrics.speculates,
        drafts=metrics.drafts,
        engines=metrics.engines,
        cached_before=metrics.cached_tokens,
    )
    return ServerRun(
        ids=tuple(f"r{k}" for k in range(count)),
        choices=none + 1,
        prompt_tokens=none + 3,
        completion_tokens=np.array(lengths),
        position=np.arange(count),
        sent=np.zeros(count),
        finished=np.ones(count),
        server_of=none,
        failed=none,
        slots=slots,
        in_flight=slots,
        order="file order",
        retries=0,
        servers=(server,),
    )


def audited(run: ServerRun, kv: int | None = None, *, kv_stated: bool = False) -> IterationAudit:
    limits = EngineLimits(run.slots, 64, kv, 1)
    found = audit_iterations(run, limits, budget_known=False, kv_stated=kv_stated)
    assert verify_iterations(found.sequences, found.limits, found.bound, found.drafts) is None
    return found


def bases(found: IterationAudit) -> dict[str, str]:
    return {one.name: one.basis for one in found.assumptions}


def test_a_plain_vllm_page_checks_all_that_the_bound_relies_on() -> None:
    metrics = page("vllm_plain")
    assert (metrics.speculates, metrics.drafts, metrics.engines, metrics.kv_tokens) == (False, 0, 1, 1024)
    found = audited(run_on(metrics, [2, 2, 4], 5))
    assert set(bases(found).values()) == {"checked"}
    assert found.label == "proven least"


def test_drafts_divide_the_bound_and_their_number_is_in_the_certificate() -> None:
    metrics = page("vllm_drafts")
    assert (metrics.speculates, metrics.drafts) == (True, 4)
    found = audited(run_on(metrics, [150] * 4, 120))
    assert (found.bound.iterations, found.bound.certificate["drafts"]) == (60, 4)
    assert bases(found)[ONE_TOKEN] == "broken"
    assert found.broken is None
    assert min(found.losses.values()) >= 0


def test_drafts_of_an_unknown_number_leave_the_bound_by_tokens() -> None:
    metrics = page("sglang_drafts")
    assert (metrics.speculates, metrics.drafts) == (True, None)
    found = audited(run_on(metrics, [150] * 4, 10))
    assert found.bound.certificate == {"kind": "tokens"}
    assert found.broken is None


@pytest.mark.parametrize("kind", ["slots", "longest", "packing", "KV"])
def test_a_certificate_for_fewer_drafts_than_the_engine_makes_is_refused(kind: str) -> None:
    work = Sequences(np.array([1, 1]), np.array([10, 10]))
    limits = EngineLimits(2, 64, 64, 1)
    bound = iteration_bound(work, limits, drafts=1, kinds=(kind,))
    assert verify_iterations(work, limits, bound, 1) is None
    assert bound.iterations == 0 or bound.certificate["drafts"] == 1
    for drafts in (2, None):
        assert bound.iterations == 0 or verify_iterations(work, limits, bound, drafts) is not None
    more = replace(bound, iterations=bound.iterations + 1)
    assert verify_iterations(work, limits, more, 1) is not None


@pytest.mark.parametrize("seed", range(40))
def test_no_run_with_drafts_is_below_its_bound(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, slots, drafts = (int(value) for value in draw.integers((1, 1, 0), (9, 4, 4)))
    work = Sequences(draw.integers(1, 4, count), draw.integers(1, 12, count))
    left, waiting, iterations, held = work.output.copy(), list(range(count)), 0, 0
    running: list[int] = []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        iterations += 1
        held = max(held, sum(int(work.prompt[k] + work.output[k] - left[k]) for k in running))
        for k in list(running):
            left[k] -= draw.integers(1, drafts + 2)
            if left[k] <= 0:
                running.remove(k)
    limits = EngineLimits(slots, 64, held, 1)
    bound = iteration_bound(work, limits, drafts=drafts)
    assert bound.iterations <= iterations
    assert verify_iterations(work, limits, bound, drafts) is None


def test_two_engines_behind_an_address_are_counted() -> None:
    metrics = page("vllm_two_engines")
    assert (metrics.engines, metrics.kv_tokens) == (2, 2 * 1024)
    found = audited(run_on(metrics, [4, 4], None))
    assert bases(found)[ONE_ENGINE] == "broken"
    assert "2 engines behind http://a" in str(found.assumptions)


def test_tokens_of_other_clients_are_told_and_nothing_is_compared() -> None:
    run = run_on(page("vllm_plain"), [1, 1, 4], 6)
    servers = (replace(run.servers[0], generated=6 + 20),)
    result = ServerResult(3, replace(run, servers=servers), EngineLimits(2, 64, None, 1), False, None, 0, 0)
    remarks: list[str] = []
    assert result.figures(remarks.append)["comparable"] is False
    assert "20 tokens of other clients" in remarks[-1]
    retried = replace(result, run=replace(result.run, retries=1))
    assert retried.figures()["comparable"] is True


def test_requests_in_progress_at_a_deadline_are_told_and_nothing_is_compared() -> None:
    run = run_on(page("vllm_plain"), [1, 1, 4], 6)
    servers = (replace(run.servers[0], generated=6 + 20),)
    ended = replace(run, servers=servers, abandoned=2)
    result = ServerResult(3, ended, EngineLimits(2, 64, None, 1), False, None, 0, 0)
    remarks: list[str] = []
    figures = result.figures(remarks.append)
    assert (figures["comparable"], figures["simulated_iterations"]) == (False, {})
    assert remarks[-1].startswith("2 requests were in progress at the deadline")


def test_a_warm_prefix_cache_withholds_the_bound_by_tokens() -> None:
    run = run_on(page("vllm_prefix_cache"), [1] * 8, 1, slots=8)
    tight = EngineLimits(8, 8, None, 1)
    hits = replace(run, servers=(replace(run.servers[0], cached_tokens=16),))
    warm = audit_iterations(hits, tight, budget_known=True)
    # Three prompt tokens each, of which the cache may hold two: one iteration of eight tokens.
    assert (warm.bound.iterations, warm.broken) == (1, None)
    assert "counts one token of each prompt" in str(warm.assumptions)
    # The counter did not move, whatever it counted of earlier jobs.
    cold = audit_iterations(run, tight, budget_known=True)
    assert (cold.bound.iterations, bases(cold)[COLD_CACHE]) == (3, "checked")


def shared_run(unit: int = 1, **counts: object) -> ServerRun:
    """Return a run of eight requests with two of three prompt tokens in common."""
    run = run_on(page("vllm_plain"), [1] * 8, 10, slots=8)
    tree = PrefixTree.of_prompts([[1, 2, 3 + k] for k in range(8)], unit=unit)
    context = (Assumption(WHOLE_CONTEXT, "checked"),)
    server = replace(run.servers[0], prefix_caching=True, **counts)  # type: ignore[arg-type]
    return replace(run, servers=(server,), tree=tree, assumptions=context)


def test_a_run_that_lost_its_shared_beginnings_does_not_bound_orders_that_keep_them() -> None:
    run = shared_run(unit=2, looked_up_before=0, cached_tokens=0)
    unsure = replace(run, assumptions=())
    # Blocks of a model that may have windows tell nothing of what another order reuses.
    assert sequences_of(unsure).cached.tolist() == [2] * 8
    untold = Assumption(DISTINCT, "broken", "the prompts share beginnings of unknown tokens")
    assert sequences_of(replace(run, tree=None, assumptions=(untold,))).cached.tolist() == [2] * 8
    assert sequences_of(replace(run, tree=None)).cached.tolist() == [0] * 8


def test_a_shared_beginning_is_counted_once_by_a_server_that_is_known_to_begin_cold() -> None:
    limits = EngineLimits(8, 1, None, 1)
    fresh = audit_iterations(shared_run(looked_up_before=0, cached_tokens=14), limits, budget_known=True)
    assert (fresh.bound.iterations, fresh.bound.source) == (2 + 8, "tokens")
    assert bases(fresh)[COLD_CACHE] == "checked"
    used = audit_iterations(shared_run(looked_up_before=64, cached_tokens=14), limits, budget_known=True)
    assert bases(used)[COLD_CACHE] == "assumed"
    assert used.bound.iterations == 10
    likely = audit_iterations(shared_run(cached_before=64, cached_tokens=14), limits, budget_known=True)
    assert bases(likely).get(COLD_CACHE) != "broken"
    assert likely.bound.iterations < 10
    before = {"looked_up_before": 64, "cached_before": 0}
    warm = audit_iterations(shared_run(**before, cached_tokens=15), limits, budget_known=True)
    assert bases(warm)[COLD_CACHE] == "broken"
    assert "15 prompt tokens came from the cache, and a cold cache gives 14" in str(warm.assumptions)
    assert warm.bound.certificate["kind"] != "tokens"
    untouched = audit_iterations(
        shared_run(cached_before=64, looked_up_before=64, cached_tokens=0), limits, budget_known=True
    )
    assert (bases(untouched)[COLD_CACHE], untouched.bound.iterations) == ("checked", 10)


@pytest.mark.parametrize("change", [{"retries": 1}, {"preemptions": 1}, {"generated": 9}])
def test_hits_that_have_another_explanation_break_no_assumption_and_weaken_the_bound(
    change: dict[str, int],
) -> None:
    counts = {"looked_up_before": 64, "cached_before": 0, "cached_tokens": 15} | change
    retries = counts.pop("retries", 0)
    run = replace(shared_run(**counts), retries=retries)
    found = audit_iterations(run, EngineLimits(8, 1, None, 1), budget_known=True)
    assert bases(found).get(COLD_CACHE) != "broken"
    assert REUSE_UNIT not in bases(found)
    assert found.bound.iterations < 10


@pytest.mark.parametrize("before", [64, None])
def test_no_bound_counts_chunks_of_a_prompt_that_a_warm_cache_may_hold(before: int | None) -> None:
    # Two prompts of 20 tokens that the cache holds but for the last: an iteration each, whatever the budget.
    run = run_on(page("vllm_plain"), [1] * 2, 2, slots=1)
    server = replace(run.servers[0], prefix_caching=True, cached_before=before, cached_tokens=38)
    tree = PrefixTree.of_prompts([list(range(20)), list(range(20, 40))])
    context = (Assumption(WHOLE_CONTEXT, "checked"),)
    run = replace(run, servers=(server,), tree=tree, prompt_tokens=np.array([20, 20]), assumptions=context)
    found = audit_iterations(run, EngineLimits(1, 5, None, 1), budget_known=True)
    assert found.bound.iterations <= 2
    assert found.broken is None
    assert verify_iterations(found.sequences, found.limits, found.bound) is None


def test_more_hits_than_the_prompts_share_withhold_the_bound() -> None:
    limits = EngineLimits(8, 1, None, 1)
    counts = {"looked_up_before": 0, "preemptions": 0}
    run = shared_run(unit=2, **counts, cached_tokens=14)
    checked = audit_iterations(run, limits, budget_known=True)
    assert checked.bound.iterations == 10
    assert bases(checked)[REUSE_UNIT] == "checked"
    more = audit_iterations(shared_run(**counts, cached_tokens=15), limits, budget_known=True)
    assert bases(more)[REUSE_UNIT] == "broken"
    assert more.bound.certificate["kind"] != "tokens"
    # What was preempted finds its own tokens again.
    again = shared_run(looked_up_before=0, preemptions=1, cached_tokens=15)
    assert audit_iterations(again, limits, budget_known=True).bound.certificate["kind"] == "tokens"


def test_prompt_tokens_from_a_kv_connector_count_as_cached() -> None:
    local, fetched = "vllm:prefix_cache_hits_total 32.0\n", "vllm:external_prefix_cache_hits_total 64.0\n"
    assert parse_metrics(local + fetched).cached_tokens == 96
    assert parse_metrics(local).cached_tokens == 32


@pytest.mark.parametrize(
    ("labels", "unit"),
    [
        ('block_size="16",prefix_match_unit="32"', 32),
        ('block_size="16",prefix_match_unit="None"', 16),
        ('block_size="16"', 16),
        ('block_size="784",mamba_block_size="784"', None),
        ('block_size="784",mamba_block_size="784",prefix_match_unit="32"', 32),
        ("", None),
    ],
)
def test_the_unit_of_a_reused_beginning_is_never_coarser_than_known(labels: str, unit: int | None) -> None:
    text = f'vllm:cache_config_info{{{labels},enable_prefix_caching="True"}} 1.0\n'
    assert parse_metrics(text).reuse_unit == unit


def test_the_kv_that_a_server_tells_bounds_only_models_without_windows() -> None:
    run = run_on(page("vllm_plain"), [20, 20], 40)
    assert audited(run, kv=24).bound.certificate["kind"] != "KV"
    stated = audited(run, kv=24, kv_stated=True)
    assert stated.bound.certificate["kind"] == "KV"
    assert bases(stated)[WHOLE_CONTEXT] == "stated"
    checked = replace(run, assumptions=(Assumption(WHOLE_CONTEXT, "checked"),))
    assert bases(audited(checked, kv=24))[WHOLE_CONTEXT] == "checked"


def test_preemptions_withhold_the_packing_bound() -> None:
    run = run_on(page("vllm_plain"), [3, 3, 3], 6)
    assert audited(run).bound.source == "packing"
    evicted = replace(run, servers=(replace(run.servers[0], preemptions=1),))
    found = audited(evicted)
    assert found.bound.source == "slots"
    assert bases(found)[NO_EVICTION] == "broken"


@pytest.mark.parametrize(
    ("config", "whole"),
    [
        ({"num_attention_heads": 4}, True),
        ({"num_attention_heads": 4, "sliding_window": None}, True),
        ({"num_attention_heads": 4, "sliding_window": 64}, False),
        ({"num_attention_heads": 4, "sliding_window": 64, "use_sliding_window": False}, True),
        ({"text_config": {"num_attention_heads": 4, "layer_types": ["sliding_attention"]}}, False),
        ({"num_attention_heads": 4, "mamba_d_state": 16}, False),
    ],
)
def test_a_config_says_whether_requests_hold_their_whole_context(
    tmp_path: Path, config: dict[str, object], whole: bool
) -> None:
    assert holds_whole_context(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert holds_whole_context(tmp_path) is whole


def test_a_beaten_bound_names_the_assumption_that_one_request_refutes(
    public_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(public_data / "inputs" / "spec_decode_trace.jsonl"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "broken assumption: one token a sequence and iteration" in captured.err
    assert not [name for name in json.loads(captured.out)["iterations"] if "lost" in name or "proven" in name]


def test_a_bound_beaten_under_checked_assumptions_is_our_defect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_on(page("vllm_plain"), [2, 2, 4], 3).save(tmp_path / "trace.jsonl")
    assert main(["audit", str(tmp_path / "trace.jsonl")]) == WRONG_BOUND
    captured = capsys.readouterr()
    assert "every assumption was checked, so the bound itself is wrong" in captured.err
    assert "lost" not in captured.out


def test_blame_falls_on_the_least_sure_assumptions() -> None:
    checked, stated, assumed = (Assumption(name, name) for name in ("checked", "stated", "assumed"))
    assert blame([checked, stated, assumed]) == ("broken assumption: assumed", False)
    assert blame([checked, stated]) == ("broken assumption: stated", False)
    assert blame([checked])[1] is True


def screen(run: ServerRun) -> list[str]:
    """Return the end screen of a run that took two seconds."""
    limits = EngineLimits(run.slots, 64, None, 1)
    result = ServerResult(len(run), replace(run, finished=2 * run.finished), limits, False, None, 0, 0)
    return server_lines(result.figures() | {"slots": run.slots}, "here", None, planned=False)


def test_fewer_prompt_tokens_are_a_gain_where_no_seconds_are_known() -> None:
    counts: dict[str, Any] = {
        "requests": 48, "slots": 8, "makespan_s": 36.2, "output_tokens_per_s": 11.0, "iterations": 49,
        "prompt_tokens_computed": 4984, "prompt_tokens_needed": 5880, "prompt_tokens_again": 0,
        "simulated_iterations": {"file order": 49, "as sent": 49, "longest first": 49},
        "simulated_prompt_tokens": {"file order": 16376, "as sent": 4984, "longest first": 4984},
    }  # fmt: skip
    assert server_lines(counts, "here", None, planned=False)[1:4] == [
        "  first come, first served        49    simulated; 16,376 prompt tokens",
        "  this run                        49    36.2 s; as many; 70% less prefill",
        "  lengths known beforehand        49    no better order found",
    ]


def test_seconds_of_an_outage_are_told_apart() -> None:
    counts: dict[str, Any] = {
        "requests": 8, "slots": 8, "makespan_s": 50.0, "iterations": 25, "unreachable_s": 30.0,
        "simulated_iterations": {"file order": 30, "as sent": 25, "longest first": 25},
    }  # fmt: skip
    lines = server_lines(counts, "here", None, planned=False)
    assert lines[-1] == "  30 s of this run the server was unreachable: no seconds are compared"
    undisturbed = server_lines(counts | {"unreachable_s": 0.2}, "here", None, planned=False)
    assert "unreachable" not in " ".join(undisturbed)


def test_an_iteration_that_no_simulation_has_is_no_loss() -> None:
    counts: dict[str, Any] = {
        "requests": 8, "slots": 8, "makespan_s": 2.0, "iterations": 26,
        "simulated_iterations": {"file order": 25, "as sent": 25, "longest first": 25},
    }  # fmt: skip
    assert [line[36:] for line in server_lines(counts, "here", "again", planned=False)[1:]] == [
        "    simulated, same lengths",
        "    2 s; no gain",
        "    no better order found",
    ]
    # Of several, the share is printed, whatever their cause.
    assert server_lines(counts | {"iterations": 28}, "here", None, planned=False)[2].endswith("2 s; 12% more")


def test_shares_are_those_of_the_printed_numbers() -> None:
    counts: dict[str, Any] = {
        "requests": 40, "slots": 8, "makespan_s": 20.0, "iterations": 245,
        "simulated_iterations": {"file order": 257, "as sent": 247, "longest first": 243},
    }  # fmt: skip
    # The simulation of this run saves 4 %, and is 1.6 % above the best order.
    assert [line[30:] for line in server_lines(counts, "here", None, planned=True)[1:]] == [
        "   257    simulated, same lengths",
        "   245    20 s; 5% fewer",
        "   243    1% fewer than this run",
    ]
    counts |= {"iterations": 132, "simulated_iterations": {"as sent": 131, "longest first": 128}}
    assert server_lines(counts, "here", None, planned=True)[2].endswith("128    3% fewer than this run")


@pytest.mark.parametrize(
    ("iterations", "seconds", "this_run", "known"),
    [
        ((300, 240, 200), {}, "20 s, 1,234 tokens/s; 20% fewer", "17% fewer, if lengths repeat"),
        ((300, 240, 200), {"file order": 25, "longest first": 18}, "20 s; 20% fewer; 20% less time",
         "17% fewer; 10% less time, if they repeat"),
        ((240, 264, 200), {"file order": 16, "longest first": 22}, "20 s; 10% more; 25% more time",
         "24% fewer; 10% more time, if they repeat"),
        ((240, 240, 240), {"file order": 25, "longest first": 18}, "20 s; as many; 20% less time",
         "as many; 10% less time, if they repeat"),
        ((300, 240, 240), {"file order": 20, "longest first": 20}, "20 s; 20% fewer; same time",
         "no better order found"),
    ],
)  # fmt: skip
def test_iterations_come_before_seconds_whether_costs_are_known_or_not(
    iterations: tuple[int, int, int], seconds: dict[str, float], this_run: str, known: str
) -> None:
    first, taken, longest = iterations
    simulated = {"file order": first, "as sent": taken, "longest first": longest}
    counts: dict[str, Any] = {
        "requests": 40, "slots": 8, "makespan_s": 20.0, "output_tokens_per_s": 1234.0, "iterations": taken,
        "simulated_iterations": simulated, "simulated_seconds": seconds and {"as sent": 20.0} | seconds,
    }  # fmt: skip
    lines = server_lines(counts, "here", None, planned=False)
    assert [line[40:] for line in lines[2:4]] == [this_run, known]
    assert max(map(len, lines)) <= 80


def test_a_run_without_a_counter_is_compared_by_the_simulation_of_what_was_sent() -> None:
    # On two slots, 1 1 1 1 8 takes 10 iterations as sent, and 8 with the longest first.
    run = run_on(page("vllm_plain"), [1, 1, 1, 1, 8], None)
    assert screen(run) == [
        "5 requests, 2 at a time, here, iterations",
        "  first come, first served        10    simulated, same lengths",
        "  this run                   unknown    2 s, 6 tokens/s; no gain; simulated",
        "  lengths known beforehand         8    20% fewer, if lengths repeat",
        "  least possible                   8    proven",
    ]


def test_no_more_to_gain_is_said_only_at_the_bound() -> None:
    at_bound = screen(run_on(page("vllm_plain"), [8, 1, 1, 1, 1], 8))
    assert at_bound[3].endswith("  no more to gain")
    # Three requests of two tokens on two slots: four iterations, though half of six are three.
    between = screen(run_on(page("vllm_plain"), [2, 2, 2, 3, 3, 3], 9))
    assert between[3].endswith(("no better order found", "fewer, if lengths repeat"))


@pytest.mark.parametrize("name", ["vllm_drafts", "vllm_two_engines", "sglang_drafts"])
def test_nothing_is_compared_with_an_engine_that_this_is_not(name: str) -> None:
    lines = screen(run_on(page(name), [1, 1, 1, 1, 8], 10))
    assert not any("first come" in line or "known beforehand" in line for line in lines)
    assert not any("fewer" in line or "least possible                   1" in line for line in lines)


def test_a_run_below_its_bound_is_compared_with_nothing() -> None:
    lines = screen(run_on(page("vllm_plain"), [1, 1, 1, 1, 8], 3))
    assert [line[2:16] for line in lines[1:]] == ["this run      ", "least possible"]
    assert lines[2].endswith("not valid: this run took fewer")
