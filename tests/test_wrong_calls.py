"""Wrong calls that a new user makes, what each is answered with, and that nothing was changed by it.

A row is a call and words of the answer. Every error is one of rlkit's own, in one sentence.
"""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import pytest

import rlkit
from rlkit import advantages, credit, envs, losses
from rlkit.backends.toy import ByteTokenizer
from rlkit.errors import ConfigError, RlkitError
from tests.each import for_each

SAMPLE = rlkit.Sample([65], [66, 67], [-1.0, -2.0])
DATA = [SAMPLE.datum(1.0)]
PARAMS = rlkit.SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def policy():
    with rlkit.connect("toy", seed=0) as policy:
        yield policy


@pytest.fixture(scope="module")
def sampler(policy):
    return policy.sampler().result()


def answer(call, *arguments):
    """The error of a call, which is of rlkit's own and says something."""
    with pytest.raises(RlkitError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


# Names from other libraries.
NAMES = [
    (lambda: rlkit.Adam(lr=1e-4), "Adam: no argument 'lr'; write learning_rate="),
    (lambda: rlkit.Adam(betas=(0.9, 0.95)), "write beta1= and beta2="),
    (lambda: rlkit.Adam(max_grad_norm=1.0), "write grad_clip_norm="),
    (lambda: rlkit.Adam(learning_rat=1e-4), "did you mean 'learning_rate'"),
    (lambda: rlkit.SamplingParams(max_new_tokens=8), "write max_tokens="),
    (lambda: rlkit.SamplingParams(max_length=8), "write max_tokens="),
    (lambda: rlkit.SamplingParams(n=8), "sampler.sample(prompt, params, n=8)"),
    (lambda: rlkit.SamplingParams(num_generations=8), "sampler.sample(prompt, params, n=8)"),
    (lambda: rlkit.Lora(r=8), "write rank="),
    (lambda: rlkit.Lora(lora_alpha=16), "write alpha="),
    (lambda: rlkit.Lora(lora_dropout=0.1), "does not support dropout"),
    (lambda: rlkit.connect("local", "model"), "connect: got 2 positional arguments; it takes name; by name only"),
    (lambda: rlkit.connect("toy", sead=3), "did you mean 'seed'"),
    (lambda: rlkit.connect("toy", lr=3), "policy.optim_step(rlkit.Adam(learning_rate=...))"),
    (lambda: rlkit.connect("toy", lora_rank=3), "write lora=rlkit.Lora(rank=..., alpha=...)"),
    (lambda: rlkit.connect("toy", base_model="x"), "write model="),
    (lambda: rlkit.connect(), "lacks name="),
    (lambda: rlkit.connect("toi"), "did you mean 'toy'"),
    (lambda: credit.assign([], beta=0.1), "write kl_coef="),
    (lambda: credit.assign([], ref_policy=None), "write reference="),
    (lambda: credit.assign([], gamma=0.9), "config={...}"),
    (lambda: credit.assign([], config={"num_generations": 2}), "rlkit.advantages.by_group"),
    (lambda: credit.assign([], config={"epsilon": 1e-4}), "assign(config): no option 'epsilon'; write eps="),
    (lambda: credit.assign([], "gae", config={"discount": 0.9}), "write gamma="),
    (lambda: credit.assign([], "rloo", config={"beta": 0.1}), "rlkit.losses.with_kl"),
    (lambda: rlkit.rollouts.rollout_sync(None, [], num_generations=4), "write n="),
    (lambda: rlkit.rollouts.rollout_sync(None, [], temperature=1.0), "params=rlkit.SamplingParams(...)"),
    (
        lambda: advantages.kl_penalty(
            sampling_logprobs=[-1.0], reference_logprobs=[-1.0], coef=0.1, estimator="low_var_kl"
        ),
        "here it is 'k3'",
    ),
    (lambda: rlkit.Datum([1, 2]), "Datum: lacks mask="),
    (lambda: ByteTokenizer()("text"), "ByteTokenizer: is not callable; use encode(text) for ids"),
    (lambda: rlkit.Lora(target_modules="q_proj"), "expected a tuple of module names, or 'all-linear'"),
    (lambda: envs.StepResult(reward="1"), "StepResult.reward: got '1' (str); expected a finite number"),
    (lambda: envs.function(["a"], dict), "reward: got <class 'dict'>"),
    (
        lambda: envs.function({"prompt": ["a"], "answer": ["b"]}, len),
        "rows of text, messages or token ids, or mappings with a 'prompt' (convert it: [dict(zip",
    ),
]


@for_each(("call", "words"), NAMES)
def test_names_from_elsewhere(call, words):
    """A setting under another library's name, or misspelt, is answered with the name that it has here."""
    assert words in answer(call)


LOSSES = [
    ("grpo", {}, "grpo is an estimator (rlkit.advantages.grpo); pass its advantages to the loss 'ppo'"),
    ("GRPO", {}, "grpo is an estimator"),
    ("dapo", {}, "clip_high_threshold=1.28"),
    ("sft", {}, "it is 'cross_entropy'"),
    ("pppo", {}, "did you mean 'ppo'"),
    ("ppo", {"clip_eps": 0.2}, "clip_low_threshold=1 - 0.2 and clip_high_threshold=1 + 0.2"),
    ("ppo", {"epsilon": 0.2}, "clip_low_threshold=1 - 0.2 and clip_high_threshold=1 + 0.2"),
    ("ppo", {"clip_ratio_high": 0.28}, "clip_high_threshold=1 + 0.2"),
    ("ppo", {"beta": 0.1}, "rlkit.losses.with_kl(loss, coef=...)"),
    ("ppo", {"delta": 3.0}, "write dual_clip="),
    ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "write 1 - 0.2 and 1 + 0.2"),
    ("ppo", {"clip_high_threshold": 0.28}, "write 1 - 0.2 and 1 + 0.2"),
    ("cispo", {"clip_low_threshold": 1.5}, "clip_low_threshold: is 1.5; expected at most 1"),
]


