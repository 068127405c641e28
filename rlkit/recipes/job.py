"""Build the job of a run: its settings become small objects, and mistakes in them are found before any work."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from rlkit import _check, _runtime, backends, storage, tracking
from rlkit.backends.tokenizers import ByteTokenizer, tokenizer_from
from rlkit.chat.templates import Template
from rlkit.config import dump
from rlkit.envs import TaskSource
from rlkit.errors import ConfigError
from rlkit.recipes import _models
from rlkit.recipes import tasks as environments
from rlkit.recipes._models import ChatOptions, PolicyOptions, Schedule
from rlkit.recipes.data import Example, fit, read_examples, read_rows
from rlkit.recipes.algorithms import Method, resolve
from rlkit.recipes.settings import (
    Algorithm,
    Experience,
    Format,
    Monitor,
    Operator,
    Settings,
    Synchronizer,
    Taskset,
    Teacher,
)
from rlkit.recipes.settings import check as check_keys
from rlkit.recipes.tasks import MASKED
from rlkit.rollouts import Plan
from rlkit.trajectory import Group, Trajectory
from rlkit.types import OPTIONAL_OPTIONS, SamplingParams

__all__ = ["NOTE", "Job", "Learnt", "build_job", "check_rows", "make_plan"]

logger = logging.getLogger("rlkit.recipes")


_LOWEST = {
    "buffer.train_batch_size": 0,
    "buffer.total_epochs": 1,
    "trainer.save_interval": 0,
    "trainer.max_checkpoints_to_keep": 0,
    "trainer.epochs": 1,
    "trainer.critic_warmup": 0,
    "explorer.eval_interval": 1,
    "synchronizer.sync_interval": 1,
    "synchronizer.sync_offset": 0,
    "algorithm.optimizer.lr_warmup_steps": -1,
}


def _check_numbers(settings: Settings) -> None:
    """Raise for a name or number that is out of range, and for two names of one thing that disagree."""
    for where in ("project", "group", "name"):
        path = Path(getattr(settings, where))
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(where, f"is {str(path)!r}", "a name below checkpoint_root_dir")
    optimizer, trainer, sync = settings.algorithm.optimizer, settings.trainer, settings.synchronizer
    for where, low in _LOWEST.items():
        _check.integer(where, operator.attrgetter(where)(settings), low=low)
    for where, high in (("lr", None), ("min_lr_ratio", 1.0), ("lr_warmup_steps_ratio", 1.0)):
        _check.real(f"algorithm.optimizer.{where}", getattr(optimizer, where), low=0.0, high=high)
    if len(optimizer.betas) != 2:
        raise ConfigError("algorithm.optimizer.betas", f"has {len(optimizer.betas)} entries", "two")
    clip = None if trainer.grad_clip == 1.0 else trainer.grad_clip
    for where, value, other, wanted in (
        ("synchronizer.explorer_sync_interval", sync.explorer_sync_interval, "sync_interval", sync.sync_interval),
        ("synchronizer.trainer_sync_interval", sync.trainer_sync_interval, "sync_interval", sync.sync_interval),
        ("trainer.total_steps", trainer.total_steps, "buffer.total_steps", settings.buffer.total_steps),
        ("algorithm.optimizer.clip_grad", optimizer.clip_grad, "trainer.grad_clip", clip),
    ):
        if None not in (value, wanted) and value != wanted:
            raise ConfigError(where, f"is {value}", f"{other}, {wanted}")


def _check_needs(settings: Settings, method: Method, mode: str, policy: PolicyOptions) -> None:
    """Raise where a requirement of the algorithm is missing; log settings that it does not need."""
    algorithm, teachers = settings.algorithm, settings.explorer.auxiliary_models
    for key, value, need in (
        ("trainer.critic_warmup", settings.trainer.critic_warmup, "critic"),
        ("model.critic_model_path", settings.model.critic_model_path, "critic"),
        ("explorer.auxiliary_models", teachers, "teacher"),
    ):
        if value and need not in method.recipe.needs:
            logger.info("without effect: %s (%s has no %s)", key, algorithm.algorithm_type, need)
    if "teacher" in method.recipe.needs and mode not in ("explore", "bench") and not teachers:
        why = f"{algorithm.algorithm_type} learns from it"
        raise ConfigError("explorer.auxiliary_models", "is empty", "a teacher", why)
    if algorithm.entropy_loss_fn == "exact" and policy.backend == "tinker":
        why = "a Tinker service does not return whole distributions; default is the sampled estimate"
        raise ConfigError("algorithm.entropy_loss_fn", "is 'exact'", "default", why)


def _check_sampling(settings: Settings, method: Method, mode: str, backend: str, params: SamplingParams) -> None:
    """Raise if the sampling settings do not fit the loss or the backend."""
    inputs = settings.buffer.explorer_input
    played = {"buffer.explorer_input.taskset": inputs.taskset} if inputs.taskset is not None else {}
    played |= {f"buffer.explorer_input.tasksets[{i}]": each for i, each in enumerate(inputs.tasksets)}
    for where, taskset in played.items():
        own = taskset.rollout_args.temperature
        key = "model.temperature" if own is None else f"{where}.rollout_args.temperature"
        drawn = params if own is None else attrs.evolve(params, temperature=own)
        if "sampling_logprobs" in method.inputs:
            _check_whole(key, drawn, method.recipe.loss)
        if backend == "tinker":
            _check_service(key, drawn, rescored=mode != "both" or "off_temperature" in settings.options)


def _check_whole(key: str, params: SamplingParams, loss: object) -> None:
    """Raise unless tokens are drawn from the policy's whole distribution."""
    if params.temperature == 0 or params.reshapes:
        drawn = params.sampling_options.items()
        others = {k: v for k, v in drawn if k in ("top_p", "top_k") or v != OPTIONAL_OPTIONS.get(k, v)}
        what = f"is {params.temperature}, " + ", ".join(f"{name} {value}" for name, value in others.items())
        why = f"the loss {loss} forms a ratio to the sampling policy"
        raise ConfigError(key, what, "sampling from the whole distribution", why)


