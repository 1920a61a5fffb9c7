"""
What a finished run on a server lost: ``python examples/audit_lengths.py``.

Lengths alone are enough for the bound and for what another order would have taken; a trace of
``run --server`` or vLLM's iteration log adds where the iterations went.
"""

from __future__ import annotations

import csv
import random

import batchbound


def main() -> None:
    """Audit 300 requests of which only the lengths that came out are known."""
    rng = random.Random(1)
    with open("lengths.csv", "w", newline="") as out:
        table = csv.writer(out)
        table.writerow(("id", "input_tokens", "output_tokens"))
        for k in range(300):
            table.writerow((f"r{k}", rng.randint(20, 400), min(1500, 1 + int(rng.lognormvariate(5, 1)))))
    for title, figures in batchbound.audit("lengths.csv", slots=32).tables.items():
        print(title)
        for name, value in figures.items():
            print(f"  {name:<28}{value}")


if __name__ == "__main__":
    main()
