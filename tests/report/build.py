"""Runs to make pages of: folders as a run writes them."""

from __future__ import annotations

import json

import numpy as np

from rlkit import Sample, storage
from rlkit.advantages import grpo
from rlkit.backends.toy import ByteTokenizer
from rlkit.tracking import Jsonl
from rlkit.trajectory import Failure, Group, Trajectory, Turn

TOKENIZER = ByteTokenizer()


def play(rng, a, b, right, env):
    """A trajectory that may call a calculator before it answers; its texts hold characters of several bytes."""
    messages = [{"role": "system", "content": "You can add."}, {"role": "user", "content": f"What is {a} + {b}?"}]
    turns, prompt = [], list(f"user\nWhat is {a} + {b}?\nassistant\n".encode())

    def say(text, reward=0.0, **more):
        tokens = [*text.encode(), 257]
        logprobs = -rng.exponential(0.4, len(tokens)) * (rng.random(len(tokens)) < 0.4)
        turns.append(Turn(Sample(list(prompt), tokens, logprobs, version=3), reward, more.pop("metrics", {})))
        messages.append({"role": "assistant", "content": text, **more})
        prompt.extend(tokens)

    if rng.random() < 0.6:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"x": a, "y": b})}}
        say("I add them with the tool.\n", tool_calls=[call], metrics={"tool_calls": 1.0})
        messages.append({"role": "tool", "name": "add", "content": str(a + b)})
        prompt.extend(f"tool\n{a + b}\nassistant\n".encode())
    answer = a + b if right else a + b + int(rng.integers(1, 9))
    say(f"The sum of {a} and {b} is **{answer}**. ✓ é 🙂", float(right))
    tags, ended = {"answer": str(a + b)}, {"terminated": True, "ended": "terminated"}
    return Trajectory(turns, env=env, index=a, seed=int(rng.integers(1e9)), tags=tags, messages=messages, **ended)


def make_record(rng, step, number, n=4, progress=0.5):
    """The line of a group, with the advantage and the trainer's logprobs of its trajectories."""
    a, b = (int(x) for x in rng.integers(2, 99, 2))
    env = ("sums", "more-sums")[number % 2]
    members = [play(rng, a, b, rng.random() < 0.2 + 0.7 * progress, env) for _ in range(n)]
    failures = [Failure(env, "TimeoutError", "no answer in 60 s", "step")] if number % 5 == 4 else []
    group = Group(members, failures=failures, env=env, index=a, number=number, step=step)
    record = storage.to_record(group)
    for raw, trajectory, advantage in zip(record["trajectories"], members, grpo(group.rewards).tolist(), strict=True):
        logprobs = np.concatenate([turn.logprobs for turn in trajectory.turns])
        trainer = np.minimum(0, logprobs + rng.normal(0, 0.03, logprobs.size))
        raw |= {"advantages": advantage, "trainer_logprobs": trainer.tolist()}
    return record


def run(folder, groups=5, n=4, per_step=2, seed=0, learning_rate=1e-4):
    """A run's folder with everything that a page shows; of many groups, lines repeat after 200."""
    rng = np.random.default_rng(seed)
    tracker = Jsonl(folder, clock=iter(range(10**9)).__next__)
    steps = -(-groups // per_step)
    made = {}
    with (folder / "trajectories.jsonl").open("w") as file:
        for i in range(groups):
            step, number = divmod(i, per_step)
            record = made.get(i % 200) or make_record(rng, step, number, n, (i % 200) / min(200, groups))
            made[i % 200] = record
            file.write(json.dumps(record | {"step": step, "number": number}) + "\n")
    for step in range(steps):
        done = step / steps
        noise = rng.normal(0, 1, 9)
        metrics = {
            f"env/{env}/reward": float(0.2 + 0.7 * done + 0.1 * noise[i]) for i, env in enumerate(("sums", "more-sums"))
        }
        metrics |= {
            "env/sums/tokens": float(90 + 10 * noise[2]),
            "env/sums/episodes": 4.0,
            "env/sums/tokens/max": 131.0,
        }
        metrics |= {"train/loss": float(-0.1 * np.exp(-done)), "train/entropy": float(0.3 + np.exp(-2 * done))}
        metrics |= {"train/kl_k3": float(0.002 + 4e-4 * noise[3]), "train/learning_rate": learning_rate}
        metrics |= {"train/grad_norm": float("nan") if step == 1 else float(0.4 + 0.05 * noise[4])}
        if step % 10 == 0:
            metrics |= {
                "eval/sums/mean": 0.2 + 0.7 * done,
                "eval/sums/low": 0.1 + 0.7 * done,
                "eval/sums/high": 0.3 + 0.7 * done,
            }
        tracker.log(metrics | {"my/own": float(noise[5])}, step)
    tracker.close()
    config = {
        "model": "toy",
        "adam": {"learning_rate": learning_rate},
        "envs": ["sums", "more-sums"],
        "api_key": "hush-hush",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "run.json").write_text(json.dumps({"seed": seed, "versions": {"numpy": np.__version__}}))
    return folder
