"""Field names of older files."""

from __future__ import annotations

from typing import Any

RENAMED = {
    "rounds": "decode_steps",
    "round": "decode_step",
    "round_by": "step_by",
    "decode_rounds": "decode_steps",
    "decode rounds": "decode steps",
    "slot-rounds": "slot-steps",
}
"""Old and new names of fields, for files of an older version."""


SOURCES = {"fewest stages and rounds": "fewest stages and decode steps"}
"""Old and present names of a bound's argument."""


def with_new_names(value: Any) -> Any:
    """Return an older file's values with present field names."""
    if isinstance(value, dict):
        found = {RENAMED.get(name, name): with_new_names(entry) for name, entry in value.items()}
        if isinstance(found.get("source"), str):
            found["source"] = SOURCES.get(found["source"], found["source"])
        return found
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [with_new_names(entry) for entry in value]
    return value
