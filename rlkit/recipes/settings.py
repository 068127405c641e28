"""The settings of a run, read from one YAML file: the keys are those of Trinity-RFT's configurations.

The classes have the keys that mean something here, with Trinity-RFT's meaning unless a comment says another. Of the
others ``load`` ignores those that cannot change what is trained (``IGNORED``), and refuses those that would unless
they are off (``REFUSED``).
"""

from __future__ import annotations

import difflib
import fnmatch
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs

from rlkit import config
from rlkit.errors import ConfigError
from rlkit.types import OPTIONAL_OPTIONS

__all__ = ["Algorithm", "Settings", "Taskset", "load"]

_ENGINE_KEYS = (
    "model_path name engine_* *_parallel_size enable_* enforce_eager use_v1 gpu_* *_engine_args *_parser logprobs "
    "base_port api_key nnodes node_rank weight_sync_* bundle_* ray_* sync_method checkpoint_job_dir cuda_* lora_* "
    "cache_dir"
)
# Section -> patterns of keys for Trinity-RFT's engines, workers, services and files, which rlkit does not have. A
# pattern takes no key that is close to one that means something: that is a typing error.
IGNORED = {
    "Settings": "cluster service checkpoint_job_dir ray_* ignore_validator_*",
    "Model": "enable_prompt_truncation logprobs *_loras",
    "LoraConfig": "base_model_name lora_dtype is_dummy",
    "Buffer": "explorer_output tokenizer_path cache_dir",
    "Taskset": "max_retry_* enable_progress_* index is_eval batch_size total_* ray_*",
    "Format": "enable_concatenated_* prompt_type",  # messages and texts are both rendered by the chat template
    "Sampling": "logprobs n",
    "Experience": "capacity max_re* enable_progress_* schema_type index batch_size tokenizer_* total_* ray_*",
    "ExperiencePipeline": "save_input input_save_path",
    "RolloutModel": _ENGINE_KEYS,
    "Teacher": f"{_ENGINE_KEYS} seed dtype temperature top_* repetition_penalty max_*_tokens min_*_tokens "
    "max_model_len chat_template ignore_eos",
    "OverRollout": "wait_* return_partial_*",
    "Explorer": "name runner_* concurrent_mode max_repeat_times_per_runner env_vars max_inflight_* proxy_* listen_* "
    "service_* min_running_* db_url",
    "Trainer": "name trainer_type trainer_strategy trainer_config_path enable_preview save_* use_* max_token_* *_batch "
    "ulysses_* fix_* *offload* megatron",
    "Synchronizer": "sync_method sync_style sync_timeout wait_for_* group_name explorer_world_size ray_*",
    "Monitor": "detailed_stats enable_* cache_dir",
    "Log": "group_by_node save_dir",
}
# Keys that would change training, and that rlkit does not support: they may be null, false, 0, "none" or disabled.
_ENGINES = "trust_remote_code external_model_config enable_multimodal enable_return_routed_experts"
REFUSED = {
    "Settings": "cod",
    "Algorithm": "rollout_correction enable_router_replay",
    "Model": "trust_remote_code min_response_tokens rope_scaling rope_theta external_model",
    "LoraConfig": "path exclude_modules",
    "Format": "image_key video_key workflow_key reward_fn_key",
    "DataProcessor": "task_pipeline",
    "ExperiencePipeline": "inputs output",
    "Explorer": "dynamic_timeout",
    "RolloutModel": f"{_ENGINES} rope_scaling rope_theta ignore_eos min_response_tokens",
    "Teacher": f"{_ENGINES} rope_scaling rope_theta",
    "Trainer": "trust_remote_code",
}
# Keys that have another name here.
RENAMED = {
    "Format": {"chat_template": "model.custom_chat_template", "enable_thinking": "model.enable_thinking"},
    "Optimizer": {"warmup_style": "algorithm.optimizer.lr_scheduler_type", "clip_grad": "trainer.grad_clip"},
    "Model": {"chat_template_path": "model.custom_chat_template"},
    "RolloutModel": {
        "chat_template": "model.custom_chat_template",
        "enable_thinking": "model.enable_thinking",
        **{x: f"model.{x}" for x in ("temperature", "top_p", "top_k", "repetition_penalty", "max_model_len")},
        **{x: f"model.{x}" for x in ("max_prompt_tokens", "max_response_tokens")},
    },
    "Synchronizer": dict.fromkeys(("explorer_sync_interval", "trainer_sync_interval"), "synchronizer.sync_interval"),
}
# Keys that change the order or the reuse of data there: a run warns of them, and trains in its own order.
NOT_FOLLOWED = {"Taskset": "data_selector task_selector", "Experience": "replay_buffer data_selector"}


