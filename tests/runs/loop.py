"""A user's loop, with everything that has to be resumed: minibatches, an adaptive coefficient, draws, data order."""

from __future__ import annotations

import hashlib

import numpy as np

import rlkit
from rlkit import losses
from rlkit.advantages import grpo
from rlkit.runs import Run

PROMPTS = ["ab", "hello 12", "Call ", "1 + 2", "zz", "Dial ", "x"]


class Stopped(Exception):
    """The run was cut off, for a test."""


def train(folder, steps, *, name="toy", cut=None, seen=None, every=1, **options):
    """Runs until ``steps``, or is cut off in the middle of step ``cut``. Returns what each step saw, by step."""
    seen = {} if seen is None else seen
    with Run(folder, seed=7, trackers=()) as run:
        policy = run.connect(name, **options)
        kl = run.keep("kl", losses.kl.adaptive_coefficient(coef=0.1, target=0.01, horizon=10))
        noise = run.rng("noise")
        reference = policy.base_sampler().result()
        for step in run.steps(steps):
            prompts = run.batch(PROMPTS, 2)
            sampler = policy.sampler().result()
            params = rlkit.SamplingParams(max_tokens=4, stop=())
            groups = [sampler.sample(policy.tokenizer.encode(text), params, n=3) for text in prompts]
            data, rewards = [], []
            for group in groups:
                samples = group.result()
                r = np.array([float(np.mean(s.tokens % 3 == 0)) for s in samples]) + 0.01 * noise.normal(size=3)
                rewards.append(float(r.mean()))
                for sample, a in zip(samples, grpo(r), strict=True):
                    tokens = np.concatenate([sample.prompt, sample.tokens])
                    lp = reference.logprobs(tokens).result()
                    data.append(sample.datum(a, reference_logprobs=lp, kl_coef=kl.coef))
            order = noise.permutation(len(data))
            metrics = []
            for half in np.array_split(order, 2):
                fb = policy.forward_backward([data[i] for i in half], losses.with_kl("ppo", "kl_coef"))
                op = policy.optim_step(rlkit.Adam(learning_rate=0.02))
                if cut == step:
                    raise Stopped
                metrics += [fb.result().metrics["loss:sum"], op.result()["grad_norm:mean"]]
            kl.update(abs(metrics[0]), len(data))
            seen[step] = (prompts, rewards, metrics, kl.coef, tuple(int(t) for d in data for t in d.tokens))
            run.checkpoint(policy, every=every)
        probe = policy.forward([rlkit.Datum([65, 66, 67, 68], [0, 1, 1, 1])]).result().logprobs[0]
    return seen, hashlib.sha256(probe.tobytes()).hexdigest()
