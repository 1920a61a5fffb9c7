"""lm-eval's model ``batchbound``: completions by :class:`~..LLM`, the rest as ``hf``.

Log-likelihoods of several endings of a context share one row, which computes the context once.

``python -m batchbound.integrations.lm_eval ARGUMENTS`` registers the model and runs ``lm-eval ARGUMENTS``.
Tested with lm-eval 0.4.13.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from ..data.readers.sampling import Sampling
from ..executor.llm import LLM
from ..executor.models.request_rules import served_settings

NAME = "batchbound"

_log = logging.getLogger(__name__)


@register_model(NAME)
class BatchboundLM(HFLM):  # type: ignore[misc]
    """lm-eval model that refills a slot when its completion ends."""

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the completions of requests, each up to its stop texts."""
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        asked = [self._asked(request.args[1], eos) for request in requests]
        own = [one for one in asked if one is not None]
        if len(own) < len(requests) or self.mixed_precision_dtype is not None:
            _log.warning("unsupported generation settings or mixed precision: generating with hf")
            generated: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return generated
        prompts = [
            self._prompt(request.args[0], most) for request, (_, most) in zip(requests, own, strict=True)
        ]
        slots = 64 if self.batch_size == "auto" else int(self.batch_size)
        llm = LLM(self.model, self.tokenizer, slots=slots)
        texts = [""] * len(requests)
        bar = tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running generate_until requests",
        )
        sampling, most = [one for one, _ in own], [most for _, most in own]
        with bar:
            for done in llm.generate(prompts, sampling, max_tokens=most):
                context, settings = requests[done.index].args
                text = self._text(list(done.completion_ids), list(sampling[done.index].stop))
                texts[done.index] = text
                self.cache_hook.add_partial("generate_until", (context, settings), text)
                bar.update(1)
        return texts

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return each ending's log-likelihood, and whether it is greedy."""
        rows = sorted(_rows_of(requests), key=lambda row: -len(row.tokens))
        if not (rows and self._packs(rows) and self._agrees(rows[0], requests)):
            own: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return own
        most = (override_bs or 64) if self.batch_size == "auto" else int(self.batch_size)
        found = [(0.0, False)] * len(requests)
        bar = tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        )
        with bar:
            while rows:
                count, endings = 1, len(rows[0].endings)
                while count < len(rows) and endings + len(rows[count].endings) <= most:
                    endings += len(rows[count].endings)
                    count += 1
                for index, answer in self._log_likelihoods(rows[:count]):
                    found[index] = answer
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                rows = rows[count:]
                bar.update(endings)
        return found

    def _packs(self, rows: Sequence[_Row]) -> bool:
        """Return whether the model can score several endings in a row."""
        attention = getattr(self.model.config, "_attn_implementation", None)
        return bool(
            self.backend == "causal"
            and self.mixed_precision_dtype is None
            and attention in ("sdpa", "eager")
            and "logits_to_keep" in inspect.signature(self.model.forward).parameters
            and max(row.longest for row in rows) <= self.max_length
        )

    def _agrees(self, row: _Row, requests: Sequence[Any]) -> bool:
        """Return whether a row scores as hf does ending by ending."""
        packed = dict(self._log_likelihoods([row]))
        few = [(None, *requests[index][1:]) for index in packed]
        alone = super()._loglikelihood_tokens(few, disable_tqdm=True)
        near = torch.finfo(self.model.dtype).eps ** 0.5
        return all(
            abs(value - one) <= near * (1 + abs(one))
            for (value, _), (one, _) in zip(packed.values(), alone, strict=True)
        )

    @torch.no_grad()
    def _log_likelihoods(self, rows: Sequence[_Row]) -> list[tuple[int, tuple[float, bool]]]:
        """Return each ending's position and log-likelihood."""
        length = max(len(row.tokens) for row in rows)
        tail = max(len(row.tokens) - row.context + 1 for row in rows)

        def padded(values: list[list[int]], fill: int) -> torch.Tensor:
            filled = [[fill] * (length - len(one)) + one for one in values]
            return torch.tensor(filled, device=self.device)

        ending = padded([row.ending for row in rows], -1)
        same = ending[:, :, None] == ending[:, None]
        shared = (ending == 0)[:, None] & (ending >= 0)[:, :, None]
        lowest = torch.finfo(self.model.dtype).min
        mask = torch.zeros(same.shape, dtype=self.model.dtype, device=self.device)
        mask = mask.masked_fill(~((same | shared).tril()), lowest)[:, None]
        logits = self.model(
            padded([row.tokens for row in rows], 0),
            attention_mask=mask,
            position_ids=padded([row.positions for row in rows], 0),
            use_cache=False,
            logits_to_keep=tail,
        ).logits.log_softmax(dim=-1, dtype=self.softmax_dtype)
        found = []
        for row, scores in zip(rows, logits, strict=True):
            for index, tokens, places in row.endings:
                wanted = torch.tensor(tokens, device=self.device)
                of_ending = scores[torch.tensor(places, device=self.device) - len(row.tokens)]
                total = float(of_ending.gather(-1, wanted[:, None]).sum())
                found.append((index, (total, bool((of_ending.argmax(-1) == wanted).all()))))
        return found

    def _asked(self, given: dict[str, Any], eos: str) -> tuple[Sampling, int] | None:
        """Return sampling and most tokens; None if only hf understands them."""
        kwargs = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = handle_stop_sequences(kwargs.pop("until"), eos=eos)
        most = kwargs.pop("max_gen_toks")
        if not kwargs["do_sample"]:
            kwargs.pop("temperature", None)
        settings = copy.deepcopy(self.model.generation_config)
        if "max_length" in kwargs or settings.update(**kwargs):
            return None
        try:
            fields = served_settings(settings)
        except ValueError:
            return None
        # The harness cuts only at its own stop texts.
        fields["stop"] = tuple(text for text in stop if text)
        return Sampling(**fields, seed=torch.initial_seed() % 2**31), most

    def _prompt(self, context: str, most: int) -> list[int]:
        """Tokenize a context, truncated on the left as in hf."""
        room = self.max_length - most
        if room <= 0:
            raise ValueError(f"max_gen_toks is {most}, and the model's length is {self.max_length}: lower it")
        tokens, _ = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)
        return [int(token) for token in tokens[0]]

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


