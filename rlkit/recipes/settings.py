"""The settings of a run, read from one YAML file: the keys are those of Trinity-RFT's configurations.

Unmarked keys keep Trinity-RFT's meaning; keys.toml marks the others, and has those that do nothing here.
"""

# ruff: noqa: RUF009  # defaults are frozen

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import attrs

from rlkit import config
from rlkit.recipes.inputs import Buffer, DataProcessor
from rlkit.recipes.keys import with_keys
from rlkit.recipes.learning import Algorithm, Model

__all__ = ["Settings", "Stage", "load"]

Mode: TypeAlias = Literal["both", "train", "explore", "bench", "colocate", "serve"]


@attrs.frozen
@with_keys
class Engine:
    """What engines that serve a model can be told."""


@attrs.frozen
@with_keys
class RolloutModel(Engine):
    """The engine that samples."""

    dtype: Literal["float32", "bfloat16"] | None = None
    seed: int | None = None
    enable_thinking: bool | None = None
    chat_template: str | None = None


@attrs.frozen
@with_keys
class Teacher(Engine):
    """A frozen model: the first of explorer.auxiliary_models is the teacher."""

    model_path: str | None = None
    name: str | None = None
    backend: str | None = None
    path: str | None = None
    options: Mapping[str, object] = attrs.Factory(dict)


@attrs.frozen
@with_keys
class OverRollout:
    """Waiting for most episodes only."""

    ratio: float = 0.0


@attrs.frozen
@with_keys
class Explorer:
    """How episodes are played, and how often is evaluated."""

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
@with_keys
class Trainer:
    """Saving and clipping."""

    save_interval: int = 10
    max_checkpoints_to_keep: int = 2
    grad_clip: float = 1.0
    epochs: int = 1
    total_steps: int | None = None
    critic_warmup: int = 0
    trainer_config: Mapping[str, object] = attrs.Factory(dict)


@attrs.frozen
@with_keys
class Synchronizer:
    """When the sampler takes the trained weights."""

    sync_interval: int = 1
    sync_offset: int = 0
    explorer_sync_interval: int | None = None
    trainer_sync_interval: int | None = None


@attrs.frozen
@with_keys
class Monitor:
    """Where metrics go, beside metrics.jsonl."""

    monitor_type: str | None = None
    monitor_args: Mapping[str, object] | None = None
    trajectories: bool = True


@attrs.frozen
@with_keys
class Log:
    """Python's logging."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


@attrs.frozen
@with_keys
class Stage:
    """One stage: each section that it has takes the place of the run's."""

    stage_name: str
    mode: Mode | None = None
    algorithm: Algorithm | None = None
    buffer: Buffer | None = None
    explorer: Explorer | None = None
    trainer: Trainer | None = None
    init_from: str | None = None
    data_processor: DataProcessor | None = None


@attrs.frozen
@with_keys
class Settings:
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
    return config.load(Settings, path, overrides)
