# ruff: noqa: B018
"""Lines of a user's program, each of them wrong; read by a type checker, never run."""

from __future__ import annotations

import rlkit
from rlkit import advantages, losses
from rlkit.advantages import gae, grpo

policy = rlkit.connect("toy")
sampler = policy.sampler().result()
prompt = policy.tokenizer.encode("Q:")
params = rlkit.SamplingParams()

rlkit.nonsense  # wrong
rlkit.rolout  # wrong
advantages.ppo  # wrong
losses.grpo  # wrong
rlkit.SamplingParams(max_tokens="8")  # wrong
rlkit.SamplingParams(max_new_tokens=8)  # wrong
rlkit.SamplingParams(stop="\n")  # wrong
rlkit.Adam(lr=1e-4)  # wrong
rlkit.Adam(learning_rate="1e-4")  # wrong
rlkit.Lora(r=16)  # wrong
rlkit.connect(3)  # wrong
policy.sample(prompt, params)  # wrong
policy.sampler().sample(prompt, params)  # wrong
policy.sampler()[0]  # wrong
sampler.sample(prompt)  # wrong
sampler.sample(prompt, params, num=4)  # wrong
sampler.sample(prompt, params).tokens  # wrong
sampler.sample(prompt, params).result().tokens  # wrong
sampler.sample(prompt, {"max_tokens": 8})  # wrong
sampler.sample(prompt, params).result()[0].text  # wrong
grpo("text")  # wrong
grpo(1.0)  # wrong
grpo([1.0, 0.0], eps="small")  # wrong
grpo([1.0, 0.0], epsilon=1e-4)  # wrong
grpo([1.0, 0.0]).result()  # wrong
grpo([[1.0], [0.0]]).mean()  # wrong
gae([0.0, 1.0])  # wrong
policy.optim_step(learning_rate=1e-4)  # wrong
policy.optim_step(1e-4)  # wrong
policy.forward_backward([], 3)  # wrong
policy.forward_backward([], "ppo").loss  # wrong
policy.forward_backward([], "ppo").result().loss  # wrong
policy.save(3)  # wrong
policy.model  # wrong
rlkit.Datum([1, 2], [0, 1]).text  # wrong
rlkit.Run(3)  # wrong
rlkit.Run("runs/first", seed="0")  # wrong
rlkit.Run("runs/first").steps("10")  # wrong
rlkit.Run("runs/first").log([1.0])  # wrong
rlkit.Run("runs/first").checkpoint(sampler)  # wrong
rlkit.rollout(policy, [])  # wrong
rlkit.Datum("text", [0, 1])  # wrong
rlkit.Sample([1], "text", [-1.0])  # wrong
rlkit.Lora(target_modules="q_proj")  # wrong
