"""The models of a run as small objects: the policy, its chat format, a critic, and a teacher."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np

from rlkit import backends, schedules
from rlkit._interaction import Message, Observation
from rlkit.backends import sampler
from rlkit.backends.protocol import Sampler, Tokenizer, TrainerBackend
from rlkit.chat import Chat, Conversation
from rlkit.errors import ConfigError
from rlkit.recipes.data import RAW
from rlkit.recipes.settings import Format, Model, Optimizer, RolloutModel, Settings
from rlkit.types import Adam, Lora


@attrs.frozen
class Schedule:
    """AdamW by step, as section algorithm.optimizer has it; ``grad_clip`` applies where that has no clip."""

    settings: Optimizer
    grad_clip: float
    total: int

    def adam(self, step: int, base: float | None = None) -> Adam:
        """Return the optimizer of a step; ``base`` replaces the section's learning rate (a critic's)."""
        settings = self.settings
        rate = self.rate(step)
        if base is not None and settings.lr:
            rate *= base / settings.lr
        clip = self.grad_clip if settings.clip_grad is None else settings.clip_grad
        beta1, beta2 = settings.betas
        return Adam(rate, beta1, beta2, eps=settings.eps, weight_decay=settings.weight_decay, grad_clip_norm=clip)

    def rate(self, step: int) -> float:
        """Return the learning rate: a warm-up, then constant, or falling to lr min_lr_ratio at the last step."""
        settings = self.settings
        kind = settings.warmup_style or settings.lr_scheduler_type
        warm = (
            settings.lr_warmup_steps
            if settings.lr_warmup_steps >= 0
            else math.floor(settings.lr_warmup_steps_ratio * self.total)
        )
        if step < warm:
            return settings.lr * schedules.warmup(step, steps=warm)
        if kind == "constant":
            return settings.lr
        fall = schedules.cosine if kind == "cosine" else schedules.linear
        return fall(
            step - warm, start=settings.lr, end=settings.lr * settings.min_lr_ratio, steps=max(self.total - warm, 1)
        )


Options: TypeAlias = Mapping[str, Any]  # of backends, which check them
logger = logging.getLogger("rlkit.recipes")

_PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
_OF_SAMPLERS = ("model", "base_url", "api_key", "dtype", "device", "client", "tokenizer", "project")


@attrs.frozen
class PolicyOptions:
    """The policy: a backend, the options of ``rlkit.connect`` besides seed and folder, and the seed of the run."""

    backend: str
    options: Options
    seed: int | None = None

    @property
    def of_sampler(self) -> dict[str, Any]:
        """Options of a sampler of the same kind."""
        return {name: value for name, value in self.options.items() if name in _OF_SAMPLERS}

    def reference(self, policy: TrainerBackend, start: str | None) -> Sampler:
        """Open the policy that the run began with, frozen: the base model, or the weights of ``start``."""
        if start is None:
            return policy.base_sampler().result()
        return sampler(self.backend, path=start, **self.of_sampler)


class _Chat(Chat):
    """A chat that sends prompts of ``raw_prompt`` unchanged, and renders all others."""

    def start(self, observation: Observation, tools: Sequence[Message] = ()) -> Conversation:
        if not isinstance(observation, (str, np.ndarray)) and observation and observation[0].get("role") == RAW:
            plain = Chat(self.tokenizer, template=_PLAIN, prefill=self.prefill, history=self.history)
            return plain.start(str(observation[0]["content"]), tools)
        return super().start(observation, tools)


@attrs.frozen
class ChatOptions:
    """The rendering of prompts, in rollouts and for rows; None: the model's own template, thinking left alone."""

    form: Format
    template: str | None
    thinking: bool | None

    def chat(self, tokenizer: Tokenizer) -> Chat:
        """Make the chat; a template without thinking accepts ``enable_thinking: false``."""
        make = functools.partial(
            _Chat,
            tokenizer,
            system=self.form.system_prompt,
            template=self.template,
            prefill=self.form.reply_prefix or "",
        )
        chat = make()
        if self.thinking is None:
            return chat
        if not self.thinking and (chat.template is None or not {"enable_thinking", "thinking"} & chat.template.names):
            logger.info("without effect: enable_thinking false (the chat template has no such switch)")
            return chat
        return make(thinking=self.thinking)


