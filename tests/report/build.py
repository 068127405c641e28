"""Runs to make pages of: folders as a run writes them."""

from __future__ import annotations

import json

import numpy as np

from rlkit import Sample, storage
from rlkit.backends.toy import ByteTokenizer
from rlkit.tracking import Jsonl
from rlkit.trajectory import Group, Trajectory, Turn

TOKENIZER = ByteTokenizer()


def play(rng, a, b, env):
    """A trajectory that may call a calculator before it answers; its texts hold characters of several bytes."""
    messages, turns, prompt = [{"role": "user", "content": f"What is {a} + {b}?"}], [], list(f"{a} + {b}?".encode())

    def say(text, reward=0.0, **more):
        tokens = [*text.encode(), 257]
        logprobs = -rng.exponential(0.4, len(tokens)) * (rng.random(len(tokens)) < 0.4)
        turns.append(Turn(Sample(list(prompt), tokens, logprobs), reward))
        messages.append({"role": "assistant", "content": text, **more})
        prompt.extend(tokens)

    if rng.random() < 0.6:
        function = {"name": "add", "arguments": json.dumps({"x": a, "y": b})}
        say("I add them with the tool.\n", tool_calls=[{"type": "function", "function": function}])
        messages.append({"role": "tool", "name": "add", "content": str(a + b)})
        prompt.extend(f"tool: {a + b}\n".encode())
    off = int(rng.integers(0, 2))
    say(f"The sum of {a} and {b} is **{a + b + off}**. ✓ é 🙂", float(not off))
    about = {"tags": {"answer": str(a + b)}, "terminated": True, "ended": "terminated"}
    return Trajectory(turns, env=env, index=a, messages=messages, **about)


def make_record(rng, n, env):
    """The line of a group, with the advantage and the trainer's logprobs of its trajectories."""
    a, b = (int(x) for x in rng.integers(2, 99, 2))
    group = Group([play(rng, a, b, env) for _ in range(n)], env=env, index=a)
    record = storage.to_record(group)
    for i, trajectory in enumerate(group.trajectories):
        logprobs = np.concatenate([turn.logprobs for turn in trajectory.turns])
        trainer = np.minimum(0, logprobs + rng.normal(0, 0.03, logprobs.size)).tolist()
        record["trajectories"][i] |= {"advantages": group.rewards[i] - 0.5, "trainer_logprobs": trainer}
    return record


def run(folder, groups=5, n=4, per_step=2, seed=0):
    """A run's folder with everything that a page shows; of many groups, lines repeat after 200."""
    rng, made, envs = np.random.default_rng(seed), {}, ("sums", "more-sums")
    folder.mkdir(exist_ok=True)
    with (folder / "trajectories.jsonl").open("w") as file:
        for i in range(groups):
            if i % 200 not in made:
                made[i % 200] = make_record(rng, n, envs[i % 2])
            place = {"step": i // per_step, "number": i % per_step}
            file.write(json.dumps(made[i % 200] | place) + "\n")
    tracker = Jsonl(folder, clock=iter(range(10**9)).__next__)
    steps = -(-groups // per_step)
    for step in range(steps):
        done, noise = step / steps, rng.normal(0, 1, 4).tolist()
        metrics = {f"env/{env}/reward": 0.2 + 0.7 * done + 0.1 * noise[i] for i, env in enumerate(envs)}
        metrics |= {f"eval/sums/{end}": 0.2 + 0.7 * done + d for end, d in (("mean", 0), ("low", -0.1), ("high", 0.1))}
        metrics |= {"train/loss": -0.1 / (1 + done), "train/grad_norm": float("nan") if step == 1 else 0.4}
        tracker.log(metrics | {"env/sums/tokens/max": 99 + noise[2], "my/own": noise[3]}, step)
    tracker.close()
    config = {"model": "toy", "adam": {"learning_rate": 1e-4}, "api_key": "hush-hush"}
    for name, content in (("config.json", config), ("run.json", {"seed": seed})):
        (folder / name).write_text(json.dumps(content))
    return folder
