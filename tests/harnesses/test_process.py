"""A program of somebody else's is shown, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlkit.errors import EnvError, EnvTimeout
from rlkit.harnesses import _running

SPAWNS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".partial", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".partial", sys.argv[1])
"""
HANGS = SPAWNS + "time.sleep(600)"
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + HANGS


def run(program, tmp_path, *arguments, deadline=60.0):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    _running.run("fake", command, environment=os.environ, log=tmp_path / "output.log", deadline=deadline)


def until(holds, seconds=30.0):
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)


def gone(path):
    """Whether the processes that the file names have ended, asked for their status or not."""

    def ended(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
        except FileNotFoundError:
            return True

    return all(ended(pid) for pid in path.read_text().split())


def test_output_is_shown_and_kept(tmp_path, capsys):
    """Both streams, as they come; what is no text does not stop it."""
    program = r"import sys; print('out', flush=True); sys.stderr.write('50%\r'); sys.stdout.buffer.write(b'\xff.')"
    run(program, tmp_path)
    assert (tmp_path / "output.log").read_bytes() in (b"out\n50%\r\xff.", b"out\n\xff.50%\r")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "out\n" in captured.err
    assert "\N{REPLACEMENT CHARACTER}" in captured.err


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('first'); print('no such task'); print(); raise SystemExit(3)", "status 3: no such task"),
        ("raise SystemExit(1)", "status 1: no output"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_failures_say_what_it_said_last(tmp_path, program, words):
    with pytest.raises(EnvError, match=words):
        run(program, tmp_path)


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(EnvError, match="cannot be started"):
        _running.run("fake", [str(tmp_path / "no")], environment={}, log=tmp_path / "output.log", deadline=1.0)


@pytest.mark.parametrize("program", [HANGS, IGNORES])
def test_the_deadline_ends_the_whole_group(tmp_path, program, monkeypatch):
    """Also one that does not listen to SIGTERM."""
    monkeypatch.setattr(_running, "_GRACE", 0.3)
    pids = tmp_path / "pids"
    with pytest.raises(EnvTimeout, match="did not end within 3 s"):
        run(program, tmp_path, pids, deadline=3.0)
    until(lambda: gone(pids))


def test_what_it_leaves_behind_is_ended(tmp_path):
    """A program that ends while what it started goes on: nothing waits for that."""
    pids = tmp_path / "pids"
    run(SPAWNS, tmp_path, pids)
    until(lambda: gone(pids))


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_end_it(tmp_path, number, raised):
    pids, before = tmp_path / "pids", signal.getsignal(signal.SIGTERM)

    def send():
        until(pids.exists)
        signal.pthread_kill(threading.main_thread().ident, number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(raised):
        run(HANGS, tmp_path, pids)
    sender.join()
    until(lambda: gone(pids))
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread(tmp_path):
    """Where no signal arrives."""
    thread = threading.Thread(target=run, args=("print(1)", tmp_path))
    thread.start()
    thread.join(60)
    assert (tmp_path / "output.log").read_text() == "1\n"


def test_a_terminal_that_is_gone(tmp_path):
    """The program goes on where nobody reads standard error any more."""
    program = f"""
import os, sys
from pathlib import Path
from rlkit.harnesses import _running
log = Path({str(tmp_path / "log")!r})
_running.run("fake", [sys.executable, "-c", "print('all')"], environment=os.environ, log=log, deadline=60.0)
"""
    reading, writing = os.pipe()
    os.close(reading)
    assert subprocess.run([sys.executable, "-c", program], stderr=writing, check=False).returncode == 0
    os.close(writing)
    assert (tmp_path / "log").read_text() == "all\n"
