"""Build the job of a run from its settings: mistakes in them are found before any work."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlkit import _check, backends, schedules, storage, tracking
from rlkit._interaction import Message, Observation
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.tokenizers import tokenizer_from
from rlkit.chat import Chat, Conversation
from rlkit.config import dump
from rlkit.envs import TaskSource
from rlkit.errors import ConfigError
from rlkit.recipes import tasks as environments
from rlkit.recipes.algorithms import Method, resolve
from rlkit.recipes.data import RAW, Example, fit, read_examples, read_rows
from rlkit.recipes.settings import Experience, Explorer, Format, Model, Operator, Settings
from rlkit.rollouts import Plan, Ray
from rlkit.trajectory import Group, Trajectory
from rlkit.types import OPTIONAL_OPTIONS, SAMPLING_OPTIONS, Adam, Lora, SamplingParams

__all__ = ["NOTE", "Job", "Operators", "Policy", "Rows", "build_job", "check_rows", "choose_policy", "make_plan"]

logger = logging.getLogger("rlkit.recipes")
NOTE = 15
"""A level of logging between DEBUG and INFO: the output of ``--check``."""

_PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
_OF_SAMPLERS = ("model", "base_url", "api_key", "dtype", "device", "client", "tokenizer", "project")
_AT_LEAST = {
    -1: "algorithm.optimizer.lr_warmup_steps",
    0: "buffer.train_batch_size trainer.save_interval trainer.max_checkpoints_to_keep trainer.critic_warmup "
    "explorer.max_retry_times synchronizer.sync_offset",
    1: "buffer.batch_size buffer.total_epochs trainer.epochs explorer.eval_interval synchronizer.sync_interval",
}
_LOSS_ARGS = "algorithm.policy_loss_fn_args"
_OF_VERL = {  # keys of trainer.trainer_config -> the same here
    **{key: f"algorithm.optimizer.{key}" for key in ("lr", "weight_decay", "betas", "min_lr_ratio")},
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), _LOSS_ARGS),
    "grad_clip": "trainer.grad_clip",
    "ppo_epochs": "trainer.epochs",
    "loss_agg_mode": "algorithm.loss_agg_mode",
    "entropy_coeff": "algorithm.entropy_loss_fn_args",
    "kl_loss_coef": "algorithm.kl_loss_fn_args",
    **dict.fromkeys(("gamma", "lam"), "algorithm.advantage_fn_args"),
}
CORRECTIONS = (
    *("token_tis", "sequence_tis", "icepop", "batch_normalized", "token_mask", "sequence_mask"),
    *("geometric_sequence_mask", "outlier_veto"),
)


@attrs.frozen
class Policy:
    """The policy: a backend, the options of ``rlkit.connect`` besides seed and folder, and the seed of the run."""

    backend: str
    options: Mapping[str, Any]
    seed: int | None = None

    @property
    def of_sampler(self) -> dict[str, Any]:
        """Options of a sampler of the same kind."""
        return {name: value for name, value in self.options.items() if name in _OF_SAMPLERS}


@attrs.frozen(eq=False)
class Rows:
    """Rows that are imitated or preferred, and the key of the setting that leaves out those longer than the context."""

    examples: Sequence[Example] = ()
    leave_out: bool = False
    setting: str = ""


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


@attrs.frozen(eq=False)
class Job:
    """A run's settings, checked and resolved.

    Attributes:
        settings: all of them.
        method: the algorithm.
        mode: "both", "explore", "train" or "bench".
        total: steps.
        policy: the policy's backend and options.
        form: the format of prompts and rows.
        tasks: the tasks to play, or None.
        held_out: the tasks to evaluate on.
        plan: the plan of training episodes; the chat and the seed are added when the run begins.
        rows: the rows to imitate or prefer.
        stored: groups to train from, or None.
        operators: operations on groups before they train.
        masked: names of environments whose answers do not train where they were cut.
        correction: a name of ``rlkit.corrections``, or None.
        needs: the models besides the policy: "critic", "teacher".
    """

    settings: Settings
    method: Method
    mode: str
    total: int
    policy: Policy
    form: Format
    tasks: TaskSource | None
    held_out: Sequence[environments.HeldOut]
    plan: Plan
    rows: Rows
    stored: Sequence[Group] | None
    operators: Operators
    masked: frozenset[str]
    correction: str | None
    needs: Sequence[str]

    @property
    def config(self) -> dict[str, object]:
        """All settings as plain data, for the run's folder."""
        return dump(self.settings)

    def chat(self, tokenizer: Tokenizer) -> Chat:
        """Return the rendering of prompts and rows; a template without thinking accepts ``enable_thinking: false``."""
        model, form = self.settings.model, self.form
        template = _PLAIN if form.raw else model.custom_chat_template
        make = functools.partial(
            _Chat, tokenizer, system=form.system_prompt, template=template, prefill=form.reply_prefix or ""
        )
        chat = make()
        if model.enable_thinking is None:
            return chat
        switches = set() if chat.template is None else {"enable_thinking", "thinking"} & chat.template.names
        if not model.enable_thinking and not switches:
            logger.info("without effect: enable_thinking false (the chat template has no such switch)")
            return chat
        return make(thinking=model.enable_thinking)

    def adam(self, step: int, base: float | None = None) -> Adam:
        """Return the optimizer of a step; ``base`` replaces the section's learning rate (a critic's)."""
        optimizer, rate = self.settings.algorithm.optimizer, self.rate(step)
        if base is not None and optimizer.lr:
            rate *= base / optimizer.lr
        beta1, beta2 = optimizer.betas
        clip = self.settings.trainer.grad_clip
        return Adam(rate, beta1, beta2, optimizer.eps, optimizer.weight_decay, clip)

    def rate(self, step: int) -> float:
        """Return the learning rate: a warm-up, then constant, or falling to lr min_lr_ratio at the last step."""
        optimizer = self.settings.algorithm.optimizer
        warm = optimizer.lr_warmup_steps
        if warm < 0:
            warm = math.floor(optimizer.lr_warmup_steps_ratio * self.total)
        if step < warm:
            return optimizer.lr * schedules.warmup(step, steps=warm)
        if optimizer.lr_scheduler_type == "constant":
            return optimizer.lr
        fall = schedules.cosine if optimizer.lr_scheduler_type == "cosine" else schedules.linear
        end, left = optimizer.lr * optimizer.min_lr_ratio, max(self.total - warm, 1)
        return fall(step - warm, start=optimizer.lr, end=end, steps=left)


