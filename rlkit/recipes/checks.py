"""What can be wrong with settings that are each right by themselves, found before any work."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import _check, _install, backends, tracking
from rlkit.backends.toy.tokenizer import ByteTokenizer
from rlkit.chat.templates import Template
from rlkit.errors import ConfigError
from rlkit.recipes import models
from rlkit.recipes.inputs import Format
from rlkit.recipes.method import Method
from rlkit.recipes.settings import Settings
from rlkit.types import SamplingParams

__all__ = ["critic", "forms", "model", "names", "needs", "numbers", "sampling", "tracker"]

logger = logging.getLogger("rlkit.recipes")


def names(settings: Settings) -> None:
    """Raises where a run's folder would not be below ``checkpoint_root_dir``."""
    for where in ("project", "group", "name"):
        path = Path(getattr(settings, where))
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(_check.problem(where, f"is {str(path)!r}", "a name below checkpoint_root_dir"))


def numbers(settings: Settings) -> None:
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


def needs(settings: Settings, method: Method, mode: str) -> None:
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
    if settings.algorithm.entropy_loss_fn == "exact" and models.backend_of(settings) == "tinker":
        why = "a Tinker service gives no whole distributions; default is the sampled estimate"
        raise ConfigError(_check.problem("algorithm.entropy_loss_fn", "is 'exact'", "default", why))


def sampling(settings: Settings, method: Method, mode: str) -> None:
    """Raises where episodes that train are sampled in a way that their loss, or the backend, cannot have."""
    if mode not in ("both", "explore") or not method.recipe.rolls_out:
        return
    model, inputs = settings.model, settings.buffer.explorer_input
    cut = models.cut_of(settings)
    SamplingParams(temperature=model.temperature, **cut)
    played = {"buffer.explorer_input.taskset": inputs.taskset} if inputs.taskset is not None else {}
    played |= {f"buffer.explorer_input.tasksets[{i}]": each for i, each in enumerate(inputs.tasksets)}
    for where, taskset in played.items():
        own = taskset.rollout_args.temperature
        key = "model.temperature" if own is None else f"{where}.rollout_args.temperature"
        temperature = model.temperature if own is None else own
        if (temperature == 0 or cut["top_p"] < 1 or cut["top_k"] > 0) and "sampling_logprobs" in method.inputs:
            what = f"is {temperature}, top_p {cut['top_p']}, top_k {cut['top_k']}"
            why = f"the loss {method.recipe.loss} compares with the policy that sampled"
            raise ConfigError(_check.problem(key, what, "sampling from the whole distribution", why))
        tempered = temperature != 1 and "off_temperature" not in settings.options
        if tempered and mode == "both" and models.backend_of(settings) == "tinker":
            expected = "1, or options.off_temperature=rescore"
            why = "a Tinker service trains at temperature 1"
            raise ConfigError(_check.problem(key, f"is {temperature}", expected, why))
    sync, args = settings.synchronizer, settings.algorithm.sample_strategy_args or {}
    if settings.algorithm.sample_strategy == "staleness_control" and "max_staleness" in args:
        where = "algorithm.sample_strategy_args.max_staleness"
        most = sync.sync_offset + sync.sync_interval - 1
        if _check.real(where, args["max_staleness"], low=0.0) < most:
            what, expected = f"is {args['max_staleness']}", f"at least {most}"
            raise ConfigError(_check.problem(where, what, expected, "synchronizer makes batches as old as that"))