@for_each(("loss", "config", "words"), LOSSES)
def test_losses_and_their_settings(policy, loss, config, words):
    """An estimator given as a loss, and settings of other libraries, are answered; no gradient is left behind."""
    assert words in answer(lambda: policy.forward_backward(DATA, loss, config=config))
    with pytest.raises(rlkit.BackendError, match="no gradient"):
        policy.optim_step(rlkit.Adam())


def test_every_estimator_is_known_where_losses_are_looked_up():
    """Each name of an estimator that is no loss is answered with where it belongs; a loss's name alike."""
    for name in advantages.registry:
        if name not in losses.registry:
            assert f"rlkit.advantages.{name}" in answer(losses.registry.resolve, name)
    assert "forward_backward(data, 'ppo')" in answer(advantages.registry.resolve, "ppo")


FUTURES = [
    lambda future: future[0],
    lambda future: list(future),
    lambda future: len(future),
    lambda future: dict(future),
    lambda future: print(*future),
    lambda future: future.__enter__(),
]


@for_each("call", FUTURES)
def test_a_future_that_is_used_as_its_value(policy, call):
    """Who forgets ``.result()`` is told so; it stays a TypeError for who expects one."""
    future = policy.sampler()
    assert "call .result() or await it" in answer(call, future)
    with pytest.raises(TypeError):
        call(future)


def test_attributes_of_a_future(policy):
    """A missing attribute stays an AttributeError, so that hasattr and copy work; it names the remedy."""
    import copy

    future = policy.sampler()
    with pytest.raises(AttributeError, match=r"no 'sample'.*call \.result\(\) or await it"):
        future.sample([1], PARAMS)
    assert future.cancel() is False
    assert not hasattr(future, "__deepcopy__")
    assert bool(future) is True
    assert copy.copy(future).result() is future.result()


def test_an_error_from_inside_passes_through():
    """A TypeError that the function itself raises is not taken for a wrong call."""
    from rlkit._check import answered

    @answered
    def broken(x):
        return x + "text"

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        broken(3)
    assert not isinstance(caught.value, ConfigError)


class TestRegistering:
    """What a cell of a notebook does again and again."""

    def test_the_same_function_takes_the_place_of_the_old_one(self):
        def define(factor):
            @losses.register("mine_again")
            def mine(logprobs, weights=1.0):
                return -factor * (weights * logprobs).sum()

            return mine

        try:
            define(1.0)
            second = define(2.0)
            assert losses.registry["mine_again"] is second
            assert "already exists" in answer(losses.register("mine_again"), len)
        finally:
            losses.registry.pop("mine_again", None)

    def test_lambdas_are_not_the_same(self):
        try:
            losses.register("mine_again")(lambda logprobs: logprobs.sum())
            assert "already exists" in answer(losses.register("mine_again"), lambda logprobs: -logprobs.sum())
        finally:
            losses.registry.pop("mine_again", None)

    @for_each("wrong", [3, "text", None, [len], np.zeros(3)])
    def test_what_is_no_function_is_refused(self, wrong):
        assert "a function or a class" in answer(losses.register("mine_again"), wrong)
        assert "mine_again" not in losses.registry

    def test_without_a_name(self):
        assert '@register("name")' in answer(losses.register, len)


NUMBERS = [
    (lambda: rlkit.SamplingParams(max_tokens=10**12), "SamplingParams.max_tokens"),
    (lambda: rlkit.Sample([1], [2], [0.5]), "Sample.logprobs[0]: is 0.5; expected a logprob"),
    (
        lambda: rlkit.Datum([1, 2], [0, 1], {"sampling_logprobs": [0.5]}),
        "Datum.inputs['sampling_logprobs'][1]: is 0.5; expected a logprob",
    ),
    (lambda: SAMPLE.datum(1.0, sampling_logprobs=[0.2, -1.0]), "is it a probability, or is its sign reversed?"),
]


@pytest.mark.parametrize(("call", "words"), NUMBERS)
def test_numbers_that_cannot_be_meant(call, words):
    """Numbers far out of any use, and probabilities where logprobs belong, are refused."""
    assert words in answer(call)


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
        (told,) = [record.getMessage() for record in caplog.records if record.name == "rlkit.rollouts._runner"]
        assert told.startswith("function: an episode failed in step, KeyError: 'b'; in the reward 'every_third' for")
        assert "env/function/failed counts them" in told
        line = every_third.__code__.co_firstlineno + 2
        assert f"; at tests/test_wrong_calls.py:{line} in every_third; env/function/failed" in told

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
