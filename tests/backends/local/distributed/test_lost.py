"""Ranks that die, hang or fail; each story is a program of its own, since its ranks are gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("peft")
from rlkit.backends.local.distributed.launch import PROGRAM

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")

BEGIN = """
import os, signal, sys, time
import rlkit
from rlkit.backends.local.distributed import Processes
from tests.backends.local.distributed.test_lost import ranks_of
from tests.backends.local.distributed.test_training import rows

model, folder = sys.argv[1:]
data = rows([3, 60, 9, 5, 33])
step = rlkit.Adam(learning_rate=0.01)

def connect(**options):
    options = {"model": model, "device": "cpu", "folder": folder, "processes": 2, **options}
    return rlkit.connect("local", **options)

def train(policy, loss="cross_entropy"):
    policy.forward_backward(data, loss).result()
    return policy.optim_step(step).result()

def lost(call):
    began = time.monotonic()
    try:
        call()
    except rlkit.RankLost as error:
        return str(error), time.monotonic() - began
    raise AssertionError("nobody noticed")
"""

STORIES = {
    "killed in the middle of a call": """
def kills(logprobs):
    for pid in ranks_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    return -logprobs.sum()

policy = connect(lora=rlkit.Lora(rank=2), seed=0)
train(policy)
saved = policy.save("good").result()
frozen = policy.sampler().result()
base = policy.base_sampler().result()
calls = []

def later(logprobs):
    calls.append(1)
    return kills(logprobs) if len(calls) > 2 else -logprobs.sum()

failing, behind = policy.forward_backward(data, later), policy.optim_step(step)
why, seconds = lost(failing.result)
assert "rank 1" in why and "SIGKILL" in why and "resume_from" in why, why
assert seconds < 60, seconds
for call in (behind.result,
             lambda: policy.forward(data).result(),
             lambda: policy.forward_backward(data, "cross_entropy").result(),
             lambda: policy.optim_step(step).result(),  # not that there is no gradient
             lambda: policy.sampler().result(),
             lambda: policy.live_sampler().result(),
             lambda: base.sample([5], rlkit.SamplingParams(max_tokens=2)).result(),
             lambda: frozen.sample([5], rlkit.SamplingParams(max_tokens=2)).result()):
    again, _ = lost(call)
    assert "SIGKILL" in again, again
policy.discard().result()
lost(lambda: policy.optim_step(step).result())
again = policy.save("still").result()  # rank 0 has all of the state
policy.close()

resumed = connect(resume_from=saved)
assert resumed.version == 1
train(resumed)
same = rlkit.connect("local", resume_from=again, device="cpu", processes=1)
assert same.version == 1

sampler = resumed.sampler().result()  # and now while both sample
futures = [sampler.sample([5, k], rlkit.SamplingParams(max_tokens=120, stop=()), n=64) for k in range(6)]
for pid in ranks_of(os.getpid()):
    os.kill(pid, signal.SIGKILL)
lost(lambda: [future.result() for future in futures])
""",
    "a loss takes longer than ranks may be silent": """
import threading

policy = connect(lora=rlkit.Lora(rank=2), seed=0, processes=Processes(2, deadline=5.0))
train(policy)

def slow(logprobs):
    time.sleep(0.6)
    return -logprobs.sum()

many = rows([9] * 20)
began = time.monotonic()
policy.forward_backward(many, slow).result()
assert time.monotonic() - began > 10  # all of it on rank 0, while the other waits
policy.optim_step(step).result()

asked, release, calls = threading.Event(), threading.Event(), []

def hangs(logprobs):
    calls.append(1)
    if len(calls) > 1:  # the first was to try it out
        asked.set()
        release.wait(60)
    return -logprobs.sum()

future = policy.forward_backward(many, hangs)
while not asked.wait(0.1):
    pass
for pid in ranks_of(os.getpid()):
    os.kill(pid, signal.SIGKILL)
release.set()
why, seconds = lost(future.result)
assert "was killed by SIGKILL" in why, why
assert seconds < 30, seconds
policy.close()
""",
    "an update that one rank alone can make": """
policy = connect(lora=rlkit.Lora(rank=2), seed=0)
live = policy.live_sampler().result()
train(policy)
update, exchange = policy._scheduler.update, policy._leader._exchange

