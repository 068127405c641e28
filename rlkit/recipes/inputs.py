"""Settings of a run's data: what is played, evaluated, learnt from, and how much of it."""

# ruff: noqa: RUF009  # defaults are fields, or frozen

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from rlkit.recipes.keys import mapped, own, refused, unused

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

_NO_CLUSTER = "there are no engines and workers: a backend samples and trains"
_BY_ITSELF = "set by itself"
_KEPT_BY_RUN = "a run knows its place by its step"
_RESENDING = "files are read once"


@attrs.frozen
class Format:
    """How rows of a file are read."""

    prompt_type: Literal["messages", "plaintext"] = mapped(
        "messages", "both are rendered by the chat template; rows with messages and rows with a prompt are told apart"
    )
    raw: bool = own(False, "prompts are sent as they are, without a chat template")
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
    tools_key: Any = unused("environments say which tools there are")
    image_key: Any = refused("text only")
    video_key: Any = refused("text only")
    workflow_key: Any = refused("one environment per task set")
    reward_fn_key: Any = refused("one reward per task set")
    enable_concatenated_multi_turn: Any = unused("every assistant message of a conversation is learnt")


@attrs.frozen
class Sampling:
    """How answers are sampled; None leaves it to ``model``."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    logprobs: Any = unused("every sample has its logprobs")
    n: Any = unused("algorithm.repeat_times and a task set's repeat_times say it")


@attrs.frozen
class Taskset:
    """Where problems come from: see ``rlkit.recipes.tasks``."""

    name: str = mapped("taskset", "the environment's name in metrics")
    storage_type: Literal["file", "reasoning_gym", "hub"] = "file"
    path: str | None = None
    split: str = "train"
    subset_name: str | None = None
    format: Format = Format()
    default_workflow_type: str | None = mapped(None, "a name in rlkit.recipes.environments")
    default_reward_fn_type: str | None = mapped(None, "a name in rlkit.recipes.rewards")
    workflow_args: Mapping[str, Any] = mapped(attrs.Factory(dict), "settings of the environment")
    reward_fn_args: Mapping[str, Any] = mapped(attrs.Factory(dict), "settings of the reward")
    rollout_args: Sampling = Sampling()
    repeat_times: int | None = mapped(None, "episodes per task in evaluations; algorithm.repeat_times in training")
    max_tasks: int | None = own(None, "the first so many")
    data_selector: Any = unused("tasks are shuffled by the run's seed, anew in each epoch")
    task_selector: Any = unused("as data_selector")
    max_retry_times: Any = unused(_RESENDING)
    max_retry_interval: Any = unused(_RESENDING)
    enable_progress_bar: Any = unused("rollouts show their own")
    index: Any = unused(_KEPT_BY_RUN)
    is_eval: Any = unused(_BY_ITSELF)
    batch_size: Any = unused(_BY_ITSELF)
    total_epochs: Any = unused(_BY_ITSELF)
    total_steps: Any = unused(_BY_ITSELF)
    ray_namespace: Any = unused(_NO_CLUSTER)


@attrs.frozen
class Experience:
    """Demonstrations, preferences, or stored trajectories."""

    name: str = ""
    storage_type: Literal["queue", "file"] = mapped("queue", "what is sampled is trained at once, nothing is queued")
    path: str | None = mapped(None, "rows to learn from, or a run's trajectories.jsonl")
    split: str = "train"
    subset_name: str | None = None
    format: Format = Format()
    replay_buffer: Any = unused("a batch trains once; a loop of your own can use rlkit.rollouts.Replay")
    capacity: Any = unused("nothing is queued")
    max_read_timeout: Any = unused("nothing is queued")
    max_retry_times: Any = unused(_RESENDING)
    max_retry_interval: Any = unused(_RESENDING)
    enable_progress_bar: Any = unused("rollouts show their own")
    data_selector: Any = unused("rows are shuffled by the run's seed")
    schema_type: Any = unused(_BY_ITSELF)
    index: Any = unused(_KEPT_BY_RUN)
    batch_size: Any = unused(_BY_ITSELF)
    tokenizer_path: Any = unused(_BY_ITSELF)
    total_epochs: Any = unused(_BY_ITSELF)
    total_steps: Any = unused(_BY_ITSELF)
    ray_namespace: Any = unused(_NO_CLUSTER)


@attrs.frozen
class ExplorerInput:
    """What is played, and what is evaluated on."""

    taskset: Taskset | None = None
    tasksets: Sequence[Taskset] = mapped((), "a mixture of environments, in equal shares")
    eval_tasksets: Sequence[Taskset] = ()
    default_workflow_type: str | None = mapped(None, "as in a task set")
    default_eval_workflow_type: str | None = mapped(None, "as in a task set, for evaluations")
    default_reward_fn_type: str | None = mapped(None, "as in a task set")


@attrs.frozen
class TrainerInput:
    """What is trained from where it is not sampled."""

    experience_buffer: Experience | None = None
    auxiliary_buffers: Mapping[str, Experience] = mapped(attrs.Factory(dict), "one: the demonstrations of mix, chord")


@attrs.frozen
class Operator:
    """One operator: see ``rlkit.recipes.operators``."""

    name: str = ""
    args: Mapping[str, Any] = attrs.Factory(dict)


@attrs.frozen
class ExperiencePipeline:
    """What is done to episodes before they train."""

    operators: Sequence[Operator] = mapped(
        (), "reward_filter, reward_std_filter, dapo_dynamic_sampling (by the reward), mask_response_truncated"
    )
    save_input: Any = unused("trajectories.jsonl in the run's folder")
    input_save_path: Any = unused("trajectories.jsonl in the run's folder")
    inputs: Any = refused("what is played is what is processed")
    output: Any = refused("what is processed is trained")


@attrs.frozen
class DataProcessor:
    """Of tasks, before they are played, and of episodes."""

    task_pipeline: Any = refused("Data-Juicer's operators are not run; name the file that they made")
    experience_pipeline: ExperiencePipeline = ExperiencePipeline()


@attrs.frozen
class Buffer:
    """How much, and from where."""

    batch_size: int = 1
    train_batch_size: int = mapped(0, "trajectories per optimizer step; 0: all of a step's in one")
    total_epochs: int = mapped(1, "passes over the tasks or rows, where total_steps is null")
    total_steps: int | None = None
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()
    explorer_output: Any = unused("trajectories.jsonl in the run's folder")
    tokenizer_path: Any = unused(_BY_ITSELF)
    cache_dir: Any = unused(_BY_ITSELF)
