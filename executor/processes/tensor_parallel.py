"""Sharing the layers of a model among processes, through transformers' own tensor parallelism."""

from __future__ import annotations

from typing import Any

from ..models.families import UnsupportedModelError


def share_layers(model: Any, degree: int) -> Any:
    """
    Return a loaded model whose every layer is shared by that many processes, of which this is one.

    Each process loads the whole model on its device, calls this, and then runs the same calls with the same
    inputs; all of them get the same logits. The processes are those that ``torchrun`` starts: they find each
    other by the environment it sets, over NCCL on CUDA devices and gloo on the CPU. An engine decides by
    decode steps and lengths, not by the clock, so engines of all processes stay in step while every request
    is there from the start.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    check_shared(model.config, degree)
    untie(model)
    shared = DistributedConfig(tp_size=degree, tp_plan="auto")
    kind = type(model)
    settled, _, mesh = kind.prepare_distribute_model(shared)
    return kind.maybe_distribute_model(model, settled, mesh).eval()


def untie(model: Any) -> None:
    """
    Give the output layer of a model a copy of the weights that it has in common with the embedding.

    transformers shares layers by the names of their weights, and finds one that two layers have only once.
    """
    import torch

    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def check_shared(config: Any, degree: int) -> None:
    """Raise, as :func:`share_layers` does, if that many processes cannot share the layers of such a model."""
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            config.model_type, "transformers has no plan for sharing its layers", "run it on one device"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None) or text.num_attention_heads
        if heads % degree:
            raise ValueError(f"{name} is {heads}, which {degree} processes cannot share evenly")
