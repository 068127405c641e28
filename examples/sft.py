"""Supervised fine-tuning on conversations, with a held-out loss, on any backend. Runs on the toy backend in seconds.

    python examples/sft.py                                                  # learns to count, on the toy
    python examples/sft.py backend=local data=conversations.jsonl max_steps=100 learning_rate=2e-4
    python examples/sft.py backend=tinker model=Qwen/Qwen3-8B data=conversations.jsonl

A line of the file is {"messages": [{"role": "user", "content": "..."}, ...]}. The assistant's last turn is trained,
the rest is prompt. Run the program again to resume.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

import rlkit
from rlkit import config, schedules
from rlkit.advantages import token_weights
from rlkit.chat import Chat
from rlkit.recipes import _rows

COUNTING = [
    [{"role": "user", "content": f"After {n} comes?"}, {"role": "assistant", "content": f"{n + 1}!"}] for n in range(40)
]


@attrs.frozen
class Settings:
    """The settings.

    Args:
        data: a jsonl file of conversations; None: counting.
        batch_size: conversations per step.
        held_out: share of the conversations to evaluate on instead of training.
        folder: the run's folder; a run in it is resumed.
    """

    backend: Literal["toy", "local", "tinker"] = "toy"
    model: str = "smollm2-135m-instruct"
    data: Path | None = None
    lora_rank: int = 16
    learning_rate: float = 0.05
    max_steps: int = 60
    batch_size: int = 8
    held_out: float = 0.1
    save_every: int = 20
    seed: int = 0
    folder: str = "runs/sft"

    def __attrs_post_init__(self) -> None:
        rlkit.Adam(learning_rate=self.learning_rate)
        if self.batch_size < 1 or self.save_every < 1 or not 0 <= self.held_out < 1:
            raise rlkit.ConfigError("batch_size and save_every: at least 1; held_out: from 0 to below 1")


def read(path: Path | None) -> list[Any]:
    """Return the conversations, each of which ends with the assistant's turn."""
    if path is None:
        return COUNTING
    talks = [row.get("messages") for row in _rows.read(str(path), where="data")]
    for i, talk in enumerate(talks):
        right = isinstance(talk, list) and len(talk) > 1 and all(isinstance(message, dict) for message in talk)
        texts = [message.get(name) for message in talk for name in ("role", "content")] if right else [None]
        if not all(isinstance(text, str) for text in texts) or talk[-1]["role"] != "assistant":
            expected = '"messages": a list of {"role": "...", "content": "..."} that ends with the assistant\'s'
            raise rlkit.DataError(f"data: {path}: row {i}: expected {expected}")
    return talks


def datum(chat: Chat, talk: list[Any]) -> rlkit.Datum:
    """Return the conversation as a datum that trains its last turn and the end token after it."""
    said = np.append(chat.tokenizer.encode(talk[-1]["content"]), chat.end)
    return rlkit.Datum.supervised(chat.start(talk[:-1]).prompt, said)


def train(s: Settings) -> list[float]:
    """Train; return the held-out loss per token before and after."""
    talks = read(s.data)
    count = min(max(1, round(s.held_out * len(talks))), len(talks) - 1) if s.held_out else 0
    found = []
    with rlkit.Run(s.folder, seed=s.seed, config=config.dump(s)) as run:
        policy = run.connect(s.backend, model=s.model, lora=rlkit.Lora(rank=s.lora_rank))
        chat = Chat(policy.tokenizer)
        data = [datum(chat, talks[i]) for i in np.random.default_rng(s.seed).permutation(len(talks))]
        held_out, data = data[:count], data[count:]

        def score() -> None:
            if held_out:
                metrics = policy.forward(held_out, "cross_entropy").result().metrics
                found.append(metrics["loss:sum"] / metrics["tokens:sum"])
                print(f"after {run.step} steps: {found[-1]:.3f} nats per token, held out")

        score()
        for step in run.steps(s.max_steps):
            batch = run.batch(data, s.batch_size)
            weights = token_weights([int(d.mask.sum()) for d in batch], "token-mean")
            batch = [d.with_inputs(weights=w) for d, w in zip(batch, weights, strict=True)]
            fb = policy.forward_backward(batch, "cross_entropy")
            rate = s.learning_rate * schedules.linear(step, start=1.0, end=0.1, steps=s.max_steps)
            policy.optim_step(rlkit.Adam(learning_rate=rate)).result()
            run.log({"train/loss": fb.result().metrics["loss:sum"], "train/learning_rate": rate})
            run.checkpoint(policy, every=s.save_every)
        score()
    return found


def main(arguments: list[str]) -> None:
    """Run a command line."""
    if arguments in (["help"], ["--help"], ["-h"]):
        print(__doc__, config.describe(Settings), sep="\n")
        return
    try:
        train(config.load(Settings, overrides=arguments))
    except rlkit.RlkitError as error:
        sys.exit(f"sft.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
