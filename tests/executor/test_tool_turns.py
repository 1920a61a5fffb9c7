"""GRPOTrainer of TRL with tools and environments: turns as TRL's own loop has them, within one batch."""

from __future__ import annotations

import copy
import itertools
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers = pytest.importorskip("transformers", reason="the engine extra is not installed")
trl_package = find_spec("trl")
if trl_package is None or trl_package.origin is None:
    pytest.skip("the trl extra is not installed", allow_module_level=True)

from batchbound.executor.llm import LLM
from batchbound.executor.rollout import replace_generation, rollout_function

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]

ASKED = ["first", "second", "third"]
TEMPLATES = Path(trl_package.origin).parent / "chat_templates"
TEMPLATE = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
"""Known to TRL, which puts the next one in its place while it trains with tools."""
TRAINED = (TEMPLATES / "qwen3_training.jinja").read_text(encoding="utf-8")
MARKS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
MARKS += ["<think>", "</think>", "<|endoftext|>"]


def look(word: str) -> str:
    """
    Look a word up.

    Args:
        word: The word to look up.

    Returns:
        What is known of it.
    """
    return f"seen {word}"


async def look_later(word: str) -> str:
    """
    Look a word up.

    Args:
        word: The word to look up.

    Returns:
        What is known of it.
    """
    return f"seen {word}"


class Library:
    """An environment that counts what it was asked."""

    def reset(self, **_: Any) -> None:
        self.asked = 0

    def look(self, word: str) -> str:
        """
        Look a word up.

        Args:
            word: The word to look up.

        Returns:
            What is known of it.
        """
        self.asked += 1
        return f"seen {word} {self.asked}"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make_tokenizer() -> Any:
    """Return a byte-level tokenizer of merges learnt from the template, with its marks as tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[], initial_alphabet=alphabet)
    text = [TEMPLATE, call_of("first"), str(look.__doc__)]
    raw.train_from_iterator(text * 3, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.add_special_tokens({"additional_special_tokens": MARKS[:2] + MARKS[8:]})
    made.add_tokens(MARKS[2:8])
    made.chat_template = TEMPLATE
    return made


def call_of(word: str) -> str:
    body = json.dumps({"name": "look", "arguments": {"word": word}})
    return f"<tool_call>\n{body}\n</tool_call>"


def taught(tokenizer: Any) -> Any:
    """Return a tiny model that calls a tool once for ``first``, again and again for ``second``, then never.

    Its next token depends on the current one and a state of the conversation that it cannot lose: it is
    trained to certainty on the conversations themselves.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.LlamaForCausalLM(config)
    rows = [row for word in ASKED for row in conversation(tokenizer, word)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([[*one, *[tokenizer.pad_token_id] * (width - len(one))] for one, _ in rows])
    labels = torch.tensor([[*own, *[-100] * (width - len(own))] for _, own in rows])
    for _ in range(400):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if float(loss) < 2e-3:
            break
    assert float(loss) < 5e-3
    return model.eval()


def conversation(tokenizer: Any, word: str) -> list[tuple[list[int], list[int]]]:
    """Return token ids of a conversation, and those that the model is to write, else -100."""
    turns = {"first": ["call", "done"], "second": ["call", "call", "call"], "third": ["done"]}[word]
    messages: list[dict[str, Any]] = [{"role": "user", "content": word}]
    options: dict[str, Any] = {"tools": [look], "tokenize": True, "return_dict": False}
    options["chat_template"] = TRAINED
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    own = [-100] * len(ids)
    for turn in turns:
        text = call_of(word) if turn == "call" else f"done {word}"
        written = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids, own = ids + written, own + written
        if turn == "call":
            answer = f"\n<|im_start|>user\n<tool_response>\nseen {word}\n</tool_response><|im_end|>\n"
            answer += "<|im_start|>assistant\n"
            told = tokenizer(answer, add_special_tokens=False)["input_ids"]
            ids, own = ids + told, own + [-100] * len(told)
    return [(ids, own)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def weights(tokenizer: Any) -> Any:
    return taught(tokenizer)


def trained(
    weights: Any,
    tokenizer: Any,
    folder: Path,
    *,
    ours: bool,
    turns: bool = False,
    peft: Any = None,
    **arguments: Any,
) -> tuple[list[Any], LLM]:
    """Train some steps; return what each generation gave the trainer, and the engine."""
    import datasets
    import trl

    model = transformers.LlamaForCausalLM(weights.config)
    model.load_state_dict(weights.state_dict())
    engine = LLM(model, tokenizer, slots=4)
    given = {name: arguments.pop(name) for name in ("tools", "environment_factory") if name in arguments}
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "max_completion_length": 160,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        **arguments,
    }
    prompts = [[{"role": "user", "content": word}] for word in ASKED]
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        args=trl.GRPOConfig(**settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts * 4}),
        processing_class=tokenizer,
        rollout_func=rollout_function(engine) if ours and not turns else None,
        peft_config=peft,
        **given,
    )
    if turns:
        replace_generation(trainer, engine)
    seen: list[Any] = []
    generate = trainer._generate

    def noted(prompts: Any) -> Any:
        found = generate(prompts)
        values = []
        training = trainer.model.training
        trainer.model.eval()
        for prompt, completion in zip(found[0], found[1], strict=True):
            ids = torch.tensor([prompt + completion])
            with torch.no_grad():
                told = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, torch.ones_like(ids), len(completion)
                )[0]
            values.append(told[0].tolist())
        trainer.model.train(training)
        seen.append((*found, values))
        return found

    trainer._generate = noted
    trainer.train()
    assert trainer.state.global_step == settings["max_steps"]
    seen.append(trainer.state.log_history)
    return seen, engine