def _check_service(key: str, params: SamplingParams, *, rescored: bool) -> None:
    """Raise for settings that a Tinker service does not support."""
    if any(getattr(params, name) != neutral for name, neutral in OPTIONAL_OPTIONS.items()):
        what, expected = "has min_p or a penalty", "only top_p and top_k"
        raise ConfigError("model", what, expected, "a Tinker service supports no others")
    if params.temperature != 1 and not rescored:
        expected, why = "1, or options.off_temperature=rescore", "a Tinker service trains at temperature 1"
        raise ConfigError(key, f"is {params.temperature}", expected, why)


def _check_staleness(algorithm: Algorithm, sync: Synchronizer) -> None:
    """Raise where batches may be older than staleness_control allows."""
    args = algorithm.sample_strategy_args or {}
    if algorithm.sample_strategy == "staleness_control" and "max_staleness" in args:
        where, most = "algorithm.sample_strategy_args.max_staleness", sync.sync_offset + sync.sync_interval - 1
        if _check.real(where, args["max_staleness"], low=0.0) < most:
            what, why = f"is {args['max_staleness']}", "the synchronizer makes batches that old"
            raise ConfigError(where, what, f"at least {most}", why)


def _check_model(policy: PolicyOptions, chat: ChatOptions, settings: Settings) -> None:
    """Raise for a local model that does not exist, or that has no switch for thinking."""
    name, path = policy.backend, policy.options.get("model")
    if settings.options:
        backend = backends.registry[name]
        _check.check_keywords("options", backend, dict(settings.options))
        if hasattr(backend, "check_options"):
            backend.check_options(**policy.options)
    if name == "local" and isinstance(path, str):
        _check_path(path)
    text = chat.template
    if text is None and name == "toy":
        text = ByteTokenizer.chat_template
    elif text is None and isinstance(path, str):
        text = _own_template(Path(path).expanduser())
    if chat.thinking and text is not None and not {"enable_thinking", "thinking"} & Template(text).names:
        why = "this template does not read enable_thinking"
        raise ConfigError("model.enable_thinking", "is True", "a template that reads it", why)
    length = settings.model.max_model_len
    if length is not None and length < 2:
        raise ConfigError("model.max_model_len", f"is {length}", "at least 2")


