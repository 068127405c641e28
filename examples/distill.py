r"""On-policy distillation: a student samples, and a teacher scores each token. For any backends.

    python examples/distill.py                                                     # on the toy, in seconds
    python examples/distill.py backend=tinker model=Qwen/Qwen3-4B-Instruct-2507 teacher=tinker \
        teacher_model=Qwen/Qwen3-30B-A3B-Instruct-2507 learning_rate=1e-4
    python examples/distill.py backend=local teacher=local teacher_path=runs/sft

The advantage of a token is log teacher - log student, the sampled reverse KL; it needs no rewards. The two must have
the same tokenizer. Run the program again to resume.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import attrs
import numpy as np

import rlkit
from rlkit import config, credit
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.chat import Chat
from rlkit.trajectory import Group

PROMPTS = ["Call me.", "Which room?", "How many?", "Your number?"]


@attrs.frozen
class Settings:
    """The settings.

    Args:
        backend, model: the student.
        teacher, teacher_model, teacher_path: a model, or a run or a saved state of one; the toy makes its own.
        prompts: the student's prompts.
        samples: of each prompt per step.
        folder: the run's folder; a run in it is resumed.
    """

    backend: Literal["toy", "local", "tinker"] = "toy"
    model: str = "smollm2-135m-instruct"
    teacher: Literal["toy", "local", "tinker"] = "toy"
    teacher_model: str | None = None
    teacher_path: str | None = None
    prompts: tuple[str, ...] = tuple(PROMPTS)
    lora_rank: int = 16
    learning_rate: float = 0.05
    max_steps: int = 20
    samples: int = 8
    max_tokens: int = 12
    save_every: int = 10
    seed: int = 0
    folder: str = "runs/distill"

    def __attrs_post_init__(self) -> None:
        rlkit.Adam(learning_rate=self.learning_rate)
        rlkit.SamplingParams(max_tokens=self.max_tokens)
        if not self.prompts or self.samples < 1 or self.save_every < 1:
            raise rlkit.ConfigError("prompts: at least one; samples and save_every: at least 1")
        if self.teacher != "toy" and not (self.teacher_model or self.teacher_path):
            raise rlkit.ConfigError("teacher: give teacher_model, teacher_path, or both")


def teacher_of(s: Settings) -> Any:
    """Return the teacher's sampler; for the toy, first train one to answer with a telephone number."""
    if s.teacher_path:
        return rlkit.runs.sampler(s.teacher_path, **({"model": s.teacher_model} if s.teacher_model else {}))
    if s.teacher != "toy":
        return rlkit.sampler(s.teacher, model=s.teacher_model)
    made = rlkit.connect("toy", seed=1)
    chat = Chat(made.tokenizer)
    number = np.append(made.tokenizer.encode("555-0199"), chat.end)
    data = [rlkit.Datum.supervised(chat.start(prompt).prompt, number) for prompt in s.prompts]
    for _ in range(60):
        made.forward_backward(data, "cross_entropy")
        made.optim_step(rlkit.Adam(learning_rate=0.05)).result()
    return made.sampler().result()


def train(s: Settings) -> list[float]:
    """Train; return the sampled KL of the student from the teacher, nats per token, at each step."""
    teacher, kls = teacher_of(s), []
    with rlkit.Run(s.folder, seed=s.seed, config=config.dump(s), trackers=("jsonl",)) as run:
        policy = run.connect(s.backend, model=s.model, lora=rlkit.Lora(rank=s.lora_rank))
        if problem := same_tokenizer(policy.tokenizer, teacher.tokenizer):
            raise rlkit.ConfigError(f"teacher: has another tokenizer than the student: {problem}")
        prompts = [Chat(policy.tokenizer).start(prompt).prompt for prompt in s.prompts]
        params = rlkit.SamplingParams(max_tokens=s.max_tokens)
        for step in run.steps(s.max_steps):
            with policy.sampler().result() as sampler:
                asked = [sampler.sample(prompt, params, n=s.samples) for prompt in prompts]
                samples = [sample for future in asked for sample in future.result()]
            group = Group.of_samples(samples, np.zeros(len(samples)))
            batch = credit.assign([group], "on_policy_distillation", level="token", teacher=teacher)
            policy.forward_backward(batch.data, "importance_sampling")
            policy.optim_step(rlkit.Adam(learning_rate=s.learning_rate)).result()
            kls.append(batch.metrics["train/kl_teacher"])
            run.log(batch.metrics)
            run.checkpoint(policy, every=s.save_every)
            print(f"step {step:3}  KL to the teacher {kls[-1]:6.3f}  {policy.tokenizer.decode(samples[0].tokens)!r}")
    return kls


def main(arguments: list[str]) -> None:
    """Run a command line."""
    if arguments in (["help"], ["--help"], ["-h"]):
        print(__doc__, config.describe(Settings), sep="\n")
        return
    try:
        train(config.load(Settings, overrides=arguments))
    except rlkit.RlkitError as error:
        sys.exit(f"distill.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
