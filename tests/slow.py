"""Which tests are slow: tests/slow.txt lists them, a measurement writes it.

    pytest -p tests.slow                                  # writes durations.json: the seconds of each test
    python -m tests.slow durations.json [--limit 0.25]     # writes slow.txt from it (--add: keeps what it lists)

A line of slow.txt is a test's id, or what several ids begin with: a file, or a test without its parameters. Seconds
are processor time of the test's process and of the children that it waited for, or a fifth of the wall-clock time where
that is more, so that a loaded machine gives nearly the list that an idle one gives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import time
from collections import defaultdict
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow.txt")
KEPT = {  # quick at any length: without them most mutants of a file survive the quick tests
    "tests/backends/test_queue.py::TestQueueHere::runTest",
    "tests/backends/test_queue.py::TestQueueOfAService::runTest",
}
_STARTED = pytest.StashKey()


def prefixes(nodeid):
    """Return the lines of slow.txt that cover a test: its id, the id without parameters, its file."""
    return {nodeid, without_case(nodeid), nodeid.partition("::")[0]}


def mark_slow(items):
    """Mark the tests that slow.txt lists."""
    listed = frozenset(LIST.read_text("utf-8").splitlines())
    for item in items:
        if not listed.isdisjoint(prefixes(item.nodeid)):
            item.add_marker(pytest.mark.slow)


def _used():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime, time.monotonic()


def _timed(item, when):
    item.stash.setdefault(_STARTED, {})[when] = _used()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    return (yield from _timed(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    return (yield from _timed(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    return (yield from _timed(item, "teardown"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if before := item.stash.get(_STARTED, {}).get(call.when):
        processor, clock = (now - then for now, then in zip(_used(), before, strict=True))
        report.user_properties = [("seconds", round(max(processor, clock / 5), 3))]
    return report


class Writer:
    """Collects what the reports of every worker say, and writes it at the end."""

    def __init__(self):
        self.seconds = defaultdict(dict)

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties:
            if name == "seconds":
                self.seconds[report.nodeid][report.when] = value

    def pytest_sessionfinish(self):
        Path(os.environ.get("RLKIT_DURATIONS", "durations.json")).write_text(
            json.dumps(self.seconds, indent=0), "utf-8"
        )


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer())


def without_case(nodeid):
    return re.sub(r"\[.*", "", nodeid, flags=re.DOTALL)


def list_slow(seconds, limit):
    """Return the lines of slow.txt: tests that take more than ``limit``, or a test or a file where two thirds of it do.

    Set-up is mostly that of a shared fixture, paid by the test that comes first: the tests of a file that have the same
    parameters share it. A file whose fixtures take 20 seconds is slow as a whole.
    """
    shared = defaultdict(list)
    for each, parts in seconds.items():
        shared[each.partition("::")[0], each.removeprefix(without_case(each))].append(parts.get("setup", 0))
    lines, names, files = set(), defaultdict(set), defaultdict(set)
    for each, parts in seconds.items():
        setup = shared[each.partition("::")[0], each.removeprefix(without_case(each))]
        if parts.get("call", 0) + parts.get("teardown", 0) + sum(setup) / len(setup) > limit:
            lines.add(each)
        names[without_case(each)].add(each)
        files[each.partition("::")[0]].add(each)
    heavy = {file for file, members in files.items() if sum(seconds[each].get("setup", 0) for each in members) > 20}
    for name, cases in [*names.items(), *files.items()]:
        if 3 * len(cases & lines) >= 2 * len(cases) or name in heavy:
            lines = lines - cases | {name}
            files[name.partition("::")[0]] -= cases
            files[name.partition("::")[0]] |= {name}
    return sorted(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=float, default=0.25, help="seconds (default: 0.25)")
    parser.add_argument("--add", action="store_true", help="keep the lines of slow.txt: the quick tests were measured")
    options = parser.parse_args()
    seconds = json.loads(options.file.read_text("utf-8"))
    lines = list_slow(seconds, options.limit)
    if options.add:
        lines = sorted({*lines, *LIST.read_text("utf-8").splitlines()})
    lines = [each for each in lines if each not in KEPT]
    LIST.write_text("".join(f"{each}\n" for each in lines), "utf-8")
    listed = set(lines)
    quick = [sum(parts.values()) for each, parts in seconds.items() if not prefixes(each) & listed]
    print(f"{len(seconds) - len(quick)} of {len(seconds)} tests are slow ({len(lines)} lines)")
    print(f"the others take {sum(quick):.0f} s")


if __name__ == "__main__":
    main()
