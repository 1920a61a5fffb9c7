"""The published JSON schemas are those of the code, and what is written keeps to them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from batchbound.data.costs.cost import CalibratedCost, CostModel, FitError
from batchbound.data.files.record import plain
from batchbound.data.plan import Plan
from batchbound.executor.reports.report import plan_report, simulated

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
KINDS |= {"null": type(None), "number": (int, float)}
PLANS = Path(__file__).parent / "plans"


def generated() -> dict[str, dict[str, object]]:
    spec = importlib.util.spec_from_file_location("write_schemas", ROOT / "docs" / "write_schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, dict[str, object]] = module.schemas()
    return found


def test_the_published_schemas_are_those_of_the_code() -> None:
    published = {path.name: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    assert published == json.loads(json.dumps(generated())), "run `python docs/write_schemas.py`"


def wrong(value: Any, schema: dict[str, Any], whole: dict[str, Any], place: str = "$") -> list[str]:
    """Return the places of a value that do not keep to a schema of the few kinds of rules that ours have."""
    if "$ref" in schema:
        return wrong(value, whole["$defs"][schema["$ref"].rpartition("/")[2]], whole, place)
    if "anyOf" in schema:
        tried = [wrong(value, each, whole, place) for each in schema["anyOf"]]
        return [] if [] in tried else min(tried, key=len)
    if "const" in schema or "enum" in schema:
        return [] if value in schema.get("enum", [schema.get("const")]) else [place]
    if "type" in schema and not isinstance(value, KINDS[schema["type"]]):
        return [f"{place}: {value!r} is no {schema['type']}"]
    found = []
    if isinstance(value, dict):
        found += [f"{place}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, entry in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            found += wrong(entry, inner if isinstance(inner, dict) else {}, whole, f"{place}.{name}")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, entry in enumerate(value):
            found += wrong(entry, schema["items"], whole, f"{place}[{index}]")
    return found


@pytest.mark.parametrize("name", ["one", "predicted", "fleet"])
def test_plans_reports_and_traces_keep_to_their_schemas(name: str, tmp_path: Path) -> None:
    schemas = generated()
    plan = Plan.load(PLANS / f"{name}.json")
    traces = simulated(plan)
    traces[0].save(tmp_path / "trace.jsonl")
    for kind, values in (
        ("plan", [plan.to_json()]),
        ("report", [plan_report(plan, traces).to_json()]),
        ("trace", [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]),
    ):
        schema = schemas[f"{kind}.schema.json"]
        for value in json.loads(json.dumps(values)):
            assert wrong(value, schema, schema) == []
            assert wrong({"batchbound": 1}, schema, schema)


def test_cost_files_keep_to_their_schema() -> None:
    fitted = CalibratedCost(
        CostModel.paper(), FitError(0.1, 0.1, 0.0, 4, 4), {"name": "e"}, "2026-01-01", (1,), (8,)
    )
    value, schema = json.loads(json.dumps(plain(fitted))), generated()["cost.schema.json"]
    assert wrong(value, schema, schema) == []
    assert wrong(value | {"date": 3}, schema, schema) == ["$.date: 3 is no string"]
