"""Schemas from Python functions, and tools as an environment."""

from __future__ import annotations

import asyncio
import enum
import json
import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from rlkit.envs.protocol import Action
from rlkit.errors import ConfigError
from rlkit.tools import ToolEnv, check_schema, describe, formats, parse, schema
from tests.each import for_each


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(TypedDict):  # whose hints are texts here, in which Python itself does not see NotRequired
    x: int
    y: float
    z: NotRequired[int]


class Loop(TypedDict):
    next: Loop | None


def everything(
    text: str,
    number: float,
    colour: Colour,
    mode: Literal["fast", 3],
    items: list[int],
    pair: tuple[int, str],
    many: tuple[str, ...],
    table: dict[str, float],
    point: Point,
    maybe: int | None = None,
    either: int | list[str] = 0,
    noted: Annotated[bool, "a note"] = False,
    anything: Any = None,
    something: object = 0,
    row: Sequence[str] = (),
) -> str:
    """Does everything
    at once.

    It really does.

    Args:
        text (str): what to say,
            on two lines.
        number: with a colon: here

        mode: how.

    Returns:
        number: of things.
    """
    return text


INTEGER = {"type": "integer"}


def test_every_kind_of_hint():
    made = schema(everything)["function"]
    assert made["parameters"]["properties"] == {
        "text": {"type": "string", "description": "what to say, on two lines."},
        "number": {"type": "number", "description": "with a colon: here"},
        "colour": {"enum": ["red", "blue"]},
        "mode": {"enum": ["fast", 3], "description": "how."},
        "items": {"type": "array", "items": INTEGER},
        "pair": {"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "minItems": 2, "maxItems": 2},
        "many": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "object", "additionalProperties": {"type": "number"}},
        "point": {
            "type": "object",
            "properties": {"x": INTEGER, "y": {"type": "number"}, "z": INTEGER},
            "required": ["x", "y"],
        },
        "maybe": {"type": ["integer", "null"], "default": None},
        "either": {"anyOf": [INTEGER, {"type": "array", "items": {"type": "string"}}], "default": 0},
        "noted": {"type": "boolean", "description": "a note", "default": False},
        "anything": {"default": None},
        "something": {"default": 0},
        "row": {"type": "array", "items": {"type": "string"}},
    }
    assert made["description"] == "Does everything\nat once.\n\nIt really does."
    assert made["parameters"]["required"] == list(made["parameters"]["properties"])[:9]
    check_schema(made["parameters"])


