"""``batchbound validate``: print the simulator's error against a measured run."""

from __future__ import annotations

from ...checking import validate
from ...options.judging import ValidateOptions
from ...screen.checks import show_validated

OPTIONS = ValidateOptions


def run(options: ValidateOptions) -> int:
    """Simulate the run, and print the errors."""
    return show_validated(validate.of(options), options)
