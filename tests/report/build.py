"""Runs to make pages of: real rollouts of a policy that plays by a script, with an environment that has tools."""

from __future__ import annotations

import json

import numpy as np

from rlkit import Future, Sample, SamplingParams
from rlkit.advantages import grpo
from rlkit.backends.toy import ByteTokenizer
from rlkit.envs import Task
from rlkit.rollouts import rollout_sync
from rlkit.tools import ToolEnv
from rlkit.tracking import Jsonl
from rlkit.trajectory import Group, Trajectory, Turn


class Scripted:
    """A sampler that calls a calculator, then answers; the later the version, the more often it is right."""

    max_length = 8192
    tokenizer = ByteTokenizer()

    def __init__(self, version=0):
        self.version = version

    def sample(self, prompt, params, *, n=1, seed=None):
        said = self.tokenizer.decode(prompt, skip_special=False)
        a, b = (int(x) for x in said.partition("What is ")[2].partition("?")[0].split(" + "))
        samples = []
        for i in range(n):
            rng = np.random.default_rng(np.random.SeedSequence([seed, i]))
            right = rng.random() < 0.25 + 0.65 * self.version / 40
            if "tool\n" not in said and rng.random() < 0.7:
                call = {"name": "add", "arguments": {"x": a, "y": b if right else "b"}}
                text = f"I add them with the tool.\n<tool_call>{json.dumps(call)}</tool_call>"
            else:
                text = f"The sum of {a} and {b} is **{a + b if right else a + b + int(rng.integers(1, 9))}**. ✓ é"
            tokens = [*text.encode(), 257][: params.max_tokens]
            logprobs = -rng.exponential(0.4, len(tokens)) * (rng.random(len(tokens)) < 0.4)
            stop = "stop" if tokens[-1] == 257 else "length"
            samples.append(Sample(prompt, tokens, logprobs, stop, version=self.version))
        return Future.of(samples)

    def logprobs(self, tokens, *, temperature=1.0):
        return Future.of(np.zeros(len(tokens), np.float32))

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def add(x: int, y: int) -> int:
    """Adds two numbers."""
    return x + y


def task(seed, name="sums"):
    a, b = np.random.default_rng(seed).integers(2, 99, 2)
    return Task(lambda: ToolEnv(f"What is {a} + {b}?", [add], lambda s: float(f"**{a + b}**" in s)), name, index=seed)


def run(folder, steps=6, tasks=2, n=4, tokenizer=True):
    """A run's folder with everything that a page shows."""
    rng = np.random.default_rng(0)
    tracker = Jsonl(folder)
    for step in range(steps):
        names = ["sums", "more-sums"]
        asked = [task(1000 * step + i, names[i % 2]) for i in range(tasks)]
        params = SamplingParams(max_tokens=160)
        got = rollout_sync(Scripted(step), asked, step=step, n=n, max_turns=4, params=params)
        advantages = np.concatenate([grpo(group.rewards) for group in got])
        trajectories = [t for group in got for t in group.trajectories]
        trainer = [
            np.minimum(0, np.concatenate([u.logprobs for u in t.turns]) + rng.normal(0, 0.03, t.token_count))
            for t in trajectories
        ]
        tracker.log_trajectories(got, step, advantages=advantages, trainer_logprobs=trainer)
        decay = np.exp(-step / 30)
        tracker.log(
            got.metrics
            | {
                "train/loss": float(-0.1 * decay + rng.normal(0, 0.01)),
                "train/grad_norm": float(0.4 + decay + rng.normal(0, 0.05)),
                "train/learning_rate": 1e-4 * min(1, (step + 1) / 10),
                "train/kl_v1": float(0.002 + rng.normal(0, 4e-4)),
                "train/kl_k3": float(0.002 + 0.001 * (1 - decay)),
                "train/entropy": float(0.3 + decay),
                "train/clip_fraction/low": 0.01,
                "train/clip_fraction/high": float(0.02 + 0.01 * rng.random()),
                "train/effective_sample_size": float(0.97 - 0.1 * rng.random()),
                "time/step": float(3.4 + rng.random()),
                "time/train": float(1.2 + 0.2 * rng.random()),
                "time/rollout": float(1.6 + 0.5 * rng.random()),
                "my/own/number": float(rng.random()),
            },
            step,
        )
    tracker.close()
    config = {"model": "toy", "sampling": {"max_tokens": 64, "temperature": 1.0}, "adam": {"learning_rate": 1e-4}}
    (folder / "config.json").write_text(json.dumps(config | {"envs": ["sums", "more-sums"], "api_key": "hush-hush"}))
    return folder


def many(folder, groups, n=8, turns=2, length=100):
    """A run's folder with ``groups`` x ``n`` trajectories, written without playing them."""
    rng = np.random.default_rng(1)
    tracker = Jsonl(folder)
    words = ["seven", "the", "sum", "is", "tool", "answer", "because", "maybe", "carry", "one"]
    for number in range(groups):
        members = []
        for _ in range(n):
            made, messages, prompt = [], [], list(b"What is it? ")
            for _ in range(turns):
                text = " ".join(rng.choice(words, length // 5))[:length]
                tokens = list(text.encode())
                made.append(Turn(Sample(prompt, tokens, -rng.exponential(0.3, len(tokens))), float(rng.integers(0, 2))))
                messages += [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": text}]
                prompt = [*prompt, *tokens, *b" And now? "]
            members.append(Trajectory(made, terminated=True, ended="terminated", env="words", messages=messages))
        group = Group(members, env="words", number=number % 50, step=number // 50)
        tracker.log_trajectories([group], number // 50, advantages=grpo(group.rewards))
        if number % 50 == 0:
            tracker.log({"env/words/reward": float(group.rewards.mean())}, number // 50)
    return folder


def cut(folder):
    """A run of three steps on one question, in which three answers of four are cut by max_tokens, and evaluations."""
    import rlkit
    from rlkit.envs import function

    tasks = function([{"prompt": "Work this out: 3 + 4 =", "answer": "7"}], lambda text, answer: float(answer in text))

    class Half(Scripted):
        def sample(self, prompt, params, *, n=1, seed=None):
            said = [[*b"7", 257]] + [[*b"It is "]] * (n - 1)
            stops = ["stop"] + ["length"] * (n - 1)
            return Future.of([Sample(prompt, t, np.full(len(t), -0.5), s) for t, s in zip(said, stops, strict=True)])

    with rlkit.Run(folder / "run", seed=0, config={"lr": 0.1}) as run:
        for step in range(3):
            groups = rollout_sync(Half(), tasks, step=step, n=4, params=SamplingParams(max_tokens=6))
            run.log(groups.metrics, step)
            run.log_trajectories(groups, step)
            if step != 1:
                at = 0.2 + 0.25 * step
                run.log({f"eval/x/{k}": at + d for k, d in {"mean": 0.0, "low": -0.1, "high": 0.1}.items()}, step)
    return folder / "run"


def judged(folder):
    """A run of three steps, and what lm-eval said about two of its checkpoints."""
    from rlkit.harnesses import Result, Score, _running

    made = cut(folder)
    for step, value in ((1, 0.25), (3, 0.5)):
        place = _running.new_folder(made, "lm-eval", step)
        _running.make(place)
        scores = [Score("arc", "acc", value, 0.05, 100), Score("<b>gsm</b>", "exact_match,strict-match", value)]
        _running.keep(Result("lm-eval", "0.4.13", step, 5.0, 60.0, scores, place))
    return made
