"""Build the job of a run: its settings become small objects, and all mistakes in them are found before any work."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from rlkit import _check, storage
from rlkit.config import dump
from rlkit.envs import TaskSource
from rlkit.errors import ConfigError
from rlkit.recipes import checks, differences, keys, models, rows
from rlkit.recipes import tasks as environments
from rlkit.recipes.correction import CORRECTIONS, correction_of
from rlkit.recipes.demonstrations import check_rows
from rlkit.recipes.inputs import Experience, Format
from rlkit.recipes.method import Method, resolve
from rlkit.recipes.operators import Operators
from rlkit.recipes.optimizer import Schedule
from rlkit.recipes.settings import Explorer, Monitor, Settings, Synchronizer, Trainer
from rlkit.recipes.workflows import MASKED
from rlkit.rollouts import Plan
from rlkit.trajectory import Group
from rlkit.types import SamplingParams

__all__ = ["Job", "Learnt", "build_job", "make_plan"]

logger = logging.getLogger("rlkit.recipes")


@attrs.frozen(eq=False)
class Learnt:
    """Rows that are imitated or preferred: what they were read from, and how they are read."""

    rows: Sequence[Mapping[str, object]] = ()
    source: str = ""
    form: Format = attrs.field(factory=Format)


@attrs.frozen(eq=False)
class Job:
    """A run's settings, checked and resolved.

    Attributes:
        folder: of the run.
        config: all settings as plain data, for the run's folder.
        resumes: whether a run that is there may be gone on with.
        method: the algorithm.
        mode: "both", "explore", "train" or "bench".
        total: steps.
        size: tasks, rows or stored groups per step.
        minibatch: trajectories, pairs or rows per optimizer step; 0 for all.
        width: the constant of weights that end in "-norm": tokens of the longest answer.
        tasks: what is played, or None.
        held_out: what to evaluate on.
        plan: how episodes that train are played; the chat and the seed are added when the run begins.
        learnt: what is imitated or preferred.
        stored: groups to train from, or None.
        operators: what is done to groups before they train.
        masked: names of environments whose answers do not train where they were cut.
        correction: of ``rlkit.recipes.correction.CORRECTIONS``, or None.
        hint: what a policy that is its own teacher is told.
        policy, chat, critic, teacher: the models; None where the method has no such.
        schedule: the optimizer's steps.
        explorer, trainer, monitor, sync: sections of the settings.
    """

    folder: Path
    config: Mapping[str, object]
    resumes: bool
    method: Method
    mode: str
    total: int
    size: int
    minibatch: int
    width: int
    tasks: TaskSource | None
    held_out: Sequence[environments.HeldOut]
    plan: Plan
    learnt: Learnt
    stored: Sequence[Group] | None
    operators: Operators
    masked: frozenset[str]
    correction: str | None
    hint: str
    policy: models.PolicyOptions
    chat: models.ChatOptions
    critic: models.CriticOptions | None
    teacher: models.TeacherOptions | None
    schedule: Schedule
    explorer: Explorer
    trainer: Trainer
    monitor: Monitor
    sync: Synchronizer


def build_job(settings: Settings) -> Job:
    """Return the job that these settings describe; files are read, nothing is connected.

    Raises:
        ConfigError, UnknownNameError, DataError: naming the setting.
    """
    _say(keys.check(settings))
    mode = {"colocate": "both"}.get(settings.mode, settings.mode)
    if mode == "serve":
        raise ConfigError("mode", "is 'serve'", "both, explore, train or bench", "rlkit serve serves")
    method, buffer, algorithm = resolve(settings.algorithm), settings.buffer, settings.algorithm
    _say(method.unused)
    _check.choice("algorithm.correction", algorithm.correction, ("auto", "none", *CORRECTIONS))
    for text in differences.notes(algorithm, method):
        logger.info("%s", text)
    size = _check.integer("buffer.batch_size", buffer.batch_size, low=1)
    checks.numbers(settings)
    operators = Operators.of(settings.data_processor.experience_pipeline.operators)
    _say(operators.unused)
    policy, engine, inputs = models.policy_options(settings), settings.explorer.rollout_model, buffer.explorer_input
    tasksets = [each for each in (inputs.taskset, *inputs.tasksets) if each is not None]
    first = next((each.format for each in tasksets), Format())
    checks.model(policy, models.chat_options(settings.model, engine, first), settings)
    plan = make_plan(settings, method.recipe.repeat_times)
    held_out = environments.held_out_tasks(buffer, plan.params)
    if mode == "bench" and not held_out:
        raise ConfigError("buffer.explorer_input.eval_tasksets", "is empty", "what to evaluate on in mode bench")
    if mode == "explore" and not method.recipe.rolls_out:
        raise ConfigError("mode", "is 'explore'", f"a mode that {algorithm.algorithm_type} has", "it plays no episodes")
    plays = method.recipe.rolls_out and mode not in ("bench", "train")
    source = environments.training_tasks(buffer) if plays else None
    learnt = _learnt(settings, method) if mode not in ("explore", "bench") else Learnt()
    stored = _stored(buffer.trainer_input.experience_buffer) if method.recipe.rolls_out and mode == "train" else None
    forms = [each.format for each in (*tasksets, *inputs.eval_tasksets)]
    forms = [learnt.form, *forms] if learnt.rows else forms or [learnt.form]
    checks.forms(settings.name, forms)
    total = _steps(settings, len(source if source is not None else learnt.rows if stored is None else stored), size)
    schedule = Schedule(algorithm.optimizer, settings.trainer.grad_clip, total)
    rate, critic_loss = checks.critic(algorithm.critic_lr, settings.trainer.trainer_config)
    if mode != "bench":
        schedule.adam(0)
    checks.needs(settings, method, mode, policy)
    critic = teacher = None
    if mode not in ("explore", "bench"):
        if "critic" in method.recipe.needs:
            critic = models.critic_options(settings, policy, rate, critic_loss)
        if "teacher" in method.recipe.needs:
            teacher = models.TeacherOptions(settings.explorer.auxiliary_models[0], policy)
    cut = checks.truncation(inputs.taskset, plan.params)
    if mode in ("both", "explore") and method.recipe.rolls_out:
        checks.sampling(settings, method, mode, policy.backend, cut)
        checks.staleness(algorithm, settings.synchronizer)
    checks.tracker(settings.monitor)
    return Job(
        folder=settings.folder,
        config=dump(settings),
        resumes=settings.continue_from_checkpoint,
        method=method,
        mode=mode,
        total=total,
        size=size,
        minibatch=buffer.train_batch_size,
        width=settings.model.max_response_tokens,
        tasks=source,
        held_out=held_out,
        plan=attrs.evolve(plan, params=cut),
        learnt=learnt,
        stored=stored,
        operators=operators,
        masked=frozenset(
            each.name for each in tasksets if (each.default_workflow_type or inputs.default_workflow_type) in MASKED
        ),
        correction=correction_of(algorithm.correction, method, elsewhere=policy.options.get("sampler") is not None),
        hint=algorithm.hint,
        policy=policy,
        chat=models.chat_options(settings.model, engine, forms[0]),
        critic=critic,
        teacher=teacher,
        schedule=schedule,
        explorer=settings.explorer,
        trainer=settings.trainer,
        monitor=settings.monitor,
        sync=settings.synchronizer,
    )


def _say(texts: Sequence[str]) -> None:
    for text in texts:
        logger.info("without effect here: %s", text)


def make_plan(settings: Settings, n: int) -> Plan:
    """Return how episodes are played, but for the chat and the seed."""
    model, explorer = settings.model, settings.explorer
    length = model.max_model_len
    if length is None and model.max_prompt_tokens is not None:
        length = model.max_prompt_tokens + model.max_response_tokens
    return Plan(
        n=n,
        params=SamplingParams(
            model.max_response_tokens,
            model.temperature,
            model.top_p,
            model.top_k,
            min_p=model.min_p,
            repetition_penalty=1.0 if model.repetition_penalty is None else model.repetition_penalty,
            presence_penalty=model.presence_penalty,
            frequency_penalty=model.frequency_penalty,
        ),
        max_turns=explorer.max_turns,
        max_total_tokens=explorer.max_total_tokens,
        max_length=length,
        concurrency=explorer.concurrency,
        deadline=explorer.max_timeout,
        executor=explorer.executor,
        executor_options=explorer.executor_options,
        attempts=1 + _check.integer("explorer.max_retry_times", explorer.max_retry_times, low=0),
        share=1.0 - _check.real("explorer.over_rollout.ratio", explorer.over_rollout.ratio, low=0.0, below=1.0),
        progress=False,
    )


def _stored(buffer: Experience | None) -> Sequence[Group]:
    where = "buffer.trainer_input.experience_buffer.path"
    if buffer is None or not buffer.path:
        raise ConfigError(where, "is not given", "a run's trajectories.jsonl", "mode is train")
    if not Path(buffer.path).is_file():
        raise ConfigError(where, f"is {buffer.path!r}", "a file that exists")
    groups = list(storage.read(buffer.path))
    if not groups:
        raise ConfigError(where, f"{buffer.path} holds no groups", "at least one")
    return groups


def _learnt(settings: Settings, method: Method) -> Learnt:
    """Read the rows that the method learns from."""
    inputs, name = settings.buffer.trainer_input, settings.algorithm.algorithm_type
    where, experience = "buffer.trainer_input.experience_buffer", inputs.experience_buffer or Experience()
    if method.recipe.rolls_out and settings.mode != "train" and experience.path is not None:
        logger.info("without effect here: %s.path (what is played is trained)", where)
    if method.recipe.data == "rollouts":
        return Learnt()
    if method.recipe.data == "mixed":
        where, known = "buffer.trainer_input.auxiliary_buffers", inputs.auxiliary_buffers
        named = (settings.algorithm.sample_strategy_args or {}).get("sft_dataset_name")
        if named is None and len(known) != 1:
            raise ConfigError(where, f"has {len(known)} entries", "one, the demonstrations", name)
        if named is not None and named not in known:
            what = f"has no {named!r}, which sft_dataset_name names"
            raise ConfigError(where, what, f"one that is there: {', '.join(known) or 'none is'}")
        key = next(iter(known)) if named is None else str(named)
        where, experience = f"{where}.{key}", known[key]
    learnt = rows.read(experience.path, where=f"{where}.path", split=experience.split, subset=experience.subset_name)
    check_rows(learnt, experience.format, method.recipe.data, str(experience.path))
    return Learnt(learnt, str(experience.path), experience.format)


def _steps(settings: Settings, count: int, size: int) -> int:
    total, trainer = settings.buffer.total_steps, settings.trainer.total_steps
    if total is not None or trainer is not None:
        if settings.buffer.total_epochs != 1:
            logger.info("without effect here: buffer.total_epochs (total_steps says how long)")
        return _check.integer("buffer.total_steps", trainer if total is None else total, low=1)
    return max(math.ceil(settings.buffer.total_epochs * count / size), 1)
