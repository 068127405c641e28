"""Runs on file systems that lack something: locks, syncing, owners."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from rlkit import _files
from rlkit.runs import Run, lock, records

UNKNOWN = ["EINVAL", "ENOTSUP", "EOPNOTSUPP", "ENOSYS"]
DATA = [rlkit.Datum([65, 66, 67], [0, 1, 1])]


def some_steps(folder, steps=2):
    with Run(folder, seed=0, trackers=("jsonl",)) as run:
        policy = run.connect("toy")
        for _ in run.steps(steps):
            run.log({"a": 1.0})
            run.checkpoint(policy)
    return [record.step for record in records(folder)]


def failing(monkeypatch, name, code, *, folders=True, files=True):
    """``os.<name>`` fails with that error, for folders, for files or both."""
    whole = getattr(os, name)

    def refused(descriptor):
        folder = os.path.isdir(f"/proc/self/fd/{descriptor}")  # noqa: PTH112
        if folders if folder else files:
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        return whole(descriptor)

    monkeypatch.setattr(os, name, refused)


@pytest.mark.parametrize("code", UNKNOWN)
def test_no_syncing_of_folders(tmp_path, monkeypatch, code):
    """Nothing is said: such systems write names at once."""
    failing(monkeypatch, "fsync", code, files=False)
    assert some_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("code", UNKNOWN)
def test_no_syncing_at_all(tmp_path, monkeypatch, code):
    """It is said once for each file system."""
    failing(monkeypatch, "fsync", code)
    monkeypatch.setattr(_files, "_warned", set())
    with pytest.warns(RuntimeWarning, match="cannot sync") as said:
        assert some_steps(tmp_path) == [1, 2]
    assert len(said) == 1


@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EDQUOT"])
def test_syncing_that_fails_is_no_small_matter(tmp_path, monkeypatch, code):
    some_steps(tmp_path)
    failing(monkeypatch, "fsync", code)
    with pytest.raises(rlkit.CheckpointError):
        some_steps(tmp_path, 3)
    monkeypatch.undo()
    assert some_steps(tmp_path, 3) == [2, 3]


@pytest.mark.parametrize("code", ["EPERM", "ENOTSUP", "ENOSYS"])
def test_no_owners(tmp_path, monkeypatch, code):
    def refused(*_, **__):
        raise OSError(getattr(errno, code), "no owners here")

    monkeypatch.setattr(Path, "chmod", refused)
    assert some_steps(tmp_path) == [1, 2]


class TestLocks:
    @pytest.fixture(autouse=True, params=["ENOLCK", "ENOTSUP", "ENOSYS", "windows"])
    def _none(self, request, monkeypatch):
        if request.param == "windows":
            monkeypatch.setattr(lock, "fcntl", None)
            return

        class Fcntl:
            LOCK_EX = LOCK_NB = 0

            @staticmethod
            def flock(*_):
                raise OSError(getattr(errno, request.param), "no locks here")

        monkeypatch.setattr(lock, "fcntl", Fcntl)

    def test_a_file_stands_for_one(self, tmp_path):
        """There while the run is open, gone after; another process is refused meanwhile."""
        with pytest.warns(RuntimeWarning, match="lock.held replaces the lock"):
            run = Run(tmp_path, seed=0, trackers=())
        with run:
            assert (tmp_path / "lock.held").exists()
            code = f"from rlkit.runs import lock, Run; lock.fcntl = None; Run({str(tmp_path)!r}, trackers=())"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert f"in use by process {os.getpid()} on {socket.gethostname()}" in done.stderr
        assert not (tmp_path / "lock.held").exists()
        with pytest.warns(RuntimeWarning, match="replaces the lock"):
            assert some_steps(tmp_path) == [1, 2]

    def test_of_a_process_that_is_gone(self, tmp_path):
        """Killed on this machine, even with this one's number: its file is no lock any more."""
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        for pid in (ended.pid, os.getpid()):
            (tmp_path / "lock.held").write_text(f"{socket.gethostname()} {pid} abc")
            with pytest.warns(RuntimeWarning, match="replaces the lock"), Run(tmp_path, seed=0, trackers=()):
                pass
        assert sorted(p.name for p in tmp_path.iterdir() if "lock" in p.name) in (["lock"], [])

    @pytest.mark.parametrize("text", ["elsewhere 1 abc", f"{socket.gethostname()} 1 abc", "", "garbage \x00\ud7ff"])
    def test_of_one_that_may_go_on(self, tmp_path, text):
        """On another machine, alive, or unknown: refused, and the message says which file to remove."""
        (tmp_path / "lock.held").write_text(text)
        with pytest.raises(rlkit.ConfigError, match="If that process has ended, remove .*lock.held"):
            Run(tmp_path, trackers=())
        assert (tmp_path / "lock.held").read_text() == text


def test_the_package_imports_without_locks():
    """As on Windows."""
    code = "import sys; sys.modules['fcntl'] = None; import rlkit, rlkit.runs; print(rlkit.runs.lock.fcntl)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