class _Chat(Chat):
    """A chat that sends prompts of ``raw_prompt`` unchanged, and renders all others."""

    def start(self, observation: Observation, tools: Sequence[Message] = ()) -> Conversation:
        if not isinstance(observation, (str, np.ndarray)) and observation and observation[0].get("role") == RAW:
            plain = Chat(self.tokenizer, template=_PLAIN, prefill=self.prefill, history=self.history)
            return plain.start(str(observation[0]["content"]), tools)
        return super().start(observation, tools)


def build_job(settings: Settings) -> Job:
    """Return the job that these settings describe; it reads files, but connects nothing.

    Raises:
        ConfigError, UnknownNameError, DataError: naming the setting.
    """
    _check_numbers(settings)
    method, policy, inputs = resolve(settings.algorithm), choose_policy(settings), settings.buffer.explorer_input
    operators = read_operators(settings.data_processor.experience_pipeline.operators)
    plan = make_plan(settings, method.recipe.repeat_times)
    held_out = environments.held_out_tasks(settings.buffer, plan.params)
    mode, rolls_out = _choose_mode(settings, method, held_out), method.recipe.rolls_out
    source = environments.training_tasks(settings.buffer) if rolls_out and mode in ("both", "explore") else None
    rows, form = _read_rows(settings, method) if mode in ("both", "train") else (Rows(), None)
    stored = _read_stored(settings.buffer.trainer_input.experience_buffer) if rolls_out and mode == "train" else None
    form = _choose_form(settings, form)
    _check_needs(settings, method, policy, mode)
    if source is not None:
        if inputs.taskset is not None:
            plan = attrs.evolve(plan, params=attrs.evolve(plan.params, **inputs.taskset.rollout_args.cut))
        _check_sampling(settings, method, policy.backend, plan.params, trains=mode == "both")
    elsewhere = policy.options.get("sampler") is not None
    job = Job(
        settings=settings,
        method=method,
        mode=mode,
        total=_count_steps(settings, source if source is not None else rows.examples if stored is None else stored),
        policy=policy,
        form=form,
        tasks=source,
        held_out=held_out,
        plan=plan,
        rows=rows,
        stored=stored,
        operators=operators,
        masked=environments.masked_tasksets(inputs),
        correction=_choose_correction(settings.algorithm.correction, method, elsewhere=elsewhere),
        needs=method.recipe.needs if mode in ("both", "train") else (),
    )
    job.adam(0)  # raises for a wrong number
    if "critic" in job.needs:
        choose_critic(settings, policy)
    of_verl = ["trainer.trainer_config"] if settings.trainer.trainer_config.keys() - {"critic"} else []
    _log_ignored([*settings.without_effect, *of_verl, *method.unused, *operators.unused], settings.not_followed)
    return job


