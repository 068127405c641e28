"""Several processes and one folder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings

from rlkit.runs import records
from rlkit.storage import TornLine, read

WRITERS, TURNS = 8, 2
TAKES_TURNS = f"""
import sys, time, rlkit
from rlkit.runs import Run, Retention
done = 0
while done < {TURNS}:
    try:
        run = Run(sys.argv[1], seed=0, trackers=(), retention=Retention(last=1))
    except rlkit.ConfigError as error:
        assert "in use" in str(error), error
        time.sleep(0.02)
        continue
    with run:
        policy = run.connect("toy")
        count = run.keep("count", {{"n": 0}})
        for _ in run.steps(run.step + 2):
            count["n"] += 1
            run.checkpoint(policy)
        done += 1
"""
ALL_AT_ONCE = f"""
import sys
from pathlib import Path
from rlkit.storage import append
from rlkit.trajectory import Group
for k in range({TURNS} * 5):
    append(Path(sys.argv[1]) / "groups.jsonl", [Group([], number=int(sys.argv[2]), env="e" * 10_000)])
"""


@contextlib.contextmanager
def writers(code, folder):
    command = [sys.executable, "-W", "error", "-c", code, str(folder)]
    processes = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(WRITERS)]
    try:
        yield processes
    finally:
        told = [process.communicate(timeout=120)[1] for process in processes]
    assert told == [""] * WRITERS
    assert not any(process.returncode for process in processes)


def test_a_run_that_eight_take_turns_at(tmp_path):
    """A reader sees whole checkpoints only, once there is one always one, and never an older one than before."""
    newest, looks = 0, 0
    with writers(TAKES_TURNS, tmp_path) as processes, warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(process.poll() is None for process in processes):
            found = records(tmp_path)
            if newest:
                assert found
            for record in found:
                assert record.kept["count"] == {"n": record.step}
            if found:
                assert found[-1].step >= newest
                newest, looks = found[-1].step, looks + 1
    assert looks > 3
    assert [record.step for record in records(tmp_path)] == [WRITERS * TURNS * 2]


def test_eight_writers_side_by_side(tmp_path):
    looks = 0
    with writers(ALL_AT_ONCE, tmp_path) as processes:
        while True:
            last = all(process.poll() is not None for process in processes)
            with warnings.catch_warnings():
                warnings.simplefilter("error" if last else "ignore", TornLine)  # the last line may be half there
                groups = list(read(tmp_path / "groups.jsonl")) if (tmp_path / "groups.jsonl").exists() else []
            assert all(group.env == "e" * 10_000 for group in groups)
            looks += 1
            if last:
                break
    assert looks > 3
    assert sorted(group.number for group in groups) == sorted(list(range(WRITERS)) * TURNS * 5)
