"""lm-eval with ``--model batchbound``: the texts are those of the harness's own model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_checkpoint

pytest.importorskip("lm_eval", reason="needs lm_eval: pip install 'batchbound[lm-eval]'")
pytest.importorskip("peft", reason="the harness's hf model needs peft")

CONTEXTS = ["w3 w4", "w5 w6 w7 w8 w9", "w10", "w11 w12 w13", "w3 w4"]


def request(context: str, **settings: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance("generate_until", doc={}, arguments=(context, settings), idx=0)


def models(folder: Path) -> tuple[Any, Any]:
    from lm_eval.models.huggingface import HFLM

    from batchbound.integrations.lm_eval import BatchboundLM

    options = {"pretrained": str(write_checkpoint(folder)), "device": "cpu", "dtype": "float32"}
    return HFLM(**options, batch_size=2), BatchboundLM(**options, batch_size=2)


@pytest.mark.filterwarnings("ignore")
def test_its_texts_are_those_of_hf_with_stops_and_lengths_of_each_request(tmp_path: Path) -> None:
    hf, own = models(tmp_path)
    free = hf.generate_until([request(CONTEXTS[0], until=[], max_gen_toks=12)], disable_tqdm=True)[0]
    stop = free.split()[3]
    asked = [
        request(context, until=[stop] if k % 2 else [], max_gen_toks=4 + k)
        for k, context in enumerate(CONTEXTS)
    ]

    texts = own.generate_until(asked, disable_tqdm=True)

    assert texts == hf.generate_until(asked, disable_tqdm=True)
    assert any(texts)


@pytest.mark.filterwarnings("ignore")
def test_texts_are_scored_at_once_also_under_an_automatic_batch_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lm_eval.api.instance import Instance

    hf, own = models(tmp_path)
    texts = [Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=0) for text in CONTEXTS]
    whole = hf.loglikelihood_rolling(texts, disable_tqdm=True)
    own.batch_size_per_gpu = "auto"
    with caplog.at_level("INFO"):
        assert own.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(whole, abs=1e-4)
    assert [line.split(",")[0] for line in caplog.messages] == ["batchbound: 5 log-likelihoods"]
    assert own.batch_size == "auto"


@pytest.mark.filterwarnings("ignore")
def test_an_end_token_of_a_task_is_hfs(tmp_path: Path) -> None:
    hf, own = models(tmp_path)
    free = hf.generate_until([request(CONTEXTS[0], until=[], max_gen_toks=12)], disable_tqdm=True)[0]
    end = hf.tok_encode(free.split()[3], add_special_tokens=False)[-1]
    asked = [request(CONTEXTS[0], until=[], max_gen_toks=12, eos_token_id=end)]
    texts = own.generate_until(asked, disable_tqdm=True)
    assert texts == hf.generate_until(asked, disable_tqdm=True)
    assert texts != [free]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{"until": None}, {"do_sample": "false"}, {"use_cache": False}])
def test_settings_that_hf_refuses_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    hf, own = models(tmp_path)
    asked = [request(CONTEXTS[0], **{"until": [], "max_gen_toks": 3, **settings})]
    with pytest.raises(Exception, match=r".+") as refused:
        hf.generate_until(asked, disable_tqdm=True)
    with pytest.raises(type(refused.value)):
        own.generate_until(asked, disable_tqdm=True)


@pytest.mark.filterwarnings("ignore")
def test_settings_that_only_hf_knows_are_generated_as_hf_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf, own = models(tmp_path)
    plain = [request(context, until=[], max_gen_toks=5) for context in CONTEXTS[:2]]
    beams = [request(context, until=[], max_gen_toks=5, num_beams=2) for context in CONTEXTS[:2]]

    with caplog.at_level("INFO"):
        texts = own.generate_until([plain[0], beams[0], plain[1], beams[1]], disable_tqdm=True)

    one, two = (hf.generate_until(asked, disable_tqdm=True) for asked in (plain, beams))
    assert texts == [one[0], two[0], one[1], two[1]]
    assert "num_beams=2, which is not served: generating 2 of 4 requests with hf" in caplog.text
    assert "batchbound: 2 completions" in caplog.text


EDGES: list[dict[str, Any]] = [
    {"until": ["w7", "w8 w9"]},
    {"until": "w7"},
    {"until": ["7 w"]},
    {"until": ["</s>", "<s>"]},
    {"until": ["ß €", "\n\n"]},
    {"until": [], "max_gen_toks": 1},
    {"until": [], "max_new_tokens": 3},
    {"until": [], "max_tokens": 3},
    {"until": [], "temperature": 0.0},
    {"until": [], "do_sample": False, "temperature": 0.7, "top_p": 0.9},
    {"until": [], "do_sample": False, "repetition_penalty": 1.3},
    {"until": [], "no_repeat_ngram_size": 2},
    {"until": [], "min_new_tokens": 6},
    {"until": [], "max_gen_toks": 60},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_edges_of_generation_are_those_of_hf(tmp_path: Path) -> None:
    hf, own = models(tmp_path)
    contexts = ["w3  w4 ", "w5\t", "w10 ß €", " ".join(f"w{k}" for k in range(3, 200))]
    for settings in EDGES:
        most = {} if any(name.startswith("max") for name in settings) else {"max_gen_toks": 8}
        asked = [request(context, **settings, **most) for context in contexts]
        texts = own.generate_until(asked, disable_tqdm=True)
        assert texts == hf.generate_until(asked, disable_tqdm=True), settings


@pytest.mark.filterwarnings("ignore")
def test_log_likelihoods_are_those_of_hf(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    hf, own = models(tmp_path)
    asked = [
        Instance("loglikelihood", doc={}, arguments=(context, ending), idx=0)
        for context in CONTEXTS[:3]
        for ending in (" w20 w21", " w22", " w23 w24 w25")
    ]

    found, expected = (one.loglikelihood(asked, disable_tqdm=True) for one in (own, hf))

    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_the_engine_does_not_score_is_scored_by_hf_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchbound.executor.engines.tiers import Tier
    from batchbound.integrations import lm_eval

    hf, own = models(tmp_path)
    monkeypatch.setattr(lm_eval, "choose_tier", lambda _: Tier("window", "ragged was refused: sinks", ""))
    asked = [endings_of("w3 w4", ending) for ending in (" w20 w21", " w22")]
    assert own.loglikelihood(asked, disable_tqdm=True) == hf.loglikelihood(asked, disable_tqdm=True)
    assert "the window tier (ragged was refused: sinks): log-likelihoods by hf" in caplog.text


def endings_of(context: str, ending: str) -> Any:
    from lm_eval.api.instance import Instance

    return Instance("loglikelihood", doc={}, arguments=(context, ending), idx=0)


@pytest.mark.filterwarnings("ignore")
def test_edges_of_log_likelihoods_are_those_of_hf(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    hf, own = models(tmp_path)
    long = " ".join(f"w{3 + k % 20}" for k in range(400))
    asked = [endings_of(*pair) for pair in [("", "w3 w4"), ("w3", " w4"), ("w3", " w4"), (long, " w9 w10")]]
    found, expected = (one.loglikelihood(asked, disable_tqdm=True) for one in (own, hf))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    rolling = [
        Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=0) for text in (long, "w3 w4")
    ]
    found, expected = (one.loglikelihood_rolling(rolling, disable_tqdm=True) for one in (own, hf))
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="an ending of 400 tokens is longer than the model's"):
        own.loglikelihood([endings_of("w5", " " + long)], disable_tqdm=True)
    with pytest.raises(ValueError, match="the ending '' of 'w5' has no tokens to score"):
        own.loglikelihood([endings_of("w5", "")], disable_tqdm=True)


@pytest.mark.filterwarnings("ignore")
def test_an_empty_prompt_begins_as_log_likelihoods_do_and_the_end_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, own = models(tmp_path)
    asked = [request(context, until=[], max_gen_toks=5) for context in ("", "w3 w4", "w3 w4")]
    with caplog.at_level("INFO"):
        texts = own.generate_until(asked, disable_tqdm=True)
    assert len(texts) == 3
    assert texts[1] == texts[2]
    assert "1 prompts are empty: they begin with token" in caplog.text
    assert "batchbound: 3 completions in 8 decode steps of 2 slots, and 8 in batches of 2" in caplog.text
    assert "4 of 5 prompt tokens computed, 20% fewer; 3 cut at their limit" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_slots_are_an_argument_of_the_model(tmp_path: Path) -> None:
    from batchbound.integrations.lm_eval import BatchboundLM

    options = {"pretrained": str(write_checkpoint(tmp_path)), "device": "cpu", "dtype": "float32"}
    assert BatchboundLM(**options, batch_size=2, slots="3")._most_at_once() == 3
    assert BatchboundLM(**options, batch_size="auto")._most_at_once() == 64
    with pytest.raises(ValueError, match="slots is 0"):
        BatchboundLM(**options, slots=0)


@pytest.mark.slow
def test_the_command_line_of_the_harness_is_passed_on(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    rows = [{"question": context, "answer": "w1"} for context in CONTEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "spell.yaml").write_text(f"""task: spell
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["w9"], max_gen_toks: 6}}
metric_list: [{{metric: exact_match}}]
""")

    command = [sys.executable, "-m", "batchbound.integrations.lm_eval", "--model", "batchbound"]
    command += ["--model_args", f"pretrained={model}", "--device", "cpu", "--batch_size", "2"]
    command += ["--include_path", str(tmp_path), "--tasks", "spell"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)

    assert done.returncode == 0, done.stderr
    assert "exact_match" in done.stdout
