"""Input and output data: requests, costs, schedules, plans, traces, files."""

from .bound import Bound
from .costs.cost import CostModel
from .files.disk import InputError
from .problem import Problem, ProblemError
from .schedule import Schedule, Violation
from .workload import Request, Workload, WorkloadError

__all__ = [
    "Bound",
    "CostModel",
    "InputError",
    "Problem",
    "ProblemError",
    "Request",
    "Schedule",
    "Violation",
    "Workload",
    "WorkloadError",
]
