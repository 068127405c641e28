"""What a run is to do, found out from its settings before any work: everything that can be wrong is found here."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlkit import _check, schedules, storage, tracking
from rlkit.envs import TaskSource
from rlkit.errors import ConfigError
from rlkit.recipes import differences, keys, models, rows, tasks
from rlkit.recipes.inputs import Experience, Format
from rlkit.recipes.method import Method, resolved
from rlkit.recipes.settings import Settings
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
        held_out: (tasks, episodes of each) to evaluate on.
        plan: how.
        rows: what is imitated or preferred.
        form: how these are read, and all conversations rendered.
        stored: groups to train from, or None.
    """

    settings: Settings
    method: Method
    mode: str
    total: int
    size: int
    tasks: TaskSource | None
    held_out: Sequence[tuple[Any, int]]
    plan: Plan
    rows: Sequence[Mapping[str, Any]]
    form: Format
    stored: Sequence[Any] | None

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
        own = self.settings.algorithm
        scale = 1.0 if own.critic_lr is None or not own.optimizer.lr else own.critic_lr / own.optimizer.lr
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
    _check_names(settings)
    _check_numbers(settings)
    models.options_of(settings)
    held_out = tasks.evaluated(buffer)
    if mode == "bench" and not held_out:
        raise ConfigError(
            _check.problem("buffer.explorer_input.eval_tasksets", "is empty", "what to evaluate on in mode bench")
        )
    if mode == "explore" and not method.recipe.rolls_out:
        raise _contradiction(settings, "mode", "'explore'", "it plays no episodes")
    plays = mode != "bench" and method.recipe.rolls_out and mode != "train"
    source = tasks.trained(buffer) if plays else None
    given, form, stored = _given(settings, method, mode)
    inputs = buffer.explorer_input
    forms = [each.format for each in (inputs.taskset, *inputs.tasksets, *inputs.eval_tasksets) if each is not None]
    forms = [form, *forms] if given else forms or [form]
    _check_forms(settings, forms)
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
    )
    if mode != "bench":
        job.adam(0)
    _check_needs(settings, method, mode)
    if settings.monitor.monitor_type not in (None, "jsonl"):
        tracking.registry.resolve(str(settings.monitor.monitor_type))
    return job


def _check_names(settings: Settings) -> None:
    """Raises where a run's folder would not be below ``checkpoint_root_dir``."""
    for where in ("project", "group", "name"):
        path = Path(getattr(settings, where))
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(_check.problem(where, f"is {str(path)!r}", "a name below checkpoint_root_dir"))


def _check_numbers(settings: Settings) -> None:
    """Raises for numbers that are out of range, and for two names of one thing that disagree."""
    own, trainer, sync, buffer = settings.algorithm.optimizer, settings.trainer, settings.synchronizer, settings.buffer
    for where, value, low in (
        ("buffer.train_batch_size", buffer.train_batch_size, 0),
        ("buffer.total_epochs", buffer.total_epochs, 1),
        ("trainer.save_interval", trainer.save_interval, 0),
        ("trainer.max_checkpoints_to_keep", trainer.max_checkpoints_to_keep, 0),
        ("trainer.epochs", trainer.epochs, 1),
        ("trainer.critic_warmup", trainer.critic_warmup, 0),
        ("explorer.eval_interval", settings.explorer.eval_interval, 1),
        ("synchronizer.sync_interval", sync.sync_interval, 1),
        ("synchronizer.sync_offset", sync.sync_offset, 0),
        ("algorithm.optimizer.lr_warmup_steps", own.lr_warmup_steps, -1),
    ):
        _check.integer(where, value, low=low)
    _check.real("algorithm.optimizer.lr", own.lr, low=0.0)
    _check.real("algorithm.optimizer.min_lr_ratio", own.min_lr_ratio, low=0.0, high=1.0)
    _check.real("algorithm.optimizer.lr_warmup_steps_ratio", own.lr_warmup_steps_ratio, low=0.0, high=1.0)
    if len(own.betas) != 2:
        raise ConfigError(_check.problem("algorithm.optimizer.betas", f"has {len(own.betas)} entries", "two"))
    for name in ("explorer_sync_interval", "trainer_sync_interval"):
        if getattr(sync, name) not in (None, sync.sync_interval):
            what = f"is {getattr(sync, name)}"
            raise ConfigError(_check.problem(f"synchronizer.{name}", what, f"sync_interval, {sync.sync_interval}"))
    if None not in (buffer.total_steps, trainer.total_steps) and buffer.total_steps != trainer.total_steps:
        what = f"is {trainer.total_steps}"
        raise ConfigError(_check.problem("trainer.total_steps", what, f"buffer.total_steps, {buffer.total_steps}"))
    if own.clip_grad is not None and trainer.grad_clip not in (1.0, own.clip_grad):
        what = f"is {own.clip_grad}"
        raise ConfigError(
            _check.problem("algorithm.optimizer.clip_grad", what, f"trainer.grad_clip, {trainer.grad_clip}")
        )


