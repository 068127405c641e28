"""MultiTracker trackers: none holds up the run, none ends it."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from rlkit import ConfigError, Sample, UnknownNameError
from rlkit.tracking import Jsonl, MultiTracker, Tracker, for_run, read_metrics, registry
from rlkit.trajectory import Group, Trajectory, Turn
from tests.each import for_each


class Kept:
    """Keeps what it is given."""

    def __init__(self, *, inline=False):
        self.inline = inline
        self.calls = []
        self.threads = set()

    def log(self, metrics, step):
        self.threads.add(threading.current_thread())
        self.calls.append((step, dict(metrics)))

    def log_trajectories(self, groups, step, **given):
        self.calls.append((step, [len(group) for group in groups], given))

    def close(self):
        self.calls.append("closed")


class Stuck(Kept):
    """Hangs in its first call until it is let go."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.begun = threading.Event()

    def log(self, metrics, step):
        self.begun.set()
        self.go.wait()
        super().log(metrics, step)


class Broken(Kept):
    """Fails at everything."""

    def log(self, metrics, step):
        raise OSError("no space left")

    log_trajectories = log

    def close(self):
        raise RuntimeError("close")


GROUP = Group([Trajectory([Turn(Sample([5], [6, 7], [-0.5, -0.5]), 1.0)])])


def test_everything_reaches_every_tracker_in_order():
    slow, quick = Kept(), Kept(inline=True)
    several = MultiTracker([slow, quick])
    assert isinstance(several, Tracker)
    for step in range(50):
        several.log({"a": step}, step)
    several.log_trajectories([GROUP], 50, advantages=[0.5])
    several.close()
    several.close()
    expected = [(step, {"a": float(step)}) for step in range(50)] + [(50, [1], {"advantages": [0.5]}), "closed"]
    assert slow.calls == quick.calls == expected
    assert quick.threads == {threading.main_thread()}
    assert threading.main_thread() not in slow.threads
    assert several.metrics == {}


def test_a_tracker_that_hangs_neither_holds_up_the_run_nor_the_others(caplog):
    """A hundred steps return while it hangs; the others have all of them; what had no room is counted, said once."""
    stuck, kept = Stuck(), Kept(inline=True)
    several = MultiTracker([stuck, kept], capacity=10, timeout=0.0)
    several.log({"a": 1.0}, 0)
    assert stuck.begun.wait(30)
    with caplog.at_level(logging.WARNING, "rlkit.tracking"):
        for step in range(1, 101):
            several.log({"a": 1.0}, step)
    assert len(kept.calls) == 101
    assert several.metrics == {"tracking/Stuck/dropped": 90.0}
    assert len(caplog.records) == 1
    assert "is slower than the run" in caplog.text
    several.close()  # gives up what waits, which is counted too
    assert several.metrics == {"tracking/Stuck/dropped": 100.0}
    stuck.go.set()


def test_a_tracker_that_fails_is_counted_and_said_once(caplog):
    broken, kept = Broken(), Kept()
    with caplog.at_level(logging.WARNING, "rlkit.tracking"), MultiTracker([broken, kept]) as several:
        for step in range(5):
            several.log({"a": 1.0}, step)
        several.log_trajectories([GROUP], 5)
    assert several.metrics == {"tracking/Broken/failed": 7.0}
    assert [record.message for record in caplog.records] == [
        "tracker Broken failed: OSError: no space left; the run continues, and this warning is shown once"
    ]
    assert len(kept.calls) == 7


