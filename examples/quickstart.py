"""GRPO from an untouched model to a learning curve: a language model learns to answer small sums.

    python examples/quickstart.py                  # a LoRA on SmolLM2-135M-Instruct, on a CPU, a few minutes
    python examples/quickstart.py --backend toy    # the same program on a toy model, in seconds
    python examples/quickstart.py --sampler vllm   # vLLM samples, this process trains

Stop it at any moment and start it again to resume. One step of the loop is the function ``train``. Copy this file and
change what you like.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rlkit
from rlkit import credit
from rlkit.backends import Sampler, TrainerBackend
from rlkit.envs import Tasks
from rlkit.evaluation import evaluate_sync
from rlkit.rollouts import rollout_sync
from rlkit.tracking import mismatch_metrics, read_metrics, train_metrics

try:
    import reasoning_gym
    from matplotlib import pyplot as plt
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:
    sys.exit(f"{error}; in rlkit's folder: pip install -e '.[all]' -c constraints.txt")

DEFAULTS = {
    "local": {"model": "smollm2-135m-instruct", "steps": 10, "learning_rate": 2e-4},
    "toy": {"model": None, "steps": 30, "learning_rate": 0.05},
}
NUMBER = re.compile(r"-?\d+")
PLAIN = {"attempts": 1, "progress": False}  # of rollouts: sums do not fail, and the screen has a bar already


def make_questions(seed: int, n: int, without: Sequence[dict] = ()) -> list[dict]:
    """Make ``n`` different sums of two one-digit terms, none of them in ``without``; only 158 exist."""
    form = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    known, found = {row["prompt"] for row in without}, []
    for entry in reasoning_gym.create_dataset("chain_sum", seed=seed, size=50 * n, **form):
        asked = telling(entry["question"], entry["answer"])
        if asked and entry["question"] not in known and len(found) < n:
            known.add(entry["question"])
            found.append({"prompt": entry["question"], "answer": entry["answer"]})
    return found


def telling(question: str, answer: str) -> bool:
    """Tell whether the answer must be computed: no term is 0 or the answer, so an echo earns nothing."""
    return not {"0", answer} & set(NUMBER.findall(question))


def right(text: str, answer: str) -> float:
    """Return the reward: 1 if the last number in the text is the answer."""
    return float(NUMBER.findall(text)[-1:] == [answer])


def train(run: rlkit.Run, policy: TrainerBackend, tasks: Tasks, args: argparse.Namespace) -> dict[str, float]:
    """Make one step of GRPO, on several completions to every question of the step's batch; return its metrics."""
    start = time.perf_counter()
    batch = run.batch(tasks, args.prompts)
    with policy.sampler().result() as sampler:  # the policy, frozen now
        own = {"n": args.samples, "params": args.params, "seed": run.seed}
        groups = rollout_sync(sampler, batch, step=run.step, **own, **PLAIN)
    sampled = time.perf_counter()

    batch = credit.assign(groups, "grpo", weights="token-mean")  # each token's advantage and weight
    loss = policy.forward_backward(batch.data, "ppo")
    update = policy.optim_step(args.adam)  # submitted before the loss is read

    trajectories = [t for group in groups for t in group.trajectories]
    means = np.array([group.rewards.mean() for group in groups])
    metrics = {
        **groups.metrics,
        **batch.metrics,
        **train_metrics(batch.data, loss.result(), update.result()),
        **mismatch_metrics(batch.data, loss.result().selected),
        "reward/std_error": float(means.std() / max(1, len(means) - 1) ** 0.5),
        "reward/without_signal": float(np.mean([np.ptp(group.rewards) == 0 for group in groups])),
        "reward/with_number": with_number(trajectories),
        "reward/cut": cut(trajectories),
        "time/rollout": sampled - start,
        "time/train": time.perf_counter() - sampled,
    }
    run.log(metrics)
    run.log_trajectories(groups, advantages=batch.advantages, trainer_logprobs=loss.result().selected)
    return metrics


