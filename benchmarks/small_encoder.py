"""A small encoder of random weights, for tests and benchmarks of the predictor that fine-tunes one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def save_small_distilbert(folder: Path, prompts: Sequence[str], *, seed: int = 0, words: int = 3000) -> None:
    """
    Write a small DistilBERT of random weights, with a vocabulary of the prompts' words.

    It takes the path of a real checkpoint where none can be had.

    Parameters
    ----------
    folder
        Where to.
    prompts
        Texts whose most frequent words the tokenizer knows.
    seed
        Of the weights.
    words
        Size of the vocabulary.
    """
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=words, special_tokens=special)
    pieces.train_from_iterator(prompts, trainer)
    ends = [(name, pieces.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    pieces.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=pieces,
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )
    config = DistilBertConfig(
        vocab_size=pieces.get_vocab_size(), dim=64, hidden_dim=128, n_layers=2, n_heads=4, pad_token_id=0
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        DistilBertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
