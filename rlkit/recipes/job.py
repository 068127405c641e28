"""What a run is to do, found out from its settings before any work: everything that can be wrong is found here."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlkit import _check, schedules, storage
from rlkit.envs import TaskSource
from rlkit.errors import ConfigError
from rlkit.recipes import checks, differences, keys, models, rows
from rlkit.recipes import tasks as environments
from rlkit.recipes.demonstrations import checked
from rlkit.recipes.inputs import Experience, Format
from rlkit.recipes.method import Method, resolved
from rlkit.recipes.operators import Operators
from rlkit.recipes.settings import Settings
from rlkit.recipes.workflows import MASKED
from rlkit.rollouts import Plan
from rlkit.types import Adam

__all__ = ["Job", "prepared"]

logger = logging.getLogger("rlkit.recipes")


@attrs.frozen(eq=False)
class Job:
    """A run's settings, checked and resolved.

    Attributes:
        settings: as read.
        method: the algorithm.
        mode: "both", "explore", "train" or "bench".
        total: steps.
        size: tasks, rows or stored groups per step.
        tasks: what is played, or None.
        held_out: what to evaluate on.
        plan: how.
        rows: what is imitated or preferred.
        form: how these are read, and all conversations rendered.
        stored: groups to train from, or None.
        operators: what is done to groups before they train.
        masked: names of environments whose answers do not train where they were cut.
        critic: the critic's learning rate, or None for the policy's, and settings of its loss.
    """

    settings: Settings
    method: Method
    mode: str
    total: int
    size: int
    tasks: TaskSource | None
    held_out: Sequence[environments.HeldOut]
    plan: Plan
    rows: Sequence[Mapping[str, Any]]
    form: Format
    stored: Sequence[Any] | None
    operators: Operators
    masked: frozenset[str]
    critic: tuple[float | None, Mapping[str, float]]

    @property
    def source(self) -> str:
        """What ``rows`` were read from."""
        return str(_experience(self.settings, self.method)[1].path)

    @property
    def minibatch(self) -> int:
        """Trajectories, pairs or rows per optimizer step; 0 for all."""
        return self.settings.buffer.train_batch_size

    def adam(self, step: int) -> Adam:
        """The optimizer's step."""
        own, trainer = self.settings.algorithm.optimizer, self.settings.trainer
        clip = trainer.grad_clip if own.clip_grad is None else own.clip_grad
        beta1, beta2 = own.betas
        return Adam(self.rate(step), beta1, beta2, eps=own.eps, weight_decay=own.weight_decay, grad_clip_norm=clip)

    def critic_adam(self, step: int) -> Adam:
        """The critic's optimizer's step: the same schedule of its own rate."""
        own, rate = self.settings.algorithm, self.critic[0]
        scale = 1.0 if rate is None or not own.optimizer.lr else rate / own.optimizer.lr
        return attrs.evolve(self.adam(step), learning_rate=self.rate(step) * scale)

    def rate(self, step: int) -> float:
        """The learning rate: a warm-up, then constant, or falling to lr min_lr_ratio at the last step."""
        own = self.settings.algorithm.optimizer
        kind = own.warmup_style or own.lr_scheduler_type
        ratio = own.lr_warmup_steps_ratio
        warm = own.lr_warmup_steps if own.lr_warmup_steps >= 0 else math.floor(ratio * self.total)
        if step < warm:
            return own.lr * schedules.warmup(step, steps=warm)
        if kind == "constant":
            return own.lr
        fall = schedules.cosine if kind == "cosine" else schedules.linear
        return fall(step - warm, start=own.lr, end=own.lr * own.min_lr_ratio, steps=max(self.total - warm, 1))


