"""GRPOTrainer of TRL as it comes, with rollouts of ours: skipped where TRL is not installed."""

from __future__ import annotations

import copy
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers = pytest.importorskip("transformers", reason="the engine extra is not installed")
if find_spec("trl") is None:
    pytest.skip("the trl extra is not installed", allow_module_level=True)

import runpy

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from builders import mostly_slow

from batchbound.data.readers.requests import read_workload
from batchbound.executor.async_rollouts import AsyncRollouts
from batchbound.executor.llm import LLM
from batchbound.executor.models.source import load_model
from batchbound.executor.partial import Until
from batchbound.executor.rollout import Rollout, rollout_function

# What TRL and its peers say of their own futures is not ours to mend.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "trl_grpo.py"
PROMPTS = ["a b c", "one two", "x", "some longer prompt of words", "end here", "y z"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted(set(" ".join(PROMPTS).split()))
    known = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{word: 3 + at for at, word in enumerate(words)}}
    known |= {f"w{at}": at for at in range(len(known), 64)}
    raw = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture
def model() -> Any:
    """A tiny model in float32, as TRL trains one."""
    model = load_model("tiny:llama", dtype="float32", device="cpu")
    model.resize_token_embeddings(64)
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    return model


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(completion)) % 7) for completion in completions]


def trained(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    peft: Any = None,
    reward: Any = reward,
    until: Until | None = None,
    **arguments: Any,
) -> tuple[Any, list[tuple[Rollout, list[list[float]]]]]:
    """Train three steps; return the trainer, and each rollout with TRL's own log-probabilities of it."""
    import datasets
    import trl

    engine = LLM(model, tokenizer, slots=4, policy="learned" if until is None else "fcfs")
    rollout = rollout_function(engine, until=until)
    seen: list[tuple[Rollout, list[list[float]]]] = []

    def compared(prompts: Any, trainer: Any) -> Rollout:
        answer = rollout(prompts, trainer)
        own = []
        training = trainer.model.training
        trainer.model.eval()
        for prompt, completion in zip(answer["prompt_ids"], answer["completion_ids"], strict=True):
            ids = torch.tensor([prompt + completion])
            with torch.no_grad():
                values = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, torch.ones_like(ids), len(completion)
                )[0]
            own.append(values[0].tolist())
        trainer.model.train(training)
        seen.append((answer, own))
        return answer

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "max_completion_length": 20,
        "learning_rate": 1e-3,
        **arguments,
    }
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=tokenizer,
        rollout_func=compared,
        peft_config=peft,
    )
    trainer.train()
    return trainer, seen


