"""Kills, full disks and interruptions, at every point of saving a run: what is lost.

    python benchmarks/crash.py [--backend toy] [--stride 1] [--signals 100]

``strace`` (from the package of that name) kills a process, or fails its system calls with ENOSPC or EIO, at each system
call in turn: of each thread, from before a step is logged until its checkpoint is there, as the run's first and over an
older one; and while a run is opened, new and after a step that has to be done again. Errors come once or from there on.
After each, the run is opened by another process: its newest checkpoint has to be the old one or the new one, whole (the
new one, if saving it did not fail), it has to take a step, and nothing may lie about. What fails has to fail with an
error of rlkit's, and where the error came once, the next save of the same process has to succeed.

Then SIGINT, SIGTERM and cancellations of an asynchronous loop, at random points of runs whose steps last up to a
minute: they have to end within 5 s, leave no process behind, and a checkpoint that is whole.

The table goes to the screen, the counts to benchmarks/results/crash-BACKEND.json, in place of those that are there.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import collections
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlkit
from rlkit.runs import Retention, Run, records
from rlkit.tracking import read_metrics

DATA = [rlkit.Datum([5, 6, 7], [0, 1, 1])]
# Calls that ask no disk, or from which a process does not come back.
NO_DISK = (
    "futex|mmap|munmap|mremap|mprotect|madvise|brk|rt_.*|getrandom|exit|exit_group|sched_.*|clock_.*|gettid|getpid"
)
SAVED, REFUSED, REFUSED_AGAIN, UNTYPED = 0, 3, 4, 5  # exit statuses
FAULTS = {
    "SIGKILL": "signal=SIGKILL:when={}",
    "ENOSPC once": "error=ENOSPC:when={}",
    "ENOSPC from there on": "error=ENOSPC:when={}+",
    "EIO once": "error=EIO:when={}",
    "EIO from there on": "error=EIO:when={}+",
}
OPTIONS: dict[str, Any] = {"name": "toy"}


def step(run: Run, policy: Any, kept: dict[str, int]) -> float:
    """One step, but for what is saved of it."""
    loss = policy.forward_backward(DATA, "cross_entropy")
    policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
    kept["steps"] = run.step + 1
    return loss.result().metrics["loss:sum"]


def saving(folder: Path, ready: Callable[[], None]) -> int:
    """Takes the next step and saves it; calls ``ready`` before what is saved. The exit status."""
    with Run(folder, seed=0, trackers=("jsonl",), retention=Retention(last=1)) as run:
        policy = run.connect(**OPTIONS)
        kept = run.keep("kept", {"steps": 0})
        for _ in run.steps(run.step + 1):
            loss = step(run, policy, kept)
            ready()
            run.log({"train/loss": loss})
            try:
                run.checkpoint(policy)
            except rlkit.RlkitError:
                try:
                    run.checkpoint(policy)
                except rlkit.RlkitError:
                    return REFUSED_AGAIN
                return REFUSED
            return SAVED
    return UNTYPED


def opening(folder: Path, ready: Callable[[], None]) -> int:
    """Opens a run, calling ``ready`` before."""
    ready()
    try:
        Run(folder, seed=0, trackers=("jsonl",))
    except rlkit.RlkitError:
        return REFUSED
    return SAVED


class Child:
    """A fork of this process, which has everything imported, that waits where ``work`` calls ``ready``."""

    def __init__(self, work: Callable[[Path, Callable[[], None]], int], folder: Path) -> None:
        told, tell = os.pipe()
        wait, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)

            def ready() -> None:
                others = [t.native_id for t in threading.enumerate() if t is not threading.main_thread()]
                os.write(tell, json.dumps([os.getpid(), *others]).encode())
                os.readv(wait, [bytearray(1)])  # a call that nothing else makes

            status = UNTYPED
            try:
                warnings.simplefilter("ignore")
                sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
                status = work(folder, ready)
            except BaseException as error:  # noqa: BLE001
                where = traceback.extract_tb(error.__traceback__)[-1]
                os.write(tell, f"{error!r} at {where.filename}:{where.lineno}".encode())
            os._exit(status)
        os.close(wait)
        os.close(tell)
        text = os.read(told, 1000).decode()
        assert text.startswith("["), text
        self.threads = json.loads(text)
        self._told = told

    def go(self) -> tuple[int, str]:
        """Lets it go on; its exit status, or minus the signal that ended it, and the error that it did not foresee."""
        os.write(self._go, b"x")
        os.close(self._go)
        stop = threading.Timer(60.0, os.kill, [self.pid, signal.SIGABRT])
        stop.start()
        _, status = os.waitpid(self.pid, 0)
        stop.cancel()
        with os.fdopen(self._told) as told:
            return os.waitstatus_to_exitcode(status), told.read()


def traced(child: Child, thread: int, *options: str) -> tuple[int, str, str]:
    """Lets the child go on with one of its threads under strace; see ``Child.go``, and what strace wrote."""
    with tempfile.NamedTemporaryFile("r") as log:
        command = ["strace", "-y", "-o", log.name, *options, "-p", str(child.threads[thread])]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert "attached" in strace.stderr.readline()
        ended = child.go()
        strace.communicate(timeout=60)
        return *ended, Path(log.name).read_text(errors="replace")


def copied(base: Path | None, where: str) -> Path:
    folder = Path(where) / "run"
    if base is not None:
        shutil.copytree(base, folder)
    return folder


def points(work: Any, base: Path | None, thread: int) -> list[tuple[str, int]]:
    """(system call, which one of its name in the thread)."""
    with tempfile.TemporaryDirectory() as where:
        status, error, log = traced(Child(work, copied(base, where)), thread)
    assert status == SAVED, error
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for line in log.splitlines():
        match = re.match(r"(\w+)\(", line)
        if match:
            counts[match[1]] += 1
            if match[1] not in ("readv", "exit", "exit_group"):
                found.append((match[1], counts[match[1]]))
    return found


def injected(work: Any, base: Path | None, thread: int, point: tuple[str, int], what: str) -> str | None:
    """ "ok", what is wrong, or None where the process never came to that point."""
    with tempfile.TemporaryDirectory() as where:
        folder = copied(base, where)
        fault = f"inject={point[0]}:{FAULTS[what].format(point[1])}"
        status, error, log = traced(Child(work, folder), thread, "-e", f"trace={point[0]}", "-e", fault)
        if status != -signal.SIGKILL if what == "SIGKILL" else "(INJECTED)" not in log:
            return None
        if status == UNTYPED or (status < 0 and what != "SIGKILL"):
            return f"exit status {status}: {error}"
        if status == REFUSED_AGAIN and what.endswith("once"):
            return "the next save was refused too"
        old = 0 if base is None else 1
        allowed = {old, old + 1} if work is saving else {old}
        if work is saving and (status == SAVED or (status == REFUSED and what.endswith("once"))):
            allowed = {old + 1}
        return forked(opened, folder, allowed, what == "SIGKILL" or work is opening)


def forked(function: Callable[..., str], *arguments: Any) -> str:
    """What ``function`` returns in a process of its own."""
    with tempfile.NamedTemporaryFile("r") as file:
        pid = os.fork()
        if pid == 0:
            try:
                text = function(*arguments)
            except BaseException as error:  # noqa: BLE001
                text = f"{type(error).__name__}: {error}"
            Path(file.name).write_text(text)
            os._exit(0)
        os.waitpid(pid, 0)
        return file.read()


def opened(folder: Path, allowed: set[int], every_row: bool) -> str:
    """What a run finds: "ok", or what is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Run(folder, trackers=("jsonl",), retention=Retention(last=1)) as run:
            policy = run.connect(**OPTIONS)
            kept = run.keep("kept", {"steps": 0})
            if run.step not in allowed:
                return f"lost: step {run.step}, expected one of {min(allowed)} to {max(allowed)}"
            if kept["steps"] != run.step or policy.version != run.step:
                return f"mixed: step {run.step}, kept {kept['steps']}, policy {policy.version}"
            rows = [row["step"] for row in read_metrics(folder)]
            if rows != list(range(run.step)) and (every_row or len(set(rows)) < len(rows)):
                return f"metrics of the steps {rows[-5:]}, going on with step {run.step}"
            for _ in run.steps(run.step + 1):
                step(run, policy, kept)
                run.checkpoint(policy)
            left = records(folder)
            used = {Path(record.policy("policy")) for record in left}
            litter = [str(p) for p in folder.rglob("*") if p.name.startswith(".")]
            litter += [str(p) for p in (folder / "policies").iterdir() if p not in used]
            if [record.step for record in left] != [run.step] or litter:
                return f"litter: {litter}, checkpoints {len(left)}"
    return "ok"


