"""The settings of a run, read from one YAML file: the keys are those of Trinity-RFT's configurations.

Unmarked keys keep Trinity-RFT's meaning; keys.toml marks the others, and lists those without effect here.

The meaning of a foreign configuration's keys here: the same, a similar one, none, or refused.

keys.toml says it, class by class, and has Trinity's names of arguments, too; ``Section`` puts the keys into the
classes of settings, and ``table`` reads them back for the documentation. A key without effect is harmless: ``load``
leaves it out. One that is "not followed" changes training there, but not here.
"""

from __future__ import annotations

import difflib
import fnmatch
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs

from rlkit import config
from rlkit.errors import ConfigError
from rlkit.recipes._hints import HINT
from rlkit.types import OPTIONAL_OPTIONS

__all__ = ["TABLE", "Algorithm", "Settings", "Taskset", "check", "load", "table"]

_KIND, _WHY = "rlkit.key", "rlkit.why"
_NAMES = {"mapped": "mapped", "own": "rlkit's own", "refused": "refused", "unfollowed": "not followed"}
_ELSEWHERE = "for Trinity's engines, workers, services and files, which rlkit does not have"
TABLE: Mapping[str, Any] = tomllib.loads(resources.files(__package__).joinpath("keys.toml").read_text("utf-8"))


class Section:
    """A class of settings: keys.toml adds metadata to its fields, and fields for dead keys, before attrs sees it."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        if "__attrs_attrs__" in vars(cls):  # the copy with slots that attrs makes
            return
        for part, keys in TABLE.get(cls.__name__, {}).items():
            for name, why in keys.items():
                dead = part in ("refused", "unfollowed")
                if dead:
                    cls.__annotations__[name] = object
                mark = {_KIND: _NAMES[part], _WHY: why}
                setattr(cls, name, attrs.field(default=None if dead else getattr(cls, name), metadata=mark))


def table(kind: type, where: str = "", seen: set[type] | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield (key, its mark, its meaning, or why it has no effect) of all marked keys below a settings class.

    The marks are "mapped", "rlkit's own", "without effect", "not followed" and "refused". Keys that occur in several
    places (task sets, the sections of a stage) are listed at the first.
    """
    seen = {kind} if seen is None else seen
    hints = typing.get_type_hints(kind)
    for pattern in _patterns(kind):
        yield where + pattern, "without effect", _ELSEWHERE
    for field in attrs.fields(kind):
        if _KIND in field.metadata:
            yield where + field.name, field.metadata[_KIND], field.metadata[_WHY]
        for inner in _classes(hints[field.name]):
            if inner not in seen:
                seen.add(inner)
                yield from table(inner, f"{where}{field.name}.", seen)


def _patterns(kind: type) -> list[str]:
    """Return the names of a section's keys that are accepted and change nothing."""
    return [pattern for each in kind.__mro__ for pattern in TABLE["elsewhere"].get(each.__name__, ())]


def _leave_out(kind: type, values: object, where: str, left_out: list[str]) -> object:
    """Return a section of a file without the keys that change nothing; those that are not null join ``left_out``."""
    if not isinstance(values, Mapping):
        return values
    hints, patterns, kept = typing.get_type_hints(kind), _patterns(kind), {}
    for key, value in values.items():
        name, path = str(key), f"{where}{key}"
        if name not in hints and (name in patterns or _foreign(name, patterns, hints)):
            left_out += [path] if value is not None else []
            continue
        kept[key] = value
        for inner in _classes(hints.get(name)):
            if isinstance(value, list):
                kept[key] = [_leave_out(inner, x, f"{path}.{i}.", left_out) for i, x in enumerate(value)]
            elif isinstance(value, Mapping) and typing.get_origin(hints[name]) is Mapping:
                kept[key] = {k: _leave_out(inner, x, f"{path}.{k}.", left_out) for k, x in value.items()}
            else:
                kept[key] = _leave_out(inner, value, f"{path}.", left_out)
    return kept


def _foreign(name: str, patterns: Sequence[str], known: Collection[str]) -> bool:
    """Return whether a pattern matches the name, and no known name is close enough to suggest."""
    return any(fnmatch.fnmatchcase(name, x) for x in patterns) and not difflib.get_close_matches(name, known)


