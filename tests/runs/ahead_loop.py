"""A loop with everything that has to be resumed, on batches sampled ahead; it hangs where it is told to, to be killed.

``python -m tests.runs.ahead_loop FOLDER '{"steps": 6, "hang": [2, "trained"], ...}'``
"""

from __future__ import annotations

import json
import sys
import threading

import rlkit
from rlkit import credit
from rlkit.envs import Tasks
from rlkit.losses.kl import adaptive_coefficient
from rlkit.rollouts import Plan, async_rollouts
from tests.rollouts.parts import Counted

MAX_LAG = 2
PLAN = Plan(n=2, params=rlkit.SamplingParams(max_tokens=12, stop=()), seed=3)


class Talk(Counted):
    turns = 2


def hang_here():
    print("here", flush=True)
    threading.Event().wait()


def train(folder, *, steps, backend="toy", in_flight=False, interval=1, every=1, last=100, hang=(-1, ""), **options):
    """Run until ``steps``; return the policy's logprobs of a text at the end."""

    def reached(*point):
        if list(point) == list(hang):
            hang_here()

    tasks = Tasks(lambda i: Talk(), 10, name="talk")
    how = {"max_lag": MAX_LAG, "interval": interval, "in_flight": in_flight, "plan": PLAN}
    with rlkit.Run(folder, seed=0, trackers=("jsonl",), retention=rlkit.runs.Retention(last=last)) as run:
        policy = run.connect(backend, **options)
        kl = run.keep("kl", adaptive_coefficient(coef=0.1, target=0.01, horizon=10))
        noise, reference = run.rng("noise"), policy.base_sampler().result()
        with async_rollouts(policy, tasks, size=2, steps=steps - run.step, start=run.step, **how) as made:
            batches = run.keep("batches", made)
            for step in run.steps(steps):
                groups = next(batches)
                reached(step, "asked")
                batch = credit.assign(groups, "grpo")
                loss = policy.forward_backward(batch.data, "ppo").result().metrics["loss:sum"]
                rate = kl.coef * (1 + noise.random()) * run.batch([0.1, 0.2, 0.3], 1)[0]
                norm = policy.optim_step(rlkit.Adam(learning_rate=rate)).result()["grad_norm:mean"]
                reached(step, "trained")
                kl.update(abs(loss), 5)
                drawn = sum(int(t) * (i + 1) for d in batch.data for i, t in enumerate(d.tokens))
                base = float(reference.logprobs(batch.data[0].tokens).result()[1:].sum())
                lag = groups.metrics["sampler/lag"]
                run.log({"loss": loss, "norm": norm, "drawn": drawn, "lag": lag, "rate": rate, "base": base})
                run.log_trajectories(groups)
                run.checkpoint(every=every)
                reached(step, "saved")
        return policy.forward([rlkit.Datum([65, 66, 67, 68], [0, 1, 1, 1])]).result().logprobs[0].tolist()


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], **json.loads(sys.argv[2]))), flush=True)