@pytest.mark.parametrize("kind", ["tools", "async", "environment", "once", "turns"])
def test_turns_and_masks_are_those_of_trls_own_loop(
    weights: Any, tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    # The likeliest token always, so that both draw the same completions.
    given: dict[str, Any] = {"tools": [look], "top_k": 1, "max_steps": 2}
    if kind == "async":
        look_later.__name__ = "look"
        given["tools"] = [look_later]
    if kind == "environment":
        given = {"environment_factory": Library, "top_k": 1, "max_steps": 2}
    if kind == "once":
        given["max_tool_calling_iterations"] = 1
    ours, _ = trained(weights, tokenizer, tmp_path / "ours", ours=True, turns=kind == "turns", **given)
    theirs, _ = trained(weights, tokenizer, tmp_path / "theirs", ours=False, **given)
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        for part in range(4):
            # Prompts, completions with the tools' answers, masks, messages.
            assert mine[part] == other[part]
    logs = [[one for one in run[-1] if "reward" in one] for run in (ours, theirs)]
    for mine, other in zip(*logs, strict=True):
        for name in ("reward", "tools/call_frequency", "tools/failure_frequency", "completions/mean_length"):
            assert mine[name] == pytest.approx(other[name])
    assert any(0 in mask for mask in ours[0][2])
    # Several completions of a group call the tool by the same tokens.
    assert all(entry["rollout/above_bound"] >= -1e-9 for entry in logs[0])
    if kind == "turns":
        # TRL applies its own tools and masks; we only draw, and say how likely the tokens are.
        for _, ids, masks, _, told, *_, own in ours[:-1]:
            for completion, mask, mine, values in zip(ids, masks, told, own, strict=True):
                assert len(mine) == len(completion)
                pairs = zip(mine, values, mask, strict=True)
                assert all(abs(a - b) < 1e-4 for a, b, drawn in pairs if drawn)
    else:
        assert logs[0][0]["rollout/waiting_for_tools"] >= 0


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "peft"])
def test_log_probabilities_of_all_turns_are_those_of_trls_forward_pass(
    weights: Any, tokenizer: Any, tmp_path: Path, adapter: bool
) -> None:
    peft = None
    if adapter:
        peft = pytest.importorskip("peft", reason="PEFT is not installed").LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, lora_alpha=0.1
        )
    seen, _ = trained(weights, tokenizer, tmp_path, ours=True, peft=peft, tools=[look])
    several = 0
    for _, ids, masks, _, told, *_, own in seen[:-1]:
        for completion, mask, mine, theirs in zip(ids, masks, told, own, strict=True):
            assert len(completion) == len(mask) == len(mine) == len(theirs)
            drawn = [value for value, model in zip(mine, mask, strict=True) if model]
            assert drawn == pytest.approx(list(itertools.compress(theirs, mask)), abs=1e-4)
            assert not any(value for value, model in zip(mine, mask, strict=True) if not model)
            several += 0 in mask
    assert several


def test_a_slow_tool_leaves_its_slot_to_others(weights: Any, tokenizer: Any, tmp_path: Path) -> None:
    def slow(word: str) -> str:
        """
        Look a word up.

        Args:
            word: The word to look up.

        Returns:
            What is known of it.
        """
        time.sleep(1.0)
        return f"seen {word}"

    slow.__name__ = "look"
    _, engine = trained(weights, tokenizer, tmp_path, ours=True, tools=[slow], top_k=1, max_steps=1)
    assert engine._ran is not None
    trace, turns = engine._ran.trace, engine._ran.turns
    assert turns is not None
    before, after = trace.finished[turns.after[~turns.first]], trace.queued[~turns.first]
    assert (after - before >= 1.0).all()
    # While a tool works, stages run, and other requests begin.
    assert any(
        begin < stage.start < end
        for begin, end in zip(before.tolist(), after.tolist(), strict=True)
        for stage in trace.stages
    )


