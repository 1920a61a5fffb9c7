"""The table of a server's iterations, and who came to it at another place than in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server_orders import displaced, table
from vllm_server import VllmServer


def test_arrivals_are_read_from_the_servers_log_and_those_out_of_place_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [f"INFO [async_llm.py:578] Added request cmpl-r{k}-0-8f0e17aa." for k in (0, 2, 1, 3)]
    log.write_text("\n".join(["INFO Received request cmpl-r0-0", *lines]))
    arrivals = VllmServer("vllm", tmp_path, log).arrivals()
    assert arrivals == ["r0", "r2", "r1", "r3"]
    assert displaced(arrivals) == 2


def test_a_line_sets_our_runs_beside_those_of_the_same_repeat() -> None:
    job: dict[str, Any] = {"name": "a job", "requests": 8, "bound": 100, "bound_source": "slots"}
    counts = {"file order": (200, 160), "all at once": (190, 170), "auto": (110, 104), "longest": (112, 112)}
    runs = [
        {**job, "way": way, "logged": count, "displaced": 5, "predicted": 103}
        for way, both in counts.items()
        for count in both
    ]
    line = table(runs).splitlines()[-1]
    assert "| 100, by slots | 200, 160 | **110, 104** | 103 | 45.0%, 35.0% | 10.0%, 4.0% |" in line
    assert line.endswith("| 190 (5 displaced), 170 (5 displaced) |")