def check_rows(job: Job) -> None:
    """Check the rows to learn from by the model's chat template and context, where its tokenizer is on this machine.

    Raises:
        DataError: a row that the template refuses, or rows longer than the context.
    """
    name, options, learnt = job.policy.backend, job.policy.options, job.learnt
    folder = Path(str(options.get("model"))).expanduser()
    if not learnt.rows:
        return
    if name == "toy":
        with backends.connect("toy", **options) as policy:  # takes milliseconds
            tokenizer, length = policy.tokenizer, policy.max_length
    elif name == "local" and folder.is_dir():
        from transformers import AutoConfig

        from rlkit.backends.local.attention.tree import context

        tokenizer = tokenizer_from(folder)
        length = context(AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config())
    else:
        logger.log(NOTE, "not checked: whether the rows fit the context of the model, which is not in a folder")
        return
    fit(learnt.rows, job.chat.chat(tokenizer), length, learnt.leave_out, learnt.setting)


def _check_path(path: str) -> None:
    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError("model.model_path", f"the directory {path!r} has no config.json", "a saved model")
    if not folder.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ConfigError("model.model_path", f"is {path!r}", "a directory that exists, or a hub id")


def _own_template(folder: Path) -> str | None:
    """Return the template in a model's folder, if there is one."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text("utf-8")
        text = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return text if isinstance(text, str) else None


def _check_tracker(monitor: Monitor) -> None:
    """Raise where the tracker that ``monitor`` names does not exist, is not installed, or takes other arguments."""
    if monitor.monitor_type in (None, "jsonl", "none"):
        return
    kind = tracking.registry.resolve(str(monitor.monitor_type))
    package = getattr(kind, "package", None)
    if package is not None and importlib.util.find_spec(package) is None:
        what = f"is {monitor.monitor_type!r}, whose package {package} is not installed"
        raise ConfigError("monitor.monitor_type", what, f"null, or {_runtime.command(kind.extra)}")
    if monitor.monitor_args is not None:
        try:
            inspect.signature(kind).bind(**monitor.monitor_args)
        except TypeError as error:
            raise ConfigError(f"monitor.monitor_args: {error}") from error


def _critic_loss(rate: float | None, config: Mapping[str, object]) -> tuple[float | None, dict[str, float]]:
    """Return the critic's learning rate and the settings of its loss, from ``trainer_config``.

    Args:
        rate: algorithm.critic_lr.
        config: trainer.trainer_config; the log lists keys without effect.

    Raises:
        ConfigError: two rates disagree, or a number is out of range.
    """
    where, flat = "trainer.trainer_config.", dict(_flat(config))
    own_rate, clip = flat.pop("critic.optim.lr", None), flat.pop("critic.cliprange_value", None)
    if flat:
        logger.info("without effect: trainer.trainer_config: %s (keys of veRL)", ", ".join(sorted(flat)))
    if own_rate is not None:
        number = _check.real(f"{where}critic.optim.lr", own_rate, low=0.0)
        if rate not in (None, number):
            raise ConfigError(f"{where}critic.optim.lr", f"is {number}", f"algorithm.critic_lr, {rate}")
        rate = number
    return rate, {} if clip is None else {"clip": _check.real(f"{where}critic.cliprange_value", clip, above=0.0)}


def _flat(config: Mapping[str, object], where: str = "") -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value


def _check_forms(name: str, given: Sequence[Format]) -> None:
    """Raise where conversations of one run, ``name``, would be rendered in different ways."""
    rendered = ("raw", "system_prompt", "reply_prefix", "chat_template", "enable_thinking")
    for form in given[1:]:
        for key in rendered:
            if getattr(form, key) != getattr(given[0], key):
                what = f"is {getattr(given[0], key)!r} in one place but {getattr(form, key)!r} in another"
                why = "a run renders all task sets and rows the same way; put differences into the prompts"
                raise ConfigError(f"{name}: format.{key}", what, "the same value everywhere", why)


CORRECTIONS = (
    *("token_tis", "sequence_tis", "icepop", "batch_normalized", "token_mask", "sequence_mask"),
    *("geometric_sequence_mask", "outlier_veto"),
)


def choose_correction(name: str, method: Method, *, elsewhere: bool) -> str | None:
    """Return the correction of ``rlkit.corrections`` for a run; None for none.

    "auto" is ``token_tis`` if another engine than the backend's own samples (``elsewhere``), and the loss does not
    correct by itself, as those with a ratio to the sampler's logprobs do: ppo, gspo, cispo, decoupled_ppo and others.
    """
    if name != "auto":
        return None if name == "none" else name
    recipe = method.recipe
    corrects = "sampling_logprobs" in method.inputs and method.old_logprobs != "sampling_logprobs"
    learns = recipe.rolls_out and recipe.advantage is not None and recipe.select != "best"  # which imitates
    return "token_tis" if elsewhere and learns and not corrects else None


def _keep_rewarded(group: Group, *, threshold: float = 0.0) -> Sequence[Trajectory]:
    """Keep episodes with at least this reward."""
    return [t for t in group.trajectories if t.reward >= threshold]


def _keep_varied(group: Group, *, threshold: float = 0.0) -> Sequence[Trajectory]:
    """Keep groups of two or more whose rewards deviate by more."""
    return group.trajectories if len(group) > 1 and np.std(group.rewards) > threshold else []


def _keep_mixed(
    group: Group, *, metric_key: str = "accuracy", correct_threshold: float = 0.0
) -> Sequence[Trajectory]:
    """Keep groups with some, but not all, episodes above the threshold."""
    right = sum(t.metrics.get(metric_key, t.reward) > correct_threshold for t in group.trajectories)
    return group.trajectories if 0 < right < len(group) else []


_FILTERS: Mapping[str, Callable[..., Sequence[Trajectory]]] = {
    "reward_filter": _keep_rewarded,
    "reward_std_filter": _keep_varied,
    "dapo_dynamic_sampling": _keep_mixed,
}
_IDLE_OPERATORS = ("pass_rate_calculator", "invalid_reward_filter")  # tasks are shuffled; unscored episodes do not train


@attrs.frozen(eq=False)
class Operators:
    """The operators of a run, in their order.

    Attributes:
        filters: functions of a group that return the trajectories to keep.
        masks: whether answers that were cut are not trained on; they stay in their group's baseline.
        unused: keys of operators without effect.
    """

    filters: Sequence[Callable[[Group], Sequence[Trajectory]]] = ()
    masks: bool = False
    unused: Sequence[str] = ()

    def apply(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """Return the groups with the kept trajectories, and how many were dropped."""
        before, left = sum(map(len, groups)), list(groups)
        for keep in self.filters:
            pairs = [(group, list(keep(group))) for group in left]
            left = [attrs.evolve(group, trajectories=kept) for group, kept in pairs if kept]
        numbers = {"filter/operators": float(before - sum(map(len, left)))} if self.filters else {}
        return left, numbers


def read_operators(given: Sequence[Operator]) -> Operators:
    """Return the operators that settings name. Raises ConfigError: one is unknown, or has another argument."""
    filters, masks, unused = list[Callable[[Group], Sequence[Trajectory]]](), False, list[str]()
    for i, operator in enumerate(given):
        where, name = f"data_processor.experience_pipeline.operators[{i}]", operator.name
        if name in _IDLE_OPERATORS:
            unused.append(where)
            continue
        if name not in (*_FILTERS, "mask_response_truncated"):
            near = _check.suggest(name, [*_FILTERS, "mask_response_truncated", *_IDLE_OPERATORS])
            raise ConfigError(f"{where}.name: unknown operator {name!r}{near}")
        known = list(inspect.signature(_FILTERS[name]).parameters)[1:] if name in _FILTERS else []
        for key, value in operator.args.items():
            if key not in known:
                raise ConfigError(f"{where}.args.{key}: unknown setting{_check.suggest(key, known)}")
            if key != "metric_key":
                _check.real(f"{where}.args.{key}", value)
        if name == "mask_response_truncated":
            masks = True
        else:
            filters.append(functools.partial(_FILTERS[name], **operator.args))
    return Operators(filters, masks, unused)


NOTE = 15
"""A level of logging between DEBUG and INFO: the output of ``--check``."""


@attrs.frozen(eq=False)
class Learnt:
    """Rows that are imitated or preferred, their format, and whether those longer than the context are left out."""

    rows: Sequence[Example] = ()
    form: Format = attrs.field(factory=Format)
    leave_out: bool = False
    setting: str = ""


@attrs.frozen(eq=False)
class Job:
    """A run's settings, checked and resolved.

    Attributes:
        settings: all of them.
        method: the algorithm.
        mode: "both", "explore", "train" or "bench".
        total: steps.
        tasks: the tasks to play, or None.
        held_out: the tasks to evaluate on.
        plan: the plan of training episodes; the chat and the seed are added when the run begins.
        learnt: the rows to imitate or prefer.
        stored: groups to train from, or None.
        operators: operations on groups before they train.
        masked: names of environments whose answers do not train where they were cut.
        correction: of ``CORRECTIONS``, or None.
        policy, chat, critic, teacher: the models; None if the method does not use it.
        schedule: the optimizer's steps.
    """

    settings: Settings
    method: Method
    mode: str
    total: int
    tasks: TaskSource | None
    held_out: Sequence[environments.HeldOut]
    plan: Plan
    learnt: Learnt
    stored: Sequence[Group] | None
    operators: Operators
    masked: frozenset[str]
    correction: str | None
    policy: PolicyOptions
    chat: ChatOptions
    critic: _models.CriticOptions | None
    teacher: Teacher | None
    schedule: Schedule

    @property
    def config(self) -> dict[str, object]:
        """All settings as plain data, for the run's folder."""
        return dump(self.settings)


