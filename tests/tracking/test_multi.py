"""Several trackers: none blocks the run, none ends it."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from rlkit import ConfigError, Sample
from rlkit.tracking import MultiTracker, Tracker
from rlkit.trajectory import Group, Trajectory, Turn
from tests.each import for_each


class Kept:
    """Keeps what it is given; waits for ``go`` before it keeps numbers."""

    def __init__(self, *, inline=False, go=True):
        self.inline, self.calls, self.threads = inline, [], set()
        self.go, self.begun = threading.Event(), threading.Event()
        if go:
            self.go.set()

    def log(self, metrics, step):
        self.begun.set()
        self.go.wait()
        self.threads.add(threading.current_thread())
        self.calls.append((step, dict(metrics)))

    def log_trajectories(self, groups, step, **given):
        self.calls.append((step, [len(group) for group in groups], given))

    def close(self):
        self.calls.append("closed")


class Broken(Kept):
    def log(self, metrics, step, **_):
        raise OSError("no space left")

    log_trajectories = log

    def close(self):
        raise RuntimeError("close")


GROUP = Group([Trajectory([Turn(Sample([5], [6, 7], [-0.5, -0.5]), 1.0)])])


def test_everything_reaches_every_tracker_in_order():
    slow, quick = Kept(), Kept(inline=True)
    multi = MultiTracker([slow, quick])
    assert isinstance(multi, Tracker)
    for step in range(50):
        multi.log({"a": step}, step)
    multi.log_trajectories([GROUP], 50, advantages=[0.5])
    multi.close()
    multi.close()
    expected = [(step, {"a": float(step)}) for step in range(50)] + [(50, [1], {"advantages": [0.5]}), "closed"]
    assert slow.calls == quick.calls == expected
    assert quick.threads == {threading.main_thread()}
    assert threading.main_thread() not in slow.threads
    assert multi.metrics == {}


def test_a_tracker_that_hangs_blocks_neither_the_run_nor_the_others(caplog):
    before = set(threading.enumerate())
    stuck, kept = Kept(go=False), Kept(inline=True)
    multi = MultiTracker([stuck, kept], capacity=10, timeout=30.0)
    multi.log({"a": 1.0}, 0)
    assert stuck.begun.wait(30)
    with caplog.at_level(logging.WARNING, "rlkit.tracking"):
        for step in range(1, 101):
            multi.log({"a": 1.0}, step)
    assert multi.metrics == {"tracking/Kept/dropped": 90.0}
    assert [record.message.partition(":")[0] for record in caplog.records] == ["tracker Kept is slower than the run"]
    multi.close(timeout=0.2)
    assert multi.metrics == {"tracking/Kept/dropped": 100.0}  # and what it gave up
    assert [*map(len, (kept.calls, stuck.calls))] == [102, 0]
    stuck.go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before
    multi.log({"a": 1.0}, 1)  # after the end: nothing
    assert stuck.calls == [(0, {"a": 1.0})]
    assert kept.calls[-1] == "closed"


def test_a_last_call_that_is_late_has_failed():
    stuck = Kept(go=False)
    with MultiTracker([stuck], timeout=0.1) as multi:
        multi.log({"a": 1.0}, 0)
        assert stuck.begun.wait(30)
    assert multi.metrics == {"tracking/Kept/failed": 1.0}
    stuck.go.set()


def test_a_tracker_that_fails_is_counted_with_one_warning(caplog):
    kept = Kept()
    with caplog.at_level(logging.WARNING, "rlkit.tracking"), MultiTracker([Broken(), kept, Broken()]) as multi:
        for step in range(5):
            multi.log({"a": 1.0}, step)
        multi.log_trajectories([GROUP], 5)
    assert multi.metrics == {"tracking/Broken/failed": 7.0, "tracking/Broken-2/failed": 7.0}
    said = "failed: OSError: no space left; the run continues, and this warning is shown once"
    assert sorted(record.message for record in caplog.records) == [f"tracker Broken {said}", f"tracker Broken-2 {said}"]
    assert len(kept.calls) == 7


def test_numbers_are_taken_as_they_are_when_they_are_logged():
    stuck = Kept(go=False)
    multi = MultiTracker([stuck])
    metrics, advantages = {"a": np.array(1.0)}, [np.array([1.0, 2.0])]
    multi.log(metrics, 0)
    multi.log_trajectories([GROUP], 0, advantages=advantages)
    metrics["a"] += 1
    advantages[0] += 1
    stuck.go.set()
    multi.close()
    assert stuck.calls[0] == (0, {"a": 1.0})
    assert stuck.calls[1][2]["advantages"][0].tolist() == [1.0, 2.0]


def test_what_can_not_be_logged_is_left_out_and_the_rest_logged(caplog):
    kept = Kept()
    with MultiTracker([kept]) as multi:
        multi.log({"a": "x", 1: 1.0, "b": 2.0}, 3)
        for metrics, step in ((None, 0), ({"a": 1.0}, -1), ({"a": 1.0}, "x")):
            multi.log(metrics, step)
        multi.log_trajectories("nonsense", 0)
        multi.log_trajectories([GROUP], 0, advantages=[1.0, 2.0])
        multi.log_trajectories([GROUP], 0, advantages=[threading.Lock()])  # which cannot be copied
    assert kept.calls == [(3, {"b": 2.0}), "closed"]
    assert multi.metrics == {"tracking/Kept/refused": 7.0}
    assert "cannot be logged" in caplog.text


@for_each(
    ("trackers", "options", "says"),
    [
        ([], {}, "trackers: is empty"),
        ([None], {}, r"trackers\[0\]: got None"),
        ([Kept], {}, r"trackers\[0\]"),
        ([Kept()], {"capacity": 0}, "capacity"),
        ([Kept()], {"timeout": -1.0}, "timeout"),
    ],
)
def test_bad_arguments(trackers, options, says):
    with pytest.raises(ConfigError, match=says):
        MultiTracker(trackers, **options)
