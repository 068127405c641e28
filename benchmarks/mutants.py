"""Mutation testing: small changes to a package of rlkit, one at a time, and whether its tests notice.

    python benchmarks/mutants.py advantages --sample 300 [--seed 0]
    python benchmarks/mutants.py advantages --again    # those that survived, after new tests
    python benchmarks/mutants.py --table               # what the results say, a line for each target

A mutant is one change to the syntax tree of one file; no file is written. The tests are collected once. For a mutant
inside a function the process forks, gives the living functions the changed code, and runs those tests that call it,
the quickest first, until one fails; decorators do not matter. For a mutant outside functions the fork runs the changed
file and takes over its defaults, marks and constants; for one among the fields of a class it imports everything anew.
Before the first mutant every file is put in its own place in these ways, and all tests have to pass.
The changes are those of the usual tools: comparisons, arithmetic, boolean operators, negations, numbers, True and
False, statements left out, and pairs of functions such as minimum and maximum; and those that people make: an argument
left out of a call, one local name for another that is like it, a ``.detach()`` forgotten, an index, a mask or an end of
a slice replaced by its neighbour. Texts, annotations and docstrings are left alone. Survivors go to the screen,
everything to benchmarks/results/mutants-TARGET.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeAlias

import attrs
import hypothesis
import numpy as np  # noqa: F401 - imported before the first fork, since it takes long
import pytest
import torch
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item
from mutations import ROOT, Mutant, codes, compiled, mutants

RESULTS = Path(__file__).parent / "results"
LIMIT = 60  # seconds of processor time for a mutant; what takes longer never ends
LOCAL = [
    f"rlkit/backends/local/{name}.py"
    for name in ("model/output_head", "products/linear", "training/micro_batches", "attention/tree")
]
SETTINGS, TYPES, SHAPES, DEFAULTS, CRITIC = (
    f"tests/test_{name}.py" for name in ("settings_matter", "types", "shapes", "defaults", "critic")
)
ARRAYS = [DEFAULTS, SETTINGS, TYPES, SHAPES]
QUEUE, WORKER, OPENING, TOY, STOPS, SHOWN, REFERENCE, DRAWING = (
    f"tests/backends/test_{name}.py"
    for name in ("queue", "worker", "opening", "toy", "stops", "shown", "reference", "drawing")
)
POLICIES = [TOY, STOPS, SHOWN, REFERENCE, CRITIC]
QUICK = "-mnot slow"  # an option of pytest among the tests: only those that tests/slow.txt does not list
RUN_COMMANDS = ["tests/runs/test_commands.py", "tests/runs/test_eval.py"]
TARGETS = {  # the files; the tests that are likely to notice a changed default; all tests
    "advantages": (
        ["rlkit/_rows.py", "rlkit/advantages/*.py"],
        ["tests/advantages/test_inputs.py", "tests/advantages/test_oracle.py"],
        ["tests/advantages", *ARRAYS],
    ),
    "losses": (
        ["rlkit/losses/*.py"],
        ["tests/losses/test_settings.py", "tests/losses/test_golden.py"],
        ["tests/losses", SETTINGS, TYPES, SHAPES],
    ),
    **{
        name: (
            [f"rlkit/{name}.py", f"rlkit/{name}/*.py"],
            [f"tests/test_{name}.py", DEFAULTS],
            [f"tests/test_{name}.py", *ARRAYS],
        )
        for name in ("corrections", "metrics", "filters", "rewards", "schedules")
    },
    "types": (["rlkit/types.py"], [TYPES], [TYPES, SHAPES]),
    "registry": (["rlkit/registry.py"], ["tests/test_registry.py"], ["tests/test_registry.py", OPENING]),
    "credit": (["rlkit/credit.py"], ["tests/test_credit.py"], ["tests/test_credit.py", CRITIC, TYPES, SHAPES]),
    "trainer": (["rlkit/backends/trainer.py"], [QUEUE, WORKER], [QUEUE, WORKER, OPENING, *POLICIES]),
    "drawing": (["rlkit/backends/_drawing.py"], [DRAWING], [DRAWING]),
    "toy": (["rlkit/backends/toy.py"], [TOY], POLICIES),
    "trajectory": (
        ["rlkit/trajectory.py"],
        ["tests/test_trajectory.py"],
        ["tests/test_trajectory.py", "tests/rollouts/test_alignment.py", "tests/test_credit.py"],
    ),
    "local": (
        LOCAL,
        ["tests/backends/local/training/test_micro_batches.py"],
        ["tests/backends/local/training/test_micro_batches.py", "tests/backends/local/gemm/test_linear.py"],
    ),
    "routes": (
        ["rlkit/backends/tinker/_losses.py"],
        ["tests/backends/tinker/test_routes.py"],
        ["tests/backends/tinker/test_routes.py"],
    ),
    "recipes": (["rlkit/recipes/*.py"], ["tests/recipes/test_settings.py", QUICK], ["tests/recipes", QUICK]),
    "runs": (
        ["rlkit/runs/*.py", "rlkit/_files.py", "rlkit/storage.py"],
        ["tests/runs/test_kept.py", "tests/test_storage.py", QUICK],
        ["tests/runs", "tests/test_storage.py", "tests/tracking/test_jsonl.py", QUICK],
    ),
    "tracking": (
        ["rlkit/tracking/*.py", "rlkit/report/page.py", "rlkit/_secrets.py"],
        ["tests/tracking/test_console.py", "tests/test_secrets.py", QUICK],
        ["tests/tracking", "tests/report", "tests/test_secrets.py", QUICK],
    ),
    "commands": (
        ["rlkit/cli.py", "rlkit/config.py", "rlkit/_doctor.py", "rlkit/evaluation.py"],
        ["tests/test_cli.py", "tests/test_config.py", QUICK],
        [*(f"tests/test_{name}.py" for name in ("cli", "config", "doctor", "evaluation")), *RUN_COMMANDS, QUICK],
    ),
}
ROOM = [TARGETS[name] for name in ("recipes", "runs", "tracking", "commands")]
TARGETS["programs"] = tuple(
    [*dict.fromkeys(name for part in parts for name in part)] for parts in zip(*ROOM, strict=True)
)
OPTIONS = ["-qs", "-pno:cacheprovider", "-otimeout=0", "-Wignore::pytest.PytestAssertRewriteWarning"]
CONSTANTS = (int, float, str, tuple, dict, frozenset)
Key: TypeAlias = tuple[str, str, int]
Calls: TypeAlias = dict[Key, list[tuple[float, pytest.Item]]]


def key(code: CodeType) -> Key:
    """What tells a function's code from all others."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def in_fork(job: Callable[[], bool], limit: int = LIMIT) -> str:
    """What becomes of a mutant: ``job`` says in a process of its own whether the tests pass."""
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, limit)
        signal.setitimer(signal.ITIMER_REAL, 5 * limit)  # what waits for ever takes no processor time
        resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        passed = False
        try:
            passed = job()
        finally:
            os._exit(0 if passed else 1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM) else "crash"
    return "survived" if os.WEXITSTATUS(status) == 0 else "killed"


