"""MICO's length predictor: a fine-tuned encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np

from ...data.arrays import FloatArray
from ...data.predictor import COVERAGE, Examples, Predicted, bucket_of

DISTILBERT = "distilbert-base-uncased"
"""The paper's base model (section 4.1.1)."""

LONGEST_PROMPT = 512
"""Most tokens of a prompt that are read."""

_BATCH = 32
"""Prompts of a training step, as in the paper."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderPredictor:
    r"""Classifier of prompts into ranges of completion length (section 3.2).

    Label :math:`\lfloor l / (l_{max} / N) \rfloor`; a length is predicted as the middle of the likeliest
    range, and its interval by the classifier's probabilities.

    model, tokenizer: A transformers model for sequence classification and its tokenizer.
    longest, buckets: :math:`l_{max}` and N.
    """

    model: Any
    tokenizer: Any
    longest: int
    buckets: int

    @classmethod
    def learnt(
        cls,
        examples: Examples,
        encoder: str,
        *,
        buckets: int = 10,
        epochs: int = 3,
        learning_rate: float = 5e-5,
        seed: int = 0,
    ) -> Self:
        """Fine-tune a classifier as the paper does.

        It uses transformers' Trainer, AdamW and linear decay.
        """
        _need_transformers()
        if find_spec("accelerate") is None:
            raise ImportError(
                "transformers' Trainer needs accelerate: in the clone, run `pip install '.[encoder]'`"
            )
        import torch
        from transformers import (
            AutoModelForSequenceClassification,
            AutoTokenizer,
            DataCollatorWithPadding,
            PrinterCallback,
            Trainer,
            TrainingArguments,
        )

        longest = int(examples.lengths.max()) + 1
        labels = bucket_of(examples.lengths, longest, buckets)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            tokenizer = AutoTokenizer.from_pretrained(encoder)
            model = AutoModelForSequenceClassification.from_pretrained(
                encoder, num_labels=buckets, ignore_mismatched_sizes=True
            )
            fitted = cls(model, tokenizer, longest, buckets)
            read = tokenizer(list(examples.prompts), truncation=True, max_length=fitted._most_tokens)
            rows = [
                {"input_ids": ids, "attention_mask": mask, "labels": label}
                for ids, mask, label in zip(
                    read["input_ids"], read["attention_mask"], labels.tolist(), strict=True
                )
            ]
            with TemporaryDirectory() as folder:
                trainer = Trainer(
                    model,
                    TrainingArguments(
                        output_dir=folder,
                        num_train_epochs=epochs,
                        per_device_train_batch_size=_BATCH,
                        learning_rate=learning_rate,
                        optim="adamw_torch",
                        lr_scheduler_type="linear",
                        seed=seed,
                        save_strategy="no",
                        logging_strategy="no",
                        report_to=[],
                        disable_tqdm=True,
                        dataloader_pin_memory=torch.cuda.is_available(),
                    ),
                    train_dataset=rows,
                    data_collator=DataCollatorWithPadding(tokenizer),
                )
                # It prints what it logs; a library does not.
                trainer.remove_callback(PrinterCallback)
                trainer.train()
        model.eval()
        return fitted

    def predict(self, prompts: Sequence[str]) -> Predicted:
        """Return the middle of each likeliest range, with its interval."""
        chances = self.probabilities(prompts)
        width = self.longest / self.buckets
        below = np.cumsum(chances, axis=1)
        low = (below < (1 - COVERAGE) / 2).sum(axis=1)
        high = (below < (1 + COVERAGE) / 2).sum(axis=1)
        middle = (chances.argmax(axis=1) + 0.5) * width
        return Predicted.of(middle, low * width, (np.minimum(high, self.buckets - 1) + 1) * width)

    def probabilities(self, prompts: Sequence[str]) -> FloatArray:
        """Return each range's probability, shape (prompts, ranges)."""
        import torch

        rows = []
        with torch.inference_mode():
            for first in range(0, len(prompts), 32):
                logits = self.model(**self._inputs(prompts[first : first + 32])).logits
                rows.append(logits.double().softmax(dim=-1).cpu().numpy())
        return np.concatenate(rows)

    def _inputs(self, prompts: Sequence[str]) -> Any:
        limit = self._most_tokens
        encoded = self.tokenizer(
            list(prompts), padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        return encoded.to(self.model.device)

    @property
    def _most_tokens(self) -> int:
        return min(LONGEST_PROMPT, int(self.model.config.max_position_embeddings))

    def save(self, folder: Path) -> dict[str, object]:
        """Write model and tokenizer in transformers' own format."""
        self.model.save_pretrained(folder / "encoder")
        self.tokenizer.save_pretrained(folder / "encoder")
        return {"longest": self.longest, "buckets": self.buckets}

    @classmethod
    def load(cls, folder: Path, fields: dict[str, Any]) -> Self:
        """Return the predictor that :meth:`save` wrote."""
        _need_transformers()
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / "encoder")
        model = AutoModelForSequenceClassification.from_pretrained(
            folder / "encoder", use_safetensors=True
        ).eval()
        return cls(model, tokenizer, int(fields["longest"]), int(fields["buckets"]))


def _need_transformers() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        raise ImportError(
            "an encoder needs torch and transformers: in the clone, run `pip install '.[engine]'`"
        ) from None