def with_number(trajectories: Sequence[Any]) -> float:
    """Return the share of answers that contain a number."""
    return float(np.mean([bool(NUMBER.search(t.messages[-1]["content"])) for t in trajectories]))


def cut(trajectories: Sequence[Any]) -> float:
    """Return the share of answers that ended at ``max_tokens``, before the model had finished."""
    return float(np.mean([t.turns[-1].stop_reason == "length" for t in trajectories]))


def score(run: rlkit.Run, sampler: Sampler, tasks: Tasks, max_tokens: int, *, log: bool = True) -> dict[str, Any]:
    """Answer held-out questions greedily; return the share of right ones, its 95 % interval (Wilson), and the texts."""
    with sampler:
        params = rlkit.SamplingParams(max_tokens=max_tokens)
        found = evaluate_sync(sampler, tasks, greedy=True, params=params, **PLAIN)
    if log:
        run.log(found.metrics)
        run.log_trajectories(found.rollouts)
    result = found.scores[tasks.name]
    answers = [t for group in found.rollouts for t in group.trajectories]
    texts = [t.messages[-1]["content"] for t in answers]
    scores = {"mean": result.mean, "low": result.low, "high": result.high}
    return {**scores, "with_number": with_number(answers), "cut": cut(answers), "texts": texts}


class Screen(Live):
    """A live table and a progress bar on a terminal; elsewhere a line for each part, and the table at the end."""

    columns = {  # noqa: RUF012
        "step": "step",
        "reward": "env/sums/reward",
        "number": "reward/with_number",
        "cut": "reward/cut",
        "loss": "train/loss",
        "grad norm": "train/grad_norm",
        "rollout s": "time/rollout",
        "train s": "time/train",
    }

    def __init__(self, parts: int) -> None:
        self.table = Table(*self.columns)
        self.progress = Progress(BarColumn(), "{task.description}", TimeElapsedColumn(), "left", TimeRemainingColumn())
        self.bar = self.progress.add_task("", total=parts, completed=-1)
        super().__init__(Group(self.table, self.progress), refresh_per_second=4)

    def doing(self, what: str) -> None:
        """Show the current part; the previous one is done."""
        self.progress.update(self.bar, advance=1, description=what)
        if not self.console.is_terminal:
            print(what, flush=True)

    def add(self, metrics: dict) -> None:
        """Show a step."""
        self.table.add_row(*(f"{metrics.get(name, np.nan):.3g}" for name in self.columns.values()))


