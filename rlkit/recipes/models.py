"""The models of a run as small objects: the policy, how it is talked to, a critic, and a teacher."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs

import rlkit
from rlkit import backends
from rlkit.backends.protocol import Sampler, Tokenizer, TrainerBackend
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.chat import Chat
from rlkit.errors import ConfigError
from rlkit.recipes.inputs import Format
from rlkit.recipes.learning import Model
from rlkit.recipes.settings import RolloutModel, Settings, Teacher
from rlkit.types import Lora

__all__ = ["ChatOptions", "CriticOptions", "PolicyOptions", "TeacherOptions", "chat_options", "policy_options"]

Options: TypeAlias = Mapping[str, Any]  # of backends, which check them
logger = logging.getLogger("rlkit.recipes")

_PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
_OF_SAMPLERS = ("model", "base_url", "api_key", "dtype", "device", "client", "tokenizer", "project")


@attrs.frozen
class PolicyOptions:
    """The policy: a backend, what ``rlkit.connect`` is given beside seed and folder, and the seed of the run."""

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
        return rlkit.sampler(self.backend, path=start, **self.of_sampler)


@attrs.frozen
class ChatOptions:
    """How prompts are rendered, in rollouts and for rows; None: the model's own template, thinking left alone."""

    form: Format
    template: str | None
    thinking: bool | None

    def chat(self, tokenizer: Tokenizer) -> Chat:
        """Make the chat; a template that cannot think is satisfied by ``enable_thinking: false``."""
        make = functools.partial(
            Chat,
            tokenizer,
            system=self.form.system_prompt,
            template=self.template,
            prefill=self.form.reply_prefix or "",
        )
        chat = make()
        if self.thinking is None:
            return chat
        if not self.thinking and (chat.template is None or not {"enable_thinking", "thinking"} & chat.template.names):
            logger.info("without effect here: enable_thinking false (the chat template has no such switch)")
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


@attrs.frozen
class TeacherOptions:
    """``explorer.auxiliary_models[0]``, and the policy, whose backend and options it has unless it names others."""

    section: Teacher
    policy: PolicyOptions

    def open(self, tokenizer: Tokenizer, stages: Mapping[str, str]) -> Sampler:
        """Open the teacher.

        Args:
            tokenizer: the policy's.
            stages: names of earlier stages -> their saved paths, for "stage:<name>".

        Raises:
            ConfigError: it has another tokenizer.
        """
        where, section = "explorer.auxiliary_models[0]", self.section
        name = section.backend or self.policy.backend
        shared = self.policy.of_sampler if name == self.policy.backend else {}
        path = stage_path(f"{where}.path", section.path, stages)
        model = {} if section.model_path is None else {"model": section.model_path}
        options = {**shared, **section.options, **model}
        teacher = rlkit.sampler(name, **options) if path is None else rlkit.runs.sampler(path, **options)
        problem = same_tokenizer(tokenizer, teacher.tokenizer)
        if problem:
            teacher.close()
            text = "the teacher scores the policy's tokens, so both need one tokenizer"
            raise ConfigError(where, problem, "the policy's tokenizer", text)
        return teacher


def policy_options(settings: Settings) -> PolicyOptions:
    """Return the policy that the settings describe. Raises ConfigError: settings contradict each other."""
    model, engine = settings.model, settings.explorer.rollout_model
    name = settings.backend or ("tinker" if model.tinker.enable else "local")
    if name not in backends.registry:
        backends.registry[name]  # raises, unless a package has it
    if settings.backend not in (None, "tinker") and model.tinker.enable:
        raise ConfigError("backend", f"is {settings.backend!r}", "tinker, or nothing", "model.tinker.enable is true")
    path = model.tinker.base_model if name == "tinker" and model.tinker.base_model else model.model_path
    if path is None and name != "toy":
        raise ConfigError("model.model_path", "is not given", "a directory, a hub id, or a service's name")
    options: dict[str, Any] = {} if path is None else {"model": path}
    options |= _of_tinker(model) if name == "tinker" else {"lora": lora(model)}
    if engine.dtype is not None and name == "local":
        options["dtype"] = engine.dtype
    seed = engine.seed if settings.seed is None else settings.seed
    return PolicyOptions(name, {**options, **settings.options}, seed)


def _of_tinker(model: Model) -> dict[str, Any]:
    service = model.tinker
    parts: dict[str, Any] = {name: getattr(service, name) for name in ("train_mlp", "train_attn", "train_unembed")}
    options: dict[str, Any] = {"lora": Lora(rank=service.rank, seed=service.seed, **parts)}
    if service.base_url is not None:
        options["base_url"] = service.base_url
    if "TINKER_API_KEY" not in os.environ and os.environ.get("TRINITY_API_KEY"):
        options["api_key"] = os.environ["TRINITY_API_KEY"]
    return options


def lora(model: Model) -> Lora:
    """Return the adapter of a model that this machine trains.

    Raises:
        ConfigError: there are several, or its modules are named otherwise than here.
    """
    adapters = model.lora_configs or ()
    if len(adapters) > 1:
        raise ConfigError("model.lora_configs", f"has {len(adapters)} entries", "one", "one adapter trains")
    if not adapters:
        return Lora()
    adapter, names = adapters[0], adapters[0].target_modules
    if isinstance(names, str) and names != "all-linear":
        raise ConfigError("model.lora_configs[0].target_modules", f"is {names!r}", "all-linear, or a list of names")
    modules = None if isinstance(names, str) else tuple(names)
    shape: dict[str, Any] = {"train_unembed": adapter.train_unembed, "target_modules": modules}
    return Lora(rank=adapter.lora_rank, alpha=adapter.lora_alpha, **shape)


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
    """Return a path; of an earlier stage where it says so. Raises ConfigError: there is no such stage before."""
    if path is None or not path.startswith("stage:"):
        return path
    name = path.removeprefix("stage:")
    if name not in stages:
        raise ConfigError(where, f"is {path!r}", "an earlier stage: " + (", ".join(stages) or "none is"))
    return stages[name]