def check(settings: attrs.AttrsInstance, where: str = "") -> list[str]:
    """Return the set keys that would change training and are not followed, one text each.

    Raises:
        ConfigError: a refused key switches something on.
    """
    not_followed: list[str] = []
    for field in attrs.fields(type(settings)):
        value, key = getattr(settings, field.name), where + field.name
        kind = field.metadata.get(_KIND)
        if kind == "refused" and _on(value):
            raise ConfigError(key, f"is {value!r}", "no value", field.metadata[_WHY])
        if kind == "not followed" and _on(value) and not _shuffles(value):
            not_followed.append(f"{key} ({field.metadata[_WHY]})")
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        names = value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, (list, tuple)) else [""]
        for name, item in zip(names, items, strict=True):
            if attrs.has(type(item)):
                not_followed += check(item, f"{key}.{name}." if name != "" else f"{key}.")
    return not_followed


def _on(value: object) -> bool:
    """Return whether a value switches something on: not null, false, 0, "none", their texts, or ``enable: false``."""
    if isinstance(value, Mapping):
        return _on(value.get("enable", any(_on(x) for x in value.values())))
    return bool(value) and str(value).lower() not in ("none", "null", "false", "0")  # texts: ${oc.env:NAME,false}


def _shuffles(value: object) -> bool:
    """Return whether a selector asks for the behaviour that is fixed here."""
    return isinstance(value, Mapping) and value.get("selector_type") == "shuffle"


def _classes(hint: object) -> list[type]:
    """Return the settings classes in an annotation."""
    if isinstance(hint, type) and attrs.has(hint):
        return [hint]
    return [kind for part in typing.get_args(hint) for kind in _classes(part)]


@attrs.frozen
class Format(Section):
    """The format of a file's rows."""

    prompt_type: Literal["messages", "plaintext"] = "messages"
    raw: bool = False
    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt: str | None = None
    system_prompt_key: str | None = None
    messages_key: str = "messages"
    tools_key: str = "tools"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    reply_prefix: str | None = None
    chat_template: str | None = None
    enable_thinking: bool | None = None


@attrs.frozen
class Sampling(Section):
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
class Taskset(Section):
    """The source of problems: see ``rlkit.recipes.tasks``."""

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
class Experience(Section):
    """Demonstrations, preferences, or stored trajectories."""

    name: str = ""
    storage_type: Literal["queue", "file"] = "queue"
    path: str | None = None
    split: str = "train"
    subset_name: str | None = None
    format: Format = Format()
    leave_out_long_rows: bool = False


@attrs.frozen
class ExplorerInput(Section):
    """The tasks to play, and those to evaluate on."""

    taskset: Taskset | None = None
    tasksets: Sequence[Taskset] = ()
    eval_tasksets: Sequence[Taskset] = ()
    default_workflow_type: str | None = None
    default_eval_workflow_type: str | None = None
    default_reward_fn_type: str | None = None


@attrs.frozen
class TrainerInput(Section):
    """The training data that is not sampled."""

    experience_buffer: Experience | None = None
    auxiliary_buffers: Mapping[str, Experience] = attrs.Factory(dict)


@attrs.frozen
class Operator(Section):
    """One operator: see ``rlkit.recipes.method``."""

    name: str = ""
    args: Mapping[str, object] = attrs.Factory(dict)


@attrs.frozen
class ExperiencePipeline(Section):
    """The processing of episodes before they train."""

    operators: Sequence[Operator] = ()


@attrs.frozen
class DataProcessor(Section):
    """The processing of tasks before they are played, and of episodes."""

    experience_pipeline: ExperiencePipeline = ExperiencePipeline()


@attrs.frozen
class Buffer(Section):
    """The amount and the sources of data."""

    batch_size: int = 1
    train_batch_size: int = 0
    total_epochs: int = 1
    total_steps: int | None = None
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()


@attrs.frozen
class Optimizer(Section):
    """AdamW and its learning rate."""

    lr: float = 1e-6
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.01
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    warmup_style: Literal["constant", "cosine", "linear"] | None = None
    optimizer_type: Literal["adam", "adamw"] = "adam"
    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float | None = None


