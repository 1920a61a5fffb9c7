"""
Write the JSON schemas of the files that batchbound writes, into ``docs/schemas``.

Run: ``python docs/write_schemas.py``; ``tests/data/test_schemas.py`` compares them with the code.
"""

from __future__ import annotations

import json
from pathlib import Path

from batchbound.data.costs.cost import CalibratedCost
from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.costs.layer_profile import LayerProfile
from batchbound.data.files.record import schema
from batchbound.data.iteration_plan import IterationPlan
from batchbound.data.plan import Plan
from batchbound.data.report import Report
from batchbound.data.trace import ServedRequest, Stage, TraceHeader
from batchbound.gain import Gain

FOLDER = Path(__file__).parent / "schemas"


def schemas() -> dict[str, dict[str, object]]:
    """Return the schema of each kind of file, by the schema's file name."""
    kinds = {
        "cost": CalibratedCost,
        "profile": LayerProfile,
        "plan": Plan,
        "iteration_plan": IterationPlan,
        "iteration_cost": IterationRates,
        "gain": Gain,
    }
    found = {f"{name}.schema.json": schema(kind) for name, kind in kinds.items()}
    found["report.schema.json"] = Report.json_schema()
    lines = [schema(kind) for kind in (TraceHeader, Stage, ServedRequest)]
    found["trace.schema.json"] = {
        "$schema": lines[0]["$schema"],
        "title": "Trace",
        "description": "A line of a trace: a header, then its stages, then its requests.",
        "anyOf": [{name: part for name, part in line.items() if name != "$schema"} for line in lines],
    }
    return found


def main() -> None:
    """Write the schemas."""
    FOLDER.mkdir(exist_ok=True)
    for name, value in schemas().items():
        (FOLDER / name).write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
