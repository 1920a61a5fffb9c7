"""Edits of logits before the choice of a token.

They are biases, penalties, forbidden words and ends. Emitted tokens are kept on the device, by request and
index. So a preempted request, or a repeated decode step, finds its own history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...data.readers.sampling import Sampling

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Edit:
    """Edits of one request, in tokens.

    ends: Tokens that are forbidden before ``min_tokens``.
    bad_words: Token sequences that are forbidden.
    begun: Earlier tokens of its completion.
    """

    sampling: Sampling
    prompt: tuple[int, ...]
    most_tokens: int
    ends: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    begun: tuple[int, ...] = ()

    @property
    def looks_back(self) -> bool:
        """True if it depends on earlier tokens."""
        sampling = self.sampling
        return bool(
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or any(len(word) > 1 for word in self.bad_words)
        )


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Edits of a batch's requests; other rows are unchanged.

    edits: Edits by a request's random stream, at least one.
    """

    edits: Mapping[int, Edit]
    _on_device: dict[torch.device, _Tables] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[type[LogitEdits], tuple[Mapping[int, Edit]]]:
        # Reset per job: the device of this process may have served other requests.
        return LogitEdits, (self.edits,)

    def apply(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the edited logits, shape (rows, vocabulary).

        They are float32 at least, and the input is unchanged.
        """
        import torch

        tables = self._tables(logits)
        row = tables.row(streams)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits.scatter_add(-1, tables.bias_tokens[row], tables.bias[row].to(logits.dtype))
        if tables.history is not None:
            logits = tables.penalised(logits, tables.history, row, indices)
            logits = tables.without_bad_words(logits, tables.history, row, indices)
        early = indices[:, None] < tables.min_tokens[row, None]
        hidden = torch.zeros_like(tables.ends[row], dtype=logits.dtype)
        hidden = hidden.masked_fill(early & tables.ends_held[row], -torch.inf)
        return logits.scatter_add(-1, tables.ends[row], hidden)

    def note(self, chosen: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> None:
        """Remember the token chosen for each row."""
        for tables in self._on_device.values():
            if tables.history is not None and tables.history.device == chosen.device:
                row = tables.row(streams)
                at = (tables.prompt_tokens[row] + indices).clamp_(max=tables.history.shape[1] - 1)
                tables.history[row, at] = chosen

    def give(self, stream: int, tokens: Sequence[int], first: int) -> None:
        """Remember given tokens of a completion from index ``first`` on."""
        import torch

        # Earlier tokens were noted in this mode.
        with torch.inference_mode():
            for device in self._on_device:
                streams = torch.full((len(tokens),), stream, device=device)
                indices = torch.arange(first, first + len(tokens), device=device)
                self.note(torch.tensor(tokens, device=device), streams, indices)

    def _tables(self, logits: torch.Tensor) -> _Tables:
        tables = self._on_device.get(logits.device)
        if tables is None:
            tables = self._on_device[logits.device] = _Tables.of(self.edits, logits)
        return tables


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Edits on a device, by the requests' streams.

    The last row is for other requests.

    streams: Sorted, shape (requests,).
    bias_tokens, bias: Tokens and their biases, shape (requests + 1, most biased).
    ends, ends_held, min_tokens: Tokens that end a completion, a mask of the valid ones, and the length up to
    which they are forbidden.
    repetition, frequency, presence: The penalties, shape (requests + 1, 1).
    prompt_tokens: Prompt lengths, shape (requests + 1,).
    history: Tokens of prompt and completion, shape (requests + 1, longest + 1); None if no request looks
        back.
    words, word_ends: Sequences without their last tokens, aligned on the right and padded with -1, shape
    (requests + 1, words, longest); and their last tokens, -1 for none.
    """

    streams: torch.Tensor
    bias_tokens: torch.Tensor
    bias: torch.Tensor
    ends: torch.Tensor
    ends_held: torch.Tensor
    min_tokens: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    prompt_tokens: torch.Tensor
    history: torch.Tensor | None
    words: torch.Tensor
    word_ends: torch.Tensor

    @classmethod
    def of(cls, edits: Mapping[int, Edit], logits: torch.Tensor) -> _Tables:
        import torch

        device = logits.device
        streams = sorted(edits)
        edits_of = [*(edits[stream] for stream in streams), Edit(Sampling(), (), 0)]
        single = [
            [*edit.sampling.logit_bias, *((word[0], -torch.inf) for word in edit.bad_words if len(word) == 1)]
            for edit in edits_of
        ]
        longer = [[word for word in edit.bad_words if len(word) > 1] for edit in edits_of]
        longest = max((len(word) - 1 for words in longer for word in words), default=0)
        prefixes = [
            [[-1] * (longest + 1 - len(word)) + list(word[:-1]) for word in words] for words in longer
        ]
        ends = [sorted(edit.ends) if edit.sampling.min_tokens else [] for edit in edits_of]

        def column(name: str) -> torch.Tensor:
            values = [[getattr(edit.sampling, name)] for edit in edits_of]
            return torch.tensor(values, dtype=torch.float64, device=device)

        def table(rows: Sequence[Sequence[object]], fill: object, dtype: torch.dtype) -> torch.Tensor:
            width = max(1, *(len(row) for row in rows))
            filled = [[*row, *[fill] * (width - len(row))] for row in rows]
            return torch.tensor(filled, dtype=dtype, device=device)

        history = None
        if any(edit.looks_back for edit in edits_of):
            history = table(
                [
                    edit.prompt + edit.begun + (0,) * (edit.most_tokens + 1 - len(edit.begun))
                    for edit in edits_of
                ],
                0,
                torch.int64,
            ).contiguous()
        return cls(
            torch.tensor(streams, device=device),
            table([[token for token, _ in row] for row in single], 0, torch.int64),
            table([[bias for _, bias in row] for row in single], 0.0, torch.float64),
            table(ends, 0, torch.int64),
            table([[True] * len(row) for row in ends], False, torch.bool),
            torch.tensor([edit.sampling.min_tokens for edit in edits_of], device=device),
            column("repetition_penalty"),
            column("frequency_penalty"),
            column("presence_penalty"),
            torch.tensor([len(edit.prompt) for edit in edits_of], device=device),
            history,
            table(prefixes, [-1] * longest, torch.int64),
            table([[word[-1] for word in words] for words in longer], -1, torch.int64),
        )

    def row(self, streams: torch.Tensor) -> torch.Tensor:
        """Return each stream's row, the last one for others."""
        import torch

        at = torch.searchsorted(self.streams, streams).clamp_(max=len(self.streams) - 1)
        return at.where(self.streams[at] == streams, len(self.streams))

    def penalised(
        self, logits: torch.Tensor, history: torch.Tensor, row: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        import torch

        vocabulary = logits.shape[-1]
        tokens, prompt = history[row], self.prompt_tokens[row, None]
        at = torch.arange(history.shape[1], device=row.device)[None]
        before = at < prompt + indices[:, None]
        # An extra column takes the entries that do not count.
        empty = logits.new_zeros(len(row), vocabulary + 1)
        ones = torch.ones_like(tokens, dtype=logits.dtype)
        present = empty.scatter(-1, tokens.where(before, vocabulary), ones)[:, :-1] > 0
        emitted = empty.scatter_add(-1, tokens.where(before & (at >= prompt), vocabulary), ones)[:, :-1]
        repetition = self.repetition[row].to(logits.dtype)
        logits = logits.where(~present, (logits * repetition).where(logits < 0, logits / repetition))
        logits = logits - self.frequency[row].to(logits.dtype) * emitted
        return logits - self.presence[row].to(logits.dtype) * (emitted > 0)

    def without_bad_words(
        self, logits: torch.Tensor, history: torch.Tensor, row: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        import torch

        longest = self.words.shape[-1]
        if longest == 0:
            return logits
        back = torch.arange(-longest, 0, device=row.device)[None]
        at = (self.prompt_tokens[row] + indices)[:, None] + back
        # Requests without edits have no history here, and may run longer than any that has.
        tail = history[row[:, None], at.clamp(0, history.shape[1] - 1)].where(at >= 0, -2)
        words, last = self.words[row], self.word_ends[row]
        matches = ((tail[:, None] == words) | (words < 0)).all(-1) & (last >= 0)
        hidden = torch.zeros_like(last, dtype=logits.dtype).masked_fill(matches, -torch.inf)
        return logits.scatter_add(-1, last.clamp(min=0), hidden)
