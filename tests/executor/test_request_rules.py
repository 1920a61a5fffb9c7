"""What requests ask, token by token against transformers' own logits processors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers = pytest.importorskip("transformers", reason="the engine extra is not installed")

from builders import mostly_slow
from transformers.generation import logits_process as processors

from batchbound.data.readers.sampling import Sampling
from batchbound.executor.completion import Completion
from batchbound.executor.llm import LLM
from batchbound.executor.models.endings import Ending
from batchbound.executor.models.logit_edits import Edit, LogitEdits
from batchbound.executor.models.request_rules import NOT_SERVED, declared_sampling, rules_of, word_tokens
from batchbound.executor.models.sampling import Sampler
from batchbound.executor.models.tokenizers import ByteTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a", "bb bb", "some longer prompt", "dd", "and one more"]
EOS = 257


@pytest.fixture(scope="module")
def engine() -> LLM:
    return LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=4)


def processed(engine: LLM, asked: Sampling, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
    """Log-probabilities of each step of a completion, through transformers' processors one by one."""
    with torch.no_grad():
        every = engine.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    words = [list(word) for text in asked.bad_words for word in word_tokens(text, engine.tokenizer)]
    ends = sorted(Ending.of(asked, {EOS}).tokens)
    rows = []
    for step, logits in enumerate(every):
        ids, scores = torch.tensor([[*prompt, *tokens[:step]]]), logits[None]
        if asked.logit_bias:
            bias: Any = [[[token], value] for token, value in asked.logit_bias]
            scores = processors.SequenceBiasLogitsProcessor(bias)(ids, scores)
        if asked.repetition_penalty != 1.0:
            scores = processors.RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(ids, scores)
        # transformers has neither; these are the definitions of OpenAI's reference and of vLLM.
        counts = torch.bincount(torch.tensor(tokens[:step], dtype=torch.int64), minlength=scores.shape[1])
        scores = scores - asked.frequency_penalty * counts - asked.presence_penalty * (counts > 0)
        if words:
            scores = processors.NoBadWordsLogitsProcessor(words, eos_token_id=None)(ids, scores)
        if asked.min_tokens and ends:
            least = processors.MinNewTokensLengthLogitsProcessor(len(prompt), asked.min_tokens, ends)
            scores = least(ids, scores)
        if asked.logits_processor is not None:
            scores = asked.logits_processor(tuple(tokens[:step]), scores[0])[None]
        if asked.temperature > 0:
            scores = processors.TemperatureLogitsWarper(asked.temperature)(ids, scores)
            if asked.top_k > 0:
                scores = processors.TopKLogitsWarper(asked.top_k)(ids, scores)
            if asked.top_p < 1.0:
                scores = processors.TopPLogitsWarper(asked.top_p)(ids, scores)
            if asked.min_p > 0.0:
                scores = processors.MinPLogitsWarper(asked.min_p)(ids, scores)
        rows.append(scores[0].log_softmax(-1))
    return torch.stack(rows)


def unlike_the_last(tokens: tuple[int, ...], logits: Any) -> Any:
    """Forbid the tokens that came last, the more the longer the completion."""
    logits[list(tokens[-3:])] = -torch.inf
    return logits - 0.01 * len(tokens) * torch.arange(len(logits))