def test_a_hung_tool_and_a_wrong_call_are_errors_that_the_model_reads(
    weights: Any, tokenizer: Any, tmp_path: Path
) -> None:
    from trl.chat_template_utils import add_response_schema

    from batchbound.executor.tool_turns import ToolTurns

    tokenizer = add_response_schema(copy.deepcopy(tokenizer))

    class Trainer:
        tools = (look,)
        environment_factories = None
        max_tool_calling_iterations = 9
        max_completion_length = 400
        model, _tokenizer = weights, tokenizer
        _sync_tool_dicts = ({"look": lambda word: time.sleep(60)},)
        _async_tool_dicts = ({},)  # type: ignore[var-annotated]  # no tool is a coroutine
        _tool_call_loop = None

        def _tokenize_prompts(self, prompts: Any) -> Any:
            return [[1, 2]], None, {}

        def _get_tool_suffix_ids(self, messages: Any) -> list[int]:
            self.messages = messages
            return [5, 6]

    trainer = Trainer()
    turns = ToolTurns(trainer, ["x"], 0.05)
    call = tuple(tokenizer(call_of("first"), add_special_tokens=False)["input_ids"])
    assert turns.next_turn(0, call).result(30) == [5, 6]  # type: ignore[union-attr]  # it calls a tool
    assert trainer.messages[0]["content"] == "{'error': 'no answer within 0.05 seconds'}"
    other = tuple(tokenizer(call_of("x").replace("look", "seek"), add_special_tokens=False)["input_ids"])
    assert (turns.calls, turns.failures) == (1, 1)
    turns = ToolTurns(trainer, ["x"], 0.05)
    turns.next_turn(0, other).result(30)  # type: ignore[union-attr]  # it calls a tool
    assert trainer.messages[0]["content"] == "{'error': 'Tool seek not found.'}"


@pytest.mark.parametrize(("how", "first"), [("tools", 0), ("environment_factory", 1)])
def test_asynchronous_rollouts_call_tools_and_begin_where_the_trainer_says(
    weights: Any, tokenizer: Any, how: str, first: int, tmp_path: Path
) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from batchbound.executor.async_rollouts import AsyncRollouts

    model = transformers.LlamaForCausalLM(weights.config)
    model.load_state_dict(weights.state_dict())
    config = AsyncGRPOConfig(
        str(tmp_path),
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        max_staleness=1,
        max_completion_length=80,
        max_tool_calling_iterations=2,
        use_cpu=True,
        bf16=False,
    )
    rows = [{"prompt": [{"role": "user", "content": word}], "worth": k} for k, word in enumerate(ASKED)]

    async def reward(completions: list[Any], worth: list[int], **_: Any) -> list[float | None]:
        return [None if own == 2 else float(own) for own in worth]

    given: dict[str, Any] = {how: [look] if how == "tools" else Library}
    rollouts = AsyncRollouts(LLM(model, tokenizer, slots=4), rows, reward, config, **given)
    rollouts._loop_kwargs["dataset_start_index"] = first
    rollouts.pause()
    rollouts.send_weights(model.named_parameters())
    rollouts.resume()
    rollouts.update_model_version(1)
    rollouts.start()
    samples = [rollouts.rollout_buffer.get(timeout=120) for _ in range(6)]
    rollouts.check_health(60.0)
    rollouts.stop()
    asked = [sample.prompt[0]["content"] for sample in samples]
    assert asked == [word for word in ASKED[first:] + ASKED[:first] for _ in range(2)]
    for word, sample in zip(asked, samples, strict=True):
        told = [message["content"] for message in sample.completion if message["role"] == "tool"]
        # The whole conversation is written again for each turn, so later ones may end otherwise than above.
        assert bool(told) == (word != "third")
        assert all(content.startswith("seen ") for content in told)
        assert sample.advantage == 0.0
        assert np.isnan(sample.metrics["reward"]) == (word == "third")
        ids, own = torch.tensor(sample.input_ids)[None], sample.completion_mask[1:] == 1
        with torch.no_grad():
            values = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        assert sample.old_log_probs[1:][own] == pytest.approx(values[own], abs=1e-4)
        assert not sample.old_log_probs[1:][~own].any()