def test_numbers_are_taken_as_they_are_when_they_are_logged():
    """What the loop changes afterwards is not what a slow tracker sees."""
    stuck = Stuck()
    several = MultiTracker([stuck])
    metrics, advantages = {"a": np.array(1.0)}, [np.array([1.0, 2.0])]
    several.log(metrics, 0)
    several.log_trajectories([GROUP], 0, advantages=advantages)
    metrics["a"] += 1
    advantages[0] += 1
    stuck.go.set()
    several.close()
    assert stuck.calls[0] == (0, {"a": 1.0})
    assert stuck.calls[1][2]["advantages"][0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("metrics", [{"a": "x", "b": 2.0}, {"a": None, "b": 2.0}, {1: 1.0, "b": 2.0}])
def test_what_can_not_be_logged_is_left_out_and_the_rest_logged(tmp_path, caplog, metrics):
    with MultiTracker([Jsonl(tmp_path)]) as several:
        several.log(metrics, 3)
    assert [(row["step"], row["metrics"]) for row in read_metrics(tmp_path)] == [(3, {"b": 2.0})]
    assert several.metrics == {"tracking/Jsonl/refused": 1.0}
    assert "cannot be logged" in caplog.text


@pytest.mark.parametrize("call", [("log", None, 0), ("log", {"a": 1.0}, -1), ("log", {"a": 1.0}, "x")])
def test_calls_that_make_no_sense_do_not_end_the_run(call):
    kept = Kept()
    with MultiTracker([kept]) as several:
        getattr(several, call[0])(*call[1:])
        several.log_trajectories("nonsense", 0)
        several.log_trajectories([GROUP], 0, advantages=[1.0, 2.0])
    assert kept.calls == ["closed"]
    assert several.metrics == {"tracking/Kept/refused": 3.0}


def test_closing_is_bounded_and_leaves_no_thread_behind():
    before = set(threading.enumerate())
    stuck, kept = Stuck(), Kept()
    several = MultiTracker([stuck, kept], timeout=0.2)
    several.log({"a": 1.0}, 0)
    several.close()
    assert kept.calls[-1] == "closed"
    assert several.metrics == {"tracking/Stuck/failed": 1.0}  # it was not done in time
    stuck.go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before
    several.log({"a": 1.0}, 1)  # after the end: nothing
    assert kept.calls[-1] == "closed"


def test_rewind_reaches_those_that_can(tmp_path):
    with MultiTracker([Jsonl(tmp_path), Kept()]) as several:
        for step in range(4):
            several.log({"a": 1.0}, step)
        several.rewind(2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]
    assert several.metrics == {}


@for_each(
    ("arguments", "says"),
    [
        (([],), "trackers: is empty"),
        (([None],), r"trackers\[0\]: got None"),
        (([Kept],), r"trackers\[0\]"),
        (([Kept()], 0), "capacity"),
        (([Kept()], 1, -1.0), "timeout"),
    ],
)
def test_bad_arguments(arguments, says):
    names = dict(zip(("trackers", "capacity", "timeout"), arguments, strict=False))
    with pytest.raises(ConfigError, match=says):
        MultiTracker(names.pop("trackers"), **names)


def test_two_of_a_kind_are_told_apart():
    with MultiTracker([Broken(), Broken()]) as several:
        several.log({"a": 1.0}, 0)
    assert several.metrics == {"tracking/Broken/failed": 2.0, "tracking/Broken-2/failed": 2.0}


def test_the_registry_names_them_all():
    assert set(registry) >= {"jsonl", "console", "wandb", "tensorboard", "trackio", "mlflow"}
    assert registry["jsonl"] is Jsonl
    for name in registry:
        assert callable(registry[name])  # importing one needs none of the packages


def test_for_a_run(tmp_path, capsys):
    """By name, with defaults that suit a run's folder."""
    several = MultiTracker([for_run(name, tmp_path / "r") for name in ("jsonl", "console")])
    several.log({"train/loss": 0.5}, 0)
    several.close()
    assert len(read_metrics(tmp_path / "r")) == 1
    assert "0.5" in capsys.readouterr().out
    with pytest.raises(UnknownNameError, match="did you mean 'wandb'"):
        for_run("wandbb", tmp_path)


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboardX"), ("trackio",) * 2])
def test_services_for_a_run(tmp_path, name, package):
    pytest.importorskip(package)
    assert isinstance(for_run(name, tmp_path), Tracker)
