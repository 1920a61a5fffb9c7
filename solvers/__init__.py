"""Solvers that find schedules: backends, exact and anytime solvers, configuration search."""

from .result import Limits, Result, Status, StoppedBy
from .solve import SOLVERS, solve

__all__ = ["SOLVERS", "Limits", "Result", "Status", "StoppedBy", "solve"]
