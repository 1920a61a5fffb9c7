"""``batchbound export``: write a workload's linear model as MPS."""

from __future__ import annotations

from ...options.bound import ExportOptions

OPTIONS = ExportOptions


def run(options: ExportOptions) -> int:
    """Write the model, and print its size."""
    from ...checking import export
    from ...screen.checks import show_model

    return show_model(export.of(options), options)
