"""Log-probabilities of chosen tokens, kept on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .sampling import computable

if TYPE_CHECKING:
    import torch

    from ...data.readers.sampling import LogprobsMode


class TokenLogprob(NamedTuple):
    """Log-probability of a chosen token, and of the likeliest ones."""

    value: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class _Ring:
    """Entries of captured decode steps.

    entries: Shape (decode steps, fields, rows).
    cursor: The next decode step, int64, shape (1,).
    active: True while decode steps write here.
    """

    entries: torch.Tensor
    cursor: torch.Tensor
    active: bool = False

    @classmethod
    def of(cls, held: int, rows: int, decode_steps: int, device: torch.device) -> _Ring:
        import torch

        entries = torch.zeros(decode_steps, held, rows, dtype=torch.int64, device=device)
        return cls(entries, torch.zeros(1, dtype=torch.int64, device=device))

    def write(self, entries: torch.Tensor) -> None:
        import torch

        missing = self.entries.shape[2] - entries.shape[1]
        whole = torch.nn.functional.pad(entries, (0, missing), value=-1)
        self.entries.index_copy_(0, self.cursor, whole[None])
        self.cursor.add_(1).clamp_(max=len(self.entries) - 1)

    def taken(self) -> list[torch.Tensor]:
        decode_steps = int(self.cursor)
        self.cursor.zero_()
        return list(self.entries[:decode_steps].clone().unbind())


@dataclass(frozen=True, slots=True, eq=False)
class Recorder:
    """Recorder of chosen tokens' log-probabilities.

    Entries are kept by request and index: a token chosen again after a preemption counts once.

    modes: Recorded distribution, by a request's random stream.
    likeliest: Number of likeliest tokens to keep, too.
    temperatures: Divisor of the logits in mode ``temperature``, by stream; 1 where it is missing.
    """

    modes: Mapping[int, LogprobsMode]
    likeliest: int = 0
    temperatures: Mapping[int, float] = field(default_factory=dict)
    _ring: list[_Ring] = field(default_factory=list, init=False, repr=False)
    _on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    _shape: list[tuple[int, torch.device]] = field(default_factory=list, init=False, repr=False)
    _kept: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)
    _read: dict[int, dict[int, TokenLogprob]] = field(default_factory=dict, init=False, repr=False)

    def become(self, other: Recorder) -> None:
        """Record other requests, too; entries stay."""
        self._read_back()
        for name, value in (
            ("modes", other.modes),
            ("temperatures", other.temperatures),
            ("likeliest", max(self.likeliest, other.likeliest)),
        ):
            object.__setattr__(self, name, value)
        for buffer in (self._on_device, self._shape, self._ring):
            buffer.clear()

    def keep(
        self,
        logits: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        streams: torch.Tensor,
        indices: torch.Tensor,
    ) -> None:
        """Record the chosen tokens; logits (rows, vocabulary), chosen (rows,)."""
        import torch

        kinds = {mode == "processed" for mode in self.modes.values()}
        told = [self._scores(kind, logits, weights, streams) for kind in sorted(kinds, reverse=True)]
        row_scores = self._of_rows(streams)[0] if len(told) > 1 else None

        def of_mode(found: list[torch.Tensor]) -> torch.Tensor:
            if row_scores is None:
                return found[0]
            return found[0].where(row_scores.view(-1, *[1] * (found[0].dim() - 1)), found[1])

        # Only requested logarithms are computed: the whole vocabulary's cost as much as the choice.
        values = [of_mode([log(scores.gather(-1, chosen[:, None]))[:, 0] for scores, log in told])]
        tokens: list[torch.Tensor] = []
        if self.likeliest:
            every = of_mode([log(scores) for scores, log in told])
            best = every.topk(min(self.likeliest, every.shape[-1]), dim=-1)
            tokens, values = [*best.indices.T], [*values, *best.values.T]
        # A stream has 64 bits, more than float64 holds, so its bits are stored unchanged.
        bits = [value.contiguous().view(torch.int64) for value in values]
        entries = torch.stack([streams, indices, *bits, *tokens])
        if self._ring and self._ring[0].active:
            self._ring[0].write(entries)
            return
        self._kept.append(entries)
        if not self._shape:
            self._shape.append((len(entries), entries.device))

    @contextmanager
    def in_place(self, rows: int, decode_steps: int) -> Iterator[None]:
        """Keep entries in fixed device memory within a context.

        Decode steps can then be captured.
        """
        if not self._ring:
            # A prefill has stored some before.
            logits, device = self._shape[0]
            self._ring.append(_Ring.of(logits, rows, decode_steps, device))
        ring = self._ring[0]
        ring.active = True
        try:
            yield
        finally:
            ring.active = False
            self._kept.extend(ring.taken())

    def _scores(
        self, processed: bool, logits: torch.Tensor, weights: torch.Tensor, streams: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return every token's score, and their normalisation."""
        import torch

        if processed:
            total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64).log()
            return weights, lambda some: some.double().log() - total
        scores = computable(logits)
        if self.temperatures:
            scores = scores / self._of_rows(streams)[1][:, None].to(scores.dtype)
        largest = scores.amax(dim=-1, keepdim=True)
        sums = (scores - largest).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
        total = sums.log() + largest
        return scores, lambda some: some.double() - total

    def _of_rows(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each row's mode is ``processed``, and its temperature, shape (rows,)."""
        import torch

        device = streams.device
        if device not in self._on_device:
            known = sorted(self.modes)
            self._on_device[device] = (
                torch.tensor(known, device=device),
                torch.tensor([self.modes[stream] == "processed" for stream in known], device=device),
                torch.tensor(
                    [self.temperatures.get(stream, 1.0) for stream in known],
                    dtype=torch.float64,
                    device=device,
                ),
            )
        streams_of_rows, processed, temperatures = self._on_device[device]
        # Rows without a recorded request have some other stream; their entries are never read.
        row = torch.searchsorted(streams_of_rows, streams).clamp_(max=len(streams_of_rows) - 1)
        return processed[row], temperatures[row]

    def read(
        self, stream: int, tokens: int, first: int = 0, given: Sequence[range] = ()
    ) -> tuple[TokenLogprob, ...]:
        """Return and forget a completion's entries; given tokens are certain."""
        self._read_back()
        of_request = self._read.pop(stream) if tokens > first else {}
        for index in (index for part in given for index in part):
            of_request[index] = TokenLogprob(0.0, ())
        return tuple(of_request[index] for index in range(first, tokens))

    def _read_back(self) -> None:
        import torch

        if not self._kept:
            return
        rows = torch.cat(self._kept, dim=1).cpu()
        self._kept.clear()
        alternatives = (len(rows) - 3) // 2
        values = rows[2 : 3 + alternatives].view(torch.float64).T.tolist()
        tokens = rows[3 + alternatives :].T.tolist()
        for stream, index, value, token in zip(*rows[:2].tolist(), values, tokens, strict=True):
            # An index below zero marks an empty row.
            if stream in self.modes and index >= 0:
                likeliest = tuple(zip(token, value[1:], strict=True))
                self._read.setdefault(stream, {})[index] = TokenLogprob(value[0], likeliest)