def drawn_at_random(rng: random.Random) -> Sampling:
    """A request that asks for some of everything."""

    def some(share: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < share else otherwise

    biased = tuple((token, rng.uniform(-5, 5)) for token in rng.sample(range(288), rng.randint(1, 6)))
    words = tuple(rng.choice(["a", "zz", "\x01\x02", "ab", " c", "é"]) for _ in range(rng.randint(1, 4)))
    return Sampling(
        n=some(0.2, rng.randint(2, 3), 1),
        temperature=some(0.7, rng.choice([0.3, 0.7, 1.0, 1.8]), 0.0),
        top_k=some(0.3, rng.choice([-1, 1, 5, 50, 1000]), 0),
        top_p=some(0.3, rng.uniform(0.2, 1.0), 1.0),
        min_p=some(0.3, rng.uniform(0.0, 0.4), 0.0),
        repetition_penalty=some(0.4, rng.choice([0.7, 1.2, 2.5]), 1.0),
        presence_penalty=some(0.3, rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(0.3, rng.uniform(-2, 2), 0.0),
        logit_bias=some(0.3, biased, ()),
        bad_words=some(0.3, words, ()),
        seed=rng.randrange(5),
        stop=some(0.2, (rng.choice(["a", "Q", "\x05"]),), ()),
        stop_token_ids=some(0.3, tuple(rng.sample(range(256), 40)), ()),
        min_tokens=some(0.3, rng.randint(1, 9), 0),
        ignore_eos=some(0.3, True, False),
        logprobs=20,
        logprobs_mode="processed",
        stop_when=some(0.2, lambda tokens: sum(tokens) % 7 == 0, None),
        logits_processor=some(0.3, unlike_the_last, None),
    )


@pytest.mark.parametrize("seed", mostly_slow(range(8), fast=range(1)))
def test_requests_of_one_batch_are_served_as_transformers_would_each(engine: LLM, seed: int) -> None:
    rng = random.Random(seed)
    asked = [drawn_at_random(rng) for _ in range(25)]
    prompts = [rng.choice(PROMPTS) for _ in asked]
    completions = list(engine.generate(prompts, asked, max_tokens=12))
    assert sorted((one.index, one.sample) for one in completions) == [
        (index, sample) for index, one in enumerate(asked) for sample in range(one.n)
    ]
    for one in completions:
        check(engine, asked[one.index], one)


def check(engine: LLM, asked: Sampling, one: Completion) -> None:
    tokens = list(one.completion_ids)
    expected = processed(engine, asked, one.prompt_ids, tokens)
    assert one.likeliest is not None
    for step, token in enumerate(tokens):
        best = expected[step].topk(20).values.tolist()
        told = [value for _, value in one.likeliest[step]]
        assert told == pytest.approx(best, rel=1e-6, abs=1e-5)
        assert one.log_probabilities is not None
        assert one.log_probabilities[step] == pytest.approx(float(expected[step, token]), abs=1e-5)
        assert one.log_probabilities[step] > -math.inf, "a token that was left out is not drawn"
        if asked.greedy:
            assert float(expected[step, token]) == pytest.approx(best[0], rel=1e-6, abs=1e-5)
    ends = Ending.of(asked, {EOS}).tokens
    at = next((i for i, token in enumerate(tokens) if i >= asked.min_tokens and token in ends), None)
    text = [engine.tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    stops = [
        count - 1
        for count in range(max(1, asked.min_tokens + 1), len(tokens) + 1)
        if any(text[count].count(stop) > text[count - 1].count(stop) for stop in asked.stop)
        or (asked.stop_when is not None and asked.stop_when(tokens[:count]))
    ]
    ended = [i for i in (at, *stops) if i is not None]
    assert one.finish_reason == ("stop" if ended else "length")
    assert len(tokens) == (min(ended) + 1 if ended else 12)


def test_a_function_of_the_tokens_ends_a_completion(engine: LLM) -> None:
    def long_or_even(tokens: Sequence[int]) -> bool:
        return len(tokens) > 6 or tokens[-1] % 2 == 0

    found = list(engine.generate(PROMPTS, temperature=1.0, n=[1, 3, 1, 2, 1], stop_when=long_or_even))
    assert sorted(one.index for one in found) == [0, 1, 1, 1, 2, 3, 3, 4]
    for one in found:
        *before, last = (long_or_even(one.completion_ids[: k + 1]) for k in range(len(one.completion_ids)))
        assert not any(before)
        assert last or one.completion_ids[-1] == EOS
        assert one.finish_reason == "stop"


def test_greedy_completions_are_those_of_generate_with_the_same_settings(engine: LLM) -> None:
    model = engine.model
    asked = Sampling(repetition_penalty=1.7, bad_words=("e", "ab"), min_tokens=6, logit_bias=((EOS, 6.0),))
    words = [list(word) for text in asked.bad_words for word in word_tokens(text, engine.tokenizer)]
    for one in engine.generate(PROMPTS, asked, max_tokens=20):
        ids = torch.tensor([one.prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            min_new_tokens=6,
            do_sample=False,
            repetition_penalty=1.7,
            bad_words_ids=words,
            sequence_bias=[[[EOS], 6.0]],
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert list(one.completion_ids) == out[0, ids.shape[1] :].tolist()


def test_raw_log_probabilities_are_the_models_own_whatever_is_asked(engine: LLM) -> None:
    asked = Sampling(temperature=0.5, repetition_penalty=2.0, top_k=3, logprobs=2)
    for one in engine.generate(PROMPTS, asked, max_tokens=8):
        plain = processed(engine, Sampling(), one.prompt_ids, one.completion_ids)
        assert one.likeliest is not None
        for step, token in enumerate(one.completion_ids):
            best = plain[step].topk(2)
            assert [each for each, _ in one.likeliest[step]] == best.indices.tolist()
            assert one.log_probabilities is not None
            assert one.log_probabilities[step] == pytest.approx(float(plain[step, token]), abs=1e-9)


def test_each_request_is_told_as_many_likeliest_tokens_as_it_asks_for(engine: LLM) -> None:
    asked = [Sampling(logprobs=1), Sampling(logprobs=5), Sampling(logprobs=0)]
    told = {one.index: one.likeliest for one in engine.generate(PROMPTS[:3], asked, max_tokens=2)}
    assert told[2] is None
    assert told[0] is not None
    assert told[1] is not None
    assert [len(each) for each in told[0] + told[1]] == [1, 1, 5, 5]


def test_a_stop_text_ends_a_completion_across_tokens_and_is_cut_from_its_text(engine: LLM) -> None:
    ids = [list(b"so it goes. END and on"), list("café ENDs".encode()), list(b"never")]
    decode = ByteTokenizer().decode
    plain = Ending(frozenset({EOS}), stop=(". END", "END"))
    for tokens, text, kept in zip(
        ids[:2], ["so it goes", "café "], ["so it goes. END", "café END"], strict=True
    ):
        count = next(n for n in range(1, len(tokens) + 1) if plain.ended(tokens[:n], decode))
        assert plain.text(tokens[:count], decode) == (text, "stop")
        assert replace(plain, include_stop=True).text(tokens[:count], decode) == (kept, "stop")
    assert not any(plain.ended(ids[2][:n], decode) for n in range(1, 6))
    assert plain.text(ids[2], decode) == ("never", "length")
    late = replace(plain, min_tokens=15)
    assert not any(late.ended(ids[0][:n], decode) for n in range(1, len(ids[0]) + 1))
    assert plain.text([65, EOS], decode) == ("A", "stop")


def test_a_long_text_is_searched_at_its_end_only_and_nothing_is_missed() -> None:
    rng = random.Random(0)
    decode = ByteTokenizer().decode
    for _ in range(100):
        letters = "".join(rng.choice("abé") for _ in range(rng.randint(1, 200)))
        stop = tuple("".join(rng.choice("abé") for _ in range(rng.randint(5, 9))) for _ in range(2))
        tokens, ending = list(letters.encode()), Ending(stop=stop)
        ended = next((n for n in range(1, len(tokens) + 1) if ending.ended(tokens[:n], decode)), None)
        at = min((letters.find(text) + len(text) for text in stop if text in letters), default=None)
        assert ended == (None if at is None else len(letters[:at].encode()))


def test_a_stop_text_is_found_where_the_text_grows_shorter_as_a_token_comes() -> None:
    # As WordPiece tokenizers clean it up: the spaces around an apostrophe go once a letter follows.
    def decode(tokens: Sequence[int]) -> str:
        return " ".join(["we", "do", "say", "'", "t"][token] for token in tokens).replace(" ' ", "'")

    tokens = (0, 1, 2, 3, 4, 0)
    assert [decode(tokens[:n]) for n in (4, 5)] == ["we do say '", "we do say't"]
    for text, count in (("say't", 5), ("y't w", 6), ("'", 4), ("we d", 2)):
        ending = Ending(stop=(text,))
        assert [ending.ended(tokens[:n], decode) for n in range(1, count + 1)] == [False] * (count - 1) + [
            True
        ]


def test_requests_without_edits_share_a_batch_with_others_and_keep_their_logits() -> None:
    edits = LogitEdits({7: Edit(Sampling(logit_bias=((3, 2.0),), repetition_penalty=2.0), (1, 1), 5)})
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    streams, indices = torch.tensor([5, 7, -(2**63)]), torch.tensor([0, 0, 3])
    edited = edits.apply(logits, streams, indices)
    assert edited[[0, 2]].equal(logits[[0, 2]])
    assert float(edited[1, 3]) == float(logits[1, 3] + 2.0)
    assert float(edited[1, 1]) != float(logits[1, 1])


def test_words_of_several_tokens_may_be_forbidden_beside_requests_that_are_longer(engine: LLM) -> None:
    plain = Sampling(ignore_eos=True)
    alone = next(engine.generate(["a"], plain, max_tokens=30)).completion_ids
    asked = [plain, Sampling(bad_words=("ab",), ignore_eos=True)]
    both = list(engine.generate(["a", "b"], asked, max_tokens=[30, 2]))
    assert {one.index: one.completion_ids for one in both}[0] == alone


def test_a_request_that_asks_for_nothing_has_the_plain_sampler() -> None:
    rule = rules_of({"a": Sampling(), "b": Sampling(top_k=3)}, [(1,), (2,)], [4, 4], ByteTokenizer(), {EOS})
    assert isinstance(rule, Sampler)
    assert rule.greedy
    assert rule.ends == frozenset()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": ((999, 1.0),)}, "logit_bias names token 999, the model knows 288"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids names token -1"),
        ({"logprobs": 21}, r"logprobs must lie in \[0, 20\], got 21"),
        ({"presence_penalty": 3.0}, "presence_penalty must lie in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"stop": ("",)}, "stop must hold a text each"),
        ({"n": 0}, "n must be 1 or more"),
        ({"n": 2.0}, "n must be a whole number, got 2.0"),
        ({"logprobs": True}, "logprobs must be a whole number, got True"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"stop": None}, "stop must hold texts, got None"),
        ({"bad_words": [5]}, r"bad_words must hold texts, got \[5\]"),
        ({"stop_token_ids": 5}, "stop_token_ids must hold whole numbers, got 5"),
        ({"stop_when": 5}, "stop_when must be a function, got 5"),
        ({"logits_processor": "a"}, "logits_processor must be a function, got 'a'"),
        ({"n": [1, 2]}, "sampling was given for 2 of 5 prompts"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must hold a number for each token"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(engine: LLM, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS, **asked)


def test_one_text_lists_and_mappings_are_taken_for_several() -> None:
    # One text is no several of one letter each.
    one: dict[str, Any] = {"stop": "END", "bad_words": "no"}
    assert Sampling(**one) == Sampling(stop=("END",), bad_words=("no",))
    several: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": np.array([5]), "logit_bias": {7: 1.0}}
    listed = Sampling(**several)
    assert listed == Sampling(stop=("a", "b"), stop_token_ids=(5,), logit_bias=((7, 1.0),))
    assert hash(listed) == hash(replace(listed))


def test_what_a_models_generation_settings_ask_for_is_told(engine: LLM) -> None:
    asked = transformers.GenerationConfig(do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.1)
    assert declared_sampling(engine.model) == {}
    model = LLM.from_pretrained("tiny:llama", device="cpu").model
    model.generation_config = asked
    assert declared_sampling(model) == {"repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20}
    asked.do_sample = False
    assert declared_sampling(model) == {"repetition_penalty": 1.1}, "what counts for greedy completions, too"
    assert declared_sampling(engine.model) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.2, "min_new_tokens": 7, "eos_token_id": [3, 9, 40]},
        # One token is kept of those that sampling may take: as random as greedy.
        {"do_sample": True, "top_k": 1, "temperature": 0.4, "repetition_penalty": 1.1},
    ],
)
def test_a_models_generation_settings_are_heeded_as_generate_does(settings: dict[str, Any]) -> None:
    llm = LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=2)
    llm.model.generation_config = transformers.GenerationConfig(pad_token_id=0, **settings)
    for one in llm.generate(PROMPTS, max_tokens=12, ignore_eos="eos_token_id" not in settings):
        ids = torch.tensor([one.prompt_ids])
        out = llm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
        assert one.completion_ids == tuple(out[0, ids.shape[1] :].tolist())


def test_generation_settings_that_change_tokens_and_are_not_served_are_refused_by_name() -> None:
    llm = LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=2)
    wrong: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 1}, {"min_length": 9}, {"num_beams": 4},
        {"suppress_tokens": [5]}, {"forced_eos_token_id": 0},
        {"bad_words_ids": [[4]]}, {"typical_p": 0.9}, {"guidance_scale": 2.0}, {"guidance_scale": 0},
        {"token_healing": True}, {"penalty_alpha": 0.6}, {"penalty_alpha": 1.0}, {"dola_layers": "low"},
        {"cache_implementation": "quantized"}, {"max_time": 1.0}, {"force_words_ids": [[4]]},
        {"num_return_sequences": 3, "do_sample": True},
    ]  # fmt: skip
    for settings in wrong:
        llm.model.generation_config = transformers.GenerationConfig(**settings)
        with pytest.raises(ValueError, match=f"asks for {next(iter(settings))}="):
            llm.generate(PROMPTS)
    asked = transformers.GenerationConfig(do_sample=True)
    llm.model.generation_config = asked
    assert declared_sampling(llm.model) == {"temperature": 1.0, "top_k": 50}
    # What is said takes precedence.
    assert all(one.completion_ids for one in llm.generate(PROMPTS, temperature=0.0, max_tokens=3))
    # The model draws already, so that a share of its tokens counts.
    assert all(one.completion_ids for one in llm.generate(PROMPTS, top_p=0.9, max_tokens=3))


