"""The rows of the hybrid paper's table are of the policies that they name."""

from __future__ import annotations

import numpy as np
import pytest
from table3 import ROWS, Row, _policy

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.queues.assignment import Assigned
from batchbound.heuristics.queues.queue_policy import QueuePolicy

LISTED = [row for row in ROWS if row.policy.startswith(("algorithm1", "packing", "lagrangian"))]


@pytest.mark.parametrize("row", LISTED, ids=lambda row: f"{row.policy}-{row.optimal_packing}")
def test_rows_without_a_packing_deal_requests_out_in_turn(row: Row) -> None:
    problem = Problem(Workload.from_lengths([1, 1, 1], [9, 1, 8]), CostModel.paper(), slots=2)
    policy = _policy(row, problem, np.array([0, 1, 1]))
    assert isinstance(policy, QueuePolicy)
    assert isinstance(policy.queue, Assigned)
    assert policy.queue.owner == ([0, 1, 1] if row.optimal_packing else [0, 1, 0])