def _choose_mode(settings: Settings, method: Method, held_out: Sequence[environments.HeldOut]) -> str:
    """Return "both", "explore", "train" or "bench"."""
    mode = {"colocate": "both"}.get(settings.mode, settings.mode)
    if mode == "serve":
        raise ConfigError("mode", "is 'serve'", "both, explore, train or bench", "use `rlkit serve` instead")
    if mode == "bench" and not held_out:
        raise ConfigError("buffer.explorer_input.eval_tasksets", "is empty", "task sets to evaluate in mode bench")
    if mode == "explore" and not method.recipe.rolls_out:
        expected = f"a mode that {settings.algorithm.algorithm_type} supports"
        raise ConfigError("mode", "is 'explore'", expected, "it plays no episodes")
    return mode


def _log_ignored(ignored: Sequence[str], not_followed: Sequence[str]) -> None:
    """Log the keys of a file that do not have their effect here; last those that change the training."""
    if ignored:
        logger.info("without effect, since rlkit has no such engines, workers or files: %s", ", ".join(ignored))
    if not_followed:
        text = "changes training in Trinity-RFT, but is not supported (tasks and rows are shuffled by the seed): %s"
        logger.warning(text, ", ".join(not_followed))


def _check_numbers(settings: Settings) -> None:
    """Raise for a name or number that is out of range."""
    for where in ("project", "group", "name"):
        path = Path(getattr(settings, where))
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(where, f"is {str(path)!r}", "a name below checkpoint_root_dir")
    for low, keys in _AT_LEAST.items():
        for where in keys.split():
            _check.integer(where, attrgetter(where)(settings), low=low)
    optimizer = settings.algorithm.optimizer
    for where, high in (("lr", None), ("min_lr_ratio", 1.0), ("lr_warmup_steps_ratio", 1.0)):
        _check.real(f"algorithm.optimizer.{where}", getattr(optimizer, where), low=0.0, high=high)
    if len(optimizer.betas) != 2:
        raise ConfigError("algorithm.optimizer.betas", f"has {len(optimizer.betas)} entries", "two")
    _check.choice("algorithm.correction", settings.algorithm.correction, ("auto", "none", *CORRECTIONS))
    read_critic_loss(settings)
    _check.optional(_check.integer, "model.max_model_len", settings.model.max_model_len, low=2)
    _check.optional(_check.integer, "seed", settings.seed, low=0)
    _check_verl("trainer.trainer_config", settings.trainer.trainer_config)


