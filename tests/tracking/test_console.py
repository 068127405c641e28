"""Rows on the terminal."""

from __future__ import annotations

import io

import pytest

from rlkit import DataError
from rlkit.tracking import Tracker
from rlkit.tracking.console import Console


def rows_of(*logged, columns=None):
    file = io.StringIO()
    console = Console(columns, file=file)
    for step, metrics in enumerate(logged):
        console.log(metrics, step)
    console.close()
    return [line.split() for line in file.getvalue().splitlines()]


def test_rows_under_a_heading_that_comes_again():
    """Of several environments rewards are averaged, and failures are added up."""
    assert isinstance(Console(), Tracker)
    rewards = {"env/a/reward": 0.25, "env/owner/b/reward": 0.75, "env/a/info/reward": 9.0}
    rows = rows_of(*[{**rewards, "env/a/failed": 1.0, "env/owner/b/failed": 2.0}] * 21, {"unknown": 1.0})
    assert len(rows) == 23
    assert rows[0] == rows[21] == ["step", "reward", "failed"]
    assert rows[1] == ["0", "0.5", "3"]


def test_a_row_has_what_was_logged():
    """Reward and signal before the loss, which is 0 on-policy; seconds of the parts of a step, not of parallel work."""
    seconds = {"time/step": 9.0, "time/rollout": 5.5, "time/train": 2.0, "time/sampler": 70.0, "time/env": 3.0}
    kept = {"rollout/reward": 0.4, "rollout/cut": 0.5, "rollout/with_signal": 1.0, "train/kl_k3": 0.001}
    step = {"env/a/reward": 0.1, "train/loss": 8e-8, "train/with_signal": 0.25, **kept, **seconds}
    heading, row = rows_of(step)
    assert heading == ["step", "reward", "signal", "cut", "kl", "rollout", "s", "train", "s", "step", "s"]
    assert row == ["0", "0.4", "0.25", "0.5", "0.001", "5.5", "2", "9"]
    heading, row = rows_of({"train/loss": -1e-5, "train/grad_norm": 1.0})
    assert (heading, row) == (["step", "loss"], ["0", "-1e-05"])


def test_an_evaluation_in_between_adds_a_column_once():
    reward, score = {"env/a/reward": 0.5, "time/step": 1.0}, {"eval/mean": 0.75}
    rows = rows_of(reward, score, reward, score)
    assert [row for row in rows if row[0] == "step"] == [
        ["step", "reward", "step", "s"],
        ["step", "eval", "reward", "step", "s"],
    ]
    assert rows[3:] == [["1", "0.75"], ["2", "0.5", "1"], ["3", "0.75"]]


def test_names_and_long_numbers_leave_the_columns_whole():
    """Names cannot draw on the terminal; a negative number with an exponent fills its column."""
    heading, row = rows_of({"a": -1.234e-8, "b": -4.098e-8}, columns={"[red]\x1b[2J": "a", "b": "b"})
    assert (heading, row) == (["step", "[red]?[2J", "b"], ["0", "-1.234e-08", "-4.098e-08"])
    text = str(rows_of({"time/\x1b[2J\n\u202e": 1.0}))
    assert not {"\x1b", "\u202e"} & {*text}


def test_bad_input_raises():
    with pytest.raises(DataError):
        Console().log({"a": "b"}, 0)
    with pytest.raises(DataError):
        Console().log_trajectories([1], 0)
