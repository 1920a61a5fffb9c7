"""
Offline planning of LLM batch inference.

Plan a whole job of prompts, run the plan on a HuggingFace model, and report how far the run was from a
proven lower bound.
"""

from .data import Bound, CostModel, Problem, Schedule, Workload
from .data.plan import Plan
from .planning.plan import make_plan

__version__ = "0.2.0"

__all__ = ["Bound", "CostModel", "Plan", "Problem", "Schedule", "Workload", "__version__", "make_plan"]