def _leave_out(hint: object, value: object, where: str, left_out: Mapping[str, list[str]]) -> object:
    """Return a value of a file without the keys that its sections lack and that may be left out, and list those."""
    kind = _find_class(hint)
    if kind is not None and isinstance(value, list):
        return [_leave_out(kind, x, f"{where}{i}.", left_out) for i, x in enumerate(value)]
    if kind is None or not isinstance(value, Mapping):
        return value
    if typing.get_origin(hint) is Mapping:
        return {key: _leave_out(kind, x, f"{where}{key}.", left_out) for key, x in value.items()}
    hints, kept = typing.get_type_hints(kind), {}
    for key, x in value.items():
        path, why = f"{where}{key}", None
        if key not in hints:
            why = _find_reason(kind.__name__, str(key), config.to_plain(x), path, hints)
        if why is None:
            kept[key] = _leave_out(hints.get(key), x, f"{path}.", left_out)
        else:
            left_out[why].append(path)
    return kept


def _find_reason(section: str, name: str, value: object, path: str, known: Iterable[str]) -> str | None:
    """Return why to leave out a key that a section lacks: it is "off", "without_effect" or "not_followed"; or None.

    Raises:
        ConfigError: it would change training.
    """
    renamed = RENAMED.get(section, {}).get(name)
    if renamed is not None or name in REFUSED.get(section, "").split():
        if _is_on(value) if renamed is None else value is not None:
            why = f"set {renamed} instead" if renamed else "rlkit does not support what it switches on"
            raise ConfigError(path, f"is {value!r}", "no value", why)
        return "off"
    if name in NOT_FOLLOWED.get(section, "").split():
        shuffled = isinstance(value, Mapping) and value.get("selector_type") == "shuffle"  # as it is done here
        return "not_followed" if _is_on(value) and not shuffled else "off"
    patterns, live = (
        IGNORED.get(section, "").split(),
        {*known, *RENAMED.get(section, ()), *REFUSED.get(section, "").split()},
    )
    matches = any(fnmatch.fnmatchcase(name, x) for x in patterns) and not difflib.get_close_matches(
        name, live, cutoff=0.8
    )
    if name in patterns or matches:
        return "off" if value is None else "without_effect"
    return None


def _is_on(value: object) -> bool:
    """Return whether a value switches something on: not null, false, 0, "none", their texts, or ``enable: false``."""
    if isinstance(value, Mapping):
        return _is_on(value.get("enable", any(_is_on(x) for x in value.values())))
    return bool(value) and str(value).lower() not in ("none", "null", "false", "0")  # texts: ${oc.env:NAME,false}


def _find_class(hint: object) -> type | None:
    """Return the settings class in an annotation."""
    if isinstance(hint, type) and attrs.has(hint):
        return hint
    return next((kind for part in typing.get_args(hint) if (kind := _find_class(part)) is not None), None)


@attrs.frozen
class Format:
    """The format of a file's rows."""

    raw: bool = False  # prompts are sent unchanged, without a chat template
    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt: str | None = None
    system_prompt_key: str | None = None
    messages_key: str = "messages"
    tools_key: str = "tools"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    reply_prefix: str | None = None


@attrs.frozen
class Sampling:
    """The sampling of answers; None leaves it to ``model``."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None

    @property
    def cut(self) -> dict[str, Any]:
        """The settings that replace ``model``'s, except the temperature."""
        names = ("top_p", "top_k", *OPTIONAL_OPTIONS)
        return {x: getattr(self, x) for x in names if getattr(self, x) is not None}


@attrs.frozen
class Taskset:
    """The source of problems: see ``rlkit.recipes.tasks``."""

    name: str = "taskset"  # the environment's name in metrics
    storage_type: Literal["file", "reasoning_gym", "hub"] = "file"
    path: str | None = None
    split: str = "train"
    subset_name: str | None = None
    format: Format = Format()
    default_workflow_type: str | None = None  # a name of ``recipes.environments``
    default_reward_fn_type: str | None = None  # a name of ``recipes.rewards``
    workflow_args: Mapping[str, Any] = attrs.Factory(dict)
    reward_fn_args: Mapping[str, object] = attrs.Factory(dict)
    rollout_args: Sampling = Sampling()
    repeat_times: int | None = None  # episodes per task in evaluations; in training algorithm.repeat_times
    max_tasks: int | None = None  # uses only the first tasks


@attrs.frozen
class Experience:
    """Demonstrations, preferences, or stored trajectories."""

    name: str = ""
    storage_type: Literal["queue", "file"] = "queue"
    path: str | None = None  # rows to learn from, or a run's trajectories.jsonl
    split: str = "train"
    subset_name: str | None = None
    format: Format = Format()
    leave_out_long_rows: bool = False  # false: rows longer than the context are an error