def taken_over(mutant: Mutant, living: Mapping[Key, list[FunctionType]]) -> set[Key]:
    """Run the changed file, give its defaults, marks and constants to what lives, and say which functions differ."""
    module = next(m for m in sys.modules.values() if getattr(m, "__file__", None) == str(ROOT / mutant.path))
    registries = [x for x in gc.get_objects() if type(x).__name__ == "Registry"]
    before = [dict(x) for x in registries]
    for registry in registries:
        registry.clear()  # so that the same names can be registered again
    fresh = {"__name__": module.__name__, "__file__": module.__file__, "__package__": module.__package__}
    FunctionType(compiled(mutant), fresh)()
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        dict.update(registry, entries)
    spaces = [fresh, *(vars(x) for x in fresh.values() if isinstance(x, type) and x.__module__ == module.__name__)]
    differ: set[Key] = set()
    for name, new in [pair for space in spaces for pair in space.items()]:
        new = inspect.unwrap(getattr(new, "__func__", new))  # of class methods; wrappers share their code
        if type(new) is FunctionType:
            for old in living.get(key(new.__code__), []):
                for part in ("__defaults__", "__kwdefaults__", "__dict__"):
                    if repr(getattr(old, part)) != repr(getattr(new, part)):
                        setattr(old, part, getattr(new, part))
                        differ.add(key(new.__code__))
        elif type(new) in CONSTANTS and not name.startswith("__") and getattr(module, name, new) != new:
            for other in [m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("rlkit")]:
                if getattr(other, name, None) is getattr(module, name) and other is not module:
                    setattr(other, name, new)
            setattr(module, name, new)
            differ |= {k for k in living if k[0] == module.__file__}
    return differ