@attrs.frozen
class Algorithm(Section):
    """The algorithm, and changes to it: see ``rlkit.recipes.algorithms``."""

    algorithm_type: str = "ppo"
    repeat_times: int | None = None
    optimizer: Optimizer = Optimizer()
    critic_lr: float | None = None
    advantage_fn: str | None = None
    advantage_fn_args: Mapping[str, Any] | None = None
    policy_loss_fn: str | None = None
    policy_loss_fn_args: Mapping[str, Any] | None = None
    kl_penalty_fn: str | None = None
    kl_penalty_fn_args: Mapping[str, Any] | None = None
    kl_loss_fn: str | None = None
    kl_loss_fn_args: Mapping[str, Any] | None = None
    entropy_loss_fn: str | None = None
    entropy_loss_fn_args: Mapping[str, Any] | None = None
    loss_agg_mode: str | None = None
    bypass_old_logprobs: bool = True
    sample_strategy: Literal["default", "warmup", "mix", "staleness_control"] | None = None
    sample_strategy_args: Mapping[str, object] | None = None
    hint: str = HINT
    correction: str = "auto"


@attrs.frozen
class Tinker(Section):
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
class LoraConfig(Section):
    """The adapter of the local backend."""

    name: str | None = None
    lora_rank: int = 32
    lora_alpha: float = 32
    target_modules: str | Sequence[str] = "all-linear"
    train_unembed: bool | None = None


@attrs.frozen
class Model(Section):
    """The policy, and its chat format."""

    model_path: str | None = None
    critic_model_path: str | None = None
    max_prompt_tokens: int | None = None
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
    chat_template_path: str | None = None
    enable_thinking: bool | None = None
    tinker: Tinker = Tinker()
    lora_configs: Sequence[LoraConfig] | None = None


# defaults are frozen


Mode: TypeAlias = Literal["both", "train", "explore", "bench", "colocate", "serve"]


@attrs.frozen
class Engine(Section):
    """The options of engines that serve a model."""


@attrs.frozen
class RolloutModel(Engine):
    """The engine that samples."""

    dtype: Literal["float32", "bfloat16"] | None = None
    seed: int | None = None
    enable_thinking: bool | None = None
    chat_template: str | None = None


@attrs.frozen
class Teacher(Engine):
    """A frozen model: the first of explorer.auxiliary_models is the teacher."""

    model_path: str | None = None
    name: str | None = None
    backend: str | None = None
    path: str | None = None
    options: Mapping[str, object] = attrs.Factory(dict)


@attrs.frozen
class OverRollout(Section):
    """Waiting for most episodes only."""

    ratio: float = 0.0


@attrs.frozen
class Explorer(Section):
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
class Trainer(Section):
    """Saving and clipping."""

    save_interval: int = 10
    max_checkpoints_to_keep: int = 2
    grad_clip: float = 1.0
    epochs: int = 1
    total_steps: int | None = None
    critic_warmup: int = 0
    trainer_config: Mapping[str, object] = attrs.Factory(dict)


@attrs.frozen
class Synchronizer(Section):
    """When the sampler takes the trained weights."""

    sync_interval: int = 1
    sync_offset: int = 0
    explorer_sync_interval: int | None = None
    trainer_sync_interval: int | None = None


@attrs.frozen
class Monitor(Section):
    """The destination of metrics besides metrics.jsonl."""

    monitor_type: str | None = None
    monitor_args: Mapping[str, object] | None = None
    trajectories: bool = True


@attrs.frozen
class Log(Section):
    """Python's logging."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


@attrs.frozen
class Stage(Section):
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
class Settings(Section):
    """Root settings."""

    mode: Mode = "both"
    project: str = "rlkit"
    group: str = ""
    name: str = "run"
    checkpoint_root_dir: str = "./checkpoints"
    continue_from_checkpoint: bool = True
    backend: str | None = None
    options: Mapping[str, object] = attrs.Factory(dict)
    seed: int | None = None
    init_from: str | None = None
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
    without_effect: Sequence[str] = ()

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
    left_out: list[str] = []
    given = _leave_out(Settings, config.read(path, overrides), "", left_out)
    settings: Settings = config.structure(Settings, given)
    return attrs.evolve(settings, without_effect=(*settings.without_effect, *left_out))
