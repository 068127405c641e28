"""Rewards by name: rlkit's own, which are 0 or 1, and those of Trinity-RFT's configurations, with its numbers."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from rlkit import _check, answers
from rlkit._runtime import missing
from rlkit.chat.messages import is_list, read_text
from rlkit.envs import Action
from rlkit.errors import ConfigError, DataError
from rlkit.recipes._trinity_math import boxed_verdict, dapo_verdict
from rlkit.registry import Registry
from rlkit.rewards import overlong_penalty

__all__ = ["bind_reward", "read_answer", "rewards"]

rewards = Registry("reward function", entry_point_group="rlkit.rewards")
"""Name -> function ``(action, answer, **reward_fn_args)`` that returns a number."""

_R1 = r"<think>.*?</think>\s*<answer>.*?</answer>\s*$"
_STRICT = r"\A<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
_FORMAT = 0.1
_ALGEBRA = (
    "answer_reward",
    "accuracy_reward",
    "boxed_reward",
    "math_reward",
    "algebra_boxed_reward",
    "algebra_dapo_reward",
)
_OPERATORS: Mapping[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def bind_reward(
    name: str, args: Mapping[str, object], *, where: str = "reward_fn_args"
) -> Callable[[object, object], float]:
    """Return the reward of that name with its settings bound.

    Raises:
        UnknownNameError: no such reward.
        ConfigError: it does not take one of the settings, or requires one that is missing.
        MissingPackageError: it compares by algebra, and math-verify is not installed.
    """
    function = rewards[name]
    if name in _ALGEBRA and importlib.util.find_spec("math_verify") is None:
        raise missing(f"the reward {name}", "math-verify", "math")
    parameters = list(inspect.signature(function).parameters.values())
    settings = {p.name: p for p in parameters[2:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in args:
            if key not in settings:
                raise ConfigError(f"{where}.{key}: unknown setting of {name}{_check.suggest(key, settings)}")
    for key, parameter in settings.items():
        if parameter.default is parameter.empty and key not in args:
            raise ConfigError(f"{where}.{key}", "is not given", f"a setting that {name} needs")
    score = functools.partial(_score_best, function, dict(args))
    score.__name__ = name  # type: ignore[attr-defined]  # the name in errors
    return score


def _score_best(function: Callable[..., float], args: Mapping[str, object], action: object, answer: object) -> float:
    """Return the reward; of several accepted answers, the highest."""
    accepted = answer if isinstance(answer, tuple) else (answer,)
    return max(float(function(action, each, **args)) for each in accepted)


_OBJECTS = ("countdown_reward",)  # of ours, those whose answer is no text


def read_answer(reward: str, value: object, where: str) -> object:
    """Return a row's answer as the reward takes it: for a reward of ours a tuple of the texts that are accepted.

    Args:
        reward: its name. Yours gets the row's value as it is.
        value: text, a number, or a list of these of which each is right.
        where: the row and its field, for messages.

    Raises:
        DataError: another type; of an object, the dotted keys that would work are named.

    >>> read_answer("answer_reward", 34, "row 0"), read_answer("answer_reward", ["34", "thirty-four"], "row 0")
    (('34',), ('34', 'thirty-four'))
    """
    if rewards[reward].__module__ != __name__ or reward in _OBJECTS:
        return value
    accepted = list(value) if is_list(value) else [value]
    if not accepted:
        raise DataError(where, "is an empty list", "at least one accepted answer")
    return tuple(text for each in accepted for text in _accepted_texts(each, where))


def _accepted_texts(value: object, where: str) -> list[str]:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return [read_text(value, where)]
    if isinstance(value, int) and not isinstance(value, bool):
        return [str(value)]
    if isinstance(value, float) and math.isfinite(value):
        return [str(value), *([str(int(value))] if value.is_integer() else [])]
    expected = "text, a number, or a list of accepted answers"
    keys = [key for key, inner in _iterate_leaves(value) if isinstance(inner, (str, int, float))]
    named = " or ".join(f"{where.rpartition(' ')[2]}.{key}" for key in keys)
    raise DataError(where, f"got {_check.describe(value)}", expected, f"response_key={named} names it" if named else "")


def _iterate_leaves(value: object) -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and the values of an object."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if isinstance(inner, Mapping):
            yield from ((f"{key}.{rest}", leaf) for rest, leaf in _iterate_leaves(inner))
        else:
            yield str(key), inner


@rewards.register("answer_reward")
def _answer_reward(action: str, answer: object) -> float:
    """Return 1 where the answer in a box, a tag, or else the last number is equal to what is right.

    >>> _answer_reward("So it is 1,200.", "Six hundred twice. #### 1200")
    1.0
    """
    answered = answers.boxed(action) or answers.between_tags(action)
    if answered is None:
        number = answers.last_number(action)
        answered = None if number is None else str(number)
    return float(answered is not None and answers.math_equal(answered, _read_truth(answer)))


@rewards.register("accuracy_reward")
@rewards.register("boxed_reward")
def _boxed_reward(action: str, answer: object) -> float:
    """Return 1 where the answer in a box is equal to what is right."""
    answered = answers.boxed(action)
    return float(answered is not None and answers.math_equal(answered, _read_truth(answer)))


@rewards.register("exact_match")
def _exact_match(action: str, answer: object) -> float:
    """Return 1 where the whole text, without white space around it, is the answer."""
    return float(action.strip() == str(answer).strip())


@rewards.register("contains")
def _contains(action: str, answer: object) -> float:
    """Return 1 where the text contains the answer."""
    return float(str(answer).strip() in action)


@rewards.register("math_reward")
def _math_reward(action: str, answer: object, *, pattern: str = _R1) -> float:
    """Return answer_reward, and 0.1 more for thinking and an answer in their tags, 0.1 less without.

    >>> _math_reward("<think>6 + 6</think> <answer>12</answer>", 12), _math_reward("12", 12)
    (1.1, 0.9)
    """
    tagged = re.search(r"<answer>(.*?)</answer>", action)
    whole = tagged is not None and answers.math_equal(tagged[1], _read_truth(answer))
    right = whole or bool(_answer_reward(tagged[1] if tagged else action, answer))
    return float(right) + _score_form(pattern, action)


@rewards.register("format_reward")
def _format_reward(action: str, answer: object, *, pattern: str = _STRICT) -> float:
    """Return 0.1 where the text is thinking and an answer, each between tags on their own lines, else -0.1."""
    del answer
    return _score_form(pattern, action)


@rewards.register("math_boxed_reward")
def _math_boxed_reward(
    action: str, answer: object, *, with_think: bool = False, format_score_coef: float = _FORMAT
) -> float:
    r"""Return 1 where the last box is written as the truth is, less format_score_coef for wrong thinking (with_think).

    >>> _math_boxed_reward(r"so \boxed{1,000}", "1000"), _algebra_boxed_reward(r"so \boxed{1,000}", "1000")
    (0.0, 1.0)
    """
    return float(boxed_verdict(str(action), str(answer))) - _thinking_cost(action, with_think, format_score_coef)


@rewards.register("algebra_boxed_reward")
def _algebra_boxed_reward(
    action: str, answer: object, *, with_think: bool = False, format_score_coef: float = _FORMAT
) -> float:
    """Return boxed_reward, less format_score_coef where with_think is on and the text has not one block of thinking."""
    return _boxed_reward(action, answer) - _thinking_cost(action, with_think, format_score_coef)


def _thinking_cost(text: str, wanted: bool, coefficient: float) -> float:
    once = text.count("<think>") == text.count("</think>") == 1
    right = once and text.find("<think>") < text.find("</think>")
    return (coefficient or _FORMAT) if wanted and not right else 0.0


@rewards.register("math_boxed_reward_naive_dapo")
def _naive_dapo_reward(action: str, answer: object) -> float:
    """Return 1 where the last box after the thinking, or without one the whole text, satisfies math_dapo_reward."""
    return float(dapo_verdict(str(action), str(answer)))


def _dapo_reward(right: Callable[[Action, object], float]) -> Callable[..., float]:
    def reward(
        action: Action,
        answer: object,
        *,
        enable_overlong_penalty: bool = False,
        penalty_factor: float | None = None,
        max_response_length: int | None = None,
        cache_length: int | None = None,
    ) -> float:
        """Return 1 for the right answer after the thinking, else -1, less a penalty for length near the limit."""
        score = 1.0 if right(action, answer) else -1.0
        if not enable_overlong_penalty:
            return score
        longest = _check.integer("max_response_length", max_response_length, low=1)
        soft = _check.integer("cache_length", cache_length, low=1, high=longest)
        factor = _check.real("penalty_factor", penalty_factor, low=0.0)
        length = float(action.tokens.size)
        return score + float(overlong_penalty([length], max_length=longest, buffer=soft, factor=factor)[0])

    return reward


rewards.register("math_dapo_reward")(_dapo_reward(_naive_dapo_reward))
rewards.register("algebra_dapo_reward")(
    _dapo_reward(lambda action, answer: _boxed_reward(str(action).rpartition("</think>")[2], answer))
)


@rewards.register("countdown_reward")
def _countdown_reward(action: str, answer: object) -> float:
    """Return 1 where the last line's answer makes the target of every number once, 0.1 for another formula, else 0.

    >>> row = {"target": 10, "numbers": [2, 3, 4]}
    >>> [_countdown_reward(f"<answer>{said}</answer>", row) for said in ("2 * 3 + 4", "2 + 3 + 4", "5 + 5")] + [
    ...     _countdown_reward("2 * 3 + 4", row)]
    [1.0, 0.1, 0.1, 0.0]
    """
    task = json.loads(answer) if isinstance(answer, str) else answer
    if not isinstance(task, Mapping) or not {"target", "numbers"} <= task.keys():
        what = f"is {_check.describe(answer)}"
        raise DataError("countdown_reward: the answer", what, "a mapping with target and numbers")
    tagged = re.findall(r"<answer>(.*?)</answer>", action.rpartition("\n")[2])
    if not tagged:
        return 0.0
    said = tagged[-1].strip()
    if len(said) > 1000 or sorted(map(int, re.findall(r"\d+", said))) != sorted(task["numbers"]):
        return 0.1
    try:
        value = _evaluate(ast.parse(said, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return 0.1
    return 1.0 if abs(value - task["target"]) < 1e-5 else 0.1


def _evaluate(node: ast.expr) -> float:
    """Return the value of a formula of numbers, + - * / and brackets. Raises ValueError: another formula."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    raise ValueError("not a formula")


def _score_form(pattern: str, text: str) -> float:
    return _FORMAT if re.search(pattern, text, re.DOTALL | re.MULTILINE) else -_FORMAT


def _read_truth(answer: object) -> str:
    """Return the right answer: after ``####`` if present, as in GSM8K; else the box, or the whole text."""
    text = str(answer)
    if "####" in text:
        return text.rpartition("####")[2].strip().replace(",", "")
    return answers.boxed(text) or text.strip()