def plot(rows: Sequence[dict], held_out: Sequence[tuple[str, dict]], path: Path) -> None:
    """Draw the learning curve, the held-out scores, and the part of the gain that is form: to answer in time."""
    names = ("env/sums/reward", "reward/std_error", "reward/cut")
    mean, error, cut_off = (np.array([row[name] for row in rows]) for name in names)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.fill_between(range(len(rows)), mean - error, mean + error, alpha=0.15, linewidth=0)
    axes.plot(mean, marker="o", markersize=4, label="training questions, sampled (± standard error)")
    axes.plot(cut_off, linestyle="--", color="gray", label="of these, cut at max_tokens")
    (_, before), (roomy, with_room), (_, after) = held_out
    for got, x, label in ((before, 0, "held-out questions, greedy (95 % interval)"), (after, len(rows), None)):
        p, low, high = got["mean"], got["low"], got["high"]
        axes.errorbar(x, p, [[p - low], [high - p]], fmt="D", capsize=4, color="tab:orange", label=label)
        axes.annotate(f"{p:.2f}", (x, p), (9, 0), textcoords="offset points", va="center", color="tab:orange")
    axes.axhline(with_room["mean"], linestyle=":", color="tab:orange")
    told = f"{with_room['mean']:.2f} {roomy}:\nwhat is below is form, not arithmetic"
    at = (0.99, with_room["mean"])
    axes.annotate(told, at, (0, -4), axes.get_yaxis_transform(), "offset points", ha="right", va="top")
    title, y = "GRPO on sums of two one-digit terms", "share of right answers, and of cut ones"
    axes.set(title=title, xlabel="optimizer steps done", ylabel=y)
    axes.set(ylim=(-0.02, 1.3), yticks=np.linspace(0, 1, 6), xlim=(-0.03 * len(rows), 1.08 * len(rows)))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def loop(run: rlkit.Run, policy: TrainerBackend, args: argparse.Namespace) -> None:
    """Evaluate, train, evaluate again, and report what changed."""
    pool = make_questions(args.seed, 58)
    held_out = make_questions(args.seed + 1, args.eval_size, without=pool)
    tasks, unseen = (rlkit.envs.function(x, right, name=name) for x, name in ((pool, "sums"), (held_out, "held-out")))
    room = 4 * args.max_tokens
    if run.step:
        print(f"resumes {run.folder} after step {run.step}; remove the folder to start again")

    with Screen(args.steps + 3 - run.step) as screen:
        screen.doing(f"{len(unseen)} held-out questions, before")  # once: a resumed run remembers it
        before = run.value("before", lambda: score(run, policy.sampler().result(), unseen, args.max_tokens))
        screen.doing(f"the same with {room} tokens")
        with_room = run.value("room", lambda: score(run, policy.sampler().result(), unseen, room, log=False))
        for step in run.steps(args.steps):
            screen.doing(f"step {step + 1} of {args.steps}")
            screen.add({"step": step, **train(run, policy, tasks, args)})
            run.checkpoint(policy, every=5)
        screen.doing("held-out questions, after")
        after = score(run, policy.sampler().result(), unseen, args.max_tokens)
        screen.doing("done")

    print("\nHeld-out questions, greedy answers before and after, right (+) or wrong (-):")
    for question, *answers in list(zip(held_out, before["texts"], after["texts"], strict=True))[:5]:
        old, new = (f"{'+' if right(text, question['answer']) else '-'} {text!r}" for text in answers)
        print(f"{question['prompt'].rpartition(': ')[2]:>11}  {old:<50} {new}")
    scores = [("before", before), (f"before, given {room} tokens", with_room), ("after", after)]
    for when, got in scores:
        right_ones = "{mean:.2f} right (95 % interval {low:.2f} to {high:.2f})".format(**got)
        print(f"{when:>24}: {right_ones}, {got['with_number']:.2f} hold a number, {got['cut']:.2f} are cut")
    gain, form = (got["mean"] - before["mean"] for got in (after, with_room))
    print(f"What it learned: {gain:+.2f}, of which {form:+.2f} is the form, to answer within {args.max_tokens} tokens,")
    print("since the untrained model gets that far when it has room for its answer.")
    rows = [row["metrics"] for row in read_metrics(run.folder)]
    plot([row for row in rows if "env/sums/reward" in row], scores, args.out / "reward.png")
    print(f"{args.out} holds reward.png and {run.report().name}, which shows every answer")
    print(f"the adapter is in {rlkit.runs.records(run.folder)[-1].policy('policy')}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, with the defaults of its backend."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog=f"defaults by backend: {DEFAULTS}")
    parser.add_argument("--backend", choices=DEFAULTS, default="local", help="what is trained (default: %(default)s)")
    parser.add_argument("--model", help="a directory, a hub id, or smollm2-135m-instruct")
    parser.add_argument("--sampler", help="vllm, or the URL of a server, instead of this process (docs/backends.md)")
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
    """Run the command line."""
    args = arguments(argv)
    options = {"model": args.model, "lora": rlkit.Lora(rank=args.rank)}
    if args.sampler is not None:  # vLLM serves no adapter on the output head
        options |= {"sampler": args.sampler, "lora": rlkit.Lora(rank=args.rank, train_unembed=False)}
    config = {name: value for name, value in vars(args).items() if isinstance(value, (int, float, str))}
    with rlkit.Run(args.out, seed=args.seed, config=config, trackers=("jsonl",)) as run:
        loop(run, run.connect(args.backend, **options), args)


if __name__ == "__main__":
    try:
        main()
    except (rlkit.ConfigError, rlkit.UnsupportedError, rlkit.CheckpointError) as error:
        sys.exit(f"quickstart: {error}")
