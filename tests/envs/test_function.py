"""Prompts and reward functions."""

from __future__ import annotations

import asyncio
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.envs import Action, StepResult, Task, TaskSettings, function
from rlkit.envs.calling import scores
from tests.each import for_each
from tests.envs import parts


def played(task, text="an answer", **options):
    first, (result,), _ = parts.played(task, text, **options)
    return first, result


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]


@for_each(
    ("row", "first"),
    [
        ("Hi.", "Hi."),
        (MESSAGES, tuple(MESSAGES)),
        ({"prompt": "Hi."}, "Hi."),
        ({"prompt": MESSAGES}, tuple(MESSAGES)),
        ({"prompt": MESSAGES[1]}, (MESSAGES[1],)),
    ],
)
def test_forms_of_a_prompt(row, first):
    assert played(function([row], lambda text: 1.0)[0]) == (first, StepResult("", 1.0, True))


@for_each("row", [[5, 6, 7], np.array([5, 6, 7]), {"prompt": (5, 6, 7)}])
def test_token_ids_as_a_prompt(row):
    first, _ = played(function([row], len)[0])
    assert (first.dtype, first.tolist()) == (np.int64, [5, 6, 7])


def test_fields_reach_the_reward_by_name():
    """Only those that it names, or all, the prompt among them; defaults stand where a row says nothing."""
    seen = []

    def reward(action, answer, *, prompt, weight=2.0, other="none"):
        seen.append((type(action), action, answer, prompt, weight, other))
        return weight * (action == answer)

    row = {"prompt": "a?", "answer": "a", "unused": object()}
    other_row = {"prompt": "b?", "answer": "b", "weight": 0.5, "other": "some"}
    assert [played(task, "a")[1].reward for task in function([row, other_row], reward)] == [2.0, 0.0]
    assert played(function([row], lambda text, **fields: float(fields == row))[0])[1].reward == 1.0
    assert seen == [(Action, "a", "a", "a?", 2.0, "none"), (Action, "a", "b", "b?", 0.5, "some")]


async def half(text):
    await asyncio.sleep(0)
    return 0.5


class Judge:
    def __call__(self, text, answer):
        return text == answer

    async def judge(self, text, answer):
        return text == answer


@for_each(
    ("reward", "number"),
    [(half, 0.5), (Judge(), 1.0), (Judge().judge, 1.0), (len, 9.0), (operator.truth, 1.0)],
)
def test_rewards_of_every_sort(reward, number):
    found = played(function([{"prompt": "p", "answer": "an answer"}], reward)[0])[1].reward
    assert (found, type(found)) == (number, float)


@for_each("value", [float("nan"), "1", [1.0]])
def test_a_reward_that_is_none(value):
    """The episode fails, and counts as nothing: it is not scored 0."""
    where = r"environment 'function': step|in the reward '<lambda>' for prompts\[0\]"
    with pytest.raises(rlkit.EnvError, match=rf"({where}): reward: got"):
        played(function(["p"], lambda text: value)[0])


def test_splits():
    rows = {"train": ["a", "b", "c"], "test": ["d"]}
    assert [len(function(rows, len, split=split)) for split in rows] == [3, 1]
    assert played(function(rows, len, split="test")[0])[0] == "d"
    assert function(rows, len, split="test").split == "test"
    with pytest.raises(rlkit.UnknownNameError, match="no split named 'dev'. There are: train, test"):
        function(rows, len, split="dev")


def test_rows_that_are_read_when_they_are_asked_for():
    """A set on a disk: nothing but the first row is read before it is played."""
    read = []

    class Rows:
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            read.append(index)
            return {"prompt": f"row {index}"}

    tasks = function(Rows(), len, name="rows", settings=TaskSettings(n=2))
    assert read == [0]
    assert played(tasks[998])[0] == "row 998"
    assert (tasks[3].name, tasks[3].settings.n) == ("rows", 2)


@for_each(
    ("prompts", "reward", "error", "message"),
    [
        ([], len, rlkit.DataError, "empty"),
        ("text", len, rlkit.DataError, "prompts: got 'text'"),
        (None, len, rlkit.DataError, "prompts"),
        (["a", 3], len, rlkit.DataError, r"prompts\[1\]"),
        (["a", {"question": "b"}], len, rlkit.DataError, r"prompts\[1\]: has only \['question'\]"),
        ([{"prompt": None}], len, rlkit.DataError, r"prompts\[0\]\['prompt'\]"),
        ([[{"content": "no role"}]], len, rlkit.DataError, "role"),
        ([np.zeros(3)], len, rlkit.DataError, "token ids"),
        ([[1, -1]], len, rlkit.DataError, "is -1"),
        (["a\ud800"], len, rlkit.DataError, "UTF-8"),
        (["a"], "reward", rlkit.ConfigError, "reward"),
        (["a"], lambda text, answer: 1.0, rlkit.ConfigError, r"prompts\[0\]: has no field 'answer'"),
        ([{"prompt": "a", "answer": 1}, "b"], lambda text, answer: 1.0, rlkit.ConfigError, r"prompts\[1\]"),
    ],
)
def test_what_is_wrong_is_told_at_once(prompts, reward, error, message):
    with pytest.raises(error, match=message):
        function(prompts, reward)


def ranks(actions, answer):
    """The longest right answer is worth most."""
    order = sorted(range(len(actions)), key=lambda i: (answer in actions[i], len(actions[i])))
    return [order.index(i) / max(len(actions) - 1, 1) for i in range(len(actions))]


def test_a_reward_over_the_group():
    """Called once, with all answers and the fields of the row; the step itself is worth nothing."""
    task = function([{"prompt": "p", "answer": "a"}], ranks, group=True)[0]
    assert played(task, scored=True)[1] == StepResult("", 0.0, True, info={"answer": "a"}, rewards=())
    assert asyncio.run(scores(task, [Action("ba"), Action("bbbb"), Action("bba")])) == [0.5, 0.0, 1.0]
    assert asyncio.run(scores(task, [])) == []
    assert asyncio.run(scores(Task(lambda: None), [Action("a"), Action("b")])) == [0.0, 0.0], "without a score"
    with pytest.raises(rlkit.UnsupportedError, match="'function': uses group scoring"):  # which nobody would do
        played(task)


@for_each("given", [[1.0], [1.0, 2.0, 3.0], 1.0, None, "ab", {0: 1.0, 1: 2.0}, [1.0, float("nan")], [1.0, "1"]])
def test_scores_that_are_none(given):
    task = function(["p"], lambda actions: given, group=True)[0]
    with pytest.raises(rlkit.EnvError, match="environment 'function': score"):
        asyncio.run(scores(task, [Action("a"), Action("b")]))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_scores_are_the_functions_own(numbers):
    async def reward(actions):
        return np.array(numbers)

    task = function(["p"], reward, group=True)[0]
    assert asyncio.run(scores(task, [Action("x")] * len(numbers))) == numbers
