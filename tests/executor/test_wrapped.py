"""Models as trainers hold them: in training mode, checkpointing, compiled, wrapped, sharded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from builders import mostly_slow

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers = pytest.importorskip("transformers", reason="the engine extra is not installed")

from tier_cases import generate_alone

from batchbound.executor.attention.fused_layers import FusedLayers
from batchbound.executor.attention.host_kernels import built
from batchbound.executor.engines.tiers import choose_tier
from batchbound.executor.llm import LLM
from batchbound.executor.models.families import UnsupportedModelError
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tiny import tiny_config
from batchbound.executor.models.tokenizers import ByteTokenizer
from batchbound.executor.models.wrapped import Evaluation, unwrapped

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # PEFT asks transformers for a name that is on its way out.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]

PROMPTS = [[1, 2, 3], [4] * 17, [5, 6, 7, 8, 9, 10], [11], [12, 13] * 6]


def loaded(family: str = "gpt2") -> Any:
    return load_model(f"tiny:{family}", dtype="float64", device="cpu")


def answers(model: Any, tokens: int = 9, **options: Any) -> list[list[int]]:
    engine = LLM(model, ByteTokenizer(), slots=3, **options)
    done = engine.generate(PROMPTS, max_tokens=tokens, ignore_eos=True)
    return [list(one.completion_ids) for one in sorted(done, key=lambda one: one.index)]


@pytest.mark.parametrize("tier", ["ragged", "window"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_in_training_answers_without_dropout_or_checkpointing(family: str, tier: str) -> None:
    model = loaded(family)
    expected = [generate_alone(model, prompt, 9) for prompt in PROMPTS]
    checkpoint = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    checkpoint()
    model.config.use_cache = False
    model.train()
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding)).eval()
    before = [module.training for module in model.modules()]
    assert answers(model, tier=tier) == expected
    assert [module.training for module in model.modules()] == before
    assert not frozen.training
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_model_is_left_in_training_whether_a_call_fails_or_is_abandoned() -> None:
    model = loaded().train()
    engine = LLM(model, ByteTokenizer(), slots=3)

    def fail(*_: int) -> None:
        assert model.training
        raise KeyError("the caller's")

    with pytest.raises(KeyError, match="the caller's"):
        list(engine.generate(PROMPTS, max_tokens=9, on_token=fail))
    assert all(module.training for module in model.modules())
    completions = engine.generate(PROMPTS, max_tokens=[2, 9, 9, 9, 9], ignore_eos=True)
    assert next(completions).index == 0
    assert all(module.training for module in model.modules()), "the caller may train between two answers"
    del completions
    with torch.no_grad():
        model.transformer.wte.weight.fill_(torch.nan)
    with pytest.raises(Exception, match="not finite"):
        list(engine.generate(PROMPTS, max_tokens=9))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        lambda model: model.compile(backend="eager") or model,
    ],
    ids=["torch.compile", "model.compile"],
)
def test_a_compiled_model_answers_and_stays_compiled(wrap: Callable[[Any], Any]) -> None:
    model = loaded("llama")
    expected = [generate_alone(model, prompt, 9) for prompt in PROMPTS]
    compiled = wrap(model)
    call = compiled._compiled_call_impl
    assert answers(compiled) == expected
    assert compiled._compiled_call_impl is call


def test_a_forward_call_in_place_of_the_familys_own_is_compared_before_it_is_trusted() -> None:
    model = loaded("llama")
    assert choose_tier(model).check == "a tested family"
    forward = model.forward
    model.forward = lambda **arguments: forward(**arguments)
    assert choose_tier(model, "window").check == "completions compared with the model's own at load"

    def without_positions(**arguments: Any) -> Any:
        return forward(**{**arguments, "position_ids": None})

    model.forward = without_positions
    for tier in ("auto", "ragged", "window"):
        with pytest.raises(UnsupportedModelError, match="cannot be run"):
            choose_tier(model, tier)


def test_sharded_and_scattered_models_are_refused_by_name() -> None:
    model = loaded("llama")
    layer = model.model.layers[0]

    sharded = type("FSDPModule", (), {})
    before = type(layer)
    layer.__class__ = type("FSDPLayer", (sharded, before), {})
    with pytest.raises(UnsupportedModelError, match="sharded by FSDP"):
        LLM(model, ByteTokenizer())
    layer.__class__ = before

    model.lm_head.weight.ds_id = 7
    with pytest.raises(UnsupportedModelError, match="sharded by DeepSpeed ZeRO-3"):
        LLM(model, ByteTokenizer())
    del model.lm_head.weight.ds_id

    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(UnsupportedModelError, match="its layers lie on 2 devices"):
        LLM(model, ByteTokenizer())
    del model.hf_device_map

    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    with pytest.raises(UnsupportedModelError, match="a part of it is compiled apart"):
        LLM(model, ByteTokenizer())


@pytest.mark.parametrize(
    "kind", ["LlamaModel", "LlamaForTokenClassification", "LlamaForSequenceClassification"]
)
def test_a_model_with_another_head_is_refused_by_name(kind: str) -> None:
    model = getattr(transformers, kind)(tiny_config("llama"))
    with pytest.raises(UnsupportedModelError, match=f"{kind} has no logits of tokens"):
        LLM(model, ByteTokenizer())


def test_a_model_sharded_after_the_engine_was_made_is_refused_by_the_next_call() -> None:
    model = loaded("llama")
    engine = LLM(model, ByteTokenizer())
    model.lm_head.weight.ds_id = 7
    with pytest.raises(UnsupportedModelError, match="ZeRO-3"):
        engine.generate(PROMPTS)


def test_a_module_is_in_evaluation_within_and_as_it_was_after_an_error() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())

    def fail() -> None:
        assert not any(module.training for module in model.modules())
        raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"), Evaluation(model)():
        fail()
    assert [module.training for module in model.modules()] == [True, True, False]
    with Evaluation(torch.nn.Linear(2, 2, device="meta"))():
        pass


def test_an_interrupt_while_a_model_is_put_back_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("tiny:llama", dtype="float32", device="cpu").train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    attention, pending = model.config._attn_implementation, list[str]()

    def interrupted(kind: Any, name: str) -> None:
        own = getattr(kind, name)

        def first(self: Any, *given: Any) -> Any:
            if name in pending and given in ((), ("training", True)):
                pending.remove(name)
                raise KeyboardInterrupt
            return own(self, *given)

        monkeypatch.setattr(kind, name, first)

    interrupted(FusedLayers, "_restore")
    interrupted(torch.nn.Embedding, "__setattr__")
    for name in ("_restore", "__setattr__") if built() else ("__setattr__",):
        engine = LLM(model, ByteTokenizer(), slots=3)
        pending.append(name)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate(PROMPTS, max_tokens=9))
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before

    def interrupt() -> None:
        model.config._attn_implementation = "ours"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Evaluation(model)():
        interrupt()
    assert model.config._attn_implementation == attention


def test_threads_take_turns_on_one_model_and_on_several() -> None:
    model = loaded("llama").train()
    engines = [
        LLM(each, ByteTokenizer(), slots=slots) for each in (model, loaded("qwen2")) for slots in (2, 3)
    ]

    def complete(engine: LLM) -> list[tuple[int, ...]]:
        done = engine.generate(PROMPTS, max_tokens=8, ignore_eos=True)
        return [one.completion_ids for one in sorted(done, key=lambda one: one.index)]

    expected = [complete(engine) for engine in engines]
    with ThreadPoolExecutor(2 * len(engines)) as threads:
        found = list(threads.map(complete, 2 * engines))
    assert found == 2 * expected
    assert all(module.training for module in model.modules())


def test_a_model_that_runs_under_autocast_of_its_own_takes_the_ragged_tier() -> None:
    # TRL's trainer wraps the forward call so by default.
    model = load_model("tiny:llama", dtype="float32", device="cpu")
    inner = model.forward

    def forward(*given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*given, **named)

    model.forward = forward
    engine = LLM(model, ByteTokenizer(), slots=3)
    assert engine.tier.name == "ragged"
    off = []
    for one in engine.generate(PROMPTS, max_tokens=20, temperature=1.0, seed=1, log_probabilities=True):
        with torch.no_grad():
            logits = model(torch.tensor([one.prompt_ids + one.completion_ids])).logits[0].float()
        own = logits.log_softmax(-1)[len(one.prompt_ids) - 1 :][
            range(len(one.completion_ids)), one.completion_ids
        ]
        assert one.log_probabilities is not None
        off += (torch.tensor(one.log_probabilities) - own).abs().tolist()
    assert sum(off) / len(off) < 0.02
    assert max(off) < 0.1


def test_an_autocast_around_the_call_is_refused_where_it_would_count() -> None:
    double, single = loaded(), loaded().float()
    expected = answers(double)
    with torch.autocast("cpu", torch.bfloat16):
        assert answers(double) == expected
        with pytest.raises(UnsupportedModelError, match=r"torch\.autocast is on for torch\.bfloat16"):
            answers(single)


@pytest.mark.parametrize("tier", ["ragged", "window"])
def test_logits_may_be_of_another_number_format_than_the_model(tier: str) -> None:
    # As TRL's cast_lm_head_to_fp32 has it, where the model is bfloat16.
    model = loaded("llama").float()
    model.lm_head.double().register_forward_pre_hook(lambda _, given: (given[0].double(),))
    expected = [generate_alone(model, prompt, 9) for prompt in PROMPTS]
    assert answers(model, tier=tier) == expected


def adapted(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False),
        **options,
    )
    return wrapped.train()


@pytest.mark.parametrize("family", mostly_slow(["llama", "gpt2"], fast=["llama"]))
def test_a_peft_wrapper_gives_the_tokens_of_its_adapter(family: str) -> None:
    model = loaded(family)
    plain = [generate_alone(model, prompt, 9) for prompt in PROMPTS]
    wrapped = adapted(model)
    with Evaluation(wrapped)():
        expected = [generate_alone(wrapped.get_base_model(), prompt, 9) for prompt in PROMPTS]
    assert expected != plain
    assert unwrapped(wrapped) is model
    assert answers(wrapped) == expected, "wrapped"
    assert answers(model) == expected, "injected"
    assert choose_tier(wrapped).check == "completions compared with the model's own at load"
    with wrapped.disable_adapter():
        assert answers(wrapped) == plain


@pytest.mark.parametrize(
    "adapter", [{"target_modules": ["embed_tokens"]}, {"trainable_token_indices": [1, 5, 9]}]
)
def test_an_adapter_on_the_embedding_gives_its_tokens(adapter: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj"], "init_lora_weights": False, **adapter}
    wrapped = peft.get_peft_model(loaded("llama"), peft.LoraConfig(**settings)).to(torch.float64).eval()
    expected = [generate_alone(wrapped.get_base_model(), prompt, 9) for prompt in PROMPTS]
    assert answers(wrapped) == expected


def test_adapters_that_work_outside_the_layers_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(loaded("llama"), config)
    with pytest.raises(UnsupportedModelError, match="PREFIX_TUNING"):
        LLM(wrapped, ByteTokenizer())
