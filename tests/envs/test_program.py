"""Programs are fed, heard within bounds, and ended with what they have started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlkit import EnvError
from rlkit.envs._program import Program

FORK = "import os, time\npid = os.fork()\nif not pid:\n    time.sleep(600)\nprint(pid, flush=True)\n"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nUP\ntime.sleep(600)"


def program(code, **options):
    return Program([sys.executable, "-c", code], environment=dict(os.environ), **options)


def gone(pid):
    """Whether a process has ended, within a generous time; one that nobody has waited for has ended, too."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def killed_when_heard(code, *, heard, **options):
    """How a program ended that is killed once it has come to the line UP."""
    made = program(code.replace("UP", f"open({str(heard)!r}, 'w').close()"), **options)
    ends = []
    thread = threading.Thread(target=lambda: ends.append(made.run()))
    thread.start()
    while not heard.exists():
        time.sleep(0.01)
    made.kill()
    thread.join(60)
    assert not thread.is_alive()
    return ends[0]


def test_it_is_fed_and_heard():
    ended = program(
        "import sys; t = sys.stdin.read(); print(len(t), 'ä'); print('oh', file=sys.stderr)", stdin=b"x" * 10**6
    ).run()
    assert (ended.code, ended.stdout, ended.stderr) == (0, "1000000 ä\n", "oh\n")


def test_exit_codes():
    assert program("raise SystemExit(3)").run().code == 3
    assert program("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").run().code == -11


def test_input_that_nobody_reads():
    assert program("print('no')", stdin=b"x" * 10**7).run().stdout == "no\n"


def test_of_much_output_the_end_is_kept():
    ended = program("import sys; sys.stdout.write('x' * 10**7 + 'end')", most=100).run()
    assert ended.stdout == "x" * 97 + "end"


def test_a_flood_is_ended(tmp_path):
    ended = killed_when_heard("UP\nwhile True: print('x' * 1000)", heard=tmp_path / "up", most=1000)
    assert ended.code == -15
    assert len(ended.stdout) <= 1000


def test_one_that_does_not_hear_sigterm(tmp_path):
    ended = killed_when_heard(DEAF, heard=tmp_path / "up", grace=0.2)
    assert ended.code == -9


def test_children_end_with_it():
    """When it ends by itself."""
    ended = program(FORK).run()
    assert ended.code == 0
    assert gone(int(ended.stdout))


def test_children_are_killed_with_it(tmp_path):
    """One that does not hear SIGTERM, too."""
    children = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\npid = os.fork()\n"
    children += "if pid:\n    print(pid, flush=True)\n    UP\ntime.sleep(600)"
    ended = killed_when_heard(children, heard=tmp_path / "up", grace=0.3)
    assert ended.code == -9
    assert gone(int(ended.stdout))


def test_a_child_that_leaves_the_group_holds_nothing_up():
    """Its end of the pipe stays open; a second later nobody waits for it."""
    code = (
        "import os, time\npid = os.fork()\nif not pid:\n    os.setsid()\n    time.sleep(600)\nprint(pid, flush=True)\n"
    )
    began = time.monotonic()
    ended = program(code).run()
    assert time.monotonic() - began < 60
    os.kill(int(ended.stdout), 9)


def test_one_that_is_killed_first_is_not_started(tmp_path):
    made = program(f"open({str(tmp_path / 'up')!r}, 'w')")
    made.kill()
    with pytest.raises(EnvError, match="before it began"):
        made.run()
    assert not (tmp_path / "up").exists()
    made.kill()


def test_killing_one_that_has_ended():
    made = program("pass")
    made.run()
    made.kill()
    made.kill(grace=0.0)


def test_one_that_cannot_be_started(tmp_path):
    with pytest.raises(EnvError, match="cannot be started"):
        Program([str(tmp_path / "nothing")], environment={}).run()


def test_without_the_system_s_help(monkeypatch):
    """Where a process cannot be waited for by a descriptor, it is looked at now and then."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    ended = program(FORK).run()
    assert ended.code == 0
    assert gone(int(ended.stdout))


def test_none_outlives_the_interpreter():
    """The threads that watch them end with it."""
    code = """
import os, sys, threading, time
from rlkit.envs._program import Program
made = Program([sys.executable, "-c", "import time; time.sleep(600)"], environment=dict(os.environ))
threading.Thread(target=made.run, daemon=True).start()
while made._process is None:
    time.sleep(0.01)
print(made._process.pid)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert gone(int(said))


def test_no_descriptor_is_left_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        program("print(1)").run()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