def test_same_as_transformers_for_what_both_know():
    """Another implementation agrees on types, names and descriptions; it leaves out what is given by default."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")

    def f(a: str, b: list[int], c: dict[str, float], d: int = 3):
        """Does it.

        Args:
            a: the first
            b: the second
            c: the third
            d: the fourth
        """

    found, expected = schema(f)["function"], utils.get_json_schema(f)["function"]
    del found["parameters"]["additionalProperties"], found["parameters"]["properties"]["d"]["default"]
    expected.pop("return", None)
    assert found == expected


def no_hint(x): ...
def any_number(*values: int): ...
def odd(x: set[int]): ...
def unknown(x: Nowhere): ...  # noqa: F821
def loop(x: Loop): ...


@for_each(
    ("function", "message"),
    [
        (no_hint, "tool no_hint: parameter x: has no type hint"),
        (any_number, "parameter values: is variadic positional"),
        (odd, "parameter x: has the type set"),
        (unknown, "its parameters and their types cannot be found: name 'Nowhere'"),
        (max, "its parameters and their types cannot be found"),
        (loop, "parameter x: has a type that refers to itself"),
        (lambda x: x, "a function with a name"),
        (3, "a function with a name"),
    ],
)
def test_functions_that_are_no_tools(function, message):
    with pytest.raises(ConfigError, match=message):
        schema(function)


def test_every_format_is_described():
    """By the schemas and an example; written out, it is a call that its parser reads."""
    for kind in formats:
        assert '"name": "everything"' in describe([schema(everything)], kind)
    for kind in ("hermes", "json", "llama"):
        written = describe([], kind).split("write ")[1].removeprefix("nothing but ").split("; ")[0].split(", or ")[0]
        written = written.rstrip(".").replace("{...}", "{}")
        assert parse(written, kind).calls[0].name == "<tool>", kind
    with pytest.raises(ConfigError, match="one of hermes"):
        describe([], "other")


def add(x: int, y: int = 1) -> int:
    return x + y


async def wait(seconds: float) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"waited": seconds}


def fail():
    raise RuntimeError("broken")


def leave():
    raise SystemExit(3)


def long():
    return "x" * 100


def stop():
    return next(iter([]))


def dumb():
    raise Dumb


class Dumb(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(*turns, **settings):
    env = ToolEnv("Q", [add, wait, fail, leave, long, stop, dumb], lambda answer: float(answer == "42"), **settings)
    assert env.reset(seed=1) == "Q"
    results = [asyncio.run(env.step(turn if isinstance(turn, Action) else Action(turn))) for turn in turns]
    env.close()
    return results


def contents(result):
    return [message["content"] for message in result.observation]


def test_calls_are_answered_in_order():
    (result,) = played(call("add", x=1) + call("nothing") + call("wait", seconds=2) + call("add", x="1"))
    first, unknown, third, wrong = contents(result)
    assert (first, third) == ("2", '{"waited": 2}')
    assert unknown.startswith("The call of nothing was not made: the tool does not exist.")
    assert "arguments.x: '1' is not of type 'integer'" in wrong
    assert [message["tool_call_id"] for message in result.observation] == [f"call{i:05d}" for i in range(4)]
    assert (result.reward, result.terminated) == (0.0, False)
    assert result.info == {"tool_calls": 2, "malformed_calls": 2}


def test_rewards_of_turns():
    """Malformed calls may cost; a turn without calls is the answer."""
    turns = call("add"), call("add", x=1), "41", "42"
    found = [(result.reward, result.terminated) for result in played(*turns, malformed_reward=-0.5)]
    assert found == [(-0.5, False), (0.0, False), (0.0, True), (1.0, True)]


def test_what_a_tool_raises_is_told():
    """An exit too; and what is too long is cut."""
    text = call("fail") + call("leave") + call("long")
    (whole, odd), (cut,) = played(text, call("stop") + call("dumb")), played(text, max_result=13)
    assert contents(whole) == ["RuntimeError: broken", "SystemExit: 3", "x" * 100]
    assert contents(odd) == ["RuntimeError: raised StopIteration()", "Dumb"]
    assert contents(cut) == ["RuntimeError: ... (cut)", "SystemExit: 3", "x" * 13 + " ... (cut)"]


def test_the_reward_may_be_async_and_plain_tools_run_in_threads():
    seen = []

    def where():
        seen.append(threading.current_thread() is threading.main_thread())
        return ""

    async def reward(answer):
        return 7.0

    env = ToolEnv("Q", [where], reward)
    asyncio.run(env.step(Action(call("where"))))
    assert seen == [False]
    assert asyncio.run(env.step(Action("done"))).reward == 7.0


def test_calls_behind_a_control_token():
    """The decoded text has no <|python_tag|>; the raw one has."""
    action = Action('search {"name": "add"', raw='hm <|python_tag|>{"name": "add", "parameters": {"x": 2}}<|eom_id|>')
    (result,) = played(action, format="llama")
    assert contents(result) == ["3"]


def test_environments_that_cannot_be():
    with pytest.raises(ConfigError, match=r"functions are \[\]"):
        ToolEnv("Q", [], len)
    with pytest.raises(ConfigError, match="the reward is None"):
        ToolEnv("Q", [add], None)
    with pytest.raises(ConfigError, match=r"tools\[1\]"):
        ToolEnv("Q", [add, add], len)
    with pytest.raises(LookupError, match="did you mean 'hermes'"):
        ToolEnv("Q", [add], len, format="herms")
