"""What can be wrong with settings that are each right by themselves, found before any work."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from rlkit import _check, _install, backends, tracking
from rlkit._drawn import NEW_OPTIONS
from rlkit.backends.protocol import ChecksOptions
from rlkit.backends.toy.tokenizer import ByteTokenizer
from rlkit.chat.templates import Template
from rlkit.errors import ConfigError
from rlkit.recipes.inputs import Format, Taskset
from rlkit.recipes.learning import Algorithm
from rlkit.recipes.method import Method
from rlkit.recipes.models import ChatOptions, PolicyOptions
from rlkit.recipes.settings import Monitor, Settings, Synchronizer
from rlkit.types import SamplingParams

__all__ = ["critic", "forms", "model", "needs", "numbers", "sampling", "staleness", "tracker", "truncation"]

logger = logging.getLogger("rlkit.recipes")


def numbers(settings: Settings) -> None:
    """Raise for a name or number that is out of range, and for two names of one thing that disagree."""
    for where in ("project", "group", "name"):
        path = Path(getattr(settings, where))
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(where, f"is {str(path)!r}", "a name below checkpoint_root_dir")
    optimizer, trainer, sync, buffer = (
        settings.algorithm.optimizer,
        settings.trainer,
        settings.synchronizer,
        settings.buffer,
    )
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
        ("algorithm.optimizer.lr_warmup_steps", optimizer.lr_warmup_steps, -1),
    ):
        _check.integer(where, value, low=low)
    _check.real("algorithm.optimizer.lr", optimizer.lr, low=0.0)
    _check.real("algorithm.optimizer.min_lr_ratio", optimizer.min_lr_ratio, low=0.0, high=1.0)
    _check.real("algorithm.optimizer.lr_warmup_steps_ratio", optimizer.lr_warmup_steps_ratio, low=0.0, high=1.0)
    if len(optimizer.betas) != 2:
        raise ConfigError("algorithm.optimizer.betas", f"has {len(optimizer.betas)} entries", "two")
    for name in ("explorer_sync_interval", "trainer_sync_interval"):
        if getattr(sync, name) not in (None, sync.sync_interval):
            what = f"is {getattr(sync, name)}"
            raise ConfigError(f"synchronizer.{name}", what, f"sync_interval, {sync.sync_interval}")
    if None not in (buffer.total_steps, trainer.total_steps) and buffer.total_steps != trainer.total_steps:
        what = f"is {trainer.total_steps}"
        raise ConfigError("trainer.total_steps", what, f"buffer.total_steps, {buffer.total_steps}")
    if optimizer.clip_grad is not None and trainer.grad_clip not in (1.0, optimizer.clip_grad):
        what = f"is {optimizer.clip_grad}"
        raise ConfigError("algorithm.optimizer.clip_grad", what, f"trainer.grad_clip, {trainer.grad_clip}")


def needs(settings: Settings, method: Method, mode: str, policy: PolicyOptions) -> None:
    """Raise where something is missing that the algorithm needs; say what it does not need."""
    algorithm, teachers = settings.algorithm, settings.explorer.auxiliary_models
    for key, value, need in (
        ("trainer.critic_warmup", settings.trainer.critic_warmup, "critic"),
        ("model.critic_model_path", settings.model.critic_model_path, "critic"),
        ("explorer.auxiliary_models", teachers, "teacher"),
    ):
        if value and need not in method.recipe.needs:
            logger.info("without effect here: %s (%s has no %s)", key, algorithm.algorithm_type, need)
    if "teacher" in method.recipe.needs and mode not in ("explore", "bench") and not teachers:
        why = f"{algorithm.algorithm_type} learns from it"
        raise ConfigError("explorer.auxiliary_models", "is empty", "a teacher", why)
    if algorithm.entropy_loss_fn == "exact" and policy.backend == "tinker":
        why = "a Tinker service gives no whole distributions; default is the sampled estimate"
        raise ConfigError("algorithm.entropy_loss_fn", "is 'exact'", "default", why)


def truncation(taskset: Taskset | None, params: SamplingParams) -> SamplingParams:
    """Return how episodes that train are sampled: by top_p, a penalty, ... of the task set, where it says so."""
    return params if taskset is None else attrs.evolve(params, **taskset.rollout_args.cut)


def sampling(settings: Settings, method: Method, mode: str, backend: str, params: SamplingParams) -> None:
    """Raise where episodes that train are sampled in a way that their loss, or the backend, cannot have."""
    inputs = settings.buffer.explorer_input
    played = {"buffer.explorer_input.taskset": inputs.taskset} if inputs.taskset is not None else {}
    played |= {f"buffer.explorer_input.tasksets[{i}]": each for i, each in enumerate(inputs.tasksets)}
    for where, taskset in played.items():
        its_temperature = taskset.rollout_args.temperature
        key = "model.temperature" if its_temperature is None else f"{where}.rollout_args.temperature"
        temperature = params.temperature if its_temperature is None else its_temperature
        drawn = attrs.evolve(params, temperature=temperature)
        if (temperature == 0 or drawn.reshapes) and "sampling_logprobs" in method.inputs:
            others = {
                k: v for k, v in drawn.drawn_with.items() if k in ("top_p", "top_k") or v != NEW_OPTIONS.get(k, v)
            }
            what = f"is {temperature}, " + ", ".join(f"{name} {value}" for name, value in others.items())
            why = f"the loss {method.recipe.loss} compares with the policy that sampled"
            raise ConfigError(key, what, "sampling from the whole distribution", why)
        if backend == "tinker" and any(getattr(params, name) != neutral for name, neutral in NEW_OPTIONS.items()):
            what, expected = "has min_p or a penalty", "top_p and top_k alone"
            raise ConfigError("model", what, expected, "a Tinker service has no others")
        tempered = temperature != 1 and "off_temperature" not in settings.options
        if tempered and mode == "both" and backend == "tinker":
            expected, why = "1, or options.off_temperature=rescore", "a Tinker service trains at temperature 1"
            raise ConfigError(key, f"is {temperature}", expected, why)


def staleness(algorithm: Algorithm, sync: Synchronizer) -> None:
    """Raise where batches may be older than staleness_control allows."""
    args = algorithm.sample_strategy_args or {}
    if algorithm.sample_strategy == "staleness_control" and "max_staleness" in args:
        where, most = "algorithm.sample_strategy_args.max_staleness", sync.sync_offset + sync.sync_interval - 1
        if _check.real(where, args["max_staleness"], low=0.0) < most:
            what, why = f"is {args['max_staleness']}", "synchronizer makes batches as old as that"
            raise ConfigError(where, what, f"at least {most}", why)


def model(policy: PolicyOptions, chat: ChatOptions, settings: Settings) -> None:
    """Raise where this machine is to run a model that it does not have, or one that cannot be told to think."""
    name, path = policy.backend, policy.options.get("model")
    if settings.options:
        backend = backends.registry[name]
        _check.options("options", backend, dict(settings.options), kind="connect")
        if isinstance(backend, ChecksOptions):
            backend.check_options(**policy.options)
    folder = Path(path).expanduser() if isinstance(path, str) else None
    if name == "local" and isinstance(path, str) and folder is not None:
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ConfigError("model.model_path", f"the directory {path!r} has no config.json", "a saved model")
        if not folder.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
            raise ConfigError("model.model_path", f"is {path!r}", "a directory that exists, or a hub id")
    text = chat.template
    if text is None and name == "toy":
        text = ByteTokenizer.chat_template
    elif text is None and folder is not None:
        text = _own_template(folder)
    if chat.thinking and text is not None and not {"enable_thinking", "thinking"} & Template(text).names:
        why = "this one reads no enable_thinking, so that it cannot be switched on"
        raise ConfigError("model.enable_thinking", "is True", "a template that has the switch", why)
    length = settings.model.max_model_len
    if length is not None and length < 2:
        raise ConfigError("model.max_model_len", f"is {length}", "at least 2")


def _own_template(folder: Path) -> str | None:
    """Return the template that stands in a model's folder, if one does."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text("utf-8")
        text = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return text if isinstance(text, str) else None


