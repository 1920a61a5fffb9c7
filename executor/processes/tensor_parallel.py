"""Layers of a model shared among processes.

It uses transformers' tensor parallelism.
"""

from __future__ import annotations

from typing import Any

from ..models.families import UnsupportedModelError


def share_layers(model: Any, degree: int) -> Any:
    """Share every layer of a model among ``degree`` processes.

    Each process loads the whole model on its device, calls this, and then makes the same calls with the same
    inputs; all get the same logits. ``torchrun`` starts the processes: they find each other by its
    environment, over NCCL on CUDA devices and gloo on the CPU. An engine decides by decode steps and lengths,
    not by the clock. So engines of all processes stay in step while every request is there from the start.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    check_shared(model.config, degree)
    untie(model)
    shared = DistributedConfig(tp_size=degree, tp_plan="auto")
    kind = type(model)
    settled, _, mesh = kind.prepare_distribute_model(shared)
    return kind.maybe_distribute_model(model, settled, mesh).eval()


def untie(model: Any) -> None:
    """Copy the weights that output layer and embedding share.

    transformers shares layers by the names of their weights, and finds a tied weight only once.
    """
    import torch

    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def check_shared(config: Any, degree: int) -> None:
    """Raise an error if ``degree`` processes cannot share the layers."""
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            config.model_type, "transformers has no plan for sharing its layers", "run it on one device"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None) or text.num_attention_heads
        if heads % degree:
            raise ValueError(f"{name} is {heads}, which {degree} processes cannot share evenly")