SERVED = {
    "do_sample", "eos_token_id", "min_new_tokens", "min_p", "repetition_penalty", "stop_strings",
    "temperature", "top_k", "top_p",
}  # fmt: skip
LENGTHS = {"max_length", "max_new_tokens"}
WITHOUT_EFFECT = {
    # Of beams, of encoders, of drafts whose tokens the model checks, of caches and of what is returned.
    "diversity_penalty", "early_stopping", "length_penalty", "low_memory", "num_beam_groups",
    "decoder_start_token_id",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "is_assistant", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "speculation_type", "target_lookbehind",
    "use_mtp",
    "cache_config", "compile_config", "continuous_batching_config", "disable_compile", "max_cache_len",
    "prefill_chunk_size", "use_cache",
    "bos_token_id", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "pad_token_id", "remove_invalid_values", "renormalize_logits", "return_dict_in_generate",
    "_from_model_config", "transformers_version",
}  # fmt: skip


def test_every_generation_setting_is_served_or_refused_or_changes_no_token() -> None:
    known = SERVED | LENGTHS | WITHOUT_EFFECT | set(NOT_SERVED) | {"cache_implementation"}
    assert set(vars(transformers.GenerationConfig())) <= known
    llm = LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=2)
    usual = {name: values[-1] for name, values in NOT_SERVED.items()}
    for settings in (
        usual,
        {"cache_implementation": "static", "suppress_tokens": [], "renormalize_logits": True},
    ):
        llm.model.generation_config = transformers.GenerationConfig(**settings)
        assert declared_sampling(llm.model) == {}


def test_sampling_and_fields_beside_it_are_refused(engine: LLM) -> None:
    with pytest.raises(ValueError, match="temperature has no effect with sampling"):
        engine.generate(PROMPTS, Sampling(), temperature=1.0)
    with pytest.raises(ValueError, match="sampling was given for 2 of 5 prompts"):
        engine.generate(PROMPTS, [Sampling()] * 2)
