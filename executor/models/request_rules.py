"""One token rule for a batch, from its requests' sampling."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...data.readers.sampling import Sampling, Structure
from .endings import Ending
from .grammar import GrammarMasks, Grammars
from .logit_edits import Edit, LogitEdits
from .logits_processors import LogitsProcessors
from .mixed_sampling import MixedSampler
from .recording import Recorder
from .sampling import Sampler, TokenRule
from .tokenizers import Tokenizer
from .wrapped import unwrapped


def rules_of(
    asked: Mapping[str, Sampling],
    prompts: Sequence[Sequence[int]],
    most_tokens: Sequence[int],
    tokenizer: Tokenizer,
    eos: Collection[int],
    *,
    pinned: bool = False,
    begun: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    grammars: Grammars | None = None,
) -> TokenRule:
    """Return the choice of tokens for each request, and its end."""
    samplers: dict[str, Sampler] = {}
    known: dict[Sampler, Sampler] = {}
    edits: dict[int, Edit] = {}
    structures: dict[int, Structure] = {}
    endings: dict[str, Ending] = {}
    for (name, sampling), prompt, cap in zip(asked.items(), prompts, most_tokens, strict=True):
        sampler = sampler_of(sampling)
        samplers[name] = known.setdefault(sampler, sampler)
        endings[name] = Ending() if pinned else Ending.of(sampling, eos)
        if sampling.edits_logits:
            words = tuple(word for text in sampling.bad_words for word in word_tokens(text, tokenizer))
            edit = Edit(sampling, tuple(prompt), int(cap), endings[name].tokens, words, begun.get(name, ()))
            edits[sampler.stream(name)] = edit
        if sampling.structured_outputs is not None:
            structures[sampler.stream(name)] = sampling.structured_outputs
    functions = {
        samplers[name].stream(name): wanted.logits_processor
        for name, wanted in asked.items()
        if wanted.logits_processor
    }
    recorded = {
        samplers[name].stream(name): wanted for name, wanted in asked.items() if wanted.logprobs is not None
    }
    plain = {Ending() if pinned else Ending(frozenset(eos))}
    mixed = edits or structures or recorded or functions or len(known) > 1
    if not mixed and set(endings.values()) == plain:
        return next(iter(known))
    recorder = None
    if recorded:
        likeliest = max(wanted.logprobs or 0 for wanted in recorded.values())
        modes = {stream: wanted.logprobs_mode for stream, wanted in recorded.items()}
        divisors = {
            stream: wanted.temperature
            for stream, wanted in recorded.items()
            if wanted.logprobs_mode == "temperature" and wanted.temperature not in (0.0, 1.0)
        }
        recorder = Recorder(modes, likeliest, divisors)
    masks = None
    streams = {samplers[name].stream(name): tokens for name, tokens in begun.items()}
    if structures:
        masks = GrammarMasks(grammars or Grammars(tokenizer, eos), structures, streams)
    return MixedSampler(
        samplers,
        LogitEdits(edits) if edits else None,
        recorder,
        endings,
        tokenizer.decode,
        masks,
        LogitsProcessors(functions, streams) if functions else None,
    )


_WHEN_SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
"""Defaults of transformers for a model that samples."""

_UNSET = (None,)
_NO_SIZE = (None, 0)
_NO_FACTOR = (None, 1.0)
_NO_SHARE = (None, 0.0, 1.0)
NOT_SERVED: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": _UNSET,
    "begin_suppress_tokens": _UNSET,
    "constraints": _UNSET,
    "dola_layers": _UNSET,
    "encoder_no_repeat_ngram_size": _NO_SIZE,
    "encoder_repetition_penalty": _NO_FACTOR,
    "epsilon_cutoff": _NO_SHARE,
    "eta_cutoff": _NO_SHARE,
    "exponential_decay_length_penalty": _UNSET,
    "force_words_ids": _UNSET,
    "forced_bos_token_id": _UNSET,
    "forced_eos_token_id": _UNSET,
    "guidance_scale": _NO_FACTOR,
    "max_time": _UNSET,
    "min_length": (None, 0, 1),
    "no_repeat_ngram_size": _NO_SIZE,
    "num_beams": (None, 0, 1),
    "num_return_sequences": (None, 0, 1),
    "penalty_alpha": _NO_SIZE,
    "sequence_bias": _UNSET,
    "suppress_tokens": _UNSET,
    "token_healing": _NO_SIZE,
    "top_h": _NO_SHARE,
    "typical_p": _NO_SHARE,
    "watermarking_config": _UNSET,
}
"""Unsupported generation settings, with values that have no effect."""

_CACHE = "cache_implementation"
"""KV cache setting; the quantized cache changes tokens."""


def declared_sampling(model: Any) -> dict[str, Any]:
    """Return a model's generation settings that differ from the defaults.

    They apply as in transformers' ``generate``: sampling settings count only where sampling is on. Requests
    and plan decide the length of completions.
    """
    return served_settings(getattr(unwrapped(model), "generation_config", None))


def served_settings(settings: Any) -> dict[str, Any]:
    """Return sampling fields for generation settings.

    Raises ValueError for a setting that is not served.
    """
    plain = Sampling()
    stated = {name: getattr(settings, name, None) for name in (*NOT_SERVED, _CACHE)}
    wrong = [name for name, off in NOT_SERVED.items() if stated[name] not in (*off, [])]
    wrong += [_CACHE] if stated[_CACHE] == "quantized" else []
    if wrong:
        what = f"the generation config asks for {wrong[0]}={stated[wrong[0]]!r}"
        raise ValueError(f"{what}, which is not served")
    settings_kept: dict[str, Any] = {"repetition_penalty": getattr(settings, "repetition_penalty", None)}
    settings_kept["min_tokens"] = getattr(settings, "min_new_tokens", None)
    texts = getattr(settings, "stop_strings", None)
    settings_kept["stop"] = (texts,) if isinstance(texts, str) else None if texts is None else tuple(texts)
    if getattr(settings, "do_sample", False):
        for name, usual in _WHEN_SAMPLED.items():
            value = getattr(settings, name, None)
            settings_kept[name] = usual if value is None else value
    return {name: value for name, value in settings_kept.items() if value not in (None, getattr(plain, name))}


def sampler_of(sampling: Sampling) -> Sampler:
    """Return a request's sampler."""
    if sampling.greedy:
        return Sampler()
    return Sampler(
        temperature=sampling.temperature,
        top_k=max(0, sampling.top_k),
        top_p=sampling.top_p,
        seed=sampling.seed or 0,
        min_p=sampling.min_p,
    )


