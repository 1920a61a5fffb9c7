"""A tiny model in a folder, as trainers ask for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_model(seed: int) -> Any:
    """Return a Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def write_checkpoint(folder: Path) -> Path:
    """Write the model of seed 0, and a tokenizer of one token a word; return the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(
        models.WordLevel(
            {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{k}": k for k in range(3, 64)}}, unk_token="<unk>"
        )
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )
    tiny_model(0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