def long_run(folder: Path, ready: Path, rng: random.Random, how: str) -> None:
    """Steps without end, some of them hang; one run in five asks for answers of another process."""
    from rlkit.answers import math_equal

    asks = rng.random() < 0.2

    def finish(run: Run, policy: Any) -> None:
        if asks:
            math_equal(f"x+{run.step}", f"{run.step}+x")
        run.checkpoint(policy)
        ready.touch()

    def plain() -> None:
        with Run(folder, seed=0, trackers=("jsonl",), retention=Retention(last=1)) as run:
            policy = run.connect(**OPTIONS)
            kept = run.keep("kept", {"steps": 0})
            for _ in run.steps(100_000):
                run.log({"train/loss": step(run, policy, kept)})
                if run.step and rng.random() < 0.05:  # a step that hangs
                    rng.choice((time.sleep, threading.Event().wait))(60.0)
                finish(run, policy)

    async def awaiting() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, asyncio.current_task().cancel)
        with Run(folder, seed=0, trackers=("jsonl",), retention=Retention(last=1)) as run:
            policy = run.connect(**OPTIONS)
            kept = run.keep("kept", {"steps": 0})
            for _ in run.steps(100_000):
                loss = policy.forward_backward(DATA, "cross_entropy")
                await policy.optim_step(rlkit.Adam(learning_rate=0.01))
                kept["steps"] = run.step + 1
                run.log({"train/loss": (await loss).metrics["loss:sum"]})
                if run.step and rng.random() < 0.05:
                    await asyncio.sleep(60.0)
                finish(run, policy)

    asyncio.run(awaiting()) if how == "cancellation" else plain()


