"""``run --server`` on a server with a prefix cache: order, figures, and what the next run knows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cached_server import FakeCachedServer
from fake_server import FakeServer
from server_batches import run_words

from batchbound.cli import main
from batchbound.cost_cache import CostCache
from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.iterations import EngineLimits
from batchbound.data.readers.server_batch import Sent
from batchbound.data.readers.server_run import ServerRun
from batchbound.executor.server import sending
from batchbound.executor.server.client import ServerClient
from batchbound.executor.server.probe import ServerFacts
from batchbound.executor.server.reply import Reply
from batchbound.heuristics.iterations.iteration_fit import IterationFit
from batchbound.models.iterations.iteration_minorant import Minorant
from batchbound.run_job import beginnings

DOCUMENTS, QUESTIONS = 6, 5


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep costs in a folder of the test; and no proxy stands between us and ourselves."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("BATCHBOUND_COST_CACHE", str(tmp_path / "costs"))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the prompts in the order they are sent."""
    names: list[str] = []
    send = ServerClient.send

    async def noted(client: ServerClient, request: Sent) -> Reply:
        names.append(str(json.loads(request.body)["prompt"]))
        return await send(client, request)

    monkeypatch.setattr(ServerClient, "send", noted)
    return names


def _write(path: Path, *, tidy: bool, lengths: bool, choices: int = 1) -> Path:
    """Write questions on documents of 40 tokens, four letters each: in turn, or by document."""
    rows = []
    for at in range(DOCUMENTS * QUESTIONS):
        document, question = divmod(at, QUESTIONS) if tidy else divmod(at, DOCUMENTS)[::-1]
        prompt = chr(65 + document) * 160 + f"Why {question}"
        body = {"prompt": prompt, "max_tokens": 3 + (7 * at) % 5} | ({"n": choices} if choices > 1 else {})
        row = {"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body}
        rows.append(row | ({"output_tokens": body["max_tokens"]} if lengths else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _run(
    batch: Path, sent: list[str], capsys: pytest.CaptureFixture[str], *words: str, **server: Any
) -> tuple[dict[str, Any], FakeCachedServer]:
    sent.clear()
    count = DOCUMENTS * QUESTIONS
    # All wait before the first iteration, so that counts do not depend on how fast the client is.
    options = ["--slots", "2", "--in-flight", str(count), "--overwrite"]
    fake = FakeCachedServer(2, gate=count, total=count, sent=sent, blocks=30, **server)
    with fake:
        assert main(run_words(batch, fake, *options, *words)) == 0
    return json.loads(capsys.readouterr().out), fake


NEEDED = DOCUMENTS * 40 + DOCUMENTS * QUESTIONS * 2


@pytest.mark.parametrize("lengths", [True, False])
def test_an_interleaved_file_computes_each_document_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str], *, lengths: bool
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=lengths)
    by_file, _ = _run(batch, sent, capsys, "--order", "file")
    by_tree, fake = _run(batch, sent, capsys)
    assert by_tree["prompt_tokens_needed"] == by_file["prompt_tokens_needed"] == NEEDED
    assert by_tree["prompt_tokens_computed"] <= 1.1 * NEEDED
    assert by_file["prompt_tokens_computed"] > 3 * NEEDED
    assert by_file["prompt_tokens_again"] == by_file["prompt_tokens_computed"] - NEEDED
    # First come, first served is simulated on the same cache.
    assert by_tree["simulated_prompt_tokens"]["file order"] == by_file["prompt_tokens_computed"]
    assert by_tree["simulated_iterations"]["file order"] == by_file["iterations"]
    assert len(fake.tokenized) == DOCUMENTS * QUESTIONS


def test_the_prediction_is_what_the_server_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    figures, fake = _run(batch, sent, capsys)
    assert figures["predicted_iterations"] == figures["iterations"] == fake.engine.iterations
    assert figures["simulated_prompt_tokens"]["as sent"] == figures["prompt_tokens_computed"]


@pytest.mark.parametrize("lengths", [True, False])
def test_a_tidy_file_is_not_torn_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str], *, lengths: bool
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=True, lengths=lengths)
    figures, _ = _run(batch, sent, capsys)
    assert figures["prompt_tokens_computed"] <= 1.1 * NEEDED
    assert figures["iterations"] <= figures["simulated_iterations"]["file order"]


def test_the_screen_says_what_was_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    count = DOCUMENTS * QUESTIONS
    fake = FakeCachedServer(2, gate=6, total=count, sent=sent, blocks=30)
    with fake:
        words = run_words(batch, fake, "--slots", "2", "--order", "file")
        assert main([word for word in words if word != "--json"]) == 0
        computed = count * 42 - fake.engine.hits
    screen = capsys.readouterr().out
    assert (
        f"{computed:,} prompt tokens computed, {NEEDED} needed: {computed - NEEDED:,} computed again"
        in screen
    )