def build_job(settings: Settings) -> Job:
    """Return the job that these settings describe; it reads files, but connects nothing.

    Raises:
        ConfigError, UnknownNameError, DataError: naming the setting.
    """
    not_followed = check_keys(settings)
    mode = {"colocate": "both"}.get(settings.mode, settings.mode)
    if mode == "serve":
        raise ConfigError("mode", "is 'serve'", "both, explore, train or bench", "use `rlkit serve` instead")
    method, buffer, algorithm = resolve(settings.algorithm), settings.buffer, settings.algorithm
    _check.choice("algorithm.correction", algorithm.correction, ("auto", "none", *CORRECTIONS))
    size = _check.integer("buffer.batch_size", buffer.batch_size, low=1)
    _check_numbers(settings)
    operators = read_operators(settings.data_processor.experience_pipeline.operators)
    without_effect = [*settings.without_effect, *method.unused, *operators.unused]
    policy, engine, inputs = _models.policy_options(settings), settings.explorer.rollout_model, buffer.explorer_input
    tasksets = [each for each in (inputs.taskset, *inputs.tasksets) if each is not None]
    first = next((each.format for each in tasksets), Format())
    _check_model(policy, _models.chat_options(settings.model, engine, first), settings)
    plan = make_plan(settings, method.recipe.repeat_times)
    held_out = environments.held_out_tasks(buffer, plan.params)
    _check_mode(mode, algorithm.algorithm_type, rolls_out=method.recipe.rolls_out, evaluates=bool(held_out))
    source, learnt, stored = _read_sources(settings, method, mode)
    forms = environments.rendered_forms(inputs)
    forms = [learnt.form, *forms] if learnt.rows else forms or [first]
    _check_forms(settings.name, forms)
    learnt_from = learnt.rows if stored is None else stored
    total = _steps(settings, len(learnt_from if source is None else source), size)
    schedule = Schedule(algorithm.optimizer, settings.trainer.grad_clip, total)
    rate, critic_loss = _critic_loss(algorithm.critic_lr, settings.trainer.trainer_config)
    if mode != "bench":
        schedule.adam(0)
    _check_needs(settings, method, mode, policy)
    wanted = method.recipe.needs if mode in ("both", "train") else ()
    critic = _models.critic_options(settings, policy, rate, critic_loss) if "critic" in wanted else None
    teacher = settings.explorer.auxiliary_models[0] if "teacher" in wanted else None
    own = {} if inputs.taskset is None else inputs.taskset.rollout_args.cut
    plan = attrs.evolve(plan, params=attrs.evolve(plan.params, **own))
    if source is not None:
        _check_sampling(settings, method, mode, policy.backend, plan.params)
        _check_staleness(algorithm, settings.synchronizer)
    _check_tracker(settings.monitor)
    _log_foreign(without_effect, not_followed)
    return Job(
        settings=settings,
        method=method,
        mode=mode,
        total=total,
        tasks=source,
        held_out=held_out,
        plan=plan,
        learnt=learnt,
        stored=stored,
        operators=operators,
        masked=_find_masked(tasksets, inputs.default_workflow_type),
        correction=choose_correction(algorithm.correction, method, elsewhere=policy.options.get("sampler") is not None),
        policy=policy,
        chat=_models.chat_options(settings.model, engine, forms[0]),
        critic=critic,
        teacher=teacher,
        schedule=schedule,
    )


