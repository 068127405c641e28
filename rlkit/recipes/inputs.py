"""Settings of a run's data: what is played, evaluated, learnt from, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import attrs

from rlkit._drawn import NEW_OPTIONS, DrawnWith
from rlkit.recipes.keys import with_keys

__all__ = [
    "Buffer",
    "DataProcessor",
    "Experience",
    "ExperiencePipeline",
    "ExplorerInput",
    "Format",
    "Operator",
    "Sampling",
    "Taskset",
    "TrainerInput",
]


@attrs.frozen
@with_keys
class Format:
    """How rows of a file are read."""

    prompt_type: Literal["messages", "plaintext"] = "messages"
    raw: bool = False
    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt: str | None = None
    system_prompt_key: str | None = None
    messages_key: str = "messages"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    reply_prefix: str | None = None
    chat_template: str | None = None
    enable_thinking: bool | None = None


@attrs.frozen
@with_keys
class Sampling:
    """How answers are sampled; None leaves it to ``model``."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None

    @property
    def cut(self) -> DrawnWith:
        """What takes the place of ``model``'s, but for the temperature."""
        names = ("top_p", "top_k", *NEW_OPTIONS)
        return cast("DrawnWith", {x: getattr(self, x) for x in names if getattr(self, x) is not None})


@attrs.frozen
@with_keys
class Taskset:
    """Where problems come from: see ``rlkit.recipes.tasks``."""

    name: str = "taskset"
    storage_type: Literal["file", "reasoning_gym", "hub"] = "file"
    path: str | None = None
    split: str = "train"
    subset_name: str | None = None
    format: Format = Format()
    default_workflow_type: str | None = None
    default_reward_fn_type: str | None = None
    workflow_args: Mapping[str, Any] = attrs.Factory(dict)
    reward_fn_args: Mapping[str, object] = attrs.Factory(dict)
    rollout_args: Sampling = Sampling()
    repeat_times: int | None = None
    max_tasks: int | None = None


@attrs.frozen
@with_keys
class Experience:
    """Demonstrations, preferences, or stored trajectories."""

    name: str = ""
    storage_type: Literal["queue", "file"] = "queue"
    path: str | None = None
    split: str = "train"
    subset_name: str | None = None
    format: Format = Format()


@attrs.frozen
@with_keys
class ExplorerInput:
    """What is played, and what is evaluated on."""

    taskset: Taskset | None = None
    tasksets: Sequence[Taskset] = ()
    eval_tasksets: Sequence[Taskset] = ()
    default_workflow_type: str | None = None
    default_eval_workflow_type: str | None = None
    default_reward_fn_type: str | None = None


@attrs.frozen
@with_keys
class TrainerInput:
    """What is trained from where it is not sampled."""

    experience_buffer: Experience | None = None
    auxiliary_buffers: Mapping[str, Experience] = attrs.Factory(dict)


@attrs.frozen
@with_keys
class Operator:
    """One operator: see ``rlkit.recipes.operators``."""

    name: str = ""
    args: Mapping[str, object] = attrs.Factory(dict)


@attrs.frozen
@with_keys
class ExperiencePipeline:
    """What is done to episodes before they train."""

    operators: Sequence[Operator] = ()


@attrs.frozen
@with_keys
class DataProcessor:
    """Of tasks, before they are played, and of episodes."""

    experience_pipeline: ExperiencePipeline = ExperiencePipeline()


@attrs.frozen
@with_keys
class Buffer:
    """How much, and from where."""

    batch_size: int = 1
    train_batch_size: int = 0
    total_epochs: int = 1
    total_steps: int | None = None
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()