@attrs.frozen
class ExplorerInput:
    """The tasks to play, and those to evaluate on."""

    taskset: Taskset | None = None
    tasksets: Sequence[Taskset] = ()  # a mixture in equal shares
    eval_tasksets: Sequence[Taskset] = ()
    default_workflow_type: str | None = None
    default_eval_workflow_type: str | None = None
    default_reward_fn_type: str | None = None


@attrs.frozen
class TrainerInput:
    """The training data that is not sampled."""

    experience_buffer: Experience | None = None
    auxiliary_buffers: Mapping[str, Experience] = attrs.Factory(dict)  # the demonstrations of mix


@attrs.frozen
class Operator:
    """One operator: see ``rlkit.recipes.job``."""

    name: str = ""
    args: Mapping[str, object] = attrs.Factory(dict)


@attrs.frozen
class ExperiencePipeline:
    """The processing of episodes before they train."""

    operators: Sequence[Operator] = ()


@attrs.frozen
class DataProcessor:
    """The processing of tasks before they are played, and of episodes."""

    experience_pipeline: ExperiencePipeline = ExperiencePipeline()


@attrs.frozen
class Buffer:
    """The amount and the sources of data."""

    batch_size: int = 1
    train_batch_size: int = 0  # trajectories per optimizer step; 0: all of a step's in one
    total_epochs: int = 1  # passes over the tasks or rows, if total_steps is null
    total_steps: int | None = None
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()


@attrs.frozen
class Optimizer:
    """AdamW and its learning rate."""

    lr: float = 1e-6
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.01
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    optimizer_type: Literal["adam", "adamw"] = "adam"  # both are AdamW
    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@attrs.frozen
class Algorithm:
    """The algorithm, and changes to it: see ``rlkit.recipes.algorithms``."""

    algorithm_type: str = "ppo"
    repeat_times: int | None = None  # episodes per task; null: the algorithm's
    optimizer: Optimizer = Optimizer()
    critic_lr: float | None = None  # null: the policy's
    advantage_fn: str | None = None
    advantage_fn_args: Mapping[str, Any] | None = None
    policy_loss_fn: str | None = None
    policy_loss_fn_args: Mapping[str, Any] | None = None
    kl_penalty_fn: str | None = None  # k1, k2, k3 or abs, taken off the rewards
    kl_penalty_fn_args: Mapping[str, Any] | None = None
    kl_loss_fn: str | None = None  # a name of ``losses.kl.registry``; null: k2
    kl_loss_fn_args: Mapping[str, Any] | None = None  # kl_coef, by default 0
    entropy_loss_fn: str | None = None  # default: the sampled estimate; exact: of the whole distribution
    entropy_loss_fn_args: Mapping[str, Any] | None = None  # entropy_coef, by default 0
    loss_agg_mode: str | None = None  # a mode of ``advantages.token_weights``, over each optimizer step
    bypass_old_logprobs: bool = True  # false: ratios are to the policy before the step's first update
    sample_strategy: Literal["default", "warmup", "mix"] | None = None  # the algorithm has one
    sample_strategy_args: Mapping[str, object] | None = None  # of mix: expert_data_ratio, sft_dataset_name
    correction: str = "auto"  # auto, none, or a name of ``rlkit.corrections``


@attrs.frozen
class Tinker:
    """The policy on a Tinker service."""

    enable: bool = False
    base_model: str | None = None
    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None


@attrs.frozen
class LoraConfig:
    """The adapter of the local backend."""

    name: str | None = None
    lora_rank: int = 32
    lora_alpha: float = 32
    target_modules: str | Sequence[str] = "all-linear"
    train_unembed: bool | None = None  # null: if the head is not tied to the embedding


@attrs.frozen
class Model:
    """The policy, and its chat format."""

    model_path: str | None = None
    critic_model_path: str | None = None  # null: model_path; toy for a small one
    max_prompt_tokens: int | None = None  # prompts are not truncated: longer ones are left out
    max_response_tokens: int = 64
    max_model_len: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    custom_chat_template: str | None = None
    enable_thinking: bool | None = None
    tinker: Tinker = Tinker()
    lora_configs: Sequence[LoraConfig] | None = None  # one; null: rank 32


Mode: TypeAlias = Literal["both", "train", "explore", "bench", "colocate", "serve"]


@attrs.frozen
class RolloutModel:
    """The engine that samples."""

    dtype: Literal["float32", "bfloat16"] | None = None  # of the local backend's base
    seed: int | None = None  # of the run, if seed is null