def test_the_trace_keeps_the_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    _run(batch, sent, capsys, "--order", "file")
    ran = ServerRun.load(tmp_path / "trace.jsonl")
    assert ran.tree is not None
    assert ran.tree.distinct_tokens == NEEDED
    assert ran.tree.prompt_tokens.tolist() == [42] * len(ran)
    assert main(["audit", str(tmp_path / "trace.jsonl"), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert tables["prompt tokens"]["needed"] == NEEDED
    assert tables["prompt tokens"]["computed again after eviction"] > 2 * NEEDED


def test_no_costs_are_fitted_to_a_run_with_an_outage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(_write(tmp_path / "in.jsonl", tidy=False, lengths=True), sent, capsys)
    ran = ServerRun.load(tmp_path / "trace.jsonl")
    fit = IterationFit(Minorant(0.03, 0.001, 0.002, 0.0, 0.0, 0.0), 0.01, 30)
    monkeypatch.setattr(beginnings, "fit_cached", lambda *given: fit)
    facts, limits = (ServerFacts(ran.servers[0].url, True),), EngineLimits(2, 64, 480, 16)
    assert beginnings.keep_rates(ran, limits, facts) is not None
    out = (replace(ran.servers[0], unreachable=0.1 * ran.makespan),)
    assert beginnings.keep_rates(replace(ran, servers=out), limits, facts) is None


def test_the_page_of_an_audit_draws_the_cache_of_the_run_below_first_come_first_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch, page = _write(tmp_path / "in.jsonl", tidy=False, lengths=True), tmp_path / "page.html"
    figures, _ = _run(batch, sent, capsys)
    assert main(["audit", str(tmp_path / "trace.jsonl"), "--html", str(page)]) == 0
    text = page.read_text()
    first = figures["simulated_prompt_tokens"]["file order"]
    assert f"{first:,} prompt tokens computed</p>" in text
    mine = figures["simulated_prompt_tokens"]["as sent"]
    assert f"this run&#x27;s order: {figures['iterations']:,} iterations, {mine:,} prompt tokens" in text
    assert text.count("40 tokens, 5 requests") == 2 * DOCUMENTS


def test_a_server_that_does_not_tokenize_gets_an_order_by_bytes_and_no_exact_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    figures, fake = _run(batch, sent, capsys, tokenizes=False)
    assert fake.engine.prompt_tokens < 1.2 * NEEDED
    assert "prompt_tokens_needed" not in figures


def test_a_server_without_prefix_caching_is_told_what_it_would_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    with FakeServer(2, gate=6, total=DOCUMENTS * QUESTIONS) as server:
        words = run_words(batch, server, "--slots", "2", "--verbose")
        assert main([word for word in words if word != "--json"]) == 0
    assert "turn on prefix caching" in "".join(capsys.readouterr())


def test_two_servers_get_whole_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    servers = [FakeCachedServer(2, blocks=30) for _ in range(2)]
    with servers[0], servers[1]:
        words = run_words(batch, servers[0], "--slots", "2", "--server", servers[1].url)
        assert main(words) == 0
    computed = [server.engine.prompt_tokens for server in servers]
    assert sum(computed) <= 1.2 * NEEDED
    assert abs(computed[0] - computed[1]) <= 0.25 * NEEDED
    done = [sum(server.completions.values()) for server in servers]
    assert sum(done) == DOCUMENTS * QUESTIONS
    assert min(done) >= DOCUMENTS * QUESTIONS // 3


def test_samples_of_known_length_are_held_back_where_the_cache_is_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    rows = []
    for at in range(24):
        # Up to 60 tokens below three beginnings of 20: the cache holds 140.
        body = {"prompt": chr(65 + at % 3) * 80 + f"Why {at:4}", "max_tokens": 1 + 7 * at % 60}
        row = {"custom_id": f"r{at}", "url": "/v1/completions", "body": body}
        rows.append(row | {"output_tokens": body["max_tokens"]})
    batch = tmp_path / "in.jsonl"
    batch.write_text("".join(json.dumps(row) + "\n" for row in rows))
    preempted, by_order = list[int](), list[ServerRun]()
    for words, gate in ((["--order", "file", "--in-flight", "24"], 24), ([], None)):
        sent.clear()
        fake = FakeCachedServer(6, gate=gate, total=24, sent=sent, blocks=35)
        with fake:
            dear = IterationRates(1.0, 0.0, 1.0, error=0.0)
            CostCache.of_user().keep_server(fake.url, ("fake",), dear)
            assert main(run_words(batch, fake, "--slots", "6", "--overwrite", *words)) == 0
        preempted.append(fake.engine.preemptions)
        by_order.append(ServerRun.load(tmp_path / "trace.jsonl"))
    file, held = by_order
    assert file.sent_after is None
    assert held.sent_after is not None
    assert "held back" in held.order
    assert int((np.arange(24) - held.sent_after).max()) < 6
    assert preempted[1] < preempted[0]


def test_sixty_four_requests_wait_at_a_server_with_few_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    with FakeCachedServer(2, gate=6, total=DOCUMENTS * QUESTIONS, sent=sent, blocks=30) as fake:
        assert main(run_words(batch, fake, "--slots", "2")) == 0
    assert json.loads(capsys.readouterr().out)["in_flight"] == 2 + 64


@pytest.mark.parametrize("lengths", [True, False])
def test_requests_of_several_completions_are_sent_by_their_beginnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str], *, lengths: bool
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=lengths, choices=2)
    _, by_file = _run(batch, sent, capsys, "--order", "file")
    figures, fake = _run(batch, sent, capsys)
    documents = [prompt[0] for prompt in sent]
    assert sum(one != other for one, other in pairwise(documents)) == DOCUMENTS - 1
    # The second completion computes the last two tokens of its prompt, as does the first.
    assert fake.engine.prompt_tokens == DOCUMENTS * 40 + 2 * DOCUMENTS * QUESTIONS * 2
    assert by_file.engine.prompt_tokens > 2 * fake.engine.prompt_tokens
    if lengths:
        assert figures["predicted_iterations"] == fake.engine.iterations
    # Counters are of completions and rows of requests: no figure compares the two.
    assert "prompt_tokens_needed" not in figures


