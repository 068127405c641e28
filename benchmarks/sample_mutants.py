"""Draw a few mutants for each of twelve packages and record which test kills each one.

    python benchmarks/sample_mutants.py --out all.json                       # every package, all of its tests
    python benchmarks/sample_mutants.py losses credit --out quick.json -- -m "not slow"
    python benchmarks/sample_mutants.py --compare all.json quick.json

``mutants.py`` examines one package in depth, with its tests collected once. This program asks a smaller question of any
selection of tests: which of the same mutants does it kill? Everything after ``--`` goes to pytest. The working tree is
copied, and one file of the copy is changed at a time, so that programs started by tests see the change too. pytest runs
in a fork that has already imported torch, stops at the first failure and is ended at ``--limit`` seconds: a mutant is
"killed", "survived" or has "no verdict". Before the first mutant of a package its tests must pass unchanged, or run out
of time. ``--again FILE`` tries the mutants of an earlier result instead of drawing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
from mutations import ROOT, Mutant, changed_source, mutants

LOCAL = "backends/local"
PACKAGES = {  # what is changed in rlkit/, and its tests in tests/
    "advantages": (["advantages"], ["advantages"]),
    "corrections": (["corrections.py"], ["test_corrections.py"]),
    "credit": (["credit.py"], ["test_credit.py"]),
    "losses": (["losses"], ["losses"]),
    "queue": (["backends/trainer.py"], ["backends/test_queue.py", "backends/test_worker.py"]),
    "runs": (["runs"], ["runs"]),
    "trajectory": (["trajectory"], ["test_trajectory.py", "rollouts/test_alignment.py", "test_credit.py"]),
    "types": (["types.py"], ["test_types.py", "test_shapes.py", "test_storage.py", "backends/test_toy.py"]),
    "rollouts": (["rollouts"], ["rollouts"]),
    "gateway": (["gateway"], ["gateway"]),
    "local-sampling": ([f"{LOCAL}/sampling"], [f"{LOCAL}/sampling", f"{LOCAL}/test_sampling_engine.py"]),
    "local-training": ([f"{LOCAL}/training"], [f"{LOCAL}/training"]),
}
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
IDENTITY = ("path", "kind", "owner", "before", "after")


class FirstFailure:
    """Write the name of the first test that fails to a file."""

    def __init__(self, page: Path) -> None:
        self.page = page

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.page.exists():
            self.page.write_text(report.nodeid)

    pytest_runtest_logreport = _write
    pytest_collectreport = _write


def copy_tree() -> Path:
    """Copy the files that git tracks or would track, and return the copy's folder."""
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def run_tests(copy: Path, arguments: list[str], limit: float) -> dict[str, Any]:
    """Run pytest in a fork and a process group of its own; return the verdict, the killer and the seconds."""
    page = copy / "first-failure"
    page.unlink(missing_ok=True)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with (copy / "output").open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            code = int(pytest.main([*OPTIONS, *arguments], plugins=[FirstFailure(page)]))
        except BaseException:  # noqa: BLE001 - the fork must not go on as this program
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = None
    try:
        while status is None and time.monotonic() - start < limit:
            time.sleep(0.1)
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with what its tests started
    if status is None:
        os.waitpid(child, 0)
    killer = page.read_text() if page.exists() else ""
    if status == 0:
        verdict = "survived"
    else:
        verdict = "killed" if killer or status is not None else "no verdict"
    return {"verdict": verdict, "by": killer, "seconds": round(time.monotonic() - start, 1)}


def try_mutant(copy: Path, mutant: Mutant, tests: list[str], limit: float) -> dict[str, Any]:
    """Change one file of the copy, run the tests, and put the file back."""
    path = copy / mutant.path
    usual = path.read_bytes()
    compiled = Path(importlib.util.cache_from_source(str(path)))  # may be as old and as long as the changed file
    compiled.unlink(missing_ok=True)
    path.write_bytes(changed_source(mutant))
    likely = [test for test in (mutant.path, *mirrors(mutant.path)) if (copy / test).exists()]
    try:
        return run_tests(copy, [*likely, *tests], limit)
    finally:
        path.write_bytes(usual)
        compiled.unlink(missing_ok=True)