@attrs.frozen
class Teacher:
    """A frozen model: the first of explorer.auxiliary_models is the teacher."""

    model_path: str | None = None
    name: str | None = None
    backend: str | None = None  # null: the policy's
    path: str | None = None  # what a save returned, a run's folder, or stage:<name>
    options: Mapping[str, object] = attrs.Factory(dict)  # of ``rlkit.sampler``


@attrs.frozen
class OverRollout:
    """Waiting for most episodes only."""

    ratio: float = 0.0  # Plan.share = 1 - ratio: what is sampled then depends on timing


@attrs.frozen
class Explorer:
    """The playing of episodes, and the interval of evaluations."""

    rollout_model: RolloutModel = RolloutModel()
    auxiliary_models: Sequence[Teacher] = ()
    eval_interval: int = 100
    eval_on_startup: bool = True
    bench_on_latest_checkpoint: bool = False
    max_timeout: float = 1800.0
    max_retry_times: int = 2
    max_turns: int = 16
    max_total_tokens: int | None = None
    concurrency: int = 128
    executor: Literal["threads", "ray"] = "threads"
    executor_options: Mapping[str, object] = attrs.Factory(dict)
    over_rollout: OverRollout = OverRollout()


@attrs.frozen
class Trainer:
    """Saving and clipping."""

    save_interval: int = 10  # 0: only after the last step
    max_checkpoints_to_keep: int = 2  # 0: all
    grad_clip: float = 1.0
    epochs: int = 1  # passes over what was sampled for a step
    total_steps: int | None = None  # buffer.total_steps
    critic_warmup: int = 0  # steps in which only the critic learns
    trainer_config: Mapping[str, object] = attrs.Factory(dict)  # only critic.optim.lr and critic.cliprange_value


@attrs.frozen
class Synchronizer:
    """When the sampler takes the trained weights."""

    sync_interval: int = 1  # steps between fresh snapshots
    sync_offset: int = 0  # steps that sampling is ahead of training


@attrs.frozen
class Monitor:
    """The destination of metrics besides metrics.jsonl."""

    monitor_type: str | None = None  # a name of ``tracking.registry``
    monitor_args: Mapping[str, object] | None = None
    trajectories: bool = True


@attrs.frozen
class Log:
    """Python's logging."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


@attrs.frozen
class Stage:
    """One stage: its sections replace the run's."""

    stage_name: str
    mode: Mode | None = None
    algorithm: Algorithm | None = None
    buffer: Buffer | None = None
    explorer: Explorer | None = None
    trainer: Trainer | None = None
    init_from: str | None = None
    data_processor: DataProcessor | None = None


@attrs.frozen
class Settings:
    """Root settings."""

    mode: Mode = "both"  # colocate is both
    project: str = "rlkit"
    group: str = ""
    name: str = "run"
    checkpoint_root_dir: str = "./checkpoints"
    continue_from_checkpoint: bool = True
    backend: str | None = None  # null: tinker if model.tinker.enable, else local
    options: Mapping[str, object] = attrs.Factory(dict)  # further arguments of ``rlkit.connect``
    seed: int | None = None
    init_from: str | None = None  # what a save returned, or stage:<name>
    algorithm: Algorithm = Algorithm()
    model: Model = Model()
    buffer: Buffer = Buffer()
    explorer: Explorer = Explorer()
    trainer: Trainer = Trainer()
    monitor: Monitor = Monitor()
    synchronizer: Synchronizer = Synchronizer()
    log: Log = Log()
    stages: Sequence[Stage] = ()
    data_processor: DataProcessor = DataProcessor()
    without_effect: Sequence[str] = ()  # set by ``load``: the keys of the file that change nothing here
    not_followed: Sequence[str] = ()  # set by ``load``: those that change the training in Trinity-RFT, but not here

    @property
    def folder(self) -> Path:
        """Output folder of the run."""
        return Path(self.checkpoint_root_dir, self.project, self.group, self.name)


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of a YAML file with overrides such as ``"algorithm.optimizer.lr=1e-4"``.

    Raises:
        ConfigError: as for ``rlkit.config.load``.

    >>> settings = load(overrides=["algorithm.algorithm_type=grpo", "buffer.batch_size=8"])
    >>> settings.algorithm.algorithm_type, settings.buffer.batch_size, str(settings.folder)
    ('grpo', 8, 'checkpoints/rlkit/run')
    """
    left_out: dict[str, list[str]] = {"off": [], "without_effect": [], "not_followed": []}
    given = _leave_out(Settings, config.read(path, overrides), "", left_out)
    settings: Settings = config.structure(Settings, given)
    ignored, not_followed = left_out["without_effect"], left_out["not_followed"]
    return attrs.evolve(
        settings,
        without_effect=(*settings.without_effect, *ignored),
        not_followed=(*settings.not_followed, *not_followed),
    )
