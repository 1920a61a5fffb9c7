"""``python -m attack``: every attack in turn, the table of counts, exit status 1 if anything did not hold."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from . import children, faults, files, journal_damage, kills
from .jobs import Work, make_work
from .tally import Tally, as_json, table


def attacks(args: argparse.Namespace, scratch: Path) -> dict[str, Callable[[random.Random], list[Tally]]]:
    """Return what is to be tried, by name."""

    @cache
    def work() -> Work:
        return make_work(scratch / "job", scratch, count=40, most=24)

    return {
        "runs": lambda rng: [kills.kill_runs(work(), scratch, args.kills, rng)],
        "plans": lambda rng: [kills.kill_plans(work(), scratch, max(5, args.kills // 10), rng)],
        "bits": lambda rng: [journal_damage.flip_bits(scratch, args.records, rng)],
        "cuts": lambda rng: [journal_damage.cut(scratch, args.cut_records, rng)],
        "faults": lambda rng: faults.fail_models(work(), scratch, args.faults, rng),
        "disks": lambda rng: [faults.fill_disks(work(), scratch, max(5, args.faults // 2), rng)],
        "files": lambda _: files.damage_files(scratch, args.inputs, args.seed, args.keep),
    }


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument("--kills", type=int, default=60, help="of runs (default %(default)s)")
    parser.add_argument("--inputs", type=int, default=1000, help="damaged files (default %(default)s)")
    parser.add_argument("--records", type=int, default=1000, help="of the journal (default %(default)s)")
    parser.add_argument("--cut-records", type=int, default=30, help="of the one cut (default %(default)s)")
    parser.add_argument("--faults", type=int, default=35, help="of the model (default %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the files that were not handled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NAME,NAME", help="these attacks only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts, and what did not hold")
    return parser.parse_args()


def main() -> int:
    """Attack, print the table, and say what did not hold."""
    args = parsed()
    # A damaged name is looked for on this machine only.
    os.environ["HF_HUB_OFFLINE"] = "1"
    tallies = []
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        (warm := Path(folder) / "warm").mkdir()
        children.warm_up(warm)
        chosen = attacks(args, Path(folder))
        for name in args.only.split(",") if args.only else chosen:
            begun = time.monotonic()
            # Each by a seed of its own: leaving one out changes no other.
            found = chosen[name](random.Random(f"{args.seed} {name}"))
            trials = sum(one.trials for one in found)
            print(f"{name}: {trials:,} in {time.monotonic() - begun:.0f} s", file=sys.stderr)
            for one in found:
                for what in one.violations[:20]:
                    print(f"  {one.attack}: {what}", file=sys.stderr)
            tallies += found
    print(table(tallies))
    if args.json:
        args.json.write_text(as_json(tallies, args.seed))
    return 1 if any(one.violations for one in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
