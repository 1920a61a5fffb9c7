"""Log-probabilities of the tokens chosen, kept on the device until a completion is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from ...data.readers.sampling import LogprobsMode


class TokenLogprob(NamedTuple):
    """A chosen token's log-probability, and the likeliest tokens with theirs, the likeliest first."""

    value: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recorder:
    """
    Keeps the log-probability of every token chosen for some requests.

    Each is kept under its request and index: a token chosen again after a preemption counts once.

    Parameters
    ----------
    modes
        Of each request's random stream, which distribution is told of.
    likeliest
        How many of the likeliest tokens are kept, too.
    """

    modes: Mapping[int, LogprobsMode]
    likeliest: int = 0
    _kept: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)
    _read: dict[int, dict[int, TokenLogprob]] = field(default_factory=dict, init=False, repr=False)

    def keep(
        self,
        logits: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        streams: torch.Tensor,
        indices: torch.Tensor,
    ) -> None:
        """
        Keep what was chosen.

        Parameters
        ----------
        logits
            The model's, shape (rows, vocabulary).
        weights
            With which tokens were drawn, float64, up to a factor; 0 for those left out.
        chosen
            Shape (rows,).
        streams, indices
            As :meth:`~.sampling.Sampler.choose` takes them.
        """
        import torch

        modes = set(self.modes.values())
        told = weights.log() - weights.sum(dim=-1, keepdim=True).log() if "processed" in modes else None
        if "raw" in modes:
            raw = logits.double().log_softmax(dim=-1)
            if told is not None:
                processed = [stream for stream, mode in self.modes.items() if mode == "processed"]
                own = torch.isin(streams, torch.tensor(processed, device=streams.device))
                told = told.where(own[:, None], raw)
            else:
                told = raw
        assert told is not None
        values = [told.gather(-1, chosen[:, None])[:, 0]]
        tokens: list[torch.Tensor] = []
        if self.likeliest:
            best = told.topk(min(self.likeliest, told.shape[-1]), dim=-1)
            tokens, values = [*best.indices.T], [*values, *best.values.T]
        # A stream has 64 bits, which float64 does not hold: its bits go along as they are.
        bits = [value.contiguous().view(torch.int64) for value in values]
        self._kept.append(torch.stack([streams, indices, *bits, *tokens]))

    def read(self, stream: int, tokens: int) -> tuple[TokenLogprob, ...]:
        """
        Return what is kept of each token of a finished completion, and forget it.

        Parameters
        ----------
        stream
            The request's.
        tokens
            Tokens of its completion.

        Raises
        ------
        KeyError
            If fewer tokens were chosen for it.
        """
        self._read_back()
        of_request = self._read.pop(stream)
        return tuple(of_request[index] for index in range(tokens))

    def _read_back(self) -> None:
        import torch

        if not self._kept:
            return
        kept = torch.cat(self._kept, dim=1).cpu()
        self._kept.clear()
        alternatives = (len(kept) - 3) // 2
        values = kept[2 : 3 + alternatives].view(torch.float64).T.tolist()
        tokens = kept[3 + alternatives :].T.tolist()
        for stream, index, value, token in zip(*kept[:2].tolist(), values, tokens, strict=True):
            if stream in self.modes:
                likeliest = tuple(zip(token, value[1:], strict=True))
                self._read.setdefault(stream, {})[index] = TokenLogprob(value[0], likeliest)
