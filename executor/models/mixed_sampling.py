"""Sampling with different rules for the requests of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .endings import Decode, Ending
from .grammar import GrammarMasks
from .logit_edits import LogitEdits
from .logits_processors import LogitsProcessors
from .recording import Recorder
from .sampling import LEAST_TEMPERATURE, Sampler, computable, drawn, likeliest, likely_enough, likely_mass

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class MixedSampler:
    """Sampler of each request, with the tokens of its rule alone.

    A row is identified by its random stream, so a batch keeps no more of a request than for any other
    sampler.

    samplers: By request id; at least one.
    edits: Edits of logits; None for none.
    recorder: Keeps log-probabilities of chosen tokens; None for none.
    endings: Ends of completions by request id; without one the engine's end tokens decide.
    decode: Converts tokens to text; needed if a text ends a completion.
    grammar: Masks of structured outputs; None for none.
    processors: Functions of users that change logits; None for none.
    greedy: True if every request takes the likeliest token.
    ends: Tokens that may end a completion of any request.
    watches_text: True if a text may end a completion, so that every token is checked.
    """

    samplers: Mapping[str, Sampler]
    edits: LogitEdits | None = None
    recorder: Recorder | None = None
    endings: Mapping[str, Ending] = field(default_factory=dict)
    decode: Decode | None = None
    grammar: GrammarMasks | None = None
    processors: LogitsProcessors | None = None
    greedy: bool = field(init=False)
    ends: frozenset[int] = field(init=False)
    watches_text: bool = field(init=False)
    _on_device: dict[torch.device, _Rules] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # Computed once, as they are read in every step.
        for name, value in (
            ("greedy", all(sampler.greedy for sampler in self.samplers.values())),
            ("ends", frozenset().union(*(ending.tokens for ending in self.endings.values()))),
            ("watches_text", any(ending.stop or ending.when for ending in self.endings.values())),
        ):
            object.__setattr__(self, name, value)

    def become(self, other: MixedSampler) -> None:
        """Take the rules of other requests; recorded log-probabilities stay."""
        if self.recorder is not None and other.recorder is not None:
            self.recorder.become(other.recorder)
        for name in ("samplers", "edits", "endings", "grammar", "processors"):
            object.__setattr__(self, name, getattr(other, name))
        object.__setattr__(self, "recorder", self.recorder or other.recorder)
        object.__setattr__(self, "decode", other.decode)
        self._on_device.clear()
        self.__post_init__()

    def ended(self, request_id: str, tokens: Sequence[int]) -> bool | None:
        """Return whether the last token ends a completion, if known.

        None leaves it to the engine.
        """
        ending = self.endings.get(request_id)
        return None if ending is None else ending.ended(tokens, self.decode or _no_text)

    @property
    def on_host(self) -> bool:
        """True if a grammar or a function reads each token."""
        return self.grammar is not None or self.processors is not None

    def in_place(self, rows: int, decode_steps: int) -> AbstractContextManager[None]:
        """Keep entries in fixed device memory within a context.

        Decode steps can then be captured.
        """
        return nullcontext() if self.recorder is None else self.recorder.in_place(rows, decode_steps)

    def give(self, request_id: str, tokens: Sequence[int], first: int) -> None:
        """Note given tokens of a completion from index ``first`` on."""
        for edits in (self.edits, self.processors):
            if edits is not None:
                edits.give(self.stream(request_id), tokens, first)

    def stream(self, request_id: str) -> int:
        """Return a request's random stream, as its own sampler does.

        A request without a sampler, such as an engine's warm-up, has a stream with arbitrary rules.
        """
        return self.samplers.get(request_id, Sampler()).stream(request_id)

    def choose(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Choose one token per row, by each request's sampler."""
        own = self._on_device.get(logits.device)
        if own is None:
            own = self._on_device[logits.device] = _Rules.of(self, logits)
        edited = logits if self.edits is None else self.edits.apply(logits, streams, indices)
        for functions in (self.processors, self.grammar):
            edited = edited if functions is None else functions.apply(edited, streams, indices)
        if self.greedy:
            chosen = likeliest(edited)
            weights = computable(edited).softmax(dim=-1) if self.recorder is not None else edited
        else:
            temperature, weights = own.weights(edited, streams)
            chosen = drawn(weights, streams, indices)
            if own.some_greedy:
                chosen = chosen.where(temperature > 0, likeliest(edited))
        for rules in (self.edits, self.processors, self.grammar):
            if rules is not None:
                rules.note(chosen, streams, indices)
        if self.recorder is not None:
            self.recorder.keep(logits, weights, chosen, streams, indices)
        return chosen


def _no_text(tokens: Sequence[int]) -> str:
    raise ValueError(f"a text is to end a completion, and nothing turns its {len(tokens)} tokens into text")


@dataclass(frozen=True, slots=True, eq=False)
class _Rules:
    """Rules of the requests on a device, by their streams.

    streams, temperature, top_k, top_p, min_p: One per request; 0 of ``top_k`` and ``min_p`` and infinity of
    ``top_p`` keep all tokens.
    most_kept: The largest active ``top_k``; 0 for none.
    cut_mass, cut_unlikely: True if any ``top_p`` or ``min_p`` is active.
    some_greedy: True if a request is greedy.
    """

    streams: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    most_kept: int
    cut_mass: bool
    cut_unlikely: bool
    some_greedy: bool

    @classmethod
    def of(cls, mixed: MixedSampler, logits: torch.Tensor) -> _Rules:
        import torch

        vocabulary, device = logits.shape[-1], logits.device
        rows = sorted(
            (
                sampler.stream(name),
                sampler.temperature,
                sampler.top_k if sampler.top_k < vocabulary else 0,
                sampler.top_p if sampler.top_p < 1.0 else torch.inf,
                sampler.min_p,
            )
            for name, sampler in mixed.samplers.items()
        )
        streams, temperature, top_k, top_p, min_p = zip(*rows, strict=True)
        return cls(
            torch.tensor(streams, device=device),
            torch.tensor(temperature, dtype=torch.float64, device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor(min_p, dtype=torch.float64, device=device),
            max(top_k),
            min(top_p) < torch.inf,
            max(min_p) > 0.0,
            min(temperature) == 0.0,
        )

    def weights(self, logits: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's temperature and its tokens' weights.

        Greedy rows have all tokens.
        """
        import torch

        # Rows without a request have some other stream; their tokens are never read.
        row = torch.searchsorted(self.streams, streams).clamp_(max=len(self.streams) - 1)
        temperature = self.temperature[row, None]
        scaled = computable(logits)
        scaled = scaled / temperature.where(temperature > 0, 1.0).clamp(LEAST_TEMPERATURE).to(scaled.dtype)
        if self.most_kept:
            best = scaled.topk(self.most_kept, dim=-1).values
            top_k = self.top_k[row, None]
            smallest = best.gather(-1, (top_k - 1).clamp_(min=0)).where(top_k > 0, -torch.inf)
            scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
        weights = scaled.softmax(dim=-1)
        if self.cut_mass:
            weights = likely_mass(weights, self.top_p[row, None])
        if self.cut_unlikely:
            weights = likely_enough(weights, self.min_p[row, None])
        return temperature[:, 0], weights