def _check_verl(where: str, section: Mapping[str, Any]) -> None:
    """Raise for a setting of verl that changes training and has another name here."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            _check_verl(f"{where}.{key}", value)
        elif key in _OF_VERL and value is not None and f"{where}.{key}" != "trainer.trainer_config.critic.optim.lr":
            raise ConfigError(f"{where}.{key}", f"is {value!r}", "no value", f"set {_OF_VERL[key]} instead")


def _check_needs(settings: Settings, method: Method, policy: Policy, mode: str) -> None:
    """Raise where a requirement of the algorithm is missing; log settings that it does not need."""
    algorithm, teachers = settings.algorithm, settings.explorer.auxiliary_models
    for key, value, need in (
        ("trainer.critic_warmup", settings.trainer.critic_warmup, "critic"),
        ("algorithm.critic_lr", algorithm.critic_lr, "critic"),
        ("model.critic_model_path", settings.model.critic_model_path, "critic"),
        ("explorer.auxiliary_models", teachers, "teacher"),
    ):
        if value and need not in method.recipe.needs:
            logger.info("without effect: %s (%s has no %s)", key, algorithm.algorithm_type, need)
    if settings.monitor.monitor_type not in (None, "none"):
        tracker = tracking.registry[settings.monitor.monitor_type]
        _check.check_keywords("monitor.monitor_args", tracker, dict(settings.monitor.monitor_args or {}))
    if "teacher" in method.recipe.needs and mode not in ("explore", "bench") and not teachers:
        why = f"{algorithm.algorithm_type} learns from it"
        raise ConfigError("explorer.auxiliary_models", "is empty", "a teacher", why)
    if algorithm.entropy_loss_fn == "exact" and policy.backend == "tinker":
        why = "a Tinker service does not return whole distributions; default is the sampled estimate"
        raise ConfigError("algorithm.entropy_loss_fn", "is 'exact'", "default", why)


def _check_sampling(settings: Settings, method: Method, backend: str, params: SamplingParams, *, trains: bool) -> None:
    """Raise if the sampling settings do not fit the loss or the backend."""
    inputs = settings.buffer.explorer_input
    played = {} if inputs.taskset is None else {"taskset": inputs.taskset}
    played |= {f"tasksets[{i}]": each for i, each in enumerate(inputs.tasksets)}
    for where, taskset in played.items():
        own = taskset.rollout_args
        drawn = params if own.temperature is None else attrs.evolve(params, temperature=own.temperature)
        if "sampling_logprobs" in method.inputs and (drawn.temperature == 0 or drawn.reshapes):
            neutral = {"temperature": drawn.temperature or 1.0, "top_p": 1.0, "top_k": -1, **OPTIONAL_OPTIONS}
            name, value = next((k, x) for k, x in drawn.sampling_options.items() if x != neutral[k])
            key = (
                f"model.{name}" if getattr(own, name) is None else f"buffer.explorer_input.{where}.rollout_args.{name}"
            )
            why = f"the loss {method.recipe.loss} forms a ratio to the sampling policy"
            raise ConfigError(key, f"is {value}", f"{neutral[name]}, sampling from the whole distribution", why)
        if backend != "tinker":
            continue
        if any(getattr(drawn, name) != neutral for name, neutral in OPTIONAL_OPTIONS.items()):
            expected = "only top_p and top_k"
            raise ConfigError("model", "has min_p or a penalty", expected, "a Tinker service supports no others")
        key = (
            "model.temperature"
            if own.temperature is None
            else f"buffer.explorer_input.{where}.rollout_args.temperature"
        )
        if drawn.temperature != 1 and trains and "off_temperature" not in settings.options:
            expected, why = "1, or options.off_temperature=rescore", "a Tinker service trains at temperature 1"
            raise ConfigError(key, f"is {drawn.temperature}", expected, why)


def _choose_form(settings: Settings, of_rows: Format | None) -> Format:
    """Return the format of all prompts and rows. Raises ConfigError: they would be rendered in different ways."""
    inputs = settings.buffer.explorer_input
    forms = [*([] if of_rows is None else [of_rows]), *environments.rendered_forms(inputs)]
    for form in forms[1:]:
        for key in ("raw", "system_prompt", "reply_prefix"):
            if getattr(form, key) != getattr(forms[0], key):
                what = f"is {getattr(forms[0], key)!r} in one place but {getattr(form, key)!r} in another"
                why = "a run renders all task sets and rows the same way; put differences into the prompts"
                raise ConfigError(f"{settings.name}: format.{key}", what, "the same value everywhere", why)
    played = [each.format for each in (inputs.taskset, *inputs.tasksets) if each is not None]
    return next(iter([*forms, *played]), Format())


def check_rows(job: Job) -> None:
    """Check the rows to learn from by the model's chat template and context, where its tokenizer is on this machine.

    Raises:
        DataError: a row that the template refuses, or rows longer than the context.
    """
    name, options, rows = job.policy.backend, job.policy.options, job.rows
    folder = Path(str(options.get("model"))).expanduser()
    if not rows.examples:
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
    fit(rows.examples, job.chat(tokenizer), length, rows.leave_out, rows.setting)


def make_plan(settings: Settings, n: int) -> Plan:
    """Return the plan of episodes, without the chat and the seed."""
    model, explorer, length = settings.model, settings.explorer, settings.model.max_model_len
    if length is None and model.max_prompt_tokens is not None:
        length = model.max_prompt_tokens + model.max_response_tokens
    options = {name: getattr(model, name) for name in SAMPLING_OPTIONS}
    return Plan(
        n=n,
        params=SamplingParams(model.max_response_tokens, **{k: x for k, x in options.items() if x is not None}),
        max_turns=explorer.max_turns,
        max_total_tokens=explorer.max_total_tokens,
        max_length=length,
        concurrency=explorer.concurrency,
        deadline=explorer.max_timeout,
        executor=choose_executor(explorer),
        attempts=1 + explorer.max_retry_times,
        share=1.0 - _check.real("explorer.over_rollout.ratio", explorer.over_rollout.ratio, low=0.0, below=1.0),
        progress=False,
    )


def choose_executor(explorer: Explorer) -> Ray | str:
    """Return where environments run. Raises ConfigError: an option of Ray's is wrong."""
    where = "explorer.executor_options"
    options: Any = explorer.executor_options
    if explorer.executor == "threads":
        _check.require(not options, where, options, "none", 'explorer.executor is "threads"')
        return "threads"
    _check.check_keywords(where, Ray, options)
    return Ray(**options)