def _check_mode(mode: str, name: str, *, rolls_out: bool, evaluates: bool) -> None:
    if mode == "bench" and not evaluates:
        raise ConfigError("buffer.explorer_input.eval_tasksets", "is empty", "task sets to evaluate in mode bench")
    if mode == "explore" and not rolls_out:
        raise ConfigError("mode", "is 'explore'", f"a mode that {name} supports", "it plays no episodes")


def _read_sources(
    settings: Settings, method: Method, mode: str
) -> tuple[TaskSource | None, Learnt, Sequence[Group] | None]:
    """Return the tasks to play, the rows to imitate or prefer, and the stored groups."""
    rolls_out, buffer = method.recipe.rolls_out, settings.buffer
    source = environments.training_tasks(buffer) if rolls_out and mode in ("both", "explore") else None
    learnt = _learnt(settings, method) if mode in ("both", "train") else Learnt()
    stored = _stored(buffer.trainer_input.experience_buffer) if rolls_out and mode == "train" else None
    return source, learnt, stored


def _find_masked(tasksets: Sequence[Taskset], default: str | None) -> frozenset[str]:
    return frozenset(each.name for each in tasksets if (each.default_workflow_type or default) in MASKED)


def _log_foreign(without_effect: Sequence[str], not_followed: Sequence[str]) -> None:
    """Log keys of a Trinity-RFT file that have less effect here; last those that change the training.
    """
    for text in without_effect:
        logger.debug("without effect: %s", text)
    if without_effect:
        logger.info(
            "without effect: %d keys, none of which changes training; --verbose lists them", len(without_effect)
        )
    for text in not_followed:
        logger.warning("changes training in Trinity-RFT, but is not supported: %s", text)