def prepared(settings: Settings) -> Job:
    """The job that these settings describe; files are read, nothing is connected.

    Raises:
        ConfigError, UnknownNameError, DataError: naming the setting.
    """
    for text in keys.check(settings):
        logger.info("without effect here: %s", text)
    mode = {"colocate": "both"}.get(settings.mode, settings.mode)
    if mode == "serve":
        raise ConfigError(_check.problem("mode", "is 'serve'", "both, explore, train or bench", "rlkit serve serves"))
    method, buffer = resolved(settings.algorithm), settings.buffer
    for text in method.unused:
        logger.info("without effect here: %s", text)
    for text in differences.notes(settings.algorithm, method):
        logger.info("%s", text)
    size = _check.integer("buffer.batch_size", buffer.batch_size, low=1)
    checks.names(settings)
    checks.numbers(settings)
    checks.model(settings)
    operators = Operators.of(settings.data_processor.experience_pipeline.operators)
    for text in operators.unused:
        logger.info("without effect here: %s", text)
    held_out = environments.evaluated(buffer)
    if mode == "bench" and not held_out:
        raise ConfigError(
            _check.problem("buffer.explorer_input.eval_tasksets", "is empty", "what to evaluate on in mode bench")
        )
    if mode == "explore" and not method.recipe.rolls_out:
        raise _contradiction(settings, "mode", "'explore'", "it plays no episodes")
    plays = mode != "bench" and method.recipe.rolls_out and mode != "train"
    source = environments.trained(buffer) if plays else None
    given, form, stored = _given(settings, method, mode)
    inputs = buffer.explorer_input
    forms = [each.format for each in (inputs.taskset, *inputs.tasksets, *inputs.eval_tasksets) if each is not None]
    forms = [form, *forms] if given else forms or [form]
    checks.forms(settings, forms)
    count = len(source) if source is not None else len(given if stored is None else stored)
    job = Job(
        settings=settings,
        method=method,
        mode=mode,
        total=_steps(settings, count, size),
        size=size,
        tasks=source,
        held_out=held_out,
        plan=models.plan_of(settings, method.recipe.repeat_times, 0),
        rows=given,
        form=forms[0],
        stored=stored,
        operators=operators,
        masked=_masked(settings),
        critic=checks.critic(settings),
    )
    if mode != "bench":
        job.adam(0)
    checks.needs(settings, method, mode)
    checks.sampling(settings, method, mode)
    checks.tracker(settings)
    return job


def _masked(settings: Settings) -> frozenset[str]:
    """The environments whose workflow has it so."""
    given = settings.buffer.explorer_input
    played = [each for each in (given.taskset, *given.tasksets) if each is not None]
    return frozenset(t.name for t in played if (t.default_workflow_type or given.default_workflow_type) in MASKED)


def _given(settings: Settings, method: Method, mode: str) -> tuple[Sequence[Any], Format, Sequence[Any] | None]:
    """Rows to learn from and how they are read, and stored groups."""
    if mode in ("explore", "bench"):
        return (), Format(), None
    stored = None
    if method.recipe.rolls_out and mode == "train":
        own = settings.buffer.trainer_input.experience_buffer
        where = "buffer.trainer_input.experience_buffer.path"
        if own is None or not own.path:
            raise ConfigError(_check.problem(where, "is not given", "a run's trajectories.jsonl", "mode is train"))
        if not Path(own.path).is_file():
            raise ConfigError(_check.problem(where, f"is {own.path!r}", "a file that exists"))
        stored = list(storage.read(own.path))
        if not stored:
            raise ConfigError(_check.problem(where, f"{own.path} holds no groups", "at least one"))
    buffer = settings.buffer.trainer_input.experience_buffer
    if method.recipe.rolls_out and mode != "train" and buffer is not None and buffer.path is not None:
        logger.info("without effect here: buffer.trainer_input.experience_buffer.path (what is played is trained)")
    if method.recipe.data == "rollouts":
        return (), Format(), stored
    where, experience = _experience(settings, method)
    found = rows.read(experience.path, where=f"{where}.path", split=experience.split, subset=experience.subset_name)
    checked(found, experience.format, method.recipe.data, str(experience.path))
    return found, experience.format, stored


def _experience(settings: Settings, method: Method) -> tuple[str, Experience]:
    """Where demonstrations and preferences come from."""
    given = settings.buffer.trainer_input
    if method.recipe.data == "mixed":
        where = "buffer.trainer_input.auxiliary_buffers"
        named = (settings.algorithm.sample_strategy_args or {}).get("sft_dataset_name")
        if isinstance(named, str) and named in given.auxiliary_buffers:
            return f"{where}.{named}", given.auxiliary_buffers[named]
        if named is not None:
            known = ", ".join(given.auxiliary_buffers) or "none is"
            what = f"has no {named!r}, which sft_dataset_name names"
            raise ConfigError(_check.problem(where, what, f"one that is there: {known}"))
        if len(given.auxiliary_buffers) != 1:
            what = f"has {len(given.auxiliary_buffers)} entries"
            raise ConfigError(_check.problem(where, what, "one, the demonstrations", settings.algorithm.algorithm_type))
        name, found = next(iter(given.auxiliary_buffers.items()))
        return f"{where}.{name}", found
    return "buffer.trainer_input.experience_buffer", given.experience_buffer or Experience()


def _steps(settings: Settings, count: int, size: int) -> int:
    own, trainer = settings.buffer.total_steps, settings.trainer.total_steps
    if own is not None or trainer is not None:
        if settings.buffer.total_epochs != 1:
            logger.info("without effect here: buffer.total_epochs (total_steps says how long)")
        return _check.integer("buffer.total_steps", trainer if own is None else own, low=1)
    return max(math.ceil(settings.buffer.total_epochs * count / size), 1)


def _contradiction(settings: Settings, where: str, what: str, why: str) -> ConfigError:
    name = settings.algorithm.algorithm_type
    return ConfigError(_check.problem(where, f"is {what}", f"a mode that {name} has", why))