def fails(*snapshots, **options):
    raise rlkit.BackendError("no memory")

policy._scheduler.update = fails  # here: nothing has changed anywhere
try:
    live.update().result()
except rlkit.BackendError as error:
    assert "no memory" in str(error)
assert live.version == 0
policy._scheduler.update = update

def spoilt(kind, *parts, **fields):
    return exchange(kind, *parts, **{**fields, **({"snapshot": 99} if kind == "update" else {})})

policy._leader._exchange = spoilt  # there: they are not the same any more
why, _ = lost(live.update().result)
assert "update: rank 1 has not the newer policy" in why, why
assert live.version == 0
lost(lambda: live.sample([5], rlkit.SamplingParams(max_tokens=2)).result())
policy.close()
""",
    "interrupted": """
from rlkit.backends.local.distributed import world

first = connect(lora=rlkit.Lora(rank=2), seed=0)
train(first)

def interrupt(*arguments):
    raise KeyboardInterrupt

load, rlkit.backends.local.load_policy = rlkit.backends.local.load_policy, interrupt
try:
    connect(lora=rlkit.Lora(rank=2))
except KeyboardInterrupt:
    rlkit.backends.local.load_policy = load
train(first)  # the other's answer was read
receive, world._receive = world._receive, interrupt
try:
    connect(lora=rlkit.Lora(rank=2))
except KeyboardInterrupt:
    world._receive = receive
why, _ = lost(lambda: train(first))  # and not with an answer to another question
assert "KeyboardInterrupt interrupted an exchange" in why, why
first.close()
""",
    "closed by Ctrl-C, or forgotten": """
import gc
from rlkit.backends.local.distributed import world

first = connect(lora=rlkit.Lora(rank=2), seed=0)
train(first)
end = world.World.end

def interrupted(self):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    end(self)

world.World.end = interrupted
try:
    first.close()
except KeyboardInterrupt:
    world.World.end = end
first.close()
second = connect(lora=rlkit.Lora(rank=2), seed=0)
train(second)
del second
gc.collect()
until = time.monotonic() + 30
while ranks_of(os.getpid()):
    assert time.monotonic() < until
    time.sleep(0.05)
""",
    "a rank that raises": """
from rlkit.backends.local.distributed import launch

spoilt = '''
from rlkit.backends.local import LoadedPolicy
from rlkit.backends.local.distributed import follower

def spoil(owner, name, where):
    function, calls = getattr(owner, name), []
    def raises(*arguments):
        calls.append(1)
        if len(calls) in where:
            raise MemoryError(name)
        return function(*arguments)
    setattr(owner, name, raises)

spoil(LoadedPolicy, "snapshot", {2})
spoil(follower, "unpack_request", {1})
spoil(follower, "flatten", {4, 6})  # a gradient; an adapter
'''
launch.PROGRAM = launch.PROGRAM.replace("main(**told)", spoilt + "main(**told)")
policy = connect(lora=rlkit.Lora(rank=2), seed=0)
params = rlkit.SamplingParams(max_tokens=2)

def refused(call, text):
    try:
        call()
    except rlkit.BackendError as error:
        assert text in str(error) and not isinstance(error, rlkit.RankLost), error
    else:
        raise AssertionError(text)

with policy.sampler().result() as sampler:  # of two requests the other rank has one
    results = [sampler.sample([5, k], params) for k in range(2)]
    assert len(results[0].result()) == 1
    refused(results[1].result, "rank 1 raised MemoryError: unpack_request")
train(policy)
refused(policy.sampler().result, "sampler: rank 1 raised MemoryError: snapshot")
with policy.sampler().result() as sampler:
    assert all(len(future.result()) == 1 for future in [sampler.sample([5, k], params) for k in range(4)])
refused(lambda: train(policy), "forward_backward: rank 1 raised MemoryError: flatten")
policy.forward_backward(data, "cross_entropy").result()
policy.optim_step(step).result()  # it is made; the other rank cannot take it
why, _ = lost(lambda: policy.forward(data).result())
assert why.startswith("rank 1 is gone: its process ended with 1") and "MemoryError: flatten" in why, why
policy.close()
""",
    "lost in a step": """
