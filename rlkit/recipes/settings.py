"""The settings of a run, read from one YAML file: the keys are those of Trinity-RFT's configurations.

Fields without a mark mean what they mean there. ``mapped``, ``unused`` and ``refused`` (``rlkit.recipes.keys``) say
which ones do not.
"""

# ruff: noqa: RUF009  # defaults are fields, or frozen

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs

from rlkit import config
from rlkit.recipes.inputs import Buffer, DataProcessor
from rlkit.recipes.keys import mapped, own, refused, unused
from rlkit.recipes.learning import Algorithm, Model
from rlkit.recipes.running import Explorer, Log, Monitor, Synchronizer, Trainer

__all__ = ["Settings", "Stage", "load"]

_NO_CLUSTER = "there are no engines and workers: a backend samples and trains"
_ONE_PROCESS = "one process, or a service, does the training"
_BY_ITSELF = "set by itself"
Mode: TypeAlias = Literal["both", "train", "explore", "bench", "colocate", "serve"]


@attrs.frozen
class Stage:
    """One stage: each section that it has takes the place of the run's."""

    stage_name: str
    mode: Mode | None = None
    algorithm: Algorithm | None = None
    buffer: Buffer | None = None
    explorer: Explorer | None = None
    trainer: Trainer | None = None
    init_from: str | None = own(None, "as for the run; null: what the stage before ended with")
    data_processor: DataProcessor | None = None


@attrs.frozen
class Settings:
    """Everything."""

    mode: Mode = mapped("both", "colocate is both; serve is a command of its own")
    project: str = "rlkit"
    group: str = ""
    name: str = "run"
    checkpoint_root_dir: str = "./checkpoints"
    continue_from_checkpoint: bool = True
    backend: str | None = own(
        None, "toy, local, tinker ...; null: tinker where model.tinker.enable is true, else local"
    )
    options: Mapping[str, Any] = own(attrs.Factory(dict), "further arguments of rlkit.connect")
    seed: int | None = own(None, "of everything random; null: a fresh one, which the run's folder remembers")
    init_from: str | None = own(None, "weights to begin with: what a save returned, or stage:<name>")
    algorithm: Algorithm = Algorithm()
    model: Model = Model()
    buffer: Buffer = Buffer()
    explorer: Explorer = Explorer()
    trainer: Trainer = Trainer()
    monitor: Monitor = Monitor()
    synchronizer: Synchronizer = Synchronizer()
    log: Log = Log()
    stages: Sequence[Stage] = ()
    cluster: Any = unused(_ONE_PROCESS)
    service: Any = unused("there are no services beside")
    data_processor: DataProcessor = DataProcessor()
    cod: Any = refused("no packing of several problems into one")
    checkpoint_job_dir: Any = unused(_BY_ITSELF)
    ray_namespace: Any = unused(_NO_CLUSTER)
    ignore_validator_suggestions: Any = unused("every setting is checked")

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.checkpoint_root_dir, self.project, self.group, self.name)


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a YAML file with overrides such as ``"algorithm.optimizer.lr=1e-4"``.

    Raises:
        ConfigError: as for ``rlkit.config.load``.

    >>> settings = load(overrides=["algorithm.algorithm_type=grpo", "buffer.batch_size=8"])
    >>> settings.algorithm.algorithm_type, settings.buffer.batch_size, str(settings.folder)
    ('grpo', 8, 'checkpoints/rlkit/run')
    """
    return config.load(Settings, path, overrides)
