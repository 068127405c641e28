"""Several processes and one folder."""

from __future__ import annotations

import subprocess
import sys
import warnings

from rlkit.runs import records
from rlkit.storage import TornLine, read

WRITERS, LINES, TURNS = 8, 20, 2
PROGRAM = f"""
import sys, time, rlkit
from pathlib import Path
from rlkit.runs import Run, Retention
from rlkit.storage import append
from rlkit.trajectory import Group

for _ in range({LINES}):
    append(Path(sys.argv[1]) / "groups.jsonl", [Group([], number=int(sys.argv[2]), env="e" * 10_000)])
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


def test_eight_processes_and_one_folder(tmp_path):
    """A reader sees whole checkpoints only, once there is one always one, never an older one, and whole lines."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(WRITERS)]
    newest, looks, path = 0, 0, tmp_path / "groups.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(process.poll() is None for process in processes):
            found = records(tmp_path)
            assert found or not newest
            assert all(record.kept["count"] == {"n": record.step} for record in found)
            if found:
                assert found[-1].step >= newest
                newest, looks = found[-1].step, looks + 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TornLine)  # the last line may be half there
                assert all(group.env == "e" * 10_000 for group in (read(path) if path.exists() else ()))
        assert sorted(group.number for group in read(path)) == sorted(list(range(WRITERS)) * LINES)
    assert [process.communicate(timeout=120)[1] for process in processes] == [""] * WRITERS
    assert not any(process.returncode for process in processes)
    assert looks > 3
    assert [record.step for record in records(tmp_path)] == [WRITERS * TURNS * 2]
