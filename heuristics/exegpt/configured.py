"""Policies of a planned execution configuration."""

from __future__ import annotations

from ...data.configuration import PlannedConfiguration
from .dynamic_batch import THRESHOLD, DynamicBatch
from .round_robin import RoundRobinAllocation


def dynamic_batch(configuration: PlannedConfiguration) -> DynamicBatch:
    """Return the rule that keeps batches near a plan."""
    return DynamicBatch(
        configuration.encode_batch,
        configuration.input_tokens,
        configuration.decode_batch or None,
        # Batches change by whole prompts: a threshold below one would oscillate.
        max(THRESHOLD, 1 / configuration.encode_batch),
    )


def rra_policy(configuration: PlannedConfiguration) -> RoundRobinAllocation:
    """Return a fresh policy for a configuration on one device."""
    return RoundRobinAllocation(configuration.decode_steps, dynamic_batch(configuration))
