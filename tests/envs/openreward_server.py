"""A server of small environments, for the tests; the first line that it prints is its port."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from openreward.environments import Environment, Server, terminal, tool
from openreward.environments.types import TextBlock, ToolOutput
from pydantic import BaseModel
from starlette.responses import JSONResponse

SESSIONS = {"open": 0, "opened": 0, "looked": 0}


class Value(BaseModel):
    value: int


class Text(BaseModel):
    text: str


def output(text=None, reward=None, **more):
    return ToolOutput(blocks=[] if text is None else [TextBlock(text=text)], reward=reward, **more)


class Counted(Environment):
    """Counts how many sessions are open, which ``state`` tells."""

    tasks = {"train": [{}]}  # of each split
    prompt = ("",)  # its blocks
    counted = False

    @classmethod
    def list_splits(cls):
        return list(cls.tasks)

    @classmethod
    def list_tasks(cls, split):
        return cls.tasks[split]

    def get_prompt(self):
        return [TextBlock(text=block.format(**self.task_spec)) for block in self.prompt]

    def setup(self):
        self.counted = True
        SESSIONS["open"] += 1
        SESSIONS["opened"] += 1

    def teardown(self):
        if self.counted:  # a session may be given up before it is set up
            self.counted = False
            SESSIONS["open"] -= 1


class Sums(Counted):
    """Add two numbers. ``answer`` ends the episode."""

    tasks = {
        split: [{"x": number, "y": 2 * number} for number in numbers]
        for split, numbers in (("train", range(10)), ("test", range(100, 103)), ("empty", ()))
    }
    prompt = ("Add these.", "{x} + {y}")

    @tool
    async def answer(self, p: Value) -> ToolOutput:
        """Gives the sum."""
        right = p.value == self.task_spec["x"] + self.task_spec["y"]
        return output("noted", float(right), finished=True, metadata={"right": right})

    @tool
    async def look(self, p: Text) -> ToolOutput:
        """Says something back."""
        SESSIONS["looked"] += 1
        return output(f"you said {p.text}", 0.25)

    @tool
    async def fail(self) -> ToolOutput:
        """Fails."""
        raise RuntimeError("the disk is full")

    @tool
    async def sleep(self, p: Value) -> ToolOutput:
        """Takes its time."""
        await asyncio.sleep(p.value)
        return output("awake")


class Essays(Counted):
    """The policy's plain message is the answer."""

    tasks = {"train": [{"word": "sun"}, {"word": "moon"}]}
    prompt = ("Write about the {word}.",)

    @terminal
    @tool
    async def submit(self, p: Text) -> ToolOutput:
        """Grades."""
        return output(reward=float(self.task_spec["word"] in p.text), finished=True)


class Keys(Counted):
    """Says which secrets have arrived."""

    prompt = ("Which keys are there?",)

    def __init__(self, task_spec={}, secrets={}):  # noqa: B006
        super().__init__(task_spec)
        self.secrets = secrets

    @tool
    async def keys(self) -> ToolOutput:
        """Names of secrets, and how long they are."""
        return output(", ".join(f"{name}:{len(value)}" for name, value in sorted(self.secrets.items())), finished=True)


class Digits(Counted):
    """The policy's plain message is paid for by its share of digits."""

    tasks = {"train": [{"word": word} for word in "abcdef"], "test": [{"word": word} for word in "xyz"]}
    prompt = ("Dial {word}.",)

    @terminal
    @tool
    async def submit(self, p: Text) -> ToolOutput:
        """Grades."""
        return output(reward=sum(c.isdigit() for c in p.text) / max(1, len(p.text)), finished=True)


class Doors(Counted):
    """Three doors, one after the other; each opened is worth a third."""

    tasks = {"train": [{"house": 1}, {"house": 2}]}
    prompt = ("House {house}.",)
    opened = 0

    @tool
    async def go(self) -> ToolOutput:
        """Opens one."""
        self.opened += 1
        return output("Open.", 1 / 3, finished=self.opened == 3)


class Refusing:
    """Answers 429 to sessions of the deployment "full", 401 to "private", and tells how many sessions are open.

    A call with the text "lost" is carried out, and then answered by 429, as a proxy may do.
    """

    def __init__(self, app):
        self.app = app
        self.refused = 0

    async def __call__(self, scope, receive, send):
        headers = dict(scope.get("headers", ()))
        deployment = headers.get(b"x-deployment", b"").decode()
        path = scope.get("path", "")
        answer = None
        if path == "/state":
            answer = JSONResponse({**SESSIONS, "refused": self.refused})
        elif (deployment == "full" and path == "/create") or (deployment == "closed" and path == "/create_session"):
            self.refused += 1
            answer = JSONResponse({"detail": "no capacity"}, 429, {"Retry-After": "0"})
        elif deployment == "private":
            answer = JSONResponse({"detail": "who are you?"}, 401)
        elif path == "/sums/call":  # "/call" redirects there
            asked = await receive()
            if b'"lost"' in asked["body"]:
                await self.app(scope, replay(asked, receive), drop)
                answer = JSONResponse({"detail": "too many requests"}, 429, {"Retry-After": "0"})
            receive = replay(asked, receive)
        await (self.app if answer is None else answer)(scope, receive, send)


def replay(first, receive):
    """``receive``, that gives ``first`` before."""
    left = [first]

    async def next_message():
        return left.pop() if left else await receive()

    return next_message


async def drop(message):
    """Send nothing."""


if __name__ == "__main__":
    server = Server([Sums, Essays, Keys, Digits, Doors])
    server.app.add_middleware(Refusing)
    with socket.socket() as listening:  # a port that nobody else can get in between
        listening.bind(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(server.app, timeout_keep_alive=60, log_level="warning")
        uvicorn.Server(config).run(sockets=[listening])