@attrs.frozen
class CriticOptions:
    """A critic for ``Run.critic``, its learning rate (None: the policy's), and the settings of its loss."""

    name: str
    options: Options
    rate: float | None
    loss: Mapping[str, float]
    warmup: int = 0


def policy_options(settings: Settings) -> PolicyOptions:
    """Return the policy that the settings describe. Raises ConfigError: the settings contradict each other."""
    model, engine = settings.model, settings.explorer.rollout_model
    name = settings.backend or ("tinker" if model.tinker.enable else "local")
    if name not in backends.registry:
        backends.registry[name]  # raises, unless a package has it
    if settings.backend not in (None, "tinker") and model.tinker.enable:
        raise ConfigError("backend", f"is {settings.backend!r}", "tinker, or no value", "model.tinker.enable is true")
    path = model.tinker.base_model if name == "tinker" and model.tinker.base_model else model.model_path
    if path is None and name != "toy":
        raise ConfigError("model.model_path", "is not given", "a directory, a hub id, or a service's name")
    options: dict[str, object] = {} if path is None else {"model": path}
    options |= _of_tinker(model) if name == "tinker" else {"lora": lora(model)}
    if engine.dtype is not None and name == "local":
        options["dtype"] = engine.dtype
    seed = engine.seed if settings.seed is None else settings.seed
    return PolicyOptions(name, {**options, **settings.options}, seed)


def _of_tinker(model: Model) -> dict[str, object]:
    service = model.tinker
    adapter = Lora(
        rank=service.rank,
        seed=service.seed,
        train_mlp=service.train_mlp,
        train_attn=service.train_attn,
        train_unembed=service.train_unembed,
    )
    options: dict[str, object] = {"lora": adapter}
    if service.base_url is not None:
        options["base_url"] = service.base_url
    if "TINKER_API_KEY" not in os.environ and os.environ.get("TRINITY_API_KEY"):
        options["api_key"] = os.environ["TRINITY_API_KEY"]
    return options


def lora(model: Model) -> Lora:
    """Return the adapter of a model that this machine trains.

    Raises:
        ConfigError: there are several, or its modules have other names than here.
    """
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


def critic_options(
    settings: Settings, policy: PolicyOptions, rate: float | None, loss: Mapping[str, float]
) -> CriticOptions:
    """Return the critic that the settings describe; ``rate`` and ``loss`` were read from them already.

    Raises:
        ConfigError: there is no model for it.
    """
    model, dtype, warmup = settings.model, settings.explorer.rollout_model.dtype, settings.trainer.critic_warmup
    path = model.critic_model_path
    if path == "toy" or (path is None and policy.backend == "toy"):
        return CriticOptions("toy", {}, rate, loss, warmup)
    if path is None and policy.backend != "local":
        expected, why = "a model that this machine runs, or toy", "the backend has no critics"
        raise ConfigError("model.critic_model_path", "is not given", expected, why)
    shared = {key: value for key, value in policy.options.items() if key in ("device", "micro_batch_tokens")}
    options = {"model": path or model.model_path, "lora": lora(model), **shared}
    if dtype is not None:
        options["dtype"] = dtype
    return CriticOptions("local", options, rate, loss, warmup)


def chat_options(model: Model, engine: RolloutModel, form: Format) -> ChatOptions:
    """Return how prompts of this form are rendered. Raises ConfigError: the template's file cannot be read."""
    template = form.chat_template or model.custom_chat_template or engine.chat_template
    if form.raw:
        template = _PLAIN
    elif model.chat_template_path is not None:
        try:
            template = Path(model.chat_template_path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            path = model.chat_template_path
            raise ConfigError(f"model.chat_template_path: {path} cannot be read: {error}") from error
    switches = (form.enable_thinking, model.enable_thinking, engine.enable_thinking)
    return ChatOptions(form, template, next((x for x in switches if x is not None), None))


def stage_path(where: str, path: str | None, stages: Mapping[str, str]) -> str | None:
    """Return a path; for "stage:<name>" that of an earlier stage. Raises ConfigError: there is no such stage before."""
    if path is None or not path.startswith("stage:"):
        return path
    name = path.removeprefix("stage:")
    if name not in stages:
        raise ConfigError(where, f"is {path!r}", "an earlier stage: " + (", ".join(stages) or "none"))
    return stages[name]
