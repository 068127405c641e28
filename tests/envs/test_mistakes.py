"""Mistakes in prompts, rewards and environments: each is an error that names the place and the remedy."""

from __future__ import annotations

import functools
import importlib.util
import re

import pytest

import rlkit
from rlkit import envs
from rlkit.errors import RlkitError
from tests.each import for_each


@pytest.fixture(scope="module")
def play():
    """Rollouts by a toy."""
    params = rlkit.SamplingParams(max_tokens=2)
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        yield functools.partial(rlkit.rollouts.rollout_sync, sampler, params=params, attempts=1)


def answer(call, *arguments):
    """The error of a call: one of rlkit's, in one line."""
    with pytest.raises(RlkitError) as caught:
        call(*arguments)
    (line,) = str(caught.value).splitlines()
    return line


def test_values_of_another_kind():
    """A reward as text, a class for a reward, columns for rows."""
    assert "StepResult.reward: got '1' (str); expected a finite number" in answer(lambda: envs.StepResult(reward="1"))
    assert "reward: got <class 'dict'>" in answer(envs.function, ["a"], dict)
    words = "rows of text, messages or token ids, or mappings with a 'prompt' (convert it: [dict(zip"
    assert words in answer(envs.function, {"prompt": ["a"], "answer": ["b"]}, len)


def test_a_reward_of_another_library():
    def accuracy(completions, **kwargs):
        return [1.0 for _ in completions]

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

    for reward in (accuracy, compute_score):
        text = answer(envs.function, ["a"], reward)
        assert f"reward: {reward.__name__!r} has another library's signature" in text
        assert "def reward(text, answer)" in text


def broken(text, answer):
    return {}[answer]


async def broken_later(text, answer):
    return {}[answer]


@for_each("reward", [broken, broken_later])
def test_a_reward_that_raises(play, reward):
    """The message names the reward and the row, beside the environment and the exception; the cause is its own."""
    words = f"2 KeyError in step; the first error: 'b'; in the reward {reward.__name__!r} for prompts"
    with pytest.raises(rlkit.BackendError, match=words + r"\[0\]") as caught:
        play(envs.function([{"prompt": "a", "answer": "b"}], reward), n=2)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_reward_that_sometimes_raises(play, caplog):
    """Who loses a part of the episodes is told, once for each kind."""
    calls = []

    def every_third(text):
        calls.append(text)
        return 1.0 if len(calls) % 3 else {}["b"]

    assert sum(map(len, play(envs.function(["a", "c"], every_third), n=6, min_n=1))) == 8
    (told,) = [record.getMessage() for record in caplog.records if record.name == "rlkit.rollouts.api"]
    assert told.startswith("function: an episode failed in step, KeyError: 'b'; in the reward 'every_third' for")
    assert "env/function/failed counts them" in told
    line = every_third.__code__.co_firstlineno + 2
    assert f"; at tests/envs/test_mistakes.py:{line} in every_third; env/function/failed" in told


REWARDS = """
import json, rlkit, sys
def library(text): return json.loads("{")
def ours(text): return rlkit.Sample([], [], [])
def ends(text): return sys.exit(3)
"""


@pytest.mark.parametrize("within", [True, False], ids=["in the folder", "elsewhere"])
def test_where_an_error_was_raised(play, tmp_path, monkeypatch, within):
    """The line of the user's, also where another library or rlkit raised it, or it would have ended the program."""
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path if within else tmp_path / "else")
    monkeypatch.setenv("HOME", "/nowhere")
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    spec = importlib.util.spec_from_file_location("rewards", path)
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    shown = "rewards.py" if within else str(path)
    for line, name in enumerate(("library", "ours", "ends"), 3):
        with pytest.raises(rlkit.BackendError, match=f"; at {re.escape(shown)}:{line} in {name}"):
            play(envs.function(["a"], getattr(rewards, name)), n=2)