def _check_needs(settings: Settings, method: Method, mode: str) -> None:
    """Raises where something is missing that the algorithm needs; says what it does not need."""
    teachers = settings.explorer.auxiliary_models
    for key, value, need in (
        ("trainer.critic_warmup", settings.trainer.critic_warmup, "critic"),
        ("model.critic_model_path", settings.model.critic_model_path, "critic"),
        ("explorer.auxiliary_models", teachers, "teacher"),
    ):
        if value and need not in method.recipe.needs:
            logger.info("without effect here: %s (%s has no %s)", key, settings.algorithm.algorithm_type, need)
    if "teacher" in method.recipe.needs and mode not in ("explore", "bench") and not teachers:
        why = f"{settings.algorithm.algorithm_type} learns from it"
        raise ConfigError(_check.problem("explorer.auxiliary_models", "is empty", "a teacher", why))
    if "critic" in method.recipe.needs and mode not in ("explore", "bench"):
        models.critic_of(settings)
    model = settings.model
    inputs = settings.buffer.explorer_input
    played = [each.rollout_args.temperature for each in (inputs.taskset, *inputs.tasksets) if each is not None]
    greedy = 0 in [model.temperature if own is None else own for own in played or [None]]
    cut = greedy or model.top_p < 1 or model.top_k > 0
    if cut and mode in ("both", "explore") and "sampling_logprobs" in method.inputs:
        what = f"is {0 if greedy else model.temperature}, top_p {model.top_p}, top_k {model.top_k}"
        why = f"the loss {method.recipe.loss} compares with the policy that sampled"
        raise ConfigError(_check.problem("model.temperature", what, "sampling from the whole distribution", why))
    tempered = model.temperature != 1 and "off_temperature" not in settings.options
    if tempered and mode == "both" and models.backend_of(settings) == "tinker":
        expected = "1, or options.off_temperature=rescore"
        why = "a Tinker service trains at temperature 1"
        raise ConfigError(_check.problem("model.temperature", f"is {model.temperature}", expected, why))
    if settings.algorithm.entropy_loss_fn == "exact" and models.backend_of(settings) == "tinker":
        why = "a Tinker service gives no whole distributions; default is the sampled estimate"
        raise ConfigError(_check.problem("algorithm.entropy_loss_fn", "is 'exact'", "default", why))


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
    if method.recipe.data == "rollouts":
        return (), Format(), stored
    where, experience = _experience(settings, method)
    found = rows.read(experience.path, where=f"{where}.path", split=experience.split, subset=experience.subset_name)
    return found, experience.format, stored


def _experience(settings: Settings, method: Method) -> tuple[str, Experience]:
    """Where demonstrations and preferences come from."""
    given = settings.buffer.trainer_input
    if method.recipe.data == "mixed":
        where = "buffer.trainer_input.auxiliary_buffers"
        if len(given.auxiliary_buffers) != 1:
            what = f"has {len(given.auxiliary_buffers)} entries"
            raise ConfigError(_check.problem(where, what, "one, the demonstrations", settings.algorithm.algorithm_type))
        name, found = next(iter(given.auxiliary_buffers.items()))
        return f"{where}.{name}", found
    return "buffer.trainer_input.experience_buffer", given.experience_buffer or Experience()


def _check_forms(settings: Settings, forms: Sequence[Format]) -> None:
    """Raises where conversations of one run would be rendered in different ways."""
    rendered = ("prompt_type", "system_prompt", "reply_prefix", "chat_template", "enable_thinking")
    for form in forms[1:]:
        for name in rendered:
            if getattr(form, name) != getattr(forms[0], name):
                what = f"is {getattr(forms[0], name)!r} in one place and {getattr(form, name)!r} in another"
                why = "task sets and rows are rendered in one way; put what differs into the prompts"
                raise ConfigError(_check.problem(f"{settings.name}: format.{name}", what, "one for all", why))


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