def as_a_program(function: Callable[[], None]) -> int:
    """A fork that ends as a program would: its threads joined, what is registered for the end called; its id."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        atexit._clear()  # noqa: SLF001  # what this process has registered, such as its temporary folders
        status = 0
        try:
            warnings.simplefilter("ignore")
            function()
        except SystemExit as error:
            status = int(error.code)
        except KeyboardInterrupt:
            status = 130
        except asyncio.CancelledError:
            status = 1
        except BaseException:  # noqa: BLE001
            status = UNTYPED
        threading._shutdown()  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001
        os._exit(status)
    return pid


def interrupted(rng: random.Random, how: str) -> str:
    """A signal at a random moment of a long run: "ok", or what is wrong."""
    number = signal.SIGUSR1 if how == "cancellation" else signal.Signals[how]
    expected = {"SIGINT": (130,), "SIGTERM": (143, 130), "cancellation": (1,)}[how]  # 130: the step was abandoned
    with tempfile.TemporaryDirectory() as where:
        folder, ready = Path(where) / "run", Path(where) / "ready"
        pid = as_a_program(lambda: long_run(folder, ready, rng, how))
        while not ready.exists():
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 1.0))
        os.kill(pid, number)
        found, again = (0, 0), time.monotonic() + 2.0
        end = again + 5.0
        while found[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
            if time.monotonic() > again and how != "cancellation":  # a step that hangs needs a second one
                os.kill(pid, number)
                again = end
            found = os.waitpid(pid, os.WNOHANG)
        if found[0] == 0:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "did not end within 5 s of the second signal"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
            return "left a process behind"
        code = os.waitstatus_to_exitcode(found[1])
        return forked(opened, folder, set(range(1, 100_001)), False) if code in expected else f"exit status {code}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("toy", "local"), default="toy", help="local: a small one, made up")
    parser.add_argument("--stride", type=int, default=1, help="tries every so many calls only; 0: none")
    parser.add_argument("--offset", type=int, default=0, help="beginning with which")
    parser.add_argument("--signals", type=int, default=100, help="of SIGINT and SIGTERM together; half as many others")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        measured(args, Path(where))


def measured(args: argparse.Namespace, where: Path) -> None:
    for name in ("rlkit.backends.toy", "rlkit.losses", "rlkit.losses.prepare", "rlkit.tracking.console"):
        importlib.import_module(name)
    if args.backend == "local":
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.models.build import build

        for name in ("rlkit.backends.local", "rlkit.backends.local.training.trainer", "transformers", "peft"):
            importlib.import_module(name)
        OPTIONS.update(name="local", model=str(build("llama", where / "model")), lora=rlkit.Lora(rank=2))
    results: dict[str, dict[str, Any]] = {}

    def count(title: str, states: Any) -> None:
        row = results[title] = {"points": 0, "not reached": 0, "wrong": []}
        for point, state in states:
            row["not reached" if state is None else "points"] += 1
            if state not in ("ok", None):
                row["wrong"].append(f"{point}: {state}")
        print(f"{title:70} {row['points']:4} points {len(row['wrong']):3} wrong", *row["wrong"], sep="\n  ", flush=True)

    older, again = where / "older", where / "again"
    Child(saving, older).go()
    shutil.copytree(older, again)
    with Run(again, seed=0, trackers=()) as run:
        run.log({"train/loss": 1.0}, step=1)
    places = [
        ("first save", saving, None, 0),
        ("first save, backend's thread", saving, None, 1),
        ("save over an older one", saving, older, 0),
        ("save over an older one, backend's thread", saving, older, 1),
        ("new run opened", opening, None, 0),
        ("run opened after a cut", opening, again, 0),
    ]
    for title, work, base, thread in places if args.stride else ():
        every = points(work, base, thread)
        for what in FAULTS:
            tried = [p for p in every if what == "SIGKILL" or not re.fullmatch(NO_DISK, p[0])]
            tried = tried[args.offset :: args.stride]
            count(f"{title}: {what}", ((p, injected(work, base, thread, p, what)) for p in tried))
    rng = random.Random(0)
    for how in ("SIGINT", "SIGTERM", "cancellation") if args.signals else ():
        count(how, ((i, interrupted(rng, how)) for i in range(args.signals // 2)))
    path = Path(__file__).parent / "results" / f"crash-{args.backend}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
