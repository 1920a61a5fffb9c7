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

from . import children, faults, files, journal_damage, kills, servers
from .jobs import Work, make_work
from .tally import Book, table


def attacks(args: argparse.Namespace, scratch: Path, book: Book) -> dict[str, Callable[[], object]]:
    """Return what is to be tried, by name."""

    @cache
    def work(replicas: int = 1, forked: bool = True) -> Work:
        name = f"job-{replicas}-{forked}"
        return make_work(scratch / name, scratch, count=40, most=24, replicas=replicas, forked=forked)

    once = "every answer once, unchanged; user's files as before"
    runs, fleets = "kills of `run`, of resumed ones too", "kills of fleets, replicas forked"
    plans = "kills of `plan`", "the plan is whole or absent; no temporary file is left"
    bits = (
        f"every bit of a journal of {args.records:,} records flipped",
        "its own record dropped by name, the next if it was a line break; all others unchanged",
    )
    cuts = (
        f"a journal of {args.cut_records:,} records cut at every byte",
        "every whole record unchanged, no other",
    )
    disks = (
        "a full disk under `run`",
        "status 1 and how to go on; nothing finished lost; the same command finishes",
    )
    misled = (
        "servers that break HTTP or mislead",
        "each completion under its own id or an error row, an end, under 300 MiB, no control characters",
    )
    seed = args.seed
    return {
        "runs": lambda: kills.kill_runs(work(), scratch, args.kills, seed, book.open(runs, once)),
        "fleets": lambda: kills.kill_fleets(work(3), scratch, args.kills // 2, seed, book.open(fleets, once)),
        "plans": lambda: kills.kill_plans(work(), scratch, max(5, args.kills // 10), seed, book.open(*plans)),
        "bits": lambda: journal_damage.flip_bits(
            scratch, args.records, random.Random(seed), book.open(*bits)
        ),
        "cuts": lambda: journal_damage.cut(scratch, args.cut_records, random.Random(seed), book.open(*cuts)),
        "faults": lambda: faults.fail_models(work(), scratch, args.faults, seed, book),
        "disks": lambda: faults.fill_disks(
            work(), scratch, max(5, args.faults // 2), seed, book.open(*disks)
        ),
        "servers": lambda: servers.mislead(scratch, book.open(*misled)),
        "files": lambda: files.damage_files(scratch, args.inputs, seed, book, args.keep),
    }


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=60, help="of runs; half as many of fleets (default %(default)s)"
    )
    parser.add_argument("--inputs", type=int, default=1000, help="damaged files (default %(default)s)")
    parser.add_argument("--records", type=int, default=1000, help="of the journal (default %(default)s)")
    parser.add_argument("--cut-records", type=int, default=30, help="of the one cut (default %(default)s)")
    parser.add_argument("--faults", type=int, default=35, help="of the model (default %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the files that were not handled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NAME,NAME", help="these attacks only")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep the counts as they come; the same command goes on"
    )
    return parser.parse_args()


def main() -> int:
    """Attack, print the table, and say what did not hold."""
    args = parsed()
    # A damaged name is looked for on this machine only.
    os.environ["HF_HUB_OFFLINE"] = "1"
    book = Book(args.json, {"seed": args.seed, "inputs": args.inputs, "records": args.records})
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        (warm := Path(folder) / "warm").mkdir()
        children.warm_up(warm)
        chosen = attacks(args, Path(folder), book)
        names = args.only.split(",") if args.only else list(chosen)
        if unknown := [name for name in names if name not in chosen]:
            sys.exit(f"attack: --only {unknown[0]!r} is none of {', '.join(chosen)}")
        for name in names:
            begun, before = time.monotonic(), set(book.tallies)
            chosen[name]()
            book.keep()
            found = [one for attack, one in book.tallies.items() if attack not in before]
            trials = sum(one.trials for one in found)
            print(f"{name}: {trials:,} in {time.monotonic() - begun:.0f} s", file=sys.stderr)
            for one in found:
                for what in one.violations[:20]:
                    print(f"  {one.attack}: {what}", file=sys.stderr)
    tallies = list(book.tallies.values())
    print(table(tallies))
    return 1 if any(one.violations for one in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
