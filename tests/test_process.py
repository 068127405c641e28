"""Programs are fed, heard within bounds, and ended with what they have started; children answer until they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlkit import EnvError, _process
from rlkit._process import Child, ChildLost, Program
from tests.each import for_each

FORK = "import os, time\npid = os.fork()\nif not pid:\n    time.sleep(600)\nprint(pid, flush=True)\n"


def program(code, **options):
    return Program([sys.executable, "-c", code], environment=dict(os.environ), **options)


def said_by(code):
    """What another interpreter writes, which may be killed."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stdout.split()


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


def wait_for(file):
    while not file.exists():
        time.sleep(0.01)


def killed_when_heard(code, *, heard, **options):
    """How a program ended that is killed once it has come to the line UP."""
    made = program(code.replace("UP", f"open({str(heard)!r}, 'w').close()"), **options)
    ended = made.start()
    wait_for(heard)
    made.kill()
    return ended.result(60)


READS = "import sys; print(len(sys.stdin.read()), 'ä'); print('oh', file=sys.stderr)"


@for_each(
    ("code", "stdin", "expected"),
    [
        (READS, 10**6, (0, "1000000 ä\n", "oh\n")),
        ("print('no')", 10**7, (0, "no\n", "")),  # input that nobody reads
        ("raise SystemExit(3)", 0, (3, "", "")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 0, (-11, "", "")),
    ],
)
def test_it_is_fed_and_heard(code, stdin, expected):
    ended = program(code, stdin=b"x" * stdin).run()
    assert (ended.code, ended.stdout, ended.stderr) == expected


def test_of_much_output_the_end_is_kept():
    for keep in (100, 100_000):  # less and more than what is read at once
        ended = program("import sys; sys.stdout.write('x' * 10**7 + 'end')", keep=keep).run()
        assert ended.stdout == "x" * (keep - 3) + "end"


def test_what_is_in_the_pipes_when_it_has_ended(monkeypatch):
    read = _process._read
    monkeypatch.setattr(_process, "_read", lambda *args: time.sleep(0.2) or read(*args))
    ended = program("import sys; print('out'); print('err', file=sys.stderr)").run()
    assert (ended.stdout, ended.stderr) == ("out\n", "err\n")


def test_what_was_written_so_far():
    """By both outputs, while it runs; of each the end."""
    code = "import sys, time\nfor x in (sys.stderr, sys.stdout): print('x' * 99, 'up', file=x, flush=True)\n"
    made = program(f"{code}time.sleep(600)", keep=5)
    ended = made.start()
    while made.written != "x up\n\nx up\n":
        time.sleep(0.01)
    assert not ended.done()
    made.kill()
    assert ended.result(60).code == -15


def test_a_flood_is_ended(tmp_path):
    ended = killed_when_heard("UP\nwhile True: print('x' * 1000)", heard=tmp_path / "up", keep=1000)
    assert ended.code == -15
    assert len(ended.stdout) <= 1000


@pytest.mark.parametrize("waitid", [True, False])
def test_children_end_with_it(monkeypatch, waitid):
    """When it ends by itself; also where a process cannot be left waiting when it has ended."""
    if not waitid:
        monkeypatch.delattr(os, "waitid", raising=False)
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
    code = "import os, time\nleft, leaves = os.pipe()\npid = os.fork()\n"
    code += "if not pid:\n    os.setsid()\n    os.write(leaves, b'x')\n    time.sleep(600)\n"
    code += "os.read(left, 1)\nprint(pid, flush=True)\n"
    began = time.monotonic()
    ended = program(code).run()
    assert time.monotonic() - began < 60
    os.kill(int(ended.stdout), 9)


def test_one_that_is_killed_first_is_not_started(tmp_path):
    made = program(f"open({str(tmp_path / 'up')!r}, 'w')")
    made.kill()
    with pytest.raises(EnvError, match="before it started"):
        made.run()
    assert not (tmp_path / "up").exists()
    made.kill()


def test_killing_one_that_has_ended():
    made = program("pass")
    made.run()
    made.kill()
    made.kill(grace=0.0)


def test_what_cannot_be_started(tmp_path):
    command = [str(tmp_path / "nothing")]
    with pytest.raises(EnvError, match="could not be started"):
        Program(command, environment={}).run()
    with pytest.raises(EnvError, match="could not be started"):
        Program(command, environment={}).start().result(60)
    with pytest.raises(OSError, match="nothing"):
        Child(command, environment={})


