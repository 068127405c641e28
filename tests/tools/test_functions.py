"""Schemas from Python functions, and tools as an environment."""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

import pytest

from rlkit.envs.protocol import Action
from rlkit.errors import ConfigError
from rlkit.tools import ToolEnv, check_schema, describe, formats, parse, schema
from tests.each import for_each


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(TypedDict):
    x: int
    y: float


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


def parameters(function):
    return schema(function)["function"]["parameters"]["properties"]


def test_every_kind_of_hint():
    assert parameters(everything) == {
        "text": {"type": "string", "description": "what to say, on two lines."},
        "number": {"type": "number", "description": "with a colon: here"},
        "colour": {"enum": ["red", "blue"]},
        "mode": {"enum": ["fast", 3], "description": "how."},
        "items": {"type": "array", "items": {"type": "integer"}},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "many": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "object", "additionalProperties": {"type": "number"}},
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
            "required": ["x", "y"],
        },
        "maybe": {"type": ["integer", "null"], "default": None},
        "either": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}], "default": 0},
        "noted": {"type": "boolean", "description": "a note", "default": False},
        "anything": {"default": None},
        "row": {"type": "array", "items": {"type": "string"}},
    }
    made = schema(everything)["function"]
    assert made["description"] == "Does everything\nat once.\n\nIt really does."
    assert made["parameters"]["required"] == list(parameters(everything))[:9]
    check_schema(made["parameters"])


def test_same_as_transformers_for_what_both_know():
    """Another implementation agrees on types, names and descriptions."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")

    def f(a: str, b: list[int], c: dict[str, float], d: int = 3):
        """Does it.

        Args:
            a: the first
            b: the second
            c: the third
            d: the fourth
        """

    theirs = utils.get_json_schema(f)["function"]
    ours = schema(f)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    ours["parameters"]["properties"]["d"].pop("default")  # which they leave out
    assert ours["parameters"]["properties"] == theirs["parameters"]["properties"]


def no_hint(x):
    """Has none."""


def any_number(*values: int):
    """Takes any number."""


def odd(x: set[int]):
    """Takes what JSON has not."""


def unknown(x: Nowhere):  # noqa: F821
    """Names a type that does not exist."""


@for_each(
    ("function", "message"),
    [
        (no_hint, "tool no_hint: parameter x: has no type hint"),
        (any_number, "parameter values: is variadic positional"),
        (odd, "parameter x: has the type set"),
        (unknown, "type hints cannot be resolved"),
        (lambda x: x, "a function with a name"),
        (3, "a function with a name"),
    ],
)
def test_functions_that_are_no_tools(function, message):
    with pytest.raises(ConfigError, match=message):
        schema(function)


@for_each("kind", sorted(formats))
def test_every_format_is_described(kind):
    """The description holds the schemas, and no call of its own that a parser would take from it."""
    text = describe([schema(everything)], kind)
    assert '"name": "everything"' in text
    with pytest.raises(ConfigError, match="one of hermes"):
        describe([], "other")


def test_the_example_in_the_description_is_the_format():
    """Written out, each example is a call that its own parser reads."""
    for kind in ("hermes", "json", "llama"):
        written = describe([], kind).split("write ")[1].removeprefix("nothing but ").split("; ")[0].split(", or ")[0]
        written = written.rstrip(".").replace("{...}", "{}")
        assert parse(written, kind).calls[0].name == "<tool>", kind


def add(x: int, y: int = 1) -> int:
    """Adds.

    Args:
        x: the first.
        y: the second.
    """
    return x + y


async def wait(seconds: float) -> dict[str, float]:
    """Waits."""
    await asyncio.sleep(0)
    return {"waited": seconds}


def fail() -> None:
    """Fails."""
    raise RuntimeError("broken")


def leave() -> None:
    """Leaves."""
    raise SystemExit(3)


def long() -> str:
    """Talks."""
    return "x" * 100


def call(name, **arguments):
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(*turns, **settings):
    env = ToolEnv("Q", [add, wait, fail, leave, long], lambda answer: float(answer == "42"), **settings)
    assert env.reset(seed=1) == "Q"
    results = [asyncio.run(env.step(turn if isinstance(turn, Action) else Action(turn))) for turn in turns]
    env.close()
    return results


def test_calls_are_answered_in_order():
    (result,) = played(call("add", x=1) + call("nothing") + call("wait", seconds=2) + call("add", x="1"))
    contents = [message["content"] for message in result.observation]
    assert contents[0] == "2"
    assert contents[1].startswith("The call of nothing was not made: the tool does not exist.")
    assert contents[2] == '{"waited": 2}'
    assert "arguments.x: '1' is not of type 'integer'" in contents[3]
    assert [message["tool_call_id"] for message in result.observation] == [f"call{i:05d}" for i in range(4)]
    assert (result.reward, result.terminated, dict(result.info)) == (
        0.0,
        False,
        {"tool_calls": 2, "malformed_calls": 2},
    )


def test_malformed_calls_may_cost():
    first, second = played(call("add"), call("add", x=1), malformed_reward=-0.5)
    assert (first.reward, second.reward) == (-0.5, 0.0)


def test_a_turn_without_calls_is_the_answer():
    first, second = played("41", "42")
    assert (first.reward, first.terminated) == (0.0, True)
    assert (second.reward, second.terminated) == (1.0, True)


def test_what_a_tool_raises_is_told():
    """An exit too; and what is too long is cut."""
    text = call("fail") + call("leave") + call("long")
    (result,) = played(text)
    assert [m["content"] for m in result.observation] == ["RuntimeError: broken", "SystemExit: 3", "x" * 100]
    (result,) = played(text, max_result=13)
    expected = ["RuntimeError:", "SystemExit: 3", "x" * 13]
    assert [m["content"].removesuffix(" ... (cut)") for m in result.observation] == expected
    assert [m["content"].endswith(" ... (cut)") for m in result.observation] == [True, False, True]


def test_the_reward_may_be_async_and_plain_tools_run_in_threads():
    seen = []

    def where() -> str:
        """Tells."""
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
    assert result.observation[0]["content"] == "3"


def test_environments_that_cannot_be():
    with pytest.raises(ConfigError, match=r"functions are \[\]"):
        ToolEnv("Q", [], len)
    with pytest.raises(ConfigError, match="the reward is None"):
        ToolEnv("Q", [add], None)
    with pytest.raises(ConfigError, match=r"tools\[1\]"):
        ToolEnv("Q", [add, add], len)
    with pytest.raises(LookupError, match="did you mean 'hermes'"):
        ToolEnv("Q", [add], len, format="herms")
