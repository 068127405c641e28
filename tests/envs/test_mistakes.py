"""Mistakes in prompts, rewards and environments: each is an error that names the place and the remedy."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import rlkit
from rlkit import envs
from rlkit.errors import RlkitError

PARAMS = rlkit.SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def sampler():
    with rlkit.connect("toy", seed=0) as policy:
        yield policy.sampler().result()


def answer(call, *arguments):
    """The error of a call: one of rlkit's, in one line."""
    with pytest.raises(RlkitError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def test_values_of_another_kind():
    """A reward as text, a class for a reward, columns for rows."""
    assert "StepResult.reward: got '1' (str); expected a finite number" in answer(lambda: envs.StepResult(reward="1"))
    assert "reward: got <class 'dict'>" in answer(envs.function, ["a"], dict)
    words = "rows of text, messages or token ids, or mappings with a 'prompt' (convert it: [dict(zip"
    assert words in answer(envs.function, {"prompt": ["a"], "answer": ["b"]}, len)


class Words:
    def reset(self, seed):
        return self.first

    def step(self, action):
        return envs.StepResult(reward=1.0, terminated=True)

    def close(self):
        pass


class TestEnvironments:
    @pytest.mark.parametrize("first", ["", [], (), np.array([], np.int64)])
    def test_an_empty_first_observation(self, sampler, first):
        """There has to be something to answer."""
        env = type("Empty", (Words,), {"first": first})
        tasks = envs.Tasks(lambda _: env(), 1, name="empty")
        text = answer(lambda: rlkit.rollouts.rollout_sync(sampler, tasks, n=2, params=PARAMS, attempts=1))
        assert "observation: is empty; expected the text for the policy to answer" in text

    def test_a_task_beyond_the_last(self):
        """It stays an IndexError, which ends a for loop, and says how many there are."""
        tasks = envs.function(["a", "b"], lambda text: 1.0)
        with pytest.raises(IndexError, match=r"tasks\[7\]: Tasks\('function'.* has 2 tasks"):
            tasks[7]
        assert len(list(tasks)) == 2

    def test_a_reward_of_another_library(self):
        def accuracy(completions, **kwargs):
            return [1.0 for _ in completions]

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 1.0

        for reward in (accuracy, compute_score):
            text = answer(envs.function, ["a"], reward)
            assert f"reward: {reward.__name__!r} has another library's signature" in text
            assert "def reward(text, answer)" in text

    @pytest.mark.parametrize("later", [False, True])
    def test_a_reward_that_raises(self, sampler, later):
        """The message names the reward and the row, beside the environment and the exception; the cause is its own."""

        def broken(text, answer):
            return {}[answer]

        async def broken_later(text, answer):
            return {}[answer]

        reward = broken_later if later else broken
        tasks = envs.function([{"prompt": "a", "answer": "b"}], reward)
        with pytest.raises(rlkit.BackendError) as caught:
            rlkit.rollouts.rollout_sync(sampler, tasks, n=2, params=PARAMS, attempts=1)
        assert f"2 KeyError in step; the first error: 'b'; in the reward {reward.__name__!r} for prompts[0]" in str(
            caught.value
        )
        assert isinstance(caught.value.__cause__, KeyError)

    def test_a_reward_that_sometimes_raises(self, sampler, caplog):
        """Who loses a part of the episodes is told, once for each kind."""
        calls = []

        def every_third(text):
            calls.append(text)
            return 1.0 if len(calls) % 3 else {}["b"]

        tasks = envs.function(["a", "c"], every_third)
        played = rlkit.rollouts.rollout_sync(sampler, tasks, n=6, params=PARAMS, attempts=1, min_n=1)
        assert sum(map(len, played)) == 8
        (told,) = [record.getMessage() for record in caplog.records if record.name == "rlkit.rollouts.api"]
        assert told.startswith("function: an episode failed in step, KeyError: 'b'; in the reward 'every_third' for")
        assert "env/function/failed counts them" in told
        line = every_third.__code__.co_firstlineno + 2
        assert f"; at tests/envs/test_mistakes.py:{line} in every_third; env/function/failed" in told

    @pytest.mark.parametrize("within", [True, False], ids=["in the folder", "elsewhere"])
    def test_where_an_error_was_raised(self, sampler, tmp_path, monkeypatch, within):
        """The line of the user's, also where another library or rlkit raised it, or it would have ended the program."""
        (tmp_path / "else").mkdir()
        monkeypatch.chdir(tmp_path if within else tmp_path / "else")
        monkeypatch.setenv("HOME", "/nowhere")
        path = tmp_path / "rewards.py"
        path.write_text(
            "import json\nimport sys\nimport rlkit\n\n"
            "def library(text):\n    return json.loads('{')\n\n"
            "def ours(text):\n    return rlkit.Sample([], [], [])\n\n"
            "def ends(text):\n    return sys.exit(3)\n"
        )
        spec = importlib.util.spec_from_file_location("rewards", path)
        rewards = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(rewards)
        for name, line in (("library", 6), ("ours", 9), ("ends", 12)):
            tasks = envs.function(["a"], getattr(rewards, name))
            with pytest.raises(rlkit.BackendError) as caught:
                rlkit.rollouts.rollout_sync(sampler, tasks, n=2, params=PARAMS, attempts=1)
            shown = "rewards.py" if within else str(path)
            assert f"; at {shown}:{line} in {name}" in str(caught.value)

    def test_a_name_that_reasoning_gym_does_not_have(self):
        pytest.importorskip("reasoning_gym")
        assert "did you mean 'chain_sum'" in answer(envs.reasoning_gym, "chain_summ")