def imported_anew(mutant: Mutant, tests: list[str]) -> bool:
    """Whether the tests pass where the changed file is what is imported."""
    code, path, usual = compiled(mutant), str(ROOT / mutant.path), SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: (  # type: ignore[method-assign]
        code if self.get_filename(name) == path else usual(self, name)
    )
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rlkit", "tests")]:
        del sys.modules[name]
    parts = Path(mutant.path).with_suffix("").parts
    importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))  # pytest would read the file
    return pytest.main([*tests, *OPTIONS, "-x"]) == 0


def ran(item: pytest.Item) -> list[pytest.TestReport]:
    """Run a test under the filters of warnings that its marks ask for."""
    with catch_warnings_for_item(config=item.config, ihook=item.ihook, when="runtest", item=item):
        return runtestprotocol(item, log=False, nextitem=None)


def traced(items: list[pytest.Item], record: Path) -> bool:
    """Whether all tests pass; what each took and called goes to a file."""
    found = []
    for item in items:
        seen: set[CodeType] = set()

        def trace(frame: FrameType, _event: str, _arg: Any, seen: set[CodeType] = seen) -> None:
            seen.add(frame.f_code)  # None is returned: no line by line

        sys.settrace(trace)
        threading.settrace(trace)  # the workers of backends
        start = time.perf_counter()
        reports = ran(item)
        sys.settrace(None)
        threading.settrace(None)
        if any(r.failed for r in reports):
            return False
        inside = [key(code) for code in seen if code.co_filename.startswith(str(ROOT))]
        found.append((time.perf_counter() - start, inside))
    record.write_text(json.dumps(found))
    return True


def quiet(items: list[pytest.Item]) -> bool:
    """Whether all of these tests pass; the first that fails ends it."""
    return not any(r.failed for item in items for r in ran(item))


class Loop:
    """A pytest plugin that runs the collected tests once, and then some of them for each mutant."""

    def __init__(self, work: list[Mutant], first: list[str], report: Callable[[Mutant, str], None]) -> None:
        self.work, self.first, self.report = work, first, report

    @staticmethod
    def outside(
        mutant: Mutant, living: Mapping[Key, list[FunctionType]], calls: Calls, sooner: list[pytest.Item]
    ) -> bool:
        """Whether the tests pass with a change outside all functions."""
        differ = taken_over(mutant, living)
        callers = {item: seconds for k in differ for seconds, item in calls.get(k, [])}
        return quiet([*sooner, *sorted(callers, key=callers.__getitem__)])

    def control(self, living: Mapping[Key, list[FunctionType]]) -> bool:
        """Change everything to what it is already, as the mutants change it."""
        for path in {mutant.path for mutant in self.work}:
            same = attrs.evolve(self.work[0], path=path, place=-1)
            taken_over(same, living)
            for code in codes(compiled(same)):
                for function in living.get(key(code), []):
                    function.__code__ = code
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Stands in for pytest's own loop."""
        record = Path(tempfile.mkdtemp()) / "calls.json"
        if in_fork(lambda: traced(session.items, record), limit=600) != "survived":
            pytest.exit("the tests do not pass without any mutant", 3)
        calls: Calls = {}
        for item, (seconds, seen) in zip(session.items, json.loads(record.read_text()), strict=True):
            for k in seen:
                calls.setdefault(tuple(k), []).append((seconds, item))
        living: dict[Key, list[FunctionType]] = {}
        for thing in gc.get_objects():
            if type(thing) is FunctionType:  # isinstance would ask proxies, some of which warn
                living.setdefault(key(thing.__code__), []).append(thing)
        if in_fork(lambda: self.control(living) and quiet(session.items), limit=600) != "survived":
            pytest.exit("the tests do not pass where every file takes its own place", 3)
        sooner = [item for item in session.items if item.nodeid.partition("::")[0] in self.first]
        for mutant in self.work:
            if not mutant.owner:
                self.report(mutant, in_fork(partial(self.outside, mutant, living, calls, sooner)))
                continue
            named = [code for code in codes(compiled(mutant)) if code.co_qualname == mutant.owner]  # overloads, too
            code = max((code for code in named if code.co_firstlineno <= mutant.line), key=lambda c: c.co_firstlineno)
            fresh = {key(inner): inner for inner in codes(code)}  # closures that live already change too
            callers = {item: seconds for k in fresh for seconds, item in calls.get(k, [])}
            items = sorted(callers, key=callers.__getitem__)

            def passes(fresh: Any = fresh, items: Any = items) -> bool:
                for k, code in fresh.items():
                    for function in living.get(k, []):
                        function.__code__ = code
                return quiet(items)

            self.report(mutant, in_fork(passes) if items else "survived")
        return True