def word_tokens(text: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return a text's tokens at the beginning and after a space.

    If a space is a token of its own, the text alone is enough. vLLM reads ``bad_words`` so.
    """
    bare, spaced = (tuple(tokenizer.tokens_of(space + text.lstrip())) for space in ("", " "))
    if spaced[0] != bare[0] and len(spaced) == len(bare):
        return [bare, spaced]
    return [bare]


_IN_NO_VOCABULARY = "\N{EGYPTIAN HIEROGLYPH A001}\N{EGYPTIAN HIEROGLYPH B001}"


def special_stops(texts: Iterable[str], tokenizer: Tokenizer, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens of stop texts that are special tokens.

    Decoded text omits them.
    """
    written = [tokenizer.tokens_of(text) for text in texts if text.strip()]
    single = [ids for ids in written if len(ids) == 1 and ids[0] < vocabulary and not tokenizer.decode(ids)]
    # Words outside a vocabulary also map to a special token, which is not the text's own.
    return tuple(ids[0] for ids in single if ids != tokenizer.tokens_of(_IN_NO_VOCABULARY))


def ended_by_tokens(asked: Sequence[Sampling], tokenizer: Tokenizer, vocabulary: int) -> list[Sampling]:
    """Return requests' sampling, with special stop texts as end tokens."""
    ended = {}
    for sampling in dict.fromkeys(asked):
        check_tokens(sampling, vocabulary)
        special = special_stops(sampling.stop, tokenizer, vocabulary)
        ended[sampling] = (
            replace(sampling, stop_token_ids=sampling.stop_token_ids + special) if special else sampling
        )
    return [ended[sampling] for sampling in asked]


def check_tokens(sampling: Sampling, vocabulary: int) -> None:
    """Raise ValueError for a token that a model lacks."""
    biased = tuple(token for token, _ in sampling.logit_bias)
    for name, tokens in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ValueError(f"{name} names token {wrong}, the model knows {vocabulary}")