def mirrors(path: str) -> list[str]:
    """Return the test file that mirrors a file of rlkit, which is likely to notice first."""
    inside = Path(path).relative_to("rlkit")
    return [str(Path("tests") / inside.parent / f"test_{inside.stem}.py")]


def draw(name: str, count: int, seed: int, earlier: list[dict[str, Any]] | None) -> list[Mutant]:
    """Draw mutants of a package, or find those of an earlier result in the files of today."""
    sources = [ROOT / "rlkit" / source for source in PACKAGES[name][0]]
    files = sorted(path for source in sources for path in (source.rglob("*.py") if source.is_dir() else [source]))
    found = [mutant for path in files for mutant in mutants(path)]
    if earlier is None:
        return random.Random(f"{seed} {name}").sample(found, min(count, len(found)))
    chosen = []
    for wanted in [each for each in earlier if each["package"] == name]:
        alike = [m for m in found if all(getattr(m, field) == wanted[field] for field in IDENTITY)]
        if not alike:
            print(f"{name}: {wanted['path']}: {wanted['before']} -> {wanted['after']} no longer has a place")
        else:
            chosen.append(min(alike, key=lambda m: abs(m.line - wanted["line"])))
    return chosen


def compare(first: Path, second: Path) -> str:
    """Return what the second result kills of the first's kills, a line for each package and each mutant lost."""
    results = [json.loads(page.read_text()) for page in (first, second)]
    verdicts = {tuple(each[field] for field in (*IDENTITY, "line")): each for each in results[1]}
    lines, killed, kept = [], Counter[str](), Counter[str]()
    for each in results[0]:
        other = verdicts.get(tuple(each[field] for field in (*IDENTITY, "line")))
        if each["verdict"] != "killed" or other is None:
            continue
        killed[each["package"]] += 1
        kept[each["package"]] += other["verdict"] == "killed"
        if other["verdict"] != "killed":
            lines.append(f"{each['path']}:{each['line']}: {each['before']} -> {each['after']}: {other['verdict']}")
    lines += [f"{package}: {kept[package]} of {number}" for package, number in killed.items()]
    return "\n".join([*lines, f"all: {kept.total()} of {killed.total()}"])


def main() -> None:
    """Run what the command line asks for."""
    given, selection = sys.argv[1:], []
    if "--" in given:
        given, selection = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(PACKAGES)}; all by default")
    parser.add_argument("--out", type=Path, help="the results; lines of packages that are run again are replaced")
    parser.add_argument("--count", type=int, default=8, help="mutants for each package")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each run of the tests")
    parser.add_argument("--again", type=Path, help="try the mutants of this result")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="print which kills the second has lost")
    options = parser.parse_args(given)
    options.out = options.out and options.out.absolute()
    options.again = options.again and options.again.absolute()
    if options.compare:
        print(compare(*options.compare))
        return
    if options.out is None or not set(options.packages) <= PACKAGES.keys():
        parser.error(f"give --out FILE, and packages of {', '.join(PACKAGES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it started, and removes the copy
    copy = copy_tree()
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(copy))
    for name in ("torch", "transformers", "hypothesis.strategies"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)  # once for all forks
    try:
        for package in options.packages or PACKAGES:
            run_package(copy, package, selection, options)
    finally:
        shutil.rmtree(copy)


def run_package(copy: Path, package: str, selection: list[str], options: argparse.Namespace) -> None:
    """Try the mutants of one package and write each verdict as soon as it is known."""
    earlier = json.loads(options.again.read_text()) if options.again else None
    tests = [*(f"tests/{test}" for test in PACKAGES[package][1]), *selection]
    results = json.loads(options.out.read_text()) if options.out.exists() else []
    results = [each for each in results if each["package"] != package]
    control = run_tests(copy, tests, options.limit)
    print(f"{package}: unchanged: {control['verdict']} {control['by']} {control['seconds']} s", flush=True)
    if control["verdict"] == "killed":
        print((copy / "output").read_text()[-3000:])
        sys.exit(f"the tests of {package} fail without a mutant")
    for mutant in draw(package, options.count, options.seed, earlier):
        found = try_mutant(copy, mutant, tests, options.limit)
        results.append({"package": package, **attrs.asdict(mutant), **found})
        options.out.write_text("[\n" + ",\n".join(json.dumps(each) for each in results) + "\n]\n")
        change = f"{mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}"
        print(f"{change}: {found['verdict']} {found['by']} {found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
