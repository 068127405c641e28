"""Direct preference optimisation on pairs of answers, on any backend. Runs on the toy backend in seconds.

    python examples/dpo.py                                             # learn to prefer digits, on the toy
    python examples/dpo.py backend=local data=pairs.jsonl learning_rate=5e-5
    python examples/dpo.py backend=tinker model=Qwen/Qwen3-8B data=pairs.jsonl learning_rate=1e-5

A line of the file is {"prompt": "...", "chosen": "...", "rejected": "..."}. The reference is the base model; its
logprobs are computed once, before the first step. Run the program again to resume.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

import rlkit
from rlkit import config, losses
from rlkit.chat import Chat
from rlkit.recipes import _rows

DIGITS = [{"prompt": f"Say {word}.", "chosen": "2718", "rejected": word} for word in ("moon", "tree", "bird", "lake")]


@attrs.frozen
class Settings:
    """The settings.

    Args:
        data: a jsonl file of pairs; None: a few pairs that prefer digits.
        loss: dpo, or another of ``rlkit.losses`` over pairs: simpo, orpo, cpo.
        loss_config: its settings.
        batch_size: pairs per step.
        folder: the run's folder; a run in it is resumed.
    """

    backend: Literal["toy", "local", "tinker"] = "toy"
    model: str = "smollm2-135m-instruct"
    data: Path | None = None
    loss: str = "dpo"
    loss_config: dict[str, Any] = attrs.field(factory=dict)
    lora_rank: int = 16
    learning_rate: float = 0.01
    max_steps: int = 30
    batch_size: int = 4
    save_every: int = 10
    seed: int = 0
    folder: str = "runs/dpo"

    def __attrs_post_init__(self) -> None:
        rlkit.Adam(learning_rate=self.learning_rate)
        if self.batch_size < 1 or self.save_every < 1:
            raise rlkit.ConfigError("batch_size and save_every: at least 1")
        if losses.prepare(self.loss, self.loss_config).level != "pair":
            raise rlkit.ConfigError(f"loss: {self.loss!r} is none over pairs, such as dpo, simpo, orpo or cpo")


def read(path: Path | None) -> Sequence[Mapping[str, str]]:
    """Return the pairs."""
    if path is None:
        return DIGITS
    pairs = _rows.read(str(path), where="data")
    for i, pair in enumerate(pairs):
        if not all(isinstance(pair.get(name), str) for name in ("prompt", "chosen", "rejected")):
            raise rlkit.DataError(f"data: {path}: row {i}: expected the texts prompt, chosen and rejected")
    return pairs


def train(s: Settings) -> list[float]:
    """Train; return the share of pairs whose chosen answer has gained on the rejected one, at each step."""
    pairs, accuracy = read(s.data), []
    with rlkit.Run(s.folder, seed=s.seed, config=config.dump(s), trackers=("jsonl",)) as run:
        policy = run.connect(s.backend, model=s.model, lora=rlkit.Lora(rank=s.lora_rank))
        chat = Chat(policy.tokenizer)
        reference = policy.base_sampler().result()

        def datum(prompt: str, answer: str) -> rlkit.Datum:
            said = np.append(policy.tokenizer.encode(answer), chat.end)
            return rlkit.Datum.supervised(chat.start(prompt).prompt, said, weights=1.0)

        data = [[datum(pair["prompt"], pair[side]) for side in ("chosen", "rejected")] for pair in pairs]
        asked = [[reference.logprobs(d.tokens) for d in pair] for pair in data]  # all in flight
        data = [
            [d.with_inputs(reference_logprobs=np.where(d.mask, lp.result(), 0.0)) for d, lp in zip(*both, strict=True)]
            for both in zip(data, asked, strict=True)
        ]
        for step in run.steps(s.max_steps):
            batch = [d for pair in run.batch(data, s.batch_size) for d in pair]  # chosen, rejected, chosen, ...
            fb = policy.forward_backward(batch, s.loss, config=s.loss_config)
            policy.optim_step(rlkit.Adam(learning_rate=s.learning_rate)).result()
            before = [d.inputs["reference_logprobs"][d.mask].sum() for d in batch]
            gain = np.array([lp.sum() for lp in fb.result().selected]) - before
            accuracy.append(float((gain[::2] > gain[1::2]).mean()))
            metrics = {"train/loss": fb.result().metrics["loss:sum"] / s.batch_size, "train/accuracy": accuracy[-1]}
            run.log(metrics | {"train/margin": float((gain[::2] - gain[1::2]).mean())})
            run.checkpoint(policy, every=s.save_every)
            print(f"step {step:3}  loss {metrics['train/loss']:.3f}  accuracy {accuracy[-1]:.2f}")
    return accuracy


def main(arguments: list[str]) -> None:
    """Run a command line."""
    if arguments in (["help"], ["--help"], ["-h"]):
        print(__doc__, config.describe(Settings), sep="\n")
        return
    try:
        train(config.load(Settings, overrides=arguments))
    except rlkit.RlkitError as error:
        sys.exit(f"dpo.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