def tracker(monitor: Monitor) -> None:
    """Raise where the tracker that ``monitor`` names does not exist, is not installed, or takes other arguments."""
    if monitor.monitor_type in (None, "jsonl", "none"):
        return
    kind = tracking.registry.resolve(str(monitor.monitor_type))
    package = getattr(kind, "package", None)
    if package is not None and importlib.util.find_spec(package) is None:
        what = f"is {monitor.monitor_type!r}, whose package {package} is not installed"
        raise ConfigError("monitor.monitor_type", what, f"null, or {_install.command(kind.extra)}")
    if monitor.monitor_args is not None:
        try:
            inspect.signature(kind).bind(**monitor.monitor_args)
        except TypeError as error:
            raise ConfigError(f"monitor.monitor_args: {error}") from error


def critic(rate: float | None, config: Mapping[str, object]) -> tuple[float | None, dict[str, float]]:
    """Return the critic's learning rate and the settings of its loss, of what ``trainer_config`` says.

    Args:
        rate: algorithm.critic_lr.
        config: trainer.trainer_config; the log says what of it has no effect.

    Raises:
        ConfigError: two rates disagree, or a number is out of range.
    """
    where, flat = "trainer.trainer_config.", dict(_flat(config))
    own_rate, clip = flat.pop("critic.optim.lr", None), flat.pop("critic.cliprange_value", None)
    if flat:
        logger.info("without effect here: trainer.trainer_config: %s (veRL's own)", ", ".join(sorted(flat)))
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


def forms(name: str, given: Sequence[Format]) -> None:
    """Raise where conversations of one run, ``name``, would be rendered in different ways."""
    rendered = ("raw", "system_prompt", "reply_prefix", "chat_template", "enable_thinking")
    for form in given[1:]:
        for key in rendered:
            if getattr(form, key) != getattr(given[0], key):
                what = f"is {getattr(given[0], key)!r} in one place and {getattr(form, key)!r} in another"
                why = "task sets and rows are rendered in one way; put what differs into the prompts"
                raise ConfigError(f"{name}: format.{key}", what, "one for all", why)
