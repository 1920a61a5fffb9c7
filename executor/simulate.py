"""A whole job in the simulator."""

from __future__ import annotations

from ..data.cost import IntArray
from ..data.problem import Problem
from ..data.trace import Trace
from ..heuristics.policy import Policy
from .loop import execute
from .simulator import Simulator


def simulate(problem: Problem, policy: Policy, output_tokens: IntArray | None = None) -> Trace:
    """
    Return the trace of a job served in simulated time.

    Parameters
    ----------
    problem
        The problem, with the lengths the policy may count on.
    policy
        A fresh policy.
    output_tokens
        The true length of each answer (tokens, shape (requests,)); the problem's own by default.

    Raises
    ------
    PolicyError
        If the policy asks for what cannot be done.
    """
    return execute(problem, policy, Simulator(problem, output_tokens))