@dataclass(frozen=True, slots=True)
class _Row:
    """A context with endings; each attends to the context and itself.

    ending: Number of each token's ending; 0 for the context.
    context: Number of the context's tokens.
    endings: Request, tokens, and predicting places in the row, of each ending.
    longest: Tokens of the context and its longest ending, without the last token.
    """

    tokens: list[int]
    positions: list[int]
    ending: list[int]
    context: int
    endings: list[tuple[int, list[int], list[int]]]
    longest: int

    @classmethod
    def of(cls, context: Sequence[int], endings: Sequence[tuple[int, list[int]]]) -> _Row:
        start = len(context)
        tokens, positions, ending = list(context), list(range(start)), [0] * start
        placed = []
        for number, (index, wanted) in enumerate(endings, 1):
            places = [start - 1, *range(len(tokens), len(tokens) + len(wanted) - 1)]
            placed.append((index, wanted, places))
            tokens += wanted[:-1]
            positions += range(start, start + len(wanted) - 1)
            ending += [number] * (len(wanted) - 1)
        return cls(tokens, positions, ending, start, placed, max(positions) + 1)


def _rows_of(requests: Sequence[Any]) -> list[_Row]:
    """Return rows that share contexts, each at most twice the longest request."""
    endings: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for index, (_, context, ending) in enumerate(requests):
        endings.setdefault(tuple(context), []).append((index, list(ending)))
    most = 2 * max((len(context) + len(ending) for _, context, ending in requests), default=0)
    rows = []
    for context, several in endings.items():
        some: list[tuple[int, list[int]]] = []
        length = len(context)
        for one in several:
            if some and length + len(one[1]) > most:
                rows.append(_Row.of(context, some))
                some, length = [], len(context)
            some.append(one)
            length += len(one[1])
        rows.append(_Row.of(context, some))
    return rows


if __name__ == "__main__":
    cli_evaluate()
