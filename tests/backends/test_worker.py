"""Calls in order, and a fair share of the time for what runs in between."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from rlkit.backends.queue import Worker, breathe, breathing
from rlkit.errors import BackendError


class Turns:
    """Background work: ``left`` turns of some milliseconds each."""

    def __init__(self, left, seconds=0.0):
        self.left = left
        self.seconds = seconds
        self.done = []
        self.empty = threading.Event()

    def delay(self):
        return 0 if self.left > len(self.done) else None

    def turn(self):
        time.sleep(self.seconds)
        self.done.append(time.monotonic())
        if len(self.done) == self.left:
            self.empty.set()

    def stop(self):
        pass


def parts(count, seconds, ends):
    """A call of ``count`` parts."""
    for _ in range(count):
        time.sleep(seconds)
        ends.append(time.monotonic())
        yield


def test_turns_of_a_long_call():
    """Between two parts there are as many turns as fit into the time of a part, instead of one."""
    turns, ends = Turns(60, 0.005), []
    worker = Worker("test", turns)
    worker.submit(lambda: parts(6, 0.1, ends)).result(timeout=20)
    during = sum(ends[0] < t < ends[-1] for t in turns.done)
    worker.close()
    assert during > 3 * 5  # one each before; 20 each where the machine has time


def test_a_call_is_not_starved():
    """However much there is to do in between, a call takes about twice its time."""
    turns, ends = Turns(10**9, 0.001), []
    worker = Worker("test", turns)
    worker.submit(lambda: parts(5, 0.05, ends)).result(timeout=20)
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    turns.left = 0
    worker.close()
    assert min(gaps) < 0.05 * 2 + 0.05


@pytest.mark.parametrize("left", [0, 1, 3])
def test_background_alone(left):
    """Without a call it has all of the time, and the thread sleeps when it has nothing to do."""
    turns = Turns(left)
    worker = Worker("test", turns)
    worker.wake()
    assert left == 0 or turns.empty.wait(60)
    assert worker.submit(lambda: 3).result(timeout=60) == 3
    worker.close()
    assert len(turns.done) == left


@pytest.mark.parametrize("inside", [True, False])
def test_turns_in_the_middle_of_a_part(inside):
    """Where it breathes, and only inside of ``breathing``; a turn that breathes has no turns in it."""
    turns, seen = Turns(10**9, 0.002), []
    turn = turns.turn
    turns.turn = lambda: (turn(), breathe(), seen.append(len(turns.done)))

    def job():
        def whole():
            for _ in range(5):
                time.sleep(0.01)
                breathe()
            return len(turns.done)

        if not inside:
            return whole()
        with breathing():
            return whole()

    worker = Worker("test", turns)
    before = len(turns.done)
    during = worker.submit(job).result(timeout=20) - before
    turns.left = 0
    worker.close()
    assert (during >= 5) is inside
    assert seen == list(range(1, len(turns.done) + 1))


def test_long_turns_do_not_starve_short_parts():
    """A turn that takes longer than a part is paid back before the next one."""
    turns, ends = Turns(10**9, 0.05), []
    worker = Worker("test", turns)
    worker.submit(lambda: parts(60, 0.002, ends)).result(timeout=20)
    during = sum(ends[0] < t < ends[-1] for t in turns.done)
    turns.left = 0
    worker.close()
    assert during < 30  # as much time as the parts have is that of 3 turns


def test_breathing_elsewhere_does_nothing():
    """In a thread that is no worker's."""
    with breathing():
        breathe()


def test_what_is_given_up_ends_between_two_parts():
    """And what waits behind it; what comes later is done."""
    worker, begun, go_on = Worker("test"), threading.Event(), threading.Event()

    def job():
        begun.set()
        go_on.wait(60.0)
        yield
        raise AssertionError("the second part ran")

    running, waiting = worker.submit(job), worker.submit(lambda: 1)
    assert begun.wait(60.0)
    worker.give_up()
    go_on.set()
    for future in (running, waiting):
        with pytest.raises(BackendError, match="cancelled, because"):
            future.result(60.0)
    assert worker.submit(lambda: 2).result(60.0) == 2
    worker.close()