def choose_policy(settings: Settings) -> Policy:
    """Return the policy that the settings describe. Raises ConfigError: the settings contradict each other."""
    model, engine = settings.model, settings.explorer.rollout_model
    name = settings.backend or ("tinker" if model.tinker.enable else "local")
    backend = backends.registry[name]
    if settings.backend not in (None, "tinker") and model.tinker.enable:
        raise ConfigError("backend", f"is {settings.backend!r}", "tinker, or no value", "model.tinker.enable is true")
    path = model.tinker.base_model if name == "tinker" and model.tinker.base_model else model.model_path
    if path is None and name != "toy":
        raise ConfigError("model.model_path", "is not given", "a directory, a hub id, or a service's name")
    options: dict[str, object] = {} if path is None else {"model": path}
    if name == "tinker":
        names = ("rank", "seed", "train_mlp", "train_attn", "train_unembed")
        options["lora"] = Lora(**{each: getattr(model.tinker, each) for each in names})
        options |= {} if model.tinker.base_url is None else {"base_url": model.tinker.base_url}
        key = os.environ.get("TRINITY_API_KEY")
        options |= {"api_key": key} if key and "TINKER_API_KEY" not in os.environ else {}
    else:
        options["lora"] = choose_lora(model)
    if engine.dtype is not None and name == "local":
        options["dtype"] = engine.dtype
    _check.check_keywords("options", backend, settings.options)
    options |= settings.options
    if settings.options and hasattr(backend, "check_options"):
        backend.check_options(**options)
    return Policy(name, options, engine.seed if settings.seed is None else settings.seed)


def choose_lora(model: Model) -> Lora:
    """Return the adapter of a model that this machine trains. Raises ConfigError: there are several."""
    adapters = model.lora_configs or ()
    if len(adapters) > 1:
        raise ConfigError("model.lora_configs", f"has {len(adapters)} entries", "one", "one adapter trains")
    if not adapters:
        return Lora()
    adapter, names = adapters[0], adapters[0].target_modules
    if isinstance(names, str) and names != "all-linear":
        raise ConfigError("model.lora_configs[0].target_modules", f"is {names!r}", "all-linear, or a list of names")
    modules, unembed = None if isinstance(names, str) else tuple(names), adapter.train_unembed
    return Lora(rank=adapter.lora_rank, alpha=adapter.lora_alpha, train_unembed=unembed, target_modules=modules)


