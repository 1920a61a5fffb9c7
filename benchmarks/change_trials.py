"""Tries changes of the judges: their fast tests run once, then in a fork for each change."""

from __future__ import annotations

import gc
import importlib.util
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec

import pytest

CERTIFICATES = (
    "tests/models/test_certificates.py",
    "tests/models/test_difference_certificates.py",
    "tests/models/test_stage_intervals.py",
)
JUDGES = {
    "data/schedule.py": ("tests/data/test_schedule.py",),
    "data/fleet.py": ("tests/data/test_fleet_schedule.py",),
    "heuristics/serving/kv_ledger.py": ("tests/heuristics/test_kv_ledger.py",),
    "models/certificates/checker.py": (*CERTIFICATES, "tests/models/test_memory_growth.py"),
    "models/certificates/claims.py": CERTIFICATES,
    "models/certificates/fleet.py": ("tests/models/test_fleet_certificates.py",),
    "models/certificates/iterations.py": ("tests/models/test_iteration_bound.py",),
    "models/certificates/memory_growth.py": ("tests/models/test_memory_growth.py",),
    "models/certificates/reads.py": ("tests/models/test_certificates.py",),
    "models/certificates/stage_intervals.py": ("tests/models/test_stage_intervals.py",),
    "models/certificates/states.py": ("tests/models/test_state_certificates.py",),
    "executor/engines/self_check.py": ("tests/executor/test_self_check.py",),
}
"""Each judge and the fast tests that guard it."""
CHANGE = "MUTANT_UNDER_TEST"
"""The environment variable that names the change in force; mutmut's changed functions read it as well."""


class Changed(MetaPathFinder, InspectLoader):
    """Imports some modules from other sources than those on disk."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return that this imports a changed module, and None for any other."""
        return importlib.util.spec_from_loader(fullname, self) if fullname in self.sources else None

    def get_source(self, fullname: str) -> str:
        """Return the changed source of a module."""
        return self.sources[fullname]


class Trial:
    """
    A pytest plugin that runs the tests once on unchanged code, and then on each change in a fork of its own.

    A fork has everything imported and collected, and ends with the first test that fails: 0.1 CPU seconds.

    Parameters
    ----------
    changes
        The names of the changes.
    reached
        Returns, and forgets, which changes or functions the test that just ran came by.
    place
        Returns what of ``reached`` stands for a change.
    told
        Called with each change, and the test that misses it or None.
    """

    def __init__(
        self,
        changes: Sequence[str],
        reached: Callable[[], set[str]],
        place: Callable[[str], str],
        told: Callable[[str, str | None], None],
    ) -> None:
        self.changes, self.reached, self.place, self.told = changes, reached, place, told
        self.answer: int | None = None
        self.unfit = set[str]()

    def pytest_collection(self) -> None:
        """Let Hypothesis stop at the first failing example."""
        # Imported here, since pytest rewrites the plugin of hypothesis before it is imported.
        from hypothesis import Phase, settings

        # A failing example is enough; it need be neither the smallest nor remembered.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("once", settings(), phases=phases, database=None, derandomize=True)
        settings.load_profile("once")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """End a fork with the first test that fails; leave out what fails on unchanged code."""
        if not report.failed:
            return
        if self.answer is None:
            self.unfit.add(report.nodeid)
            print(
                f"{report.nodeid} fails on unchanged code and judges no change", file=sys.stderr, flush=True
            )
            return
        os.write(self.answer, report.nodeid.encode())
        os._exit(1)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests once, and those that a change can reach in its fork."""
        os.environ[CHANGE] = "stats"
        took, by = {}, defaultdict(list)
        for item in session.items:
            begun = time.process_time()
            _run([item])
            took[item] = time.process_time() - begun
            for name in self.reached():
                if item.nodeid not in self.unfit:
                    by[name].append(item)
        gc.collect()
        gc.freeze()
        killers: dict[str, int] = defaultdict(int)
        for change in self.changes:
            mine = by[self.place(change)]
            mine.sort(key=lambda item: (-min(killers[item.nodeid], 5), took[item]))
            missed = self._first_to_fail(change, mine, limit=int(5 * sum(map(took.__getitem__, mine))) + 10)
            killers[missed or ""] += 1
            self.told(change, missed)
        return True

    def _first_to_fail(self, change: str, items: list[pytest.Item], limit: int) -> str | None:
        """Return the test that fails first, or what else ends a fork; None without a test that could."""
        if not items:
            return None
        answer, self.answer = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if not child:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 2))
            os.environ[CHANGE] = change
            try:
                _run(items)
            except BaseException as error:  # of pytest itself, or one that ends it
                os.write(self.answer, repr(error).encode())
                os._exit(1)
            os._exit(0)
        os.close(self.answer)
        with os.fdopen(answer) as lines:
            failed = lines.read()
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return failed or (f"ended with status {code}" if code else None)


def _run(items: list[pytest.Item]) -> None:
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def try_changes(judges: Sequence[str], sources: Mapping[str, str], trial: Trial) -> None:
    """Run the tests of these judges with their modules imported from changed sources."""
    sys.meta_path.insert(0, Changed(sources))
    tests = sorted({test for judge in judges for test in JUDGES[judge]})
    code = pytest.main(["-s", "-p", "no:cacheprovider", "-p", "no:terminal", *tests], plugins=[trial])
    if code:
        sys.exit(f"pytest ended with status {code}")


def module_of(judge: str) -> str:
    """Return the module that a judge's file is imported as."""
    return "batchbound." + judge.removesuffix(".py").replace("/", ".")


def kept(refusal: str) -> bool:
    """Return whether a refusal stands, and note that a test came by it."""
    _passed.add(refusal)
    return os.environ.get(CHANGE) != refusal


def passed_since() -> set[str]:
    """Return, and forget, the refusals that tests came by."""
    passed = set(_passed)
    _passed.clear()
    return passed


_passed = set[str]()
