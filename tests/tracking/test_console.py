"""Rows on the terminal."""

from __future__ import annotations

import io

import pytest

from rlkit import ConfigError, DataError
from rlkit.tracking import Tracker
from rlkit.tracking._console import Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_rows_under_a_heading_that_comes_again():
    file = io.StringIO()
    console = Console(file=file)
    assert isinstance(console, Tracker)
    for step in range(21):
        rewards = {"env/a/reward": 0.25, "env/owner/b/reward": 0.75, "env/a/info/reward": 9.0}
        console.log({**rewards, "train/loss": -1e-5, "env/a/failed": 1.0}, step)
    console.log({"unknown": 1.0}, 21)
    console.close()
    lines = file.getvalue().splitlines()
    assert len(lines) == 23
    assert lines[0].split() == lines[21].split() == ["step", "reward", "failed", "loss"]
    assert lines[1].split() == ["0", "0.5", "1", "-1e-05"]  # rewards: the mean; failures: the sum
    assert len({len(line) for line in lines}) == 1


def test_names_can_not_draw_on_the_terminal():
    """Neither escape sequences nor rich's markup have an effect."""
    for file in (io.StringIO(), Terminal()):
        console = Console({"[red]\x1b[2J": "a"}, file=file)
        console.log({"a": 1.0}, 0)
        assert "[red]?[2J" in file.getvalue()
        assert "\x1b[2J" not in file.getvalue()


def test_bad_input():
    for columns in ({}, {"a": 1}, ["a"], {"": "a"}):
        with pytest.raises(ConfigError, match="columns"):
            Console(columns)
    with pytest.raises(DataError):
        Console().log({"a": "b"}, 0)
    with pytest.raises(DataError):
        Console().log_trajectories([1], 0)


def test_long_numbers_do_not_run_together():
    """A negative number with an exponent fills its column."""
    file = io.StringIO()
    console = Console({"a": "x/a", "b": "x/b"}, file=file)
    console.log({"x/a": -1.234e-8, "x/b": -4.098e-8}, step=3)
    assert file.getvalue().splitlines()[1].split() == ["3", "-1.234e-08", "-4.098e-08"]


def test_a_loss_gives_way_to_what_can_be_learnt():
    """On-policy it is 0 but for rounding; the share of a signal and of cut answers says more."""
    file = io.StringIO()
    step = {"train/loss": 8e-8, "rollout/cut": 0.5, "rollout/with_signal": 1.0}
    Console(file=file).log({**step, "train/with_signal": 0.25}, 0)
    heading, row = (line.split() for line in file.getvalue().splitlines())
    assert (heading, row) == (["step", "signal", "cut"], ["0", "0.25", "0.5"])
