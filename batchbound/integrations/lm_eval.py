"""lm-eval's model ``batchbound``: completions by :class:`~..LLM`, the rest as ``hf``.

Completions and log-likelihoods compute what contexts share once: worked examples, a context of several
endings.

``python -m batchbound.integrations.lm_eval ARGUMENTS`` registers the model and runs ``lm-eval ARGUMENTS``.
Tested with lm-eval 0.4.13.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from ..data.problem import limit_of
from ..data.readers.sampling import Sampling
from ..data.report import Report
from ..executor.engines.tiers import choose_tier
from ..executor.llm import LLM
from ..executor.models.families import UnsupportedModelError
from ..executor.models.request_rules import served_settings
from ..executor.scoring import Scored, Scoring

NAME = "batchbound"

_OF_HF = {"max_length", "eos_token_id", "use_cache"}
"""Settings of a task that only hf understands."""

# The harness shows the lines of its own loggers alone.
_log = logging.getLogger(f"lm_eval.models.{NAME}")


@register_model(NAME)
class BatchboundLM(HFLM):  # type: ignore[misc]
    """lm-eval model that refills a slot when its completion ends.

    slots: Requests at once; by default the harness's batch size. Other parameters are those of ``hf``.
    """

    def __init__(self, *arguments: Any, slots: int | str | None = None, **options: Any) -> None:
        stated: Any = int(slots) if isinstance(slots, str) and slots.isdecimal() else slots
        self._slots = None if stated is None else limit_of("slots", stated, 1)
        super().__init__(*arguments, **options)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the completions of requests, each up to its stop texts."""
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        own, refused, texts = dict[int, tuple[Sampling, int]](), "mixed precision", [""] * len(requests)
        for index, request in enumerate(requests) if self.mixed_precision_dtype is None else ():
            try:
                own[index] = self._asked(request.args[1], eos)
            except ValueError as error:
                refused = str(error)
        left = [index for index in range(len(requests)) if index not in own]
        if left:
            which = f"{len(left):,} of {len(requests):,} requests"
            _log.warning("%s: generating %s with hf", refused, which)
            theirs = super().generate_until([requests[index] for index in left], disable_tqdm=disable_tqdm)
            for index, text in zip(left, theirs, strict=True):
                texts[index] = text
        if own:
            ours = self._generated([requests[index] for index in own], [*own.values()], disable_tqdm)
            for index, text in zip(own, ours, strict=True):
                texts[index] = text
        return texts

    def _generated(
        self, requests: list[Any], own: list[tuple[Sampling, int]], disable_tqdm: bool
    ) -> list[str]:
        """Return the completions that the engine generates."""
        prompts = [
            self._prompt(request.args[0], most) for request, (_, most) in zip(requests, own, strict=True)
        ]
        empty = sum(not request.args[0] for request in requests)
        if empty:
            _log.warning("%d prompts are empty: they begin with token %d", empty, self.prefix_token_id)
        llm = LLM(self.model, self.tokenizer, slots=self._most_at_once())
        texts, tokens = [""] * len(requests), [0] * len(requests)
        bar = tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running generate_until requests",
        )
        sampling, most, cut = [one for one, _ in own], [most for _, most in own], 0
        with bar:
            for done in llm.generate(prompts, sampling, max_tokens=most):
                context, settings = requests[done.index].args
                text = self._text(list(done.completion_ids), list(sampling[done.index].stop))
                texts[done.index], tokens[done.index] = text, len(done.completion_ids)
                cut += done.finish_reason == "length"
                self.cache_hook.add_partial("generate_until", (context, settings), text)
                bar.update(1)
        _log.info("batchbound: %s", _gain(llm.report(), prompts, tokens, cut))
        return texts

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return each ending's log-likelihood, and whether it is greedy."""
        refused = self._refused()
        if refused or not requests:
            if refused:
                _log.warning("%s: log-likelihoods by hf", refused)
            own: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return own
        empty = next((text for text, _, ending in requests if not ending), None)
        if empty:
            raise ValueError(
                f"the ending {empty[1]!r} of {empty[0][-40:]!r} has no tokens to score: correct it"
            )
        longest = max(len(ending) for *_, ending in requests)
        if longest > self.max_length:
            raise ValueError(f"an ending of {longest} tokens is longer than the model's {self.max_length}")
        # As hf: the end of what is too long, and its last token is only predicted.
        sequences = [
            Scored(tuple([*context, *ending][-(self.max_length + 1) :]), len(ending))
            for _, context, ending in requests
        ]
        found = [(0.0, False)] * len(requests)
        bar = tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        )
        scoring = Scoring(self.model, sequences, slots=self._most_at_once(), dtype=self.softmax_dtype)
        with bar:
            for index, value, greedy in scoring.run():
                found[index] = value, greedy
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
                bar.update(1)
        _log.info(
            "batchbound: %s log-likelihoods, %s",
            f"{len(requests):,}",
            _computed(scoring.computed, sum(len(each.prompt) for each in sequences), "tokens"),
        )
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return each text's log-likelihood; the engine takes the windows of all texts at once."""
        if self._refused():
            found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
            return found
        given: int | str = self.batch_size
        slots, self._slots = self._slots, self._most_at_once()
        self.batch_size_per_gpu: int | str = sys.maxsize
        try:
            whole: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self._slots, self.batch_size_per_gpu = slots, given
        return whole

    def _refused(self) -> str:
        """Return why the engine does not score this model, or an empty text."""
        if self.backend != "causal" or self.mixed_precision_dtype is not None:
            return "mixed precision or no causal model"
        try:
            tier = choose_tier(self.model)
        except UnsupportedModelError as error:
            return str(error)
        return "" if tier.name == "ragged" else f"the {tier.name} tier ({tier.reason})"

    def _most_at_once(self) -> int:
        """Return the slots: ``slots`` of the model's arguments, else the batch size; ``auto`` means 64."""
        return self._slots or (64 if self.batch_size == "auto" else int(self.batch_size))

    def _asked(self, given: dict[str, Any], eos: str) -> tuple[Sampling, int]:
        """Return sampling and most tokens; a ValueError names a setting that only hf serves."""
        kwargs = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = handle_stop_sequences(kwargs.pop("until"), eos=eos)
        most = kwargs.pop("max_gen_toks")
        if not kwargs["do_sample"]:
            kwargs.pop("temperature", None)
        settings = copy.deepcopy(self.model.generation_config)
        if not isinstance(kwargs["do_sample"], bool) or not all(isinstance(text, str) for text in stop):
            raise ValueError("do_sample is no bool, or a stop text is no text")
        unknown = _OF_HF & {*kwargs} or settings.update(**kwargs)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} is not served")
        fields = served_settings(settings)
        # The harness cuts only at its own stop texts.
        fields["stop"] = tuple(text for text in stop if text)
        return Sampling(**fields, seed=torch.initial_seed() % 2**31), most

    def _prompt(self, context: str, most: int) -> list[int]:
        """Tokenize a context, truncated on the left as in hf."""
        room = self.max_length - most
        if room <= 0:
            raise ValueError(f"max_gen_toks is {most}, and the model's length is {self.max_length}: lower it")
        tokens, _ = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)
        # As hf's log-likelihoods of an empty context.
        return [int(token) for token in tokens[0]] or [self.prefix_token_id]

    def _text(self, tokens: list[int], stop: list[str]) -> str:
        """Decode a completion as hf does: cut at stop texts."""
        end = self.think_end_token
        thought = isinstance(end, int) and end in tokens
        if thought:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self.tok_decode(tokens)
        return str(
            postprocess_generated_text(
                text.lstrip() if isinstance(end, int) else text,
                stop,
                end if isinstance(end, str) else None,
            )
        )


def _gain(report: Report, prompts: Sequence[Sequence[int]], tokens: Sequence[int], cut: int) -> str:
    """Return what a generation took, beside full batches in the order of hf, the longest prompt first."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    slots = report.slots
    batches = [order[first : first + slots] for first in range(0, len(order), slots)]
    steps = sum(max(tokens[index] for index in batch) - 1 for batch in batches)
    own, whole = report.decode_steps, sum(map(len, prompts))
    fewer = f"{1 - own / steps:.0%} fewer than" if own < steps else "and"
    return (
        f"{len(prompts):,} completions in {own:,} decode steps of {slots} slots, {fewer} {steps:,} in batches"
        f" of {slots}; {_computed(report.prompt_tokens, whole, 'prompt tokens')}; {cut:,} cut at their limit"
    )


def _computed(computed: int, whole: int, tokens: str) -> str:
    """Return how many tokens were computed, of all that hf computes."""
    fewer = f", {1 - computed / whole:.0%} fewer" if computed < whole else ""
    return f"{computed:,} of {whole:,} {tokens} computed{fewer}"


if __name__ == "__main__":
    cli_evaluate()
