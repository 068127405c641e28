"""Actions, settings, tasks, and the order in which tasks come."""

from __future__ import annotations

import collections
import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.envs import Action, Env, StepResult, Task, Tasks, TaskSettings, TaskSource
from tests.each import for_each


class Nothing:
    reset = step = close = len


def tasks(size, **options):
    return Tasks(lambda _: Nothing(), size, **options)


def indices(batch):
    return [task.index for task in batch]


def test_an_action_is_its_text():
    action = Action("four", tokens=[4, 0], raw="four<end>", stop_reason="length")
    assert isinstance(action, str)
    assert {action: 1}["four"] == 1
    assert (action.tokens.tolist(), action.tokens.dtype) == ([4, 0], np.int64)
    assert (action.raw, action.stop_reason) == ("four<end>", "length")
    action = Action("x")
    assert (action.tokens.size, action.raw, action.stop_reason) == (0, "x", "stop"), "by hand it needs no tokens"


@for_each("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_action_is_copied_whole(again):
    action = Action("a", tokens=[1], raw="a.", stop_reason="length")
    other = again(action)
    assert type(other) is Action
    assert (other, other.raw, other.stop_reason, other.tokens.tolist()) == ("a", "a.", "length", [1])


@for_each(("options", "error"), [({"stop_reason": "end"}, rlkit.ConfigError), ({"tokens": [-1]}, rlkit.DataError)])
def test_an_action_that_is_none(options, error):
    with pytest.raises(error, match="Action"):
        Action("a", **options)


def test_protocols_know_their_own():
    assert isinstance(Nothing(), Env)
    assert not isinstance(object(), Env)
    assert isinstance(tasks(1), TaskSource)


def test_step_results_share_no_info():
    assert StepResult().info == {}
    with pytest.raises(TypeError):
        StepResult().info["x"] = 1


OUT_OF_RANGE = {
    "n": (0, 2.0, True),
    "min_n": (0, 3),  # more than n, which is 2
    "temperature": (-1.0, 1e-9, float("nan")),
    "max_tokens": (0,),
    "max_turns": (-1,),
    "max_total_tokens": ("many",),
    "deadline": (0.0, float("inf")),
    "reduction": ("median",),
    "nonterminal_reward": (float("nan"),),
}


@for_each(("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values])
def test_settings_out_of_range(name, value):
    with pytest.raises(rlkit.ConfigError, match=rf"Settings\.{name}"):
        TaskSettings(**{"n": 2, name: value})


def test_settings_over_others():
    """What is set wins, 0 included; what is None does not."""
    over = TaskSettings(n=4, temperature=0.0).over(TaskSettings(n=8, temperature=1.0, deadline=3.0))
    assert over == TaskSettings(n=4, temperature=0.0, deadline=3.0)


@for_each(("name", "value"), [("make", 3), ("name", ""), ("seed", -1), ("settings", {"n": 2})])
def test_a_task_that_is_none(name, value):
    with pytest.raises(rlkit.ConfigError, match=rf"Task\.{name}"):
        Task(**{"make": Nothing, name: value})


@for_each(("name", "value"), [("size", 0), ("size", 2.5), ("make", None), ("split", "")])
def test_tasks_that_are_none(name, value):
    with pytest.raises(rlkit.ConfigError, match=rf"Tasks\.{name}"):
        Tasks(**{"make": lambda _: Nothing(), "size": 2, name: value})


def test_a_task_knows_where_it_is_from():
    made = []
    settings = TaskSettings(n=2)
    some = Tasks(made.append, 5, name="some", seeds=lambda i: 100 + i, settings=settings)
    task = some[-1]
    assert (task.name, task.index, task.seed, task.settings) == ("some", 4, 104, settings)
    assert made == []
    task.make()
    task.make()
    assert made == [4, 4]
    with pytest.raises(IndexError, match=r"tasks\[5\]: Tasks\('some'.* has 5 tasks"):
        some[5]


def test_a_part_of_the_tasks():
    """A slice is a set of its own, whose tasks keep their index and seed."""
    part = tasks(10, name="ten", split="test", seeds=lambda i: i * i)[3:9:2]
    assert (len(part), part.name, part.split) == (3, "ten", "test")
    assert [(task.index, task.seed) for task in part] == [(3, 9), (5, 25), (7, 49)]
    assert sorted(indices(part.batch(0, 3))) == [3, 5, 7]
    assert indices(part[1:]) == [5, 7]
    with pytest.raises(rlkit.ConfigError, match="number of tasks"):
        part[5:]


@given(st.integers(1, 40), st.integers(0, 2**64))
def test_each_task_once_per_pass_whatever_the_size(n, seed):
    """Cut into batches of any size, the stream is the same, and every n places of it hold every task."""
    some = tasks(n)
    stream = indices(some.batch(0, 4 * n, seed=seed))
    for size in {1, 2, 3, n, n + 1}:
        steps = -(-4 * n // size)
        cut = [i for step in range(steps) for i in indices(some.batch(step, size, seed=seed))]
        assert cut[: 4 * n] == stream
    for epoch in range(4):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_batches_are_pure():
    """The same arguments give the same batch, in another order of asking and from another object."""
    first = [indices(tasks(50).batch(step, 7, seed=3)) for step in range(30)]
    some = tasks(50)
    again = {step: indices(some.batch(step, 7, seed=3)) for step in reversed(range(30))}
    assert first == [again[step] for step in range(30)]


def test_passes_seeds_and_environments_have_orders_of_their_own():
    n = 100
    orders = [
        indices(tasks(n).batch(0, n)),
        indices(tasks(n).batch(1, n)),
        indices(tasks(n).batch(0, n, seed=1)),
        indices(tasks(n, name="other").batch(0, n)),
        indices(tasks(n, split="test").batch(0, n)),
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_orders_are_even():
    """Over many seeds each task comes first about equally often: 2000 draws of 5, within 5 standard deviations."""
    first = collections.Counter(indices(tasks(5).batch(0, 1, seed=seed))[0] for seed in range(2000))
    assert sorted(first) == list(range(5))
    assert max(abs(count - 400) for count in first.values()) < 5 * np.sqrt(2000 * 0.2 * 0.8)


def test_the_order_stays():
    """Saved runs rely on it; numpy promises that the streams of SeedSequence and PCG64 stay."""
    assert indices(tasks(8).batch(0, 8)) == [4, 7, 3, 1, 6, 5, 0, 2]


@for_each("arguments", [(-1, 2), (0, 0), (0.0, 2), (0, 2.0)])
def test_batches_that_are_none(arguments):
    with pytest.raises(rlkit.ConfigError):
        tasks(3).batch(*arguments)
    with pytest.raises(rlkit.ConfigError, match="seed"):
        tasks(3).batch(0, 1, seed=-1)