@pytest.mark.slow
@pytest.mark.parametrize("temperature", mostly_slow([1.0, 0.7], fast=[0.7]))
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "peft"])
def test_log_probabilities_are_those_of_trls_own_forward_pass(
    model: Any, tokenizer: Any, tmp_path: Path, temperature: float, adapter: bool
) -> None:
    peft = None
    if adapter:
        peft = pytest.importorskip("peft", reason="PEFT is not installed").LoraConfig(
            r=4, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False
        )
    trainer, seen = trained(model, tokenizer, tmp_path, peft=peft, bf16=False, temperature=temperature)
    assert trainer.state.global_step == 3
    assert len(seen) == 3
    for answer, own in seen:
        assert len(answer["completion_ids"]) == len(own) >= 8
        for ours, theirs in zip(answer["logprobs"], own, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    assert seen[0][0]["completion_ids"] != seen[1][0]["completion_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [{"top_p": 0.9}, {"top_k": 5, "temperature": 0.7}])
def test_truncation_drops_no_completion_as_off_policy(
    model: Any, tokenizer: Any, tmp_path: Path, kept: dict[str, Any]
) -> None:
    # TRL compares log-probabilities of the whole vocabulary after temperature. With a threshold it leaves out
    # completions whose difference from ours is larger. With weights unchanged there is none.
    norms = []
    for threshold in (None, 1e-3):
        own, seen = trained(
            copy.deepcopy(model),
            tokenizer,
            tmp_path,
            bf16=False,
            off_policy_mask_threshold=threshold,
            logging_steps=1,
            **kept,
        )
        for answer, theirs in seen:
            for ours, values in zip(answer["logprobs"], theirs, strict=True):
                assert ours == pytest.approx(values, abs=1e-4)
        norms.append([entry["grad_norm"] for entry in own.state.log_history if "grad_norm" in entry])
    assert len(norms[0]) == 3
    assert any(norm > 0 for norm in norms[0])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rewarded", ["whole", "cut"])
def test_groups_that_a_step_left_unfinished_train_nothing(
    model: Any, tokenizer: Any, tmp_path: Path, rewarded: str
) -> None:
    def reward(prompts: list[str], finish_reason: list[str], **_: Any) -> list[float]:
        cut = {prompt for prompt, reason in zip(prompts, finish_reason, strict=True) if reason == "cut"}
        assert 0 < len(cut) < len(set(prompts))
        return [float(k % 3) if (own in cut) == (rewarded == "cut") else 0.0 for k, own in enumerate(prompts)]

    own, _ = trained(
        model,
        tokenizer,
        tmp_path,
        bf16=False,
        reward=reward,
        until=Until(groups=1),
        per_device_train_batch_size=8,
        num_generations=4,
        logging_steps=1,
    )
    log = [entry for entry in own.state.log_history if "grad_norm" in entry]
    assert len(log) == 3
    for entry in log:
        assert entry["reward_std"] > 0
        assert (entry["grad_norm"] > 0) == (rewarded == "whole")


def attention(query: Any, key: Any, value: Any, queries: Any, keys: Any, *_: Any, **how: Any) -> Any:
    """Stand in for ``flash_attn_varlen_func``: each segment attends to its path, causally from its end."""
    parts = []
    for q0, q1, k0, k1 in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        q, k, v = (states.transpose(0, 1) for states in (query[q0:q1], key[k0:k1], value[k0:k1]))
        k, v = (states.repeat_interleave(len(q) // len(k), dim=0) for states in (k, v))
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(int((k1 - k0) - (q1 - q0)))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=how["softmax_scale"]
        )
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.slow
def test_groups_are_no_staler_than_asked_and_each_token_is_of_its_version(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights: list[dict[str, Any]] = []
    seen: list[tuple[int, Any]] = []

    class Noted(AsyncRollouts):
        def resume(self) -> None:
            weights.append({name: weight.clone() for name, weight in engine.model.state_dict().items()})
            super().resume()

    def reward(completion_ids: list[list[int]], score: list[int], **_: Any) -> list[float]:
        odd = [sum(token % 2 for token in ids) for ids in completion_ids]
        return [float(count * own) for count, own in zip(odd, score, strict=True)]

    engine = LLM(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), tokenizer, slots=6)
    rows = [{"prompt": prompt, "score": k + 1} for k, prompt in enumerate(PROMPTS[:4])]
    config = AsyncGRPOConfig(
        str(tmp_path / "out"),
        max_steps=5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=12,
        temperature=0.8,
        top_k=20,
        max_staleness=1,
        token_budget=-1,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    rollouts = Noted(engine, rows, reward, config, log=tmp_path / "steps.csv")
    trainer = AsyncGRPOTrainer(
        str(tmp_path),
        reward,
        config,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
    queue = trainer.rollout_queue
    get = queue.get

    def noted(**how: Any) -> Any:
        sample = get(**how)
        seen.append((trainer.model_version - sample.model_version, sample))
        return sample

    monkeypatch.setattr(queue, "get", noted)
    trainer.train()
    assert trainer.state.global_step == 5
    log = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert all(abs(entry["ratio"] - 1) < 0.5 for entry in log)
    trained = Counter(int(sample.completion_mask.sum()) for _, sample in seen)
    logged = Counter(read_workload(str(tmp_path / "steps.csv")).workload.output_tokens.tolist())
    assert not trained - logged
    assert max(entry["sample/staleness_max"] for entry in log) <= 1
    assert {age for age, _ in seen} <= {0, 1, 2}
    assert len({sample.model_version for _, sample in seen}) > 2
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for _, sample in seen:
        own = sample.completion_mask == 1
        values = []
        # A group is labelled with its oldest weights; later tokens may be of later ones.
        for state in weights[sample.model_version - 1 : sample.model_version + 1]:
            judge.load_state_dict(state)
            with torch.no_grad():
                logits = judge(torch.tensor(sample.input_ids)[None]).logits[0, :-1]
                logits = (logits / 0.8).log_softmax(-1)
            values.append(logits.gather(-1, torch.tensor(sample.input_ids)[1:, None])[:, 0].numpy()[own[1:]])
        apart = [abs(sample.old_log_probs[own] - one) for one in values]
        assert np.min(apart, axis=0).max() < 1e-4


@pytest.mark.slow
def test_the_trainer_runs_with_all_its_defaults(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    trainer, seen = trained(model, tokenizer, tmp_path)
    assert trainer.args.gradient_checkpointing
    assert trainer.state.global_step == 3
    assert all(len(ids) <= 20 for answer, _ in seen for ids in answer["completion_ids"])
    assert trainer.args.bf16
    # Under autocast two orders of the same sums differ by bfloat16's rounding.
    for answer, own in seen:
        for ours, theirs in zip(answer["logprobs"], own, strict=True):
            assert ours == pytest.approx(theirs, abs=0.1)


@pytest.mark.slow
def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if line.startswith("step ")]
    rewards = [float(line.split()[-1]) for line in said if line.startswith("steps ")]
    assert (len(lines), len(rewards)) == (30, 6)
    assert rewards[-1] > rewards[0] + 0.1
    assert all("above the bound for these lengths" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("own", [[], ["--generate"]], ids=["batchbound", "generate"])
def test_the_example_of_a_real_model_writes_its_curve(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: list[str]
) -> None:
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    words = ["trl_smollm.py", str(tmp_path / "model"), "--steps", "2", "--out", str(tmp_path / "out"), *own]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(EXAMPLES / "trl_smollm.py"), run_name="__main__")
    lines = (tmp_path / "out" / "curve.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "1", "2"]
    assert (tmp_path / "out" / "curve.png").stat().st_size > 10_000
