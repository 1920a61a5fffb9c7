"""Solvers of the scheduling problem: backends, exact solvers, search."""

from .result import Limits, Result, Status, StoppedBy
from .solve import SOLVERS, solve

__all__ = ["SOLVERS", "Limits", "Result", "Status", "StoppedBy", "solve"]
