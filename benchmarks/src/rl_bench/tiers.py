"""Plugin of pytest for every test of the workspace: the environment, hypothesis, and the `core` tier."""

import asyncio
import atexit
import functools
import gc
import importlib.metadata
import multiprocessing.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Under `uv run`, Ray would copy the working directory and start every worker with `uv run` anew. It reads this when it
# is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# Workers of a parallel run share the cores: with a thread per core each, they would wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's job in the background ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("workspace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("workspace")

# Registries ask for entry points at each name, and each time a file of every installed distribution is read: 20 ms.
_read_entry_points = importlib.metadata.entry_points


@functools.cache
def _entry_points_on(_: tuple[str, ...], **wanted: str) -> Any:
    return _read_entry_points(**wanted)


def _entry_points(**wanted: str) -> Any:
    return _entry_points_on(tuple(sys.path), **wanted)


importlib.metadata.entry_points = _entry_points

OTHER_TIERS = frozenset(["process", "slow", "integration", "wheels", "gpu", "real"])
_MARKS_OF_FILE = re.compile(r"^pytestmark = .*(?:\n[ \])].*)*", re.MULTILINE)
_WHOLE_FILE = re.compile(rf"\bmark\.({'|'.join(OTHER_TIERS)})\b")
_PROBES = ("uname", "fc-list")
"""Programs of which `platform` and, once on a machine, matplotlib's cache of fonts ask."""
MAX_SLEEP_S = 0.2
"""Seconds that a `core` test may sleep altogether: enough to poll a condition, too little to wait for time to pass."""
MAX_WALKED = 30_000
"""Objects that the collection before each file may walk over, some 8 ms."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Keep the tests of a file on one worker of `-n`, unless `--dist` says otherwise: what they share is made once."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out of `pytest -m core` the files that are of another tier as a whole: importing them takes seconds."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != "core" or not is_test:
        return None
    marks = _MARKS_OF_FILE.search(collection_path.read_text())
    return True if marks and _WHOLE_FILE.search(marks[0]) else None


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Leave functions of other tiers out of `pytest -m core` before their cases are made."""
    marks = getattr(obj, "pytestmark", None)
    is_core = collector.config.option.markexpr == "core"
    is_left_out = is_core and isinstance(marks, list) and any(mark.name in OTHER_TIERS for mark in marks)
    return [] if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give `core` to every test with the mark of no other tier; files that start processes come first.

    The conftests of packages, which pytest calls first, mark what uses a fixture that starts processes. Files of quick
    tests come last, so that the workers of a parallel run end together.
    """
    slow_files: set[str] = set()
    for item in items:
        if OTHER_TIERS.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker("core")
        else:
            slow_files.add(_file_of(item))
    items.sort(key=lambda item: _file_of(item) not in slow_files)


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Costs:
    """Processes that were started and seconds slept, counted since the last `reset`."""

    def __init__(self) -> None:
        self.processes: list[str] = []
        self.slept_s = 0.0

    def reset(self) -> None:
        """Forget what was counted."""
        self.processes.clear()
        self.slept_s = 0.0

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Count one event of `sys.addaudithook`."""
        if event in {"subprocess.Popen", "os.fork", "os.posix_spawn"} and arguments[0] not in _PROBES:
            self.processes.append(f"{event} {arguments[:2]}"[:200])
        elif event == "time.sleep":
            self.slept_s += float(arguments[0])  # type: ignore[arg-type]

    def watch(self) -> None:
        """Count from now on. Audit hooks cannot be removed, hence in runs of this tier alone."""
        sys.addaudithook(self.audit)
        spawn, sleep = multiprocessing.util.spawnv_passfds, asyncio.sleep

        def counted_spawn(path: bytes, *rest: Any) -> int:
            self.processes.append(f"multiprocessing {path!r}")
            return spawn(path, *rest)

        async def counted_sleep(delay: float, *rest: object) -> object:
            answer = await sleep(delay, *rest)
            self.slept_s += max(0.0, delay)  # where nobody cancelled it
            return answer

        multiprocessing.util.spawnv_passfds = counted_spawn
        asyncio.sleep = counted_sleep


COSTS = Costs()


def pytest_collection_finish() -> None:
    """Forget what imports started."""
    COSTS.reset()


def pytest_configure(config: pytest.Config) -> None:
    """Watch the tests of `pytest -m core`, and keep collections short."""
    config.pluginmanager.register(Collector())
    if config.option.markexpr == "core":
        COSTS.watch()


class Collector:
    """Garbage collection between files of tests: a collection walks over the objects of one file alone.

    The modules and tests of a worker are some two million objects, over which each `gc.collect()` of a test, and each
    full collection that Python starts by itself, would walk. What a file leaves behind is collected at its end. While
    tests are collected there is hardly any garbage, and looking for it is a sixth of the time. What is frozen is never
    collected, also where it dies later: between files only large imports are frozen.
    """

    def __init__(self) -> None:
        self._file = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Leave garbage alone until all tests are known."""
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()
            atexit.register(gc.unfreeze)  # at the interpreter's end, compiled modules count what is not freed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Collect where a new file begins."""
        if self._file != (file := _file_of(item)):
            self._file = file
            gc.collect()
            if len(gc.get_objects(generation=2)) > MAX_WALKED:
                gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a `core` test that started a process or slept, its fixtures included: it belongs to `process`."""
    report = yield
    if call.when == "teardown" and report.passed and (COSTS.processes or COSTS.slept_s > MAX_SLEEP_S):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} started {COSTS.processes or 'no process'} and slept {COSTS.slept_s:.2f} s: mark it "
            "`process`, or have it do without"
        )
    if call.when == "teardown":
        COSTS.reset()
    return report
