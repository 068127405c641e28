"""Lines of a user's program that are right; read by a type checker, never run."""

from __future__ import annotations

import argparse
from typing import Any, assert_type

import numpy as np

import rlkit
from rlkit import advantages, corrections, filters, losses, metrics, schedules
from rlkit.advantages import gae, grpo
from rlkit.backends import Sampler, TrainerBackend
from rlkit.runs import Record

policy = rlkit.connect("local", model="smollm2-135m-instruct", lora=rlkit.Lora(rank=16), dtype="bfloat16")
assert_type(policy, TrainerBackend)
assert_type(rlkit.connect("toy", seed=0, max_length=64), TrainerBackend)
assert_type(rlkit.connect("tinker", model="Qwen/Qwen3-8B", deadline=60.0), TrainerBackend)
assert_type(rlkit.connect("a-package's", anything=3), TrainerBackend)

sampler = policy.sampler().result()
assert_type(sampler, Sampler)
prompt = policy.tokenizer.encode("Q:")
group = sampler.sample(prompt, rlkit.SamplingParams(max_tokens=8, stop=("\n",)), n=4, seed=1)
assert_type(group, rlkit.Future[list[rlkit.Sample]])
samples = group.result(timeout=60)
assert_type(samples, list[rlkit.Sample])
assert_type(policy.tokenizer.decode(samples[0].tokens), str)

scores = [1.0, 0.0, 0.5, 0.0]
assert_type(grpo(scores), Any)  # an array, or a list of arrays for a list of groups
grpo([np.float64(1.0), np.float64(0.0)])
grpo(np.zeros(4), scale="none")
grpo([[1.0, 0.0], [0.5]])
grpo([np.zeros(3), np.zeros(2)])
assert_type(gae([0.0, 1.0], values=[0.5, 0.5]), tuple[Any, Any])
assert_type(filters.zero_variance([scores]), filters.Selection)

data = [sample.datum(advantage) for sample, advantage in zip(samples, grpo(scores), strict=True)]
assert_type(data, list[rlkit.Datum])
out = policy.forward_backward(data, "ppo", config={"clip_high_threshold": 1.28})
assert_type(out.result(), rlkit.ForwardBackwardOutput)
step = policy.optim_step(rlkit.Adam(learning_rate=1e-4))
assert_type(step.result()["grad_norm:mean"], float)
assert_type(out.result().selected, list[np.ndarray])


async def loop() -> None:
    assert_type(await policy.sampler(), Sampler)
    played = await rlkit.rollout(sampler, [], n=4)
    assert_type(await rlkit.evaluate(sampler, []), rlkit.evaluation.Evaluation)
    assert_type(played, rlkit.rollouts.Rollouts)


arguments: argparse.Namespace = argparse.Namespace()
assert_type(rlkit.connect("local", model=arguments.model), TrainerBackend)

with rlkit.Run("runs/first", seed=0, config={"rate": 1e-4}) as run:
    assert_type(run, rlkit.runs.Run)
    trained = run.connect("local", model="smollm2-135m-instruct", role="policy")
    assert_type(trained, TrainerBackend)
    for number in run.steps(10):
        assert_type(number, int)
        run.log({"train/loss": 0.5})
        assert_type(run.checkpoint(trained, every=5), Record | None)
    assert_type(run.value("reference", lambda: trained.save("reference").result()), str)
    assert_type(run.rng("data"), np.random.Generator)

assert_type(rlkit.critic("toy", tokenizer=policy.tokenizer), rlkit.critics.Critic)
rlkit.Datum(np.arange(4), np.array([0, 1, 1, 1]), {"advantages": [1.0, 0.0, 0.0]})
rlkit.Sample([1], [2, 3], [-1.0, -2.0])
rlkit.SamplingParams(stop=["\n"])
rlkit.Lora(target_modules=["q_proj"])

assert_type(policy.save("state", optimizer=False), rlkit.Future[str])
assert_type(policy.forward(data).result().logprobs[0], np.ndarray)
assert_type(policy.base_sampler(), rlkit.Future[Sampler])
assert_type(sampler.logprobs(prompt), rlkit.Future[np.ndarray])
assert_type(rlkit.Datum.supervised(prompt, prompt), rlkit.Datum)
assert_type(samples[0].datum(1.0, weights=0.5), rlkit.Datum)
assert_type(rlkit.reference_logprobs(sampler, samples), rlkit.Future[list[np.ndarray]])
assert_type(schedules.cosine(3, start=1.0, steps=10), float)
assert_type(metrics.pass_at_k(4, 1, 2), float)
mask: np.ndarray = corrections.token_mask(trainer_logprobs=scores, sampling_logprobs=scores)
assert_type(losses.ppo.__name__, str)
assert_type(rlkit.rollouts.rollout_sync(sampler, [], n=4), rlkit.rollouts.Rollouts)
assert_type(rlkit.envs.StepResult("Right!", 1.0, terminated=True).reward, float | None)
assert_type(metrics.pass_at_k([4, 4], [1, 2], 2), np.ndarray)
assert_type(advantages.by_group(grpo, [1.0, 0.0], ["a", "a"]), np.ndarray)