LEAVES = """
import os, sys, threading, time
from rlkit import _orphans
from rlkit._process import Program
def told(path):
    while not os.path.exists(path):
        time.sleep(0.01)
code = "import os, signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\nleads = os.fork()\\n"
code += "own = sys.argv[1] + str(bool(leads))\\nopen(own + '.part', 'w').write(str(os.getpid()))\\n"
code += "os.rename(own + '.part', own)\\ntime.sleep(600)"  # so that there is no file that is not whole
code = "import sys\\n" + code
ending = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').close()", sys.argv[1] + "ended"]
made = Program([sys.executable, "-c", code, sys.argv[1]], environment=dict(os.environ))
threading.Thread(target=made.run, daemon=True).start()
told(sys.argv[1] + "True")
told(sys.argv[1] + "False")
while not _orphans._watcher._groups:
    time.sleep(0.01)
_orphans.adopt(*_orphans._watcher._groups, ending=ending)
if sys.argv[2] == "fork" and not os.fork():
    time.sleep(600)  # a child of the program holds nothing up
print(flush=True)
time.sleep(0 if sys.argv[2] == "exit" else 600)
"""


@pytest.mark.parametrize(
    ("number", "how"),
    [(0, "exit"), (signal.SIGTERM, "wait"), (signal.SIGKILL, "wait"), (signal.SIGKILL, "fork")],
)
def test_none_outlives_the_interpreter(tmp_path, number, how):
    """However it ends: nothing of a group is left that is deaf to SIGTERM, and the command to be run then is run."""
    names = tmp_path / "pid-"
    with subprocess.Popen(
        [sys.executable, "-c", LEAVES, str(names), how], stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout.readline() == b"\n"
        if number:
            parent.send_signal(number)
        assert parent.wait(60) == -number
        try:
            for which in ("True", "False"):
                assert gone(int(Path(f"{names}{which}").read_text()))
            wait_for(Path(f"{names}ended"))
        finally:
            if how == "fork":
                os.killpg(parent.pid, signal.SIGKILL)


def test_a_watcher_that_was_killed_is_replaced():
    """What it watched is watched by the next."""
    code = """
import os, signal, subprocess, sys, time
from rlkit import _orphans
left = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) for _ in "ab"]
_orphans.adopt(left[0].pid)
watcher = _orphans._watcher._process
watcher.kill()
watcher.wait()
_orphans.adopt(left[1].pid)
print(*(each.pid for each in left), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    first, second = said_by(code)
    assert gone(int(first))
    assert gone(int(second))


def test_no_descriptor_is_left_open():
    """Counted in a process of its own, where nothing of earlier tests is closed meanwhile."""
    code = """
import os, sys
from rlkit._process import Program
counts = []
for _ in range(6):
    Program([sys.executable, "-c", "print(1)"], environment=dict(os.environ)).run()
    counts.append(len(os.listdir("/proc/self/fd")))
print(*counts)
"""
    first, *others = said_by(code)  # the first run starts a watcher
    assert others == [first] * 5


ANSWERS = """
import json, os, sys
held = []
print("not an answer", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "hold" in asked:
        held.append(asked["id"])
    elif "leave" in asked:
        print("I am leaving", file=sys.stderr, flush=True)
        os._exit(3)
    else:
        for number in [asked["id"], *held]:
            print(json.dumps({"id": number, "told": asked.get("say"), "pid": os.getpid()}), flush=True)
"""


def child(code=ANSWERS):
    return Child([sys.executable, "-c", code], environment=dict(os.environ))


def answer_of(asked):
    return asked[1].result(60)


def test_a_child_answers_in_any_order():
    made = child()
    held = made.ask({"hold": True})
    assert answer_of(made.ask({"say": "1"}))["told"] == "1"
    assert answer_of(held)["told"] == "1"
    made.end()
    made.end()
    assert gone(made.pid)


def test_a_child_that_ends_tells_all_who_wait():
    """And whoever asks later."""
    made = child()
    asked = [made.ask({"hold": True}) for _ in range(3)] + [made.ask({"leave": True}), made.ask({})]
    for each in asked:
        with pytest.raises(ChildLost, match="the process has ended"):
            answer_of(each)
    with pytest.raises(ChildLost, match="I am leaving"):
        answer_of(asked[0])
    assert made.lost
    with pytest.raises(ChildLost):
        answer_of(made.ask({}))


def test_a_child_ends_with_what_refers_to_it():
    made = child()
    pid = answer_of(made.ask({}))["pid"]
    del made
    assert gone(pid)


@pytest.mark.parametrize("how", ["sys.exit()", "os.kill(os.getpid(), 9)"])
def test_a_child_ends_with_the_program(how):
    """Although it computes, and does not notice that its stdin has ended."""
    busy = "import json, sys\nasked = json.loads(sys.stdin.readline())\nprint(json.dumps(asked), flush=True)\n"
    busy += "while True: pass"
    code = f"""
import os, sys
from rlkit._process import Child
made = Child([sys.executable, "-c", {busy!r}], environment=dict(os.environ))
made.ask({{}})[1].result(60)
print(made.pid, flush=True)
{how}
"""
    (pid,) = said_by(code)
    assert gone(int(pid))


def test_a_fork_leaves_the_children_alone():
    made = child()
    pid = os.fork()
    if not pid:
        made.end()
        os._exit(0 if made.lost and made.ask({})[1].exception(60) else 1)  # and does not wait for their answers
    assert os.waitpid(pid, 0)[1] == 0
    assert answer_of(made.ask({"say": "here"}))["told"] == "here"
    made.end()