def choose_critic(settings: Settings, policy: Policy) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of ``Run.critic``. Raises ConfigError: there is no model for it."""
    model, dtype = settings.model, settings.explorer.rollout_model.dtype
    path = model.critic_model_path
    if path == "toy" or (path is None and policy.backend == "toy"):
        return "toy", {}
    if path is None and policy.backend != "local":
        expected, why = "a model that this machine runs, or toy", "the backend has no critics"
        raise ConfigError("model.critic_model_path", "is not given", expected, why)
    options = {key: value for key, value in policy.options.items() if key in ("device", "micro_batch_tokens")}
    options |= {"model": path or model.model_path, "lora": choose_lora(model)}
    return "local", options if dtype is None else {**options, "dtype": dtype}


def read_critic_loss(settings: Settings) -> tuple[float | None, dict[str, float]]:
    """Return the critic's learning rate (None: the policy's) and the settings of its loss.

    Raises:
        ConfigError: two rates disagree, or a number is out of range.
    """
    where, rate = "trainer.trainer_config.critic.", settings.algorithm.critic_lr
    given = _get(settings.trainer.trainer_config, "critic")
    lr, clip = _get(_get(given, "optim"), "lr"), _get(given, "cliprange_value")
    if lr is not None:
        lr = _check.real(f"{where}optim.lr", lr, low=0.0)
        if rate not in (None, lr):
            raise ConfigError(f"{where}optim.lr", f"is {lr}", f"algorithm.critic_lr, {rate}")
        rate = lr
    return rate, {} if clip is None else {"clip": _check.real(f"{where}cliprange_value", clip, above=0.0)}


def _get(section: object, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else None


def _read_stored(buffer: Experience | None) -> Sequence[Group]:
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


def _read_rows(settings: Settings, method: Method) -> tuple[Rows, Format | None]:
    """Read the rows that the method learns from, and return them with their format."""
    inputs, name = settings.buffer.trainer_input, settings.algorithm.algorithm_type
    where, experience = "buffer.trainer_input.experience_buffer", inputs.experience_buffer or Experience()
    if method.recipe.rolls_out and settings.mode != "train" and experience.path is not None:
        logger.info("without effect: %s.path (the played episodes are trained)", where)
    if method.recipe.data == "rollouts":
        return Rows(), None
    if method.recipe.data == "mixed":
        where, known = "buffer.trainer_input.auxiliary_buffers", inputs.auxiliary_buffers
        named = (settings.algorithm.sample_strategy_args or {}).get("sft_dataset_name")
        if named is None and len(known) != 1:
            raise ConfigError(where, f"has {len(known)} entries", "one, the demonstrations", name)
        if named is not None and named not in [*known]:
            what = f"has no {named!r}, the value of sft_dataset_name"
            raise ConfigError(where, what, f"one of: {', '.join(known) or 'none'}")
        key = next(iter(known)) if named is None else str(named)
        where, experience = f"{where}.{key}", known[key]
    rows = read_rows(experience.path, where=f"{where}.path", split=experience.split, subset=experience.subset_name)
    examples = read_examples(rows, method.recipe.data, experience.format, str(experience.path))
    return Rows(examples, experience.leave_out_long_rows, f"{where}.leave_out_long_rows=true"), experience.format


def _count_steps(settings: Settings, learnt_from: Sequence[object] | TaskSource) -> int:
    total, trainer = settings.buffer.total_steps, settings.trainer.total_steps
    if None not in (total, trainer) and trainer != total:
        raise ConfigError("trainer.total_steps", f"is {trainer}", f"buffer.total_steps, {total}")
    if total is not None or trainer is not None:
        if settings.buffer.total_epochs != 1:
            logger.info("without effect: buffer.total_epochs (total_steps sets the length)")
        return _check.integer("buffer.total_steps", trainer if total is None else total, low=1)
    return max(math.ceil(settings.buffer.total_epochs * len(learnt_from) / settings.buffer.batch_size), 1)


def _choose_correction(name: str, method: Method, *, elsewhere: bool) -> str | None:
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


def _keep_mixed(group: Group, *, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> Sequence[Trajectory]:
    """Keep groups with some, but not all, episodes above the threshold."""
    right = sum(t.metrics.get(metric_key, t.reward) > correct_threshold for t in group.trajectories)
    return group.trajectories if 0 < right < len(group) else []


_MASK = "mask_response_truncated"
_OPERATORS: Mapping[str, Callable[..., Sequence[Trajectory]] | None] = {
    "reward_filter": _keep_rewarded,
    "reward_std_filter": _keep_varied,
    "dapo_dynamic_sampling": _keep_mixed,
    _MASK: None,
    "pass_rate_calculator": None,  # without effect, since tasks are shuffled
    "invalid_reward_filter": None,  # without effect, since unscored episodes do not train
}


def read_operators(given: Sequence[Operator]) -> Operators:
    """Return the operators that settings name. Raises ConfigError: one is unknown, or has another argument."""
    filters, unused = list[Callable[[Group], Sequence[Trajectory]]](), list[str]()
    for i, each in enumerate(given):
        where = f"data_processor.experience_pipeline.operators[{i}]"
        if each.name not in _OPERATORS:
            raise ConfigError(f"{where}.name: unknown operator {each.name!r}{_check.suggest(each.name, _OPERATORS)}")
        keep = _OPERATORS[each.name]
        if keep is None and each.name != _MASK:
            unused.append(where)
            continue
        known = [] if keep is None else list(inspect.signature(keep).parameters)[1:]
        for key, value in each.args.items():
            if key not in known:
                raise ConfigError(f"{where}.args.{key}: unknown setting{_check.suggest(key, known)}")
            if key != "metric_key":
                _check.real(f"{where}.args.{key}", value)
        filters += [] if keep is None else [functools.partial(keep, **each.args)]
    return Operators(filters, any(each.name == _MASK for each in given), unused)