def model(settings: Settings) -> None:
    """Raises where this machine is to run a model that it does not have, or one that cannot be told to think."""
    name, given = models.backend_of(settings), settings.model
    options = models.options_of(settings)
    path = options.get("model")
    if given_options := dict(settings.options):
        _check.options("options", backends.registry[name], given_options, kind="connect")
    if name == "local" and isinstance(path, str) and Path(path).expanduser().is_dir():
        if not (Path(path).expanduser() / "config.json").is_file():
            what = f"the directory {path!r} has no config.json"
            raise ConfigError(_check.problem("model.model_path", what, "a saved model"))
    elif name == "local" and isinstance(path, str) and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ConfigError(_check.problem("model.model_path", f"is {path!r}", "a directory that exists, or a hub id"))
    thinking = models.thinking_of(settings, _first_form(settings))
    text = models.template_of(settings, _first_form(settings))
    if text is None and name == "toy":
        text = ByteTokenizer.chat_template
    elif text is None and path is not None:
        text = _own_template(Path(path).expanduser())
    if thinking and text is not None and not {"enable_thinking", "thinking"} & Template(text).names:
        expected = "a template that has the switch"
        why = "this one reads no enable_thinking, so that it cannot be switched on"
        raise ConfigError(_check.problem("model.enable_thinking", "is True", expected, why))
    if given.max_model_len is not None and given.max_model_len < 2:
        raise ConfigError(_check.problem("model.max_model_len", f"is {given.max_model_len}", "at least 2"))


def _first_form(settings: Settings) -> Format:
    inputs = settings.buffer.explorer_input
    return next((each.format for each in (inputs.taskset, *inputs.tasksets) if each is not None), Format())


def _own_template(folder: Path) -> str | None:
    """The template that stands in a model's folder, if one does."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text("utf-8")
        text = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return text if isinstance(text, str) else None


def tracker(settings: Settings) -> None:
    """Raises where the tracker that ``monitor`` names does not exist, is not installed, or takes other arguments."""
    monitor = settings.monitor
    if monitor.monitor_type in (None, "jsonl", "none"):
        return
    kind = tracking.registry.resolve(str(monitor.monitor_type))
    package = getattr(kind, "package", None)
    if package is not None and importlib.util.find_spec(package) is None:
        what = f"is {monitor.monitor_type!r}, whose package {package} is not installed"
        expected = f"null, or {_install.command(kind.extra)}"
        raise ConfigError(_check.problem("monitor.monitor_type", what, expected))
    if monitor.monitor_args is not None:
        try:
            inspect.signature(kind).bind(**monitor.monitor_args)
        except TypeError as error:
            raise ConfigError(f"monitor.monitor_args: {error}") from error


def critic(settings: Settings) -> tuple[float | None, dict[str, float]]:
    """The critic's learning rate and the settings of its loss, of what ``trainer_config`` says; the rest is told.

    Raises:
        ConfigError: two rates disagree, or a number is out of range.
    """
    given = settings.trainer.trainer_config
    found = {key: _inner(given, key) for key in ("critic.optim.lr", "critic.cliprange_value")}
    known = [key for key, value in found.items() if value is not None]
    rest = sorted({key for key in _leaves(given) if key not in known})
    if rest:
        logger.info("without effect here: trainer.trainer_config: %s (veRL's own)", ", ".join(rest))
    rate = settings.algorithm.critic_lr
    where = "trainer.trainer_config."
    if found["critic.optim.lr"] is not None:
        own = _check.real(f"{where}critic.optim.lr", found["critic.optim.lr"], low=0.0)
        if rate not in (None, own):
            raise ConfigError(_check.problem(f"{where}critic.optim.lr", f"is {own}", f"algorithm.critic_lr, {rate}"))
        rate = own
    clip = found["critic.cliprange_value"]
    if clip is None:
        return rate, {}
    return rate, {"clip": _check.real(f"{where}critic.cliprange_value", clip, above=0.0)}


def _inner(given: Any, key: str) -> Any:
    for name in key.split("."):
        given = given.get(name) if isinstance(given, Mapping) else None
    return given


def _leaves(given: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{where}{name}.")
        else:
            yield f"{where}{name}"


def forms(settings: Settings, given: Sequence[Format]) -> None:
    """Raises where conversations of one run would be rendered in different ways."""
    rendered = ("raw", "system_prompt", "reply_prefix", "chat_template", "enable_thinking")
    for form in given[1:]:
        for name in rendered:
            if getattr(form, name) != getattr(given[0], name):
                what = f"is {getattr(given[0], name)!r} in one place and {getattr(form, name)!r} in another"
                why = "task sets and rows are rendered in one way; put what differs into the prompts"
                raise ConfigError(_check.problem(f"{settings.name}: format.{name}", what, "one for all", why))
