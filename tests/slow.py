"""Which tests are slow, and why: tests/slow.txt lists them, a measurement on an idle machine writes it.

    pytest -p tests.slow                                 # writes durations.json: what each test took and did
    python -m tests.slow durations.json [--limit 0.2]     # writes slow.txt from it (--add: keeps what it lists)

A line of slow.txt is a test's id, or what several ids begin with: a file, or a test without its parameters. After ``#``
comes the reason, if it is not the time that the test takes: it starts a program or a server, it waits, or what a person
wrote there. A measurement keeps the lines whose reason a person wrote.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import socket
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow.txt")
KEPT = {  # quick at any length: without them most mutants of a file survive the quick tests, or this list is not held
    "tests/backends/test_queue.py::TestQueueHere::runTest",
    "tests/backends/test_queue.py::TestQueueOfAService::runTest",
    "tests/losses/test_oracle.py::test_losses",
    "tests/losses/test_settings.py::test_bad_settings",
    "tests/recipes/test_rows.py::test_answers",
    "tests/recipes/test_rows.py::test_one_conversation_has_one_prompt",
    "tests/test_repository.py::test_a_change_touches_the_tests_that_reach_it",
    "tests/test_repository.py::test_slow_tests_exist",
}
PROGRAM, SERVER, WAITS = "starts a program", "starts a server", "waits"
PATIENCE = 0.1  # seconds without work in which a test waits
HARMLESS = {"git", "ldconfig", "make", "uname"}  # programs that end at once
_BEGAN = pytest.StashKey[tuple[float, float]]()
_did: set[str] = set()  # what was started since the test, or the fixture, began
_fixtures: dict[tuple[str, str], set[str]] = defaultdict(set)


def read_list():
    """Return why each line of slow.txt is there, "" for the time that it takes."""
    lines = (line.partition("  # ") for line in LIST.read_text("utf-8").splitlines())
    return {test: why for test, _, why in lines}


def prefixes(nodeid):
    """Return the lines of slow.txt that cover a test: its id, the id without parameters, its file."""
    return {nodeid, without_case(nodeid), nodeid.partition("::")[0]}


def mark_slow(items):
    """Mark the tests that slow.txt lists."""
    listed = read_list().keys()
    for item in items:
        if not listed.isdisjoint(prefixes(item.nodeid)):
            item.add_marker(pytest.mark.slow)


def without_case(nodeid):
    return re.sub(r"\[.*", "", nodeid, flags=re.DOTALL)


def watch_starts():
    """Note the programs and the servers that are started from now on."""
    start, fork, listen = subprocess.Popen.__init__, os.fork, socket.socket.listen

    @functools.wraps(start)
    def started(self, args, *others, **options):
        start(self, args, *others, **options)  # what cannot be started raises here
        program = args if isinstance(args, str | os.PathLike) else args[0]
        if Path(os.fsdecode(program)).name not in HARMLESS:
            _did.add(PROGRAM)

    def forked():
        _did.add(PROGRAM)
        return fork()

    def listened(self, *backlog):
        _did.add(SERVER)
        return listen(self, *backlog)

    subprocess.Popen.__init__, os.fork, socket.socket.listen = started, forked, listened


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    outer = set(_did)
    _did.clear()
    try:
        return (yield)
    finally:
        _fixtures[fixturedef.baseid, fixturedef.argname] |= _did
        _did.update(outer)


def is_of(fixture, item):
    """Tell whether a test uses a fixture, named by where it is defined and by name."""
    place, name = fixture
    return name in getattr(item, "fixturenames", ()) and item.nodeid.startswith(place)


def _timed(item):
    item.stash[_BEGAN] = time.monotonic(), time.process_time()
    _did.clear()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    return (yield from _timed(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    return (yield from _timed(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    return (yield from _timed(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if _BEGAN in item.stash:
        shared = {each for fixture, did in _fixtures.items() if is_of(fixture, item) for each in did}
        clock, processor = item.stash[_BEGAN]
        clock, processor = time.monotonic() - clock, time.process_time() - processor
        waits = {WAITS} if report.when == "call" and clock - processor > PATIENCE else set()
        report.user_properties = [("seconds", round(clock, 3))]
        report.user_properties += [("did", each) for each in sorted(_did | shared | waits)]
    return report


class Writer:
    """Collects what the reports of every worker say, and writes it at the end."""

    def __init__(self):
        self.measured = defaultdict(dict)

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties:
            of_test = self.measured[report.nodeid]
            if name == "seconds":
                of_test[report.when] = value
            elif name == "did":
                of_test["did"] = sorted({*of_test.get("did", ()), value})

    def pytest_sessionfinish(self):
        Path(os.environ.get("RLKIT_DURATIONS", "durations.json")).write_text(
            json.dumps(self.measured, indent=0), "utf-8"
        )


def pytest_configure(config):
    watch_starts()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer())


def list_slow(measured, limit):
    """Return the lines of slow.txt, each with the reason: tests that start something or take more than ``limit``.

    Where two thirds of a test's cases, or of a file's tests, are slow, the line is the test or the file. Set-up is
    mostly that of a shared fixture, paid by the test that comes first: tests of a file with the same parameters share
    it.
    """
    shared = defaultdict(list)
    for each, parts in measured.items():
        shared[each.partition("::")[0], each.removeprefix(without_case(each))].append(parts.get("setup", 0))
    lines, names, files = {}, defaultdict(set), defaultdict(set)
    for each, parts in measured.items():
        setup = shared[each.partition("::")[0], each.removeprefix(without_case(each))]
        seconds = parts.get("call", 0) + parts.get("teardown", 0) + sum(setup) / len(setup)
        if parts.get("did") or seconds > limit:
            lines[each] = ", ".join(parts.get("did", ()))
        names[without_case(each)].add(each)
        files[each.partition("::")[0]].add(each)
    for name, cases in [*names.items(), *files.items()]:
        covered = cases & lines.keys()
        if len(covered) > 1 and 3 * len(covered) >= 2 * len(cases):
            reasons = {lines.pop(each) for each in covered}
            lines[name] = reasons.pop() if len(reasons) == 1 else ""
            files[name.partition("::")[0]] = files[name.partition("::")[0]] - cases | {name}
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=float, default=0.2, help="seconds (default: %(default)s)")
    parser.add_argument("--add", action="store_true", help="keep the lines of slow.txt: the quick tests were measured")
    options = parser.parse_args()
    measured = json.loads(options.file.read_text("utf-8"))
    before, found = read_list(), list_slow(measured, options.limit)
    own = {"", PROGRAM, SERVER, WAITS}
    kept = {test: why for test, why in before.items() if options.add or not set(why.split(", ")) <= own}
    lines = {test: why for test, why in (found | kept).items() if test not in KEPT}
    lines = {test: why for test, why in lines.items() if not (prefixes(test) - {test}) & lines.keys()}
    LIST.write_text("".join(f"{test}  # {lines[test]}".removesuffix("  # ") + "\n" for test in sorted(lines)), "utf-8")
    quick = [parts for each, parts in measured.items() if not prefixes(each) & lines.keys()]
    seconds = sum(sum(parts.get(when, 0) for when in ("setup", "call", "teardown")) for parts in quick)
    print(f"{len(measured) - len(quick)} of {len(measured)} tests are slow ({len(lines)} lines)")
    print(f"the others take {seconds:.0f} s")


if __name__ == "__main__":
    main()
