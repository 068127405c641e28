"""Jobs in order, and a fair share of the time for the background work between their parts."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest

from rlkit.backends import trainer
from rlkit.backends.trainer import Worker
from rlkit.errors import BackendError
from tests.each import for_each


class Turns:
    """Background work: ``left`` turns; each moves ``clock``, [seconds], by 1/16."""

    def __init__(self, left, clock=()):
        self.left, self.clock, self.done = left, clock, 0

    def delay(self):
        return 0 if self.left > self.done else None

    def turn(self):
        self.done += 1
        for i in range(len(self.clock)):
            self.clock[i] += 1 / 16

    def stop(self):
        self.left = 0


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@for_each(
    ("seconds", "expected"),
    [
        (1.0, [0, 16, 32, 48]),  # as many as fit into the time of a part
        (1 / 32, [0, 1, 1, 2, 2, 3]),  # a turn that takes longer than a part is paid back
    ],
)
def test_turns_between_parts(seconds, expected):
    """They neither starve the job, nor does it starve them; by a clock that moves as they say."""
    clock = [0.0]
    turns, seen = Turns(0, clock), []

    def job():
        turns.left = 10**9
        for _ in expected:
            seen.append(turns.done)
            clock[0] += seconds
            yield
        turns.left = 0

    with mock.patch.object(trainer, "time", SimpleNamespace(monotonic=lambda: clock[0])):
        worker = Worker("test", turns)
        worker.submit(job).result(timeout=60)
        worker.close()
    assert seen == expected


def test_background_alone():
    """Without a job it has all of the time, and the thread sleeps when it has nothing to do."""
    for left in (0, 1, 3):
        turns = Turns(left)
        worker = Worker("test", turns)
        worker.wake()
        assert worker.submit(lambda: 3).result(timeout=60) == 3
        wait_for(lambda turns=turns: turns.done >= turns.left)
        worker.close()
        assert turns.done == left


def test_jobs_that_are_given_up_and_a_worker_that_is_closed():
    """The running job ends after its part, those after it do not run, later ones do, also those submitted by a job."""
    worker, begun, go_on, later = Worker("test"), threading.Event(), threading.Event(), []

    def job():
        begun.set()
        go_on.wait(60.0)
        yield
        raise AssertionError("the second part ran")

    def closes():
        worker.close()
        later.append(worker.submit(lambda: 4))
        return 3

    given_up = [worker.submit(job), worker.submit(lambda: 1)]
    assert begun.wait(60.0)
    worker.give_up()
    go_on.set()
    for future in given_up:
        with pytest.raises(BackendError, match="cancelled, because"):
            future.result(60.0)
    assert worker.submit(lambda: 2).result(60.0) == 2
    assert worker.submit(closes).result(60.0) == 3
    assert later[0].result(60.0) == 4
    worker.close()


def test_nothing_finished_or_forgotten_is_kept():
    """The thread keeps no finished job while it waits for the next, and ends when its worker is forgotten.

    Also where the background wakes the worker, as that of every backend does.
    """
    turns, big = Turns(0), Turns(0)
    worker = Worker("test", turns)
    turns.wake = worker.wake
    kept, thread = weakref.ref(big), worker._thread
    worker.submit(lambda big=big: big.done).result(60.0)
    worker.drain()
    del big
    gc.collect()
    wait_for(lambda: kept() is None)
    del worker
    gc.collect()
    thread.join(60.0)
    assert not thread.is_alive()