def _tokenizer(folder: Path, batch: Path, letters: int) -> Path:
    """Write a tokenizer of pieces of some letters into a model's folder."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    prompts = [json.loads(line)["body"]["prompt"] for line in batch.read_text().splitlines()]
    pieces = {text[at : at + letters] for text in prompts for at in range(0, len(text), letters)}
    raw = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(sorted(pieces))}, None))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(f".{{1,{letters}}}"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


@pytest.mark.slow
def test_the_tokenizer_in_the_model_s_folder_counts_for_a_server_that_does_not_tokenize(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    model = str(_tokenizer(tmp_path / "model", batch, 4))
    figures, fake = _run(batch, sent, capsys, "--model", model, tokenizes=False, model=model)
    assert figures["prompt_tokens_needed"] == NEEDED
    assert figures["predicted_iterations"] == fake.engine.iterations


@pytest.mark.slow
def test_a_tokenizer_that_counts_otherwise_than_the_server_gives_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: list[str]
) -> None:
    batch = _write(tmp_path / "in.jsonl", tidy=False, lengths=True)
    model, count = str(_tokenizer(tmp_path / "model", batch, 2)), DOCUMENTS * QUESTIONS
    with FakeCachedServer(
        2, gate=6, total=count, sent=sent, blocks=30, tokenizes=False, model=model
    ) as server:
        assert main(run_words(batch, server, "--slots", "2", "--model", model)) == 0
    captured = capsys.readouterr()
    assert "has 83 prompt tokens here and 42 on the server: no figures" in captured.err
    assert "prompt_tokens_needed" not in json.loads(captured.out)


def test_the_requests_that_wait_are_sent_after_those_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The next wave would never come: each completion sends the first of those that wait.
    monkeypatch.setattr(sending, "_WAVE_SECONDS", 1e6)
    at_replies, begun, send = list[int](), list[str](), ServerClient.send

    async def noted(client: ServerClient, request: Sent) -> Reply:
        begun.append(json.loads(request.body)["prompt"])
        reply = await send(client, request)
        at_replies.append(len(begun))
        return reply

    monkeypatch.setattr(ServerClient, "send", noted)
    batch, count = _write(tmp_path / "in.jsonl", tidy=True, lengths=False), DOCUMENTS * QUESTIONS
    with FakeCachedServer(2, gate=2, total=count, blocks=30) as server:
        assert main(run_words(batch, server, "--slots", "2", "--order", "file", "--in-flight", "10")) == 0
    assert at_replies[0] == 2
    prompts = [json.loads(line)["body"]["prompt"] for line in batch.read_text().splitlines()]
    assert begun == prompts


def test_hits_of_the_run_tell_whether_the_prefix_cache_was_warm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The letters in common, at most fifteen, fill no block of sixteen.
    def remarks_of(name: str, first: int, server: FakeCachedServer) -> str:
        rows = [
            {
                "custom_id": f"r{at}",
                "url": "/v1/completions",
                "body": {"prompt": f"Answer well: {at:03}" + "x" * 32, "max_tokens": 2},
            }
            for at in range(first, first + 3)
        ]
        batch = tmp_path / f"{name}.jsonl"
        batch.write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = str(tmp_path / f"{name}.out.jsonl")
        words = ["--slots", "2", "--kv-tokens", "800", "-o", output, "--overwrite"]
        assert main(run_words(batch, server, *words)) == 0
        return capsys.readouterr().err

    server = FakeCachedServer(2, blocks=200)
    with server:
        assert "broken" not in remarks_of("first", 0, server)
        assert server.engine.hits == 0
        warm = remarks_of("again", 0, server)
        hits = server.engine.hits
        assert hits > 0
        said = (
            f"the prefix cache was warm: {hits} prompt tokens came from the cache, and a cold cache gives 0"
        )
        assert said in warm
        # The server's counter stands where the second job left it.
        assert "broken" not in remarks_of("other", 100, server)
        assert server.engine.hits == hits
