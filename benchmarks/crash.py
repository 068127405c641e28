"""Kills, full disks and damage, at every point of saving a run: what is lost.

    python benchmarks/crash.py [--stride 1] [--signals 100]

A child process does one step of a run on the toy backend and saves it; ``strace`` (from the package of that name)
kills it, or fails its system call with ENOSPC or EIO, at the n-th call that writes, for every n, at the first save of a
run and when an older checkpoint is there. After each, the run is opened: its newest checkpoint has to be the old one or
the new one, whole. Then SIGINT and SIGTERM at random points of a longer run. The table goes to the screen, the counts
to benchmarks/results/crash.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

CHILD = """
import sys, rlkit
from rlkit.runs import Run, Retention
with Run(sys.argv[1], seed=0, trackers=("jsonl",), retention=Retention(last=1), grace=2.0) as run:
    policy = run.connect("toy")
    kept = run.keep("kept", {"steps": 0})
    data = [rlkit.Datum([65, 66, 67], [0, 1, 1])]
    open(sys.argv[3], "w").close()
    for step in run.steps(int(sys.argv[2])):
        loss = policy.forward_backward(data, "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
        kept["steps"] += 1
        run.log({"train/loss": loss.result().metrics["loss:sum"]})
        run.checkpoint(policy)
"""
WRITES = (
    "openat,write,pwrite64,fsync,fdatasync,rename,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir,chmod,fchmod,ftruncate"
)


def child(folder: Path, steps: int, trace: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    mark = folder.parent / "ready"
    command = [*(trace or []), sys.executable, "-c", CHILD, str(folder), str(steps), str(mark)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def opened(folder: Path, allowed: set[int]) -> str:
    """What a run finds: "ok", or what is wrong."""
    import rlkit
    from rlkit.runs import Run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Run(folder, trackers=()) as run:
                policy = run.connect("toy")
                kept = run.keep("kept", {"steps": 0})
                if run.step not in allowed:
                    return f"step {run.step}"
                if kept["steps"] != run.step or policy.version != run.step:
                    return f"mixed: step {run.step}, kept {kept['steps']}, policy {policy.version}"
                run.checkpoint(policy)
                hidden = [p.name for p in folder.rglob(".*")]
                return f"litter: {hidden}" if hidden else "ok"
        except rlkit.RlkitError as error:
            return f"{type(error).__name__}: {error}"


def points(base: Path | None, steps: int) -> list[tuple[str, int]]:
    """(system call, which one) of the writing calls under the run's folder."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "run"
        if base is not None:
            shutil.copytree(base, folder)
        log = Path(where) / "log"
        child(folder, steps, ["strace", "-f", "-y", "-o", str(log), "-e", f"trace={WRITES}"])
        found: list[tuple[str, int]] = []
        counts: collections.Counter[str] = collections.Counter()
        for line in log.read_text(errors="replace").splitlines():
            match = re.match(r"\d+ +(\w+)\(", line)
            if match is None:
                continue
            counts[match[1]] += 1
            if str(folder) in line:
                found.append((match[1], counts[match[1]]))
        return found


def injected(base: Path | None, steps: int, call: str, number: int, what: str, allowed: set[int]) -> str:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "run"
        if base is not None:
            shutil.copytree(base, folder)
        fault = "signal=SIGKILL" if what == "SIGKILL" else f"error={what}"
        child(folder, steps, ["strace", "-f", "-o", "/dev/null", "-e", f"inject={call}:{fault}:when={number}"])
        return opened(folder, allowed)


def interrupted(rng: random.Random, number: int) -> str:
    """A signal at a random moment of a run of many steps."""
    with tempfile.TemporaryDirectory() as where:
        folder, mark = Path(where) / "run", Path(where) / "ready"
        command = [sys.executable, "-c", CHILD, str(folder), "100000", str(mark)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not mark.exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.5))
        process.send_signal(number)
        try:
            code = process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return "did not exit within 5 s"
        if code not in (130, 143, -signal.SIGINT, -signal.SIGTERM, 1):
            return f"exit status {code}"
        return opened(folder, set(range(100001)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="try every so many calls only")
    parser.add_argument("--signals", type=int, default=100)
    args = parser.parse_args()
    results: dict[str, dict[str, int]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as where:
        older = Path(where) / "run"
        child(older, 1)
        for title, base, steps, allowed in (("first save", None, 1, {0, 1}), ("over an older one", older, 2, {1, 2})):
            found = points(base, steps)[:: args.stride]
            for what in ("SIGKILL", "ENOSPC", "EIO"):
                row = results.setdefault(f"{what}, {title}", {"points": 0, "lost": 0})
                for call, number in found:
                    state = injected(base, steps, call, number, what, allowed)
                    row["points"] += 1
                    if state != "ok":
                        row["lost"] += 1
                        wrong.append(f"{what} at {call} {number}, {title}: {state}")
                print(f"{what:8} {title:20} {row['points']:5} points {row['lost']:3} lost", flush=True)
    rng = random.Random(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        row = results.setdefault(number.name, {"points": 0, "lost": 0})
        for _ in range(args.signals // 2):
            state = interrupted(rng, number)
            row["points"] += 1
            if state != "ok":
                row["lost"] += 1
                wrong.append(f"{number.name}: {state}")
        print(f"{number.name:8} {'':20} {row['points']:5} points {row['lost']:3} lost", flush=True)
    print(*wrong, sep="\n")
    path = Path(__file__).parent / "results" / "crash.json"
    path.write_text(json.dumps({"stride": args.stride, "results": results, "wrong": wrong}, indent=1) + "\n")


if __name__ == "__main__":
    main()
