"""Environments in gymnasium's manner."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.envs import Action, StepResult, TaskSettings, gymnasium
from rlkit.envs.calling import Guarded
from tests.each import for_each

ROOT = Path(__file__).parents[2]


class Countdown:
    """Say the number below, down to zero; seeded as gymnasium's environments are."""

    def __init__(self, low=3):
        self.low = low
        self.closed = False

    def reset(self, *, seed=None, options=None):
        self.left = random.Random(seed).randint(self.low, 9)
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


def played(task, *actions):
    async def scene():
        env = await Guarded.opened(task)
        try:
            return await env.reset(task.seed), [await env.step(Action(action)) for action in actions], env.env._env
        finally:
            assert await env.close() is None

    return asyncio.run(scene())


@pytest.mark.parametrize("kind", [Countdown, Later])
def test_an_episode(kind):
    task = gymnasium(kind, name="countdown", settings=TaskSettings(max_turns=9))[4]
    first, (), env = played(task)
    assert env.closed
    start = int(first.removeprefix("From ").removesuffix("."))
    answers = [str(number) for number in reversed(range(start))]
    again, results, _ = played(task, *answers)
    assert again == first
    assert [result.reward for result in results] == [1.0] * start
    assert [result.terminated for result in results] == [False] * (start - 1) + [True]
    assert not any(result.truncated for result in results)
    assert results[0] == StepResult(f"Now from {start - 1}.", 1.0, False, False, {"left": start - 1})
    assert (task.name, task.settings.max_turns) == ("countdown", 9)


def test_cut_off_by_the_environment():
    _, (result,), _ = played(gymnasium(Countdown)[0], "nonsense")
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, True)


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


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (("text only", ("", 0.0, True, False, {})), "reset returned str"),
        ((("text", {}), ("", 0.0, True, {})), "step returned tuple of 4"),
        ((("text", {}), "text"), "step returned str"),
    ],
)
def test_what_is_no_gymnasium(answers, message):
    """The old interface of four values among them."""

    class Wrong:
        def reset(self, *, seed=None, options=None):
            return answers[0]

        def step(self, action):
            return answers[1]

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


def test_gymnasium_is_not_imported():
    code = "import sys; from tests.envs.test_gymnasium import Countdown, gymnasium"
    code += "; gymnasium(Countdown)[0].make().reset(1); sys.exit('gymnasium' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_real_package():
    """Its own FrozenLake, whose moves and places are numbers."""
    package = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    moves = {"left": 0, "down": 1, "right": 2, "up": 3}

    def move(action):
        if action.strip() not in moves:
            raise ValueError(f"no such move: {action}")
        return moves[action.strip()]

    tasks = gymnasium(
        lambda: package.make("FrozenLake-v1", is_slippery=False), action=move, text=lambda place: f"You are at {place}."
    )
    path = ["down", "down", "right", "right", "down", "right"]
    first, results, _ = played(tasks[0], *path)
    assert first == "You are at 0."
    assert [result.observation for result in results] == [f"You are at {place}." for place in (4, 8, 9, 10, 14, 15)]
    assert [result.reward for result in results] == [0.0] * 5 + [1.0]
    assert results[-1].terminated
