"""``batchbound export``: write a workload's linear model as MPS."""

from __future__ import annotations

from ...checking import export
from ...options.bound import ExportOptions
from ...screen.checks import show_model

OPTIONS = ExportOptions


def run(options: ExportOptions) -> int:
    """Write the model, and print its size."""
    return show_model(export.of(options), options)
