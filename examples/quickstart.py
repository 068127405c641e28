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

import rlkit
from rlkit import credit, report
from rlkit.backends import Sampler, TrainerBackend
from rlkit.envs import Tasks
from rlkit.evaluation import evaluate_sync
from rlkit.rollouts import rollout_sync
from rlkit.tracking import mismatch_metrics, train_metrics

try:
    import reasoning_gym
except ImportError as error:
    sys.exit(f"{error}; in rlkit's folder: pip install -e '.[all]' -c constraints.txt")

DEFAULTS = {
    "local": {"model": "smollm2-135m-instruct", "steps": 10, "learning_rate": 2e-4},
    "toy": {"model": None, "steps": 30, "learning_rate": 0.05},
}
NUMBER = re.compile(r"-?\d+")
PLAIN = {"attempts": 1, "progress": False}  # of rollouts: sums do not fail, and the console tracker shows each step


def make_questions(seed: int, n: int, without: Sequence[dict] = ()) -> list[dict]:
    """Make ``n`` different sums of two one-digit terms, none of them in ``without``; only 158 exist."""
    form = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    known, found = {row["prompt"] for row in without}, []
    for entry in reasoning_gym.create_dataset("chain_sum", seed=seed, size=50 * n, **form):
        # no term is 0 or the answer, so that an echo of the question earns nothing
        echo = {"0", entry["answer"]} & set(NUMBER.findall(entry["question"]))
        if not echo and entry["question"] not in known and len(found) < n:
            known.add(entry["question"])
            found.append({"prompt": entry["question"], "answer": entry["answer"]})
    return found


def right(text: str, answer: str) -> float:
    """Return the reward: 1 if the last number in the text is the answer."""
    return float(NUMBER.findall(text)[-1:] == [answer])


def train(run: rlkit.Run, policy: TrainerBackend, tasks: Tasks, args: argparse.Namespace) -> None:
    """Make one step of GRPO, on several completions to every question of the step's batch, and log it."""
    start = time.perf_counter()
    with policy.sampler().result() as sampler:  # the policy, frozen now
        options = {"n": args.samples, "params": args.params, "seed": run.seed, **PLAIN}
        groups = rollout_sync(sampler, run.batch(tasks, args.prompts), step=run.step, **options)
    sampled = time.perf_counter()

    batch = credit.assign(groups, "grpo", weights="token-mean")  # each token's advantage and weight
    loss = policy.forward_backward(batch.data, "ppo")
    update = policy.optim_step(args.adam)  # submitted before the loss is read

    trained = train_metrics(batch.data, loss.result(), update.result())
    mismatch = mismatch_metrics(batch.data, loss.result().selected)
    times = {"time/rollout": sampled - start, "time/train": time.perf_counter() - sampled}
    run.log({**groups.metrics, **batch.metrics, **trained, **mismatch, **times})
    run.log_trajectories(groups, advantages=batch.advantages, trainer_logprobs=loss.result().selected)


def score(run: rlkit.Run, sampler: Sampler, tasks: Tasks, max_tokens: int, *, log: bool = True) -> dict[str, Any]:
    """Answer held-out questions greedily; return the share of right ones, its 95 % interval (Wilson), and the texts."""
    with sampler:
        params = rlkit.SamplingParams(max_tokens=max_tokens)
        found = evaluate_sync(sampler, tasks, greedy=True, params=params, **PLAIN)
    if log:
        run.log(found.metrics)
        run.log_trajectories(found.rollouts)
    result = found.scores[tasks.name]
    texts = [t.messages[-1]["content"] for group in found.rollouts for t in group.trajectories]
    return {"mean": result.mean, "low": result.low, "high": result.high, "texts": texts}


def loop(run: rlkit.Run, policy: TrainerBackend, args: argparse.Namespace) -> None:
    """Evaluate, train, evaluate again, and report what changed."""
    pool = make_questions(args.seed, 58)
    held_out = make_questions(args.seed + 1, args.eval_size, without=pool)
    tasks, unseen = (rlkit.envs.function(x, right, name=name) for x, name in ((pool, "sums"), (held_out, "held-out")))
    room = 4 * args.max_tokens
    if run.step:
        print(f"resumes {run.folder} after step {run.step}; remove the folder to start again")

    # once: a resumed run remembers it
    before = run.value("before", lambda: score(run, policy.sampler().result(), unseen, args.max_tokens))
    with_room = run.value("room", lambda: score(run, policy.sampler().result(), unseen, room, log=False))
    for _ in run.steps(args.steps):
        train(run, policy, tasks, args)
        run.checkpoint(policy, every=5)
    after = score(run, policy.sampler().result(), unseen, args.max_tokens)

    print("\nHeld-out questions, greedy answers before and after, right (+) or wrong (-):")
    for question, *answers in list(zip(held_out, before["texts"], after["texts"], strict=True))[:5]:
        old, new = (f"{'+' if right(text, question['answer']) else '-'} {text!r}" for text in answers)
        print(f"{question['prompt'].rpartition(': ')[2]:>11}  {old:<50} {new}")
    for when, got in {"before": before, f"before, given {room} tokens": with_room, "after": after}.items():
        print(f"{when:>24}: " + "{mean:.2f} right (95 % interval {low:.2f} to {high:.2f})".format(**got))
    gain, form = (got["mean"] - before["mean"] for got in (after, with_room))
    print(f"What it learned: {gain:+.2f}, of which {form:+.2f} is the form, to answer within {args.max_tokens} tokens,")
    print("since the untrained model gets that far when it has room for its answer.")
    print(f"{report.write(run.folder, tokenizer=policy.tokenizer)} shows the curves and every answer")
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
    with rlkit.Run(args.out, seed=args.seed, config=config, trackers=("jsonl", "console")) as run:
        loop(run, run.connect(args.backend, **options), args)


if __name__ == "__main__":
    try:
        main()
    except (rlkit.ConfigError, rlkit.UnsupportedError, rlkit.CheckpointError) as error:
        sys.exit(f"quickstart: {error}")