policy = connect(lora=rlkit.Lora(rank=2), seed=0)
policy.forward_backward(data, "cross_entropy").result()

def share():
    raise policy._leader._world.fail("gone")

policy._leader.share = share
policy.optim_step(step).result()  # it is made, so it counts
lost(lambda: train(policy))
saved = policy.save("stepped").result()
policy.close()
with connect(processes=1, resume_from=saved) as again:
    assert again.version == policy.version == 1
""",
    "a forked child leaves them alone": """
import faulthandler

policy = connect(lora=rlkit.Lora(rank=2), seed=0)
live, sampler = policy.live_sampler().result(), policy.sampler().result()
train(policy)
few = rlkit.SamplingParams(max_tokens=2)

def in_child(ends, why="fork"):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(30, exit=True)
        for call in (lambda: policy.forward(data), lambda: policy.optim_step(step), lambda: policy.save("x"),
                     policy.sampler, live.update, lambda: [live.sample([5], few) for _ in range(4)],
                     lambda: [sampler.sample([5], few) for _ in range(4)],
                     lambda: connect(lora=rlkit.Lora(rank=2), processes=2 if why else 0)):
            try:
                call()
            except rlkit.RlkitError as error:
                assert why in str(error), error
            else:
                raise AssertionError("accepted")
        ends()
        sys.exit(7)
    began = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < began + 90
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 7, ended

in_child(lambda: None)
in_child(policy.close)
assert len(ranks_of(os.getpid())) == 1
assert train(policy)
assert live.update().result() == 2
assert all(x.version == 2 for x in live.sample([5], few, n=4).result())
policy.close()
assert not ranks_of(os.getpid())
in_child(policy.close, "")
""",
    "stopped": """
policy = connect(lora=rlkit.Lora(rank=2), seed=0, processes=Processes(2, deadline=10.0))
train(policy)
for pid in ranks_of(os.getpid()):
    os.kill(pid, signal.SIGSTOP)

@rlkit.losses.loss(level="batch")
def of_all(logprobs):  # rank 0 waits for the logprobs of the other
    return -sum(x.sum() for x in logprobs)

why, seconds = lost(lambda: train(policy, of_all))
assert "has not responded for 10 s" in why, why
assert seconds < 60, seconds
end = time.monotonic() + 30
while ranks_of(os.getpid()):  # a stopped process is killed
    assert time.monotonic() < end
    time.sleep(0.05)
policy.close()

policy = connect(lora=rlkit.Lora(rank=2), seed=0)
for pid in ranks_of(os.getpid()):
    os.kill(pid, signal.SIGSTOP)
began = time.monotonic()
policy.close()  # which does not wait for ten minutes
assert time.monotonic() - began < 60 and not ranks_of(os.getpid())
try:
    connect(lora=rlkit.Lora(rank=2), processes=Processes(2, start=0.05))
except rlkit.BackendError as error:
    assert "not all of them came in 0.05 s; see Processes(start=)" in str(error), error
""",
}


def ranks_of(pid: int) -> list[int]:
    """Return the processes that serve ``pid``."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if PROGRAM in (folder / "cmdline").read_text():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    found.append(int(folder.name))
    return found


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[4])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)


@pytest.mark.parametrize("story", STORIES)
def test_a_lost_rank_is_a_typed_error(tiny, tmp_path, story):
    """Within the deadline, with the reason; the last save is whole, and a new backend takes it from there."""
    done = run(BEGIN + STORIES[story], tiny("llama"), str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_no_orphans(tiny, tmp_path):
    """Where the user's process is killed, its ranks end, too, even one that hangs, and nothing is left."""
    code = (
        BEGIN + "policy = connect(lora=rlkit.Lora(rank=2))\ntrain(policy)\nprint('ready', flush=True)\ntime.sleep(600)"
    )
    root = str(Path(__file__).parents[4])
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, tiny("llama"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout.readline().strip() == "ready"
        (folder,) = tmp_path.glob("rlkit-ranks-*")  # of torch's store
        ranks = ranks_of(process.pid)
        assert len(ranks) == 1
        os.kill(ranks[0], signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    end = time.monotonic() + 30
    running = Path(f"/proc/{ranks[0]}/cmdline")
    while folder.exists() or (running.exists() and running.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
