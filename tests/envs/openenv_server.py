"""Small OpenEnv environments for the tests, served by an interpreter that has openenv-core."""

from __future__ import annotations

import os
import random
from typing import Literal

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    word: str


class Hint(Observation):
    hint: str = ""


class Words(Environment):
    """Guess a word; its seed says which."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def reset(self, seed=None, episode_id=None, length=3, **kwargs):
        self.word = "".join(random.Random(seed).choices("ab", k=length))
        self.count = 0
        return Hint(hint=f"A word of {length} letters.")

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        if action.word == "crash":
            raise RuntimeError("the dictionary is gone")
        if action.word == "die":
            os._exit(7)
        if action.word == "show":
            return Hint(hint=self.word, reward=None)
        right = action.word == self.word
        return Hint(hint="" if right else "no", reward=float(right), done=right or self.count == 3)

    @property
    def state(self):
        return State(step_count=self.count)


class Move(Action):
    direction: Literal["left", "right"]
    steps: int = 1


class Place(Observation):
    x: int = 0
    legal: list[str] = []


class Line(Words):
    """Walk to 3."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.x = 0
        return Place(x=0, legal=["left", "right"])

    def step(self, action, timeout_s=None, **kwargs):
        self.x += action.steps * (1 if action.direction == "right" else -1)
        return Place(x=self.x, legal=["left", "right"], reward=float(self.x == 3), done=self.x == 3)


app = create_fastapi_app(Words, Guess, Hint, max_concurrent_envs=4)
line = create_fastapi_app(Line, Move, Place, max_concurrent_envs=4)
narrow = create_fastapi_app(Words, Guess, Hint, max_concurrent_envs=1)
