"""GRPO from an untouched model to a learning curve: a language model learns to answer small sums.

    python examples/quickstart.py                  # a LoRA on SmolLM2-135M-Instruct, on a CPU, a few minutes
    python examples/quickstart.py --backend toy    # the same program on a toy model, in seconds

One step of the loop is the function ``train``. It is yours: copy this file and change what you like.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

import rlkit
from rlkit.advantages import grpo, token_weights
from rlkit.backends import Sampler, Tokenizer, TrainerBackend

try:
    import reasoning_gym
    from matplotlib import pyplot as plt
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:
    sys.exit(f"{error}; install what this example needs: pip install 'rlkit-lm[local,gguf,examples,reasoning-gym]'")

DEFAULTS = {
    "local": {"model": "smollm2-135m-instruct", "steps": 10, "learning_rate": 2e-4},
    "toy": {"model": None, "steps": 30, "learning_rate": 0.02},
}
NUMBER = re.compile(r"-?\d+")


class Question(NamedTuple):
    """What is asked, as text and as tokens, and the right answer."""

    text: str
    tokens: np.ndarray
    answer: str


class Answers(NamedTuple):
    """G completions to each of Q questions."""

    samples: list[list[rlkit.Sample]]
    texts: list[list[str]]
    numbers: np.ndarray  # [Q, G], 1 where the text holds a number
    rewards: np.ndarray  # [Q, G], 1 where the last number in it is right

    def interval(self) -> tuple[float, float, float]:
        """The share of right answers, and its 95 % confidence interval (Wilson), for one completion per question."""
        n, p, z = self.rewards.size, float(self.rewards.mean()), 1.96
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = ((p + z * z / (2 * n) + side * half) / (1 + z * z / n) for side in (-1, 1))
        return p, low, high


def make_questions(tokenizer: Tokenizer, seed: int, n: int, without: Sequence[Question] = ()) -> list[Question]:
    """``n`` different sums of two one-digit terms, none of those in ``without``; fewer where there are no more."""
    form = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    known = {question.text for question in without}
    found = []
    for entry in reasoning_gym.create_dataset("chain_sum", seed=seed, size=50 * n, **form):
        text = entry["question"]
        if text not in known and len(found) < n:
            known.add(text)
            found.append(
                Question(text, tokenizer.apply_chat_template([{"role": "user", "content": text}]), entry["answer"])
            )
    return found


def ask(sampler: Sampler, questions: Sequence[Question], params: rlkit.SamplingParams, n: int = 1) -> Answers:
    """``n`` completions to every question; all requests are in flight at once."""
    futures = [sampler.sample(question.tokens, params, n=n) for question in questions]
    samples = [future.result() for future in futures]
    texts = [[sampler.tokenizer.decode(sample.tokens) for sample in group] for group in samples]
    found = [[NUMBER.findall(text)[-1:] for text in group] for group in texts]
    rewards = [[last == [question.answer] for last in group] for question, group in zip(questions, found, strict=True)]
    return Answers(samples, texts, np.array([list(map(len, group)) for group in found]), np.array(rewards, float))


def train(
    policy: TrainerBackend, questions: Sequence[Question], params: rlkit.SamplingParams, adam: rlkit.Adam, n: int
) -> tuple[dict, Answers]:
    """One step of GRPO on ``n`` completions to every question: its metrics, and the completions."""
    start = time.perf_counter()
    with policy.sampler().result() as sampler:  # the policy, frozen now
        got = ask(sampler, questions, params, n)
    sampled = time.perf_counter()

    samples = [sample for group in got.samples for sample in group]
    weights = token_weights([sample.tokens.size for sample in samples], "token-mean")
    data = [s.datum(a, weights=w) for s, a, w in zip(samples, grpo(got.rewards).ravel(), weights, strict=True)]
    loss = policy.forward_backward(data, "ppo")
    update = policy.optim_step(adam)  # submitted before the loss is read

    gaps = [np.abs(lp - s.logprobs).max() for lp, s in zip(loss.result().selected, samples, strict=True)]
    metrics = {
        "reward/mean": got.rewards.mean(),
        "reward/std_error": got.rewards.mean(axis=1).std() / math.sqrt(max(1, len(questions) - 1)),
        "reward/without_signal": np.mean(got.rewards.min(axis=1) == got.rewards.max(axis=1)),
        "sample/with_number": got.numbers.mean(),
        "sample/tokens": np.mean([sample.tokens.size for sample in samples]),
        "train/loss": loss.result().metrics["loss:sum"],
        "train/grad_norm": update.result().get("grad_norm:mean", math.nan),  # where it is known
        "train/sampler_gap": max(gaps),  # trainer against sampler, in nats
        "time/sample": sampled - start,
        "time/train": time.perf_counter() - sampled,
    }
    return {name: float(value) for name, value in metrics.items()}, got


class Screen(Live):
    """A live table and a progress bar on a terminal; elsewhere a line for each part, and the table at the end."""

    columns = {  # noqa: RUF012
        "step": "step",
        "reward": "reward/mean",
        "number": "sample/with_number",
        "loss": "train/loss",
        "grad norm": "train/grad_norm",
        "sample s": "time/sample",
        "train s": "time/train",
    }

    def __init__(self, parts: int) -> None:
        self.table = Table(*self.columns)
        self.progress = Progress(BarColumn(), "{task.description}", TimeElapsedColumn(), "left", TimeRemainingColumn())
        self.bar = self.progress.add_task("", total=parts, completed=-1)
        super().__init__(Group(self.table, self.progress), refresh_per_second=4)

    def doing(self, what: str) -> None:
        """Says what goes on now; what went on before is done."""
        self.progress.update(self.bar, advance=1, description=what)
        if not self.console.is_terminal:
            print(what, flush=True)

    def add(self, metrics: dict) -> None:
        """Shows a step."""
        self.table.add_row(*(f"{metrics[name]:.3g}" for name in self.columns.values()))


def plot(rows: Sequence[dict], held_out: Sequence[tuple[str, Answers]], path: Path) -> None:
    """The learning curve, and the held-out score before and after."""
    mean, error = (np.array([row[name] for row in rows]) for name in ("reward/mean", "reward/std_error"))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.fill_between(range(len(rows)), mean - error, mean + error, alpha=0.15, linewidth=0)
    axes.plot(mean, marker="o", markersize=4, label="training questions, sampled (± standard error)")
    (_, before), (roomy, with_room), (_, after) = held_out
    for got, x, label in ((before, 0, "held-out questions, greedy (95 % interval)"), (after, len(rows), None)):
        p, low, high = got.interval()
        axes.errorbar(x, p, [[p - low], [high - p]], fmt="D", capsize=4, color="tab:orange", label=label)
        axes.annotate(f"{p:.2f}", (x, p), (9, 0), textcoords="offset points", va="center", color="tab:orange")
    axes.axhline(with_room.rewards.mean(), linestyle=":", color="gray", label=f"held-out questions, {roomy}")
    axes.set(
        title="GRPO on sums of two one-digit terms", xlabel="optimizer steps done", ylabel="share of right answers"
    )
    axes.set(ylim=(-0.02, 1.02), xlim=(-0.03 * len(rows), 1.08 * len(rows)))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def run(policy: TrainerBackend, args: argparse.Namespace, log: TextIO, trajectories: TextIO) -> None:
    """Evaluates, trains, evaluates again, and says what changed."""
    greedy = rlkit.SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    roomy = rlkit.SamplingParams(max_tokens=4 * args.max_tokens, temperature=0.0)
    pool = make_questions(policy.tokenizer, args.seed, min(args.steps * args.prompts, 100))
    held_out = make_questions(policy.tokenizer, args.seed + 1, args.eval_size, without=pool)
    order = np.random.default_rng(args.seed).permutation(np.resize(np.arange(len(pool)), args.steps * args.prompts))
    rows = []

    def record(split: str, step: int, questions: Sequence[Question], got: Answers) -> None:
        for question, texts, rewards in zip(questions, got.texts, got.rewards, strict=True):
            for text, reward in zip(texts, rewards, strict=True):
                line = {"split": split, "step": step, "question": question.text, "answer": question.answer}
                trajectories.write(json.dumps(line | {"completion": text, "reward": reward}) + "\n")

    with Screen(args.steps + 3) as screen:
        screen.doing(f"{len(held_out)} held-out questions, before")
        before = ask(policy.sampler().result(), held_out, greedy)
        record("held-out", 0, held_out, before)
        screen.doing(f"the same with {roomy.max_tokens} tokens")
        with_room = ask(policy.sampler().result(), held_out, roomy)
        for step, indices in enumerate(order.reshape(args.steps, args.prompts)):
            last = f", reward {rows[-1]['reward/mean']:.2f}" if rows else ""
            screen.doing(f"step {step + 1} of {args.steps}{last}")
            questions = [pool[i] for i in indices]
            metrics, got = train(policy, questions, args.params, args.adam, args.samples)
            rows.append({"step": step, **metrics})
            log.write(json.dumps(rows[-1]) + "\n")
            log.flush()
            record("train", step, questions, got)
            screen.add(rows[-1])
        screen.doing("held-out questions, after")
        after = ask(policy.sampler().result(), held_out, greedy)
        record("held-out", args.steps, held_out, after)
        adapter = policy.save("adapter", optimizer=False).result()
        screen.doing("done")

    print("\nHeld-out questions, greedy answers before and after:")
    for question, old, new in list(zip(held_out, before.texts, after.texts, strict=True))[:5]:
        print(f"{question.text.rpartition(': ')[2]:>11} {old[0]!r:<50} {new[0]!r}")
    scores = [("before", before), (f"before, given {roomy.max_tokens} tokens", with_room), ("after", after)]
    for when, got in scores:
        right = "{:.2f} right (95 % interval {:.2f} to {:.2f})".format(*got.interval())
        print(f"{when:>24}: {right}, {got.numbers.mean():.2f} hold a number")
    gain, form = (got.rewards.mean() - before.rewards.mean() for got in (after, with_room))
    print(f"What it learned: {gain:+.2f}, of which {form:+.2f} is the form, to answer within {args.max_tokens} tokens,")
    print("since the untrained model gets that far when it has room for its answer.")
    plot(rows, scores, args.out / "reward.png")
    print(f"{args.out} holds metrics.jsonl, trajectories.jsonl and reward.png; the adapter is in {adapter}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the defaults of its backend."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog=f"defaults by backend: {DEFAULTS}")
    parser.add_argument("--backend", choices=DEFAULTS, default="local", help="what is trained (default: %(default)s)")
    parser.add_argument("--model", help="a directory, a hub id, or smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, help="of Adam")
    for name, default, text in (
        ("--prompts", 8, "questions per step"),
        ("--samples", 8, "completions per question"),
        ("--max-tokens", 8, "token budget of a completion"),
        ("--rank", 16, "rank of the LoRA"),
        ("--eval-size", 100, "held-out questions"),
        ("--seed", 0, "of everything random"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="results (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.backend].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    low = [name for name in ("steps", "prompts", "samples", "eval_size") if getattr(args, name) < 1]
    if low:
        parser.error(f"--{low[0].replace('_', '-')} must be at least 1")
    args.params = rlkit.SamplingParams(max_tokens=args.max_tokens)
    args.adam = rlkit.Adam(learning_rate=args.learning_rate)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    args = arguments(argv)
    options = {"model": args.model, "lora": rlkit.Lora(rank=args.rank), "seed": args.seed, "folder": args.out}
    with rlkit.connect(args.backend, **options) as policy:
        args.out.mkdir(parents=True, exist_ok=True)
        files = (args.out / name for name in ("metrics.jsonl", "trajectories.jsonl"))
        log, trajectories = (file.open("w", encoding="utf-8") for file in files)
        with log, trajectories:
            run(policy, args, log, trajectories)


if __name__ == "__main__":
    try:
        main()
    except (rlkit.ConfigError, rlkit.UnsupportedError) as error:
        sys.exit(f"quickstart: {error}")
