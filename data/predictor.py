"""Examples of completions, predicted lengths and their quality."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from .arrays import FloatArray, IntArray
from .lengths.interval import COVERAGE as COVERAGE
from .readers.openai_batch import PromptRecord
from .workload import LONGEST


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Prompts and the lengths of their completions.

    prompts: Texts; a prompt with several completions is several examples.
    lengths: Tokens of each completion, at least one, shape (examples,).
    """

    prompts: tuple[str, ...]
    lengths: IntArray

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.lengths):
            raise ValueError(f"{len(self.prompts)} prompts and {len(self.lengths)} lengths of completions")
        if self.lengths.min() < 1:
            raise ValueError(f"completion {int(self.lengths.argmin())} has no token")

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def of(cls, records: Sequence[PromptRecord], lengths: Mapping[str, int]) -> Examples:
        """Match a batch file's requests with the tokens of their completions."""
        answered = [record for record in records if record.custom_id in lengths]
        tokens = np.array([lengths[record.custom_id] for record in answered], dtype=np.int64)
        return cls(tuple(map(prompt_text, answered)), tokens)

    def select(self, rows: npt.NDArray[np.bool_] | IntArray) -> Examples:
        """Return some of the examples."""
        chosen = np.arange(len(self))[rows]
        return Examples(tuple(self.prompts[i] for i in chosen.tolist()), self.lengths[chosen])

    def split(self, share: float, seed: int) -> tuple[Examples, Examples]:
        """Split off the examples of a share of the prompts.

        Both parts have at least one. The split depends only on the prompts' texts and the seed. With more
        examples the same prompts are split off again, so no earlier predictor has learnt from them.
        """
        names, of = np.unique(np.array(self.prompts, dtype=object).astype(str), return_inverse=True)
        salt = seed.to_bytes(8, "little", signed=True)
        digests = [
            hashlib.blake2b(name.encode(), digest_size=8, salt=salt).digest() for name in names.tolist()
        ]
        drawn = np.frombuffer(b"".join(digests), dtype="<u8") / 2.0**64
        apart = drawn < share
        apart[drawn.argmin()] = True
        if len(names) > 1:
            apart[drawn.argmax()] = False
        return self.select(~apart[of]), self.select(apart[of])

    def joined(self, others: Examples) -> Examples:
        """Return the union of both sets of examples."""
        return Examples(self.prompts + others.prompts, np.concatenate((self.lengths, others.lengths)))


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """Predicted lengths with intervals.

    The intervals should hold :data:`COVERAGE` of the completions. ``tokens``, ``low`` and ``high`` are
    tokens, at least one, shape (requests,).
    """

    tokens: IntArray
    low: IntArray
    high: IntArray

    @classmethod
    def of(cls, tokens: FloatArray, low: FloatArray, high: FloatArray) -> Predicted:
        """Return whole tokens within each request's limits."""
        whole = [np.rint(np.clip(column, 1, LONGEST)).astype(np.int64) for column in (tokens, low, high)]
        return cls(whole[0], np.minimum(whole[1], whole[0]), np.maximum(whole[2], whole[0]))


@dataclass(frozen=True, slots=True)
class PredictionQuality:
    r"""Quality of predicted lengths on unseen completions.

    buckets, longest: MICO's N and :math:`l_{max}`: a length's label is :math:`\lfloor l / (l_{max} / N)
    \rfloor`.
    accuracy, neighbour_accuracy: Share of predictions with the right label, and with it or the next one.
    mean_error: Mean absolute error, tokens.
    log_bias, log_sd: Mean and standard deviation of ``log(predicted / true)``; the latter suits
    ``--length-error``.
    coverage: Share of the completions that the intervals hold.
    """

    requests: int
    buckets: int
    longest: int
    accuracy: float
    neighbour_accuracy: float
    mean_error: float
    log_bias: float
    log_sd: float
    coverage: float

    @classmethod
    def measured(
        cls, predicted: Predicted, lengths: IntArray, *, longest: int, buckets: int = 10
    ) -> PredictionQuality:
        """Compare predictions with true lengths (tokens, shape (requests,))."""
        off = np.abs(bucket_of(predicted.tokens, longest, buckets) - bucket_of(lengths, longest, buckets))
        logs = np.log(predicted.tokens / lengths)
        within = (predicted.low <= lengths) & (lengths <= predicted.high)
        return cls(
            requests=len(lengths),
            buckets=buckets,
            longest=longest,
            accuracy=float((off == 0).mean()),
            neighbour_accuracy=float((off <= 1).mean()),
            mean_error=float(np.abs(predicted.tokens - lengths).mean()),
            log_bias=float(logs.mean()),
            log_sd=float(logs.std()),
            coverage=float(within.mean()),
        )

    def to_json(self) -> dict[str, object]:
        """Return the figures by name."""
        return asdict(self)


def bucket_of(lengths: IntArray, longest: int, buckets: int) -> IntArray:
    """Return MICO's label of each length, at most N - 1."""
    label: IntArray = np.minimum(lengths * buckets // longest, buckets - 1)
    return label


def prompt_text(record: PromptRecord) -> str:
    """Return the text of a request for a predictor."""
    if isinstance(record.prompt, str):
        return record.prompt
    if record.prompt is not None:
        return " ".join(map(str, record.prompt))
    return "\n".join(f"{message.role}: {message.text}" for message in record.messages)