def make_plan(settings: Settings, n: int) -> Plan:
    """Return the plan of episodes, without the chat and the seed."""
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
    if "://" in buffer.path:
        what = f"is {buffer.path!r}, Trinity-RFT's queue between two processes"
        why = "rlkit trains in the process that samples: use only the explorer's file, with mode=both"
        raise ConfigError(where, what, "a run's trajectories.jsonl", why)
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
        logger.info("without effect: %s.path (the played episodes are trained)", where)
    if method.recipe.data == "rollouts":
        return Learnt()
    if method.recipe.data == "mixed":
        where, known = "buffer.trainer_input.auxiliary_buffers", inputs.auxiliary_buffers
        named = (settings.algorithm.sample_strategy_args or {}).get("sft_dataset_name")
        if named is None and len(known) != 1:
            raise ConfigError(where, f"has {len(known)} entries", "one, the demonstrations", name)
        if named is not None and named not in known:
            what = f"has no {named!r}, the value of sft_dataset_name"
            raise ConfigError(where, what, f"one of: {', '.join(known) or 'none'}")
        key = next(iter(known)) if named is None else str(named)
        where, experience = f"{where}.{key}", known[key]
    rows = read_rows(experience.path, where=f"{where}.path", split=experience.split, subset=experience.subset_name)
    learnt = read_examples(rows, method.recipe.data, experience.format, str(experience.path))
    return Learnt(learnt, experience.format, experience.leave_out_long_rows, f"{where}.leave_out_long_rows=true")


def _steps(settings: Settings, count: int, size: int) -> int:
    total, trainer = settings.buffer.total_steps, settings.trainer.total_steps
    if total is not None or trainer is not None:
        if settings.buffer.total_epochs != 1:
            logger.info("without effect: buffer.total_epochs (total_steps sets the length)")
        return _check.integer("buffer.total_steps", trainer if total is None else total, low=1)
    return max(math.ceil(settings.buffer.total_epochs * count / size), 1)
