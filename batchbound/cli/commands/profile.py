"""``batchbound profile``: measure a model on this machine."""

from __future__ import annotations

from ...options.profile import ProfileOptions
from ...profiling import profile
from ...screen.profile import show

OPTIONS = ProfileOptions


def run(options: ProfileOptions) -> int:
    """Measure the model and write its costs."""
    return show(profile.of(options), options)
