"""Linear models of a problem, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...data.problem import Problem
from .full_model import UnsupportedProblemError, literal_model, refuse_large, repaired_model
from .linear_model import LinearModel
from .partition_model import partition_model
from .slot_free import slot_free_model


def packing_model(problem: Problem) -> LinearModel:
    """Return the packing (26)-(30) of decode steps onto slots.

    Its optimum is the least number of decode steps that any schedule needs, in steps and not in seconds.
    Raises UnsupportedProblemError for a KV capacity or token cap, which the packing ignores, or if the model
    would be too large.
    """
    if problem.kv_capacity is not None or problem.prefill_token_cap is not None:
        raise UnsupportedProblemError("the packing has no row for a KV capacity or a token cap")
    refuse_large(len(problem) * problem.slots)
    return partition_model(problem.decode_steps, problem.slots).model


MODELS: Mapping[str, Callable[[Problem], LinearModel]] = {
    "literal": lambda problem: literal_model(problem).model,
    "repaired": lambda problem: repaired_model(problem).model,
    "slot-free": lambda problem: slot_free_model(problem).model,
    "packing": packing_model,
}
"""Formulations as linear models to be minimised, by name.

``literal`` is the hybrid paper's (1)-(25) as printed, ``repaired`` the same with corrections, ``slot-free``
ours, all in seconds; ``packing`` is the paper's (26)-(30), in decode steps.
"""
