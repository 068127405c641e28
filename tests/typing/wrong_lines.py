# ruff: noqa: B018
"""Lines of a user's program, each of them wrong; read by a type checker, never run."""

from __future__ import annotations

import rlkit
from rlkit import advantages, corrections, filters, losses, metrics, rewards, schedules
from rlkit.advantages import gae, grpo

policy = rlkit.connect("toy")
sampler = policy.sampler().result()
prompt = policy.tokenizer.encode("Q:")
params = rlkit.SamplingParams()

rlkit.nonsense  # wrong
advantages.ppo  # wrong
losses.grpo  # wrong
rlkit.SamplingParams(max_tokens="8")  # wrong
rlkit.SamplingParams(max_new_tokens=8)  # wrong
rlkit.SamplingParams(stop="\n")  # wrong
rlkit.Adam(learning_rate="1e-4")  # wrong
rlkit.connect(3)  # wrong
policy.sampler().sample(prompt, params)  # wrong
policy.sampler()[0]  # wrong
sampler.sample(prompt, params, num=4)  # wrong
sampler.sample(prompt, params).tokens  # wrong
sampler.sample(prompt, {"max_tokens": 8})  # wrong
sampler.sample(prompt, params).result()[0].text  # wrong
grpo("text")  # wrong
grpo(1.0)  # wrong
grpo([1.0, 0.0], epsilon=1e-4)  # wrong
gae([0.0, 1.0])  # wrong
policy.optim_step(1e-4)  # wrong
policy.forward_backward([], 3)  # wrong
policy.forward_backward([], "ppo").result().loss  # wrong
policy.save(3)  # wrong
policy.model  # wrong
rlkit.Run("runs/first", seed="0")  # wrong
rlkit.Run("runs/first").checkpoint(sampler)  # wrong
rlkit.rollout(policy, [])  # wrong
rlkit.Datum("text", [0, 1])  # wrong
rlkit.Sample([1], "text", [-1.0])  # wrong
rlkit.Lora(target_modules="q_proj")  # wrong
policy.version.result()  # wrong
filters.zero_variance([[1.0, 0.0]], treshold=0.1)  # wrong
corrections.token_mask([0.0], [0.0])  # wrong
metrics.pass_at_k("4", 1, 2)  # wrong
rewards.clamp([1.0], lower=0.0)  # wrong
schedules.linear(3, begin=1.0)  # wrong
rlkit.evaluation.evaluate_sync(policy, [])  # wrong
rlkit.rollouts.Plan(turns=3)  # wrong
rlkit.Datum.supervised("Q:", "A")  # wrong
rlkit.Sample([1], [2], [-1.0]).datum("1.0")  # wrong
