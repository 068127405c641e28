"""Mixtures: proportions, order, settings."""

from __future__ import annotations

import collections
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.envs import Mixture, Task, Tasks, TaskSettings, TaskSource, function, mixture
from tests.each import for_each


def tasks(size, name="plain", **options):
    return Tasks(lambda index: index, size, name=name, **options)


def names(batch):
    return [task.name for task in batch]


def identity(task):
    return task.name, task.index, task.seed, task.settings


WEIGHTS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 100), min_size=1)


def dealt(weights, seats):
    """Sainte-Laguë's method in so many words: one seat after the other to the largest weight / (2 seats + 1)."""
    counts = dict.fromkeys(weights, 0)
    for _ in range(seats):
        counts[max(weights, key=lambda name: Fraction(weights[name], 2 * counts[name] + 1))] += 1
    return counts


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 100), min_size=1), st.integers(0, 300))
def test_counts_are_the_methods_own(weights, position):
    """Found directly for any place, they are what dealing out one after the other gives, in fractions."""
    found = mixture({name: tasks(3) for name in weights}, weights=weights).counts(position)
    assert found == dealt(weights, position)


@given(WEIGHTS, st.integers(0, 10**9))
def test_proportions(weights, position):
    """At any place each part has its share, to within one more than half the number of parts."""
    found = mixture({name: tasks(3) for name in weights}, weights=weights).counts(position)
    total = sum(weights.values())
    for name, weight in weights.items():
        assert abs(found[name] - position * weight / total) <= 1 + len(weights) / 2
    assert sum(found.values()) == position


@given(WEIGHTS, st.integers(1, 9), st.integers(0, 2**32))
def test_the_stream_does_not_depend_on_the_size(weights, size, seed):
    """Cut in any way it is the same stream; each part goes through its own tasks as it does alone."""
    parts = {name: tasks(3 + i) for i, name in enumerate(weights)}
    both = mixture(parts, weights=weights)
    stream = both.batch(0, 60, seed=seed)
    cut = [task for step in range(-(-60 // size)) for task in both.batch(step, size, seed=seed)][:60]
    assert [identity(task) for task in cut] == [identity(task) for task in stream]
    assert [identity(both.at(place, seed=seed)) for place in range(60)] == [identity(task) for task in stream]
    for name, part in parts.items():
        own = [task.index for task in stream if task.name == name]
        assert own == [part.at(place, seed=seed).index for place in range(len(own))]


def test_no_batch_is_far_off():
    """One in eight, and there is one in each batch of eight."""
    both = mixture({"much": tasks(100), "little": tasks(10)}, weights={"much": 7})
    for step in range(40):
        assert collections.Counter(names(both.batch(step, 8))) == {"much": 7, "little": 1}


def test_each_task_once_per_pass_of_its_part():
    both = mixture({"a": tasks(5), "b": tasks(7)}, weights={"a": 1, "b": 2})
    found = collections.Counter((task.name, task.index) for task in both.batch(0, 3 * 35))
    assert found == {**{("a", i): 7 for i in range(5)}, **{("b", i): 10 for i in range(7)}}


def test_settings_stand_above_the_tasks_own():
    parts = {"a": tasks(2, settings=TaskSettings(n=4, temperature=0.5, max_turns=3)), "b": tasks(2)}
    other = TaskSettings(deadline=9.0, nonterminal_reward=-1.0)
    both = mixture(parts, settings={"a": TaskSettings(n=16, reduction="max"), "b": other})
    found = {task.name: task.settings for task in both.batch(0, 2)}
    assert found == {"a": TaskSettings(n=16, temperature=0.5, max_turns=3, reduction="max"), "b": other}


def test_a_task_is_otherwise_as_it_was():
    score = function(["p"], len, group=True)
    both = mixture({"a": tasks(4, seeds=lambda index: 10 + index), "b": score})
    one, other = sorted(both.batch(0, 2), key=lambda task: task.name)
    assert one.seed == 10 + one.index == 10 + one.make()
    assert other.score(["xy"]) == 1


def test_mixtures_of_mixtures():
    """Names tell them apart, weights multiply, settings of the outer stand above."""
    inner = mixture({"x": tasks(3), "y": tasks(3)}, weights={"x": 3}, settings={"x": TaskSettings(n=2, max_turns=5)})
    outer = mixture({"z": tasks(3), "in": inner}, settings={"in": TaskSettings(n=8)})
    found = collections.Counter(names(outer.batch(0, 80)))
    assert found == {"z": 40, "in/x": 30, "in/y": 10}
    (settings,) = {task.settings for task in outer.batch(0, 8) if task.name == "in/x"}
    assert settings == TaskSettings(n=8, max_turns=5)


def test_as_a_sequence():
    """All tasks, one part after the other: to evaluate on everything."""
    both = mixture({"a": tasks(2), "b": tasks(3)}, settings={"b": TaskSettings(n=1)})
    assert len(both) == 5
    assert [(task.name, task.index) for task in both] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]
    assert identity(both[-1]) == identity(both[4]) == ("b", 2, None, TaskSettings(n=1))
    assert [task.index for task in both[1:3]] == [1, 0]
    for index in (5, -6):
        with pytest.raises(IndexError, match="there are 5"):
            both[index]
    assert isinstance(both, TaskSource)
    assert repr(mixture({"a": tasks(2)}, weights={"a": 2})) == "Mixture(a=2)"
    assert isinstance(both, Mixture)
    assert isinstance(both[0], Task)


@for_each(
    ("parts", "options", "message"),
    [
        ({}, {}, "parts: got {}"),
        ([tasks(2)], {}, "parts: got"),
        ({"": tasks(2)}, {}, "name"),
        ({"a": lambda: None}, {}, r"parts\['a'\]"),
        ({"a": tasks(2)}, {"weights": {"b": 1.0}}, "weights: has 'b'"),
        ({"a": tasks(2)}, {"weights": {"a": 0.0}}, r"weights\['a'\]"),
        ({"a": tasks(2)}, {"weights": {"a": float("nan")}}, r"weights\['a'\]"),
        ({"a": tasks(2)}, {"settings": {"b": TaskSettings()}}, "settings: has 'b'"),
        ({"a": tasks(2)}, {"settings": {"a": {"n": 3}}}, r"settings\['a'\]"),
    ],
)
def test_what_is_wrong_is_told_at_once(parts, options, message):
    with pytest.raises(rlkit.ConfigError, match=message):
        mixture(parts, **options)


@for_each("arguments", [(-1, 2), (0, 0), (0.0, 2)])
def test_batches_that_are_none(arguments):
    with pytest.raises(rlkit.ConfigError):
        mixture({"a": tasks(3)}).batch(*arguments)