def table() -> str:
    """The checked-in results: how many mutants of each target were tried, and how many were killed, by kind."""
    lines = ["| target | mutants | tried | killed | operators | slips | survivors |", "|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        page = RESULTS / f"mutants-{target}.json"
        if not page.exists():
            continue
        found = json.loads(page.read_text())
        share = {}
        for title, of in (("all", None), ("operators", True), ("slips", False)):
            some = [m for m in found["mutants"] if of is None or (m["kind"] == "operator") is of]
            dead = sum(m["verdict"] != "survived" for m in some)
            share[title] = f"{dead} of {len(some)} ({100 * dead / max(1, len(some)):.1f} %)"
        alive = sum(m["verdict"] == "survived" for m in found["mutants"])
        parts = (found["of"], len(found["mutants"]), share["all"], share["operators"], share["slips"], alive)
        lines.append(f"| {target} | {' | '.join(map(str, parts))} |")
    return "\n".join(lines)


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("--table", action="store_true", help="print what the results say, and run nothing")
    parser.add_argument("--sample", type=int, help="how many mutants; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="only those that survived the last time")
    options = parser.parse_args()
    if options.table or options.target is None:
        print(table())
        return
    os.chdir(ROOT)
    torch.set_num_threads(1)
    quick = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # one failure is enough, however long
    hypothesis.settings.register_profile("mutants", phases=quick, derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    sys.dont_write_bytecode = True
    patterns, first, tests = TARGETS[options.target]
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    tests = [*tests, *(str(path.relative_to(ROOT)) for path in files)]
    found = [m for path in files for m in mutants(path)]
    total = len(found)
    page = RESULTS / f"mutants-{options.target}.json"
    page.parent.mkdir(exist_ok=True)
    results: list[dict[str, Any]] = []
    if options.again:
        results = json.loads(page.read_text())["mutants"]
        wanted = [r for r in results if r["verdict"] == "survived"]
        found = [m for m in found if any(attrs.asdict(m).items() <= r.items() for r in wanted)]
        results = [r for r in results if r["verdict"] != "survived"]
    elif options.sample is not None and options.sample < total:
        found = random.Random(options.seed).sample(found, options.sample)

    def report(mutant: Mutant, verdict: str) -> None:
        results.append({**attrs.asdict(mutant), "verdict": verdict})
        lines = ",\n".join(json.dumps(result) for result in results)
        page.write_text(f'{{"of": {total}, "seed": {options.seed}, "mutants": [\n{lines}\n]}}\n')
        if verdict == "survived":
            print(f"{mutant.path}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)

    temporary = tempfile.gettempdir()
    code = pytest.main([*tests, *OPTIONS], plugins=[Loop([m for m in found if m.owner != "class"], first, report)])
    tempfile.tempdir = os.environ["TMPDIR"] = temporary  # the folder that tests/conftest.py made is gone
    unchanged = attrs.evolve(found[0], place=-1)
    if in_fork(lambda: imported_anew(unchanged, first)) != "survived":
        sys.exit("the tests do not pass without any mutant")
    for mutant in [m for m in found if m.owner == "class"]:
        verdict = in_fork(lambda mutant=mutant: imported_anew(mutant, first))  # type: ignore[misc]
        if verdict == "survived":
            verdict = in_fork(lambda mutant=mutant: imported_anew(mutant, tests), limit=600)  # type: ignore[misc]
        report(mutant, verdict)
    verdicts = Counter(result["verdict"] for result in results)
    print(f"exit {code}; {len(results)} of {total} mutants: {dict(verdicts)}")


if __name__ == "__main__":
    main()
