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
def test_settings_that_only_hf_knows_are_generated_as_hf_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf, own = models(tmp_path)
    asked = [request(context, until=[], max_gen_toks=5, num_beams=2) for context in CONTEXTS[:2]]

    texts = own.generate_until(asked, disable_tqdm=True)

    assert texts == hf.generate_until(asked, disable_tqdm=True)
    assert "generating with hf" in caplog.text


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
