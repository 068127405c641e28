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
rlkit.Datum([1, 2], [0, 1], advantages=[1.0])  # wrong
rlkit.Datum.supervised("Q:")  # wrong
rlkit.Sample([1], [2], [-1.0]).datum(adv=1.0, advantages=2.0, weights="0.5").loss  # wrong
rlkit.Sample([1], [2], [-1.0]).logprob  # wrong
rlkit.SamplingParams(temperature="hot")  # wrong
rlkit.SamplingParams().replace(max_tokens=3)  # wrong
rlkit.connect("local", model=3)["weights"]  # wrong
rlkit.connect("local", model="m").tokenizer.pad_id  # wrong
rlkit.connect("tinker", model="m").service  # wrong
rlkit.connect(name="toy", backend="local").step()  # wrong
sampler.logprobs(prompt).mean()  # wrong
policy.discard().value  # wrong
policy.version.result()  # wrong
policy.forward([], loss=None, wanted=())  # wrong
filters.zero_variance([[1.0, 0.0]], treshold=0.1)  # wrong
filters.zero_variance([[1.0, 0.0]]).mask  # wrong
corrections.token_mask([0.0], [0.0])  # wrong
metrics.pass_at_k("4", 1, 2)  # wrong
rewards.clamp([1.0], lower=0.0)  # wrong
schedules.linear(3, begin=1.0)  # wrong
advantages.registry.get_all()  # wrong
rlkit.evaluation.evaluate_sync(policy, [])  # wrong
rlkit.rollouts.Plan(turns=3)  # wrong
rlkit.rollouts.rollout_sync(sampler, []).reward  # wrong
rlkit.envs.StepResult(done=True)  # wrong
rlkit.trajectory.datums([1.0], [1.0])  # wrong
rlkit.Datum.supervised("Q:", "A")  # wrong
rlkit.Sample([1], [2], [-1.0]).datum("1.0")  # wrong
policy.discard().result().undo  # wrong
