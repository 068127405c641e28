"""Environments in gymnasium's manner."""

from __future__ import annotations

import random

import numpy as np
import pytest

import rlkit
from rlkit.envs import StepResult, TaskSettings, gymnasium
from tests.each import for_each
from tests.envs.parts import played


class Countdown:
    """Say the number below, down to zero; seeded as gymnasium's environments are."""

    closed = False

    def reset(self, *, seed=None, options=None):
        self.left = random.Random(seed).randint(3, 9)
        return f"From {self.left}.", {"seed": seed}

    def step(self, action):
        right = action == str(self.left - 1)
        self.left -= 1
        done = self.left == 0
        return f"Now from {self.left}.", np.float64(right), np.bool_(done), not right and not done, {"left": self.left}

    def close(self):
        self.closed = True


class Later(Countdown):
    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)

    async def step(self, action):
        return super().step(action)

    async def close(self):
        super().close()


@for_each("kind", [Countdown, Later])
def test_an_episode(kind):
    task = gymnasium(kind, name="countdown", settings=TaskSettings(max_turns=9))[4]
    start = random.Random(task.seed).randint(3, 9)
    first, results, env = played(task, *map(str, reversed(range(start))), seed=task.seed)
    assert env.env._env.closed
    assert first == f"From {start}."
    assert [result.reward for result in results] == [1.0] * start
    assert [result.terminated for result in results] == [False] * (start - 1) + [True]
    assert not any(result.truncated for result in results)
    assert results[0] == StepResult(f"Now from {start - 1}.", 1.0, False, False, {"left": start - 1})
    assert (task.name, task.settings.max_turns) == ("countdown", 9)
    _, (wrong,), _ = played(task, "nonsense")
    assert (wrong.reward, wrong.terminated, wrong.truncated) == (0.0, False, True)


def test_seeds_are_the_tasks_own():
    """Others in another split, whatever its seed, and the same ones again."""
    seeds = {split: [task.seed for task in gymnasium(Countdown, split=split, size=50)] for split in ("train", "test")}
    assert len(set(seeds["train"] + seeds["test"])) == 100
    assert seeds["train"] == [task.seed for task in gymnasium(Countdown, size=50)]
    assert not set(seeds["train"]) & {task.seed for task in gymnasium(Countdown, size=50, seed=1, split="test")}


def test_spaces_that_are_not_text():
    """Observations are made text, and text actions; what cannot be is the policy's mistake."""

    class Grid:
        def reset(self, *, seed=None, options=None):
            return np.zeros((2, 2)), {}

        def step(self, action):
            assert type(action) is int
            return np.full((2, 2), action), 1.0, True, False, {}

    tasks = gymnasium(Grid, action=int, text=lambda observation: " ".join(str(int(x)) for x in observation.flat))
    first, (result,), _ = played(tasks[0], "3")
    assert (first, result.observation, result.reward) == ("0 0 0 0", "3 3 3 3", 1.0)
    _, (result,), _ = played(tasks[0], "three")
    assert (result.reward, result.terminated) == (0.0, True)
    assert "three" in result.info["invalid_action"]


@for_each(
    ("first", "answer", "message"),
    [
        ("text only", ("", 0.0, True, False, {}), "reset returned str"),
        (("text", {}), ("", 0.0, True, {}), "step returned tuple of 4"),
        (("text", {}), "text", "step returned str"),
    ],
)
def test_what_is_no_gymnasium(first, answer, message):
    """The old interface of four values among them."""

    class Wrong:
        def reset(self, *, seed=None, options=None):
            return first

        def step(self, action):
            return answer

    with pytest.raises(rlkit.EnvError, match=f"environment 'wrong': {message}"):
        played(gymnasium(Wrong, name="wrong")[0], "x")


@for_each(
    ("options", "message"),
    [
        ({"make": Countdown()}, "make"),
        ({"size": 0}, "size"),
        ({"seed": -1}, "seed"),
        ({"split": "dev"}, "split"),
        ({"action": "int"}, "action"),
        ({"text": "str"}, "text"),
        ({"name": ""}, "name"),
    ],
)
def test_what_is_wrong_is_told_at_once(options, message):
    with pytest.raises(rlkit.ConfigError, match=message):
        gymnasium(**({"make": Countdown} | options))


def test_the_real_package():
    """Its own FrozenLake, whose moves and places are numbers."""
    package = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    moves = {"left": 0, "down": 1, "right": 2, "up": 3}
    tasks = gymnasium(lambda: package.make("FrozenLake-v1", is_slippery=False), action=moves.__getitem__, text=str)
    first, results, _ = played(tasks[0], "down", "down", "right", "right", "down", "right")
    assert first == "0"
    assert [result.observation for result in results] == ["4", "8", "9", "10", "14", "15"]
    assert [result.reward for result in results] == [0.0] * 5 + [1.0]
    assert results[-1].terminated
