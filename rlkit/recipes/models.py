"""The models of a run: the policy, how it is talked to, its reference, and a teacher."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import rlkit
from rlkit import _check, backends
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.chat import Chat
from rlkit.errors import ConfigError
from rlkit.recipes.inputs import Format
from rlkit.recipes.settings import Settings, Teacher
from rlkit.rollouts import Plan
from rlkit.types import Lora, SamplingParams

__all__ = [
    "backend_of",
    "chat_of",
    "critic_of",
    "cut_of",
    "options_of",
    "plan_of",
    "reference_of",
    "same_tokenizer",
    "seed_of",
    "teacher_of",
    "template_of",
    "thinking_of",
]

logger = logging.getLogger("rlkit.recipes")

_PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def backend_of(settings: Settings) -> str:
    """The backend's name."""
    if settings.backend is not None:
        return settings.backend
    return "tinker" if settings.model.tinker.enable else "local"


def options_of(settings: Settings) -> dict[str, Any]:
    """What ``rlkit.connect`` is given, without seed and folder.

    Raises:
        ConfigError: settings contradict each other.
    """
    name, model = backend_of(settings), settings.model
    if name not in backends.registry:
        backends.registry[name]  # raises, unless a package has it
    if settings.backend not in (None, "tinker") and model.tinker.enable:
        what = f"is {settings.backend!r}"
        raise ConfigError(_check.problem("backend", what, "tinker, or nothing", "model.tinker.enable is true"))
    path = model.tinker.base_model if name == "tinker" and model.tinker.base_model else model.model_path
    if path is None and name != "toy":
        raise ConfigError(
            _check.problem("model.model_path", "is not given", "a directory, a hub id, or a service's name")
        )
    found: dict[str, Any] = {} if path is None else {"model": path}
    if name == "tinker":
        found |= _tinker(settings)
    else:
        found["lora"] = _lora(settings)
        if settings.explorer.rollout_model.dtype is not None and name == "local":
            found["dtype"] = settings.explorer.rollout_model.dtype
    return {**found, **settings.options}


def seed_of(settings: Settings) -> int | None:
    """Of the whole run."""
    return settings.explorer.rollout_model.seed if settings.seed is None else settings.seed


def _tinker(settings: Settings) -> dict[str, Any]:
    own = settings.model.tinker
    flags: dict[str, Any] = {
        "train_mlp": own.train_mlp,
        "train_attn": own.train_attn,
        "train_unembed": own.train_unembed,
    }
    found: dict[str, Any] = {"lora": Lora(rank=own.rank, seed=own.seed, **flags)}
    if own.base_url is not None:
        found["base_url"] = own.base_url
    if "TINKER_API_KEY" not in os.environ and os.environ.get("TRINITY_API_KEY"):
        found["api_key"] = os.environ["TRINITY_API_KEY"]
    return found


def _lora(settings: Settings) -> Lora:
    given = settings.model.lora_configs or ()
    if len(given) > 1:
        raise ConfigError(
            _check.problem("model.lora_configs", f"has {len(given)} entries", "one", "one adapter trains")
        )
    if not given:
        return Lora()
    names = given[0].target_modules
    if isinstance(names, str) and names != "all-linear":
        expected = "all-linear, or a list of names"
        raise ConfigError(_check.problem("model.lora_configs[0].target_modules", f"is {names!r}", expected))
    modules = None if isinstance(names, str) else tuple(names)
    return Lora(rank=given[0].lora_rank, alpha=given[0].lora_alpha, target_modules=modules)


def chat_of(settings: Settings, tokenizer: Tokenizer, form: Format) -> Chat:
    """How prompts are rendered, in rollouts and for rows.

    A template that cannot think is satisfied by ``enable_thinking: false``.
    """
    template, thinking = template_of(settings, form), thinking_of(settings, form)
    make = functools.partial(Chat, tokenizer, system=form.system_prompt, template=template)
    chat = make(prefill=form.reply_prefix or "")
    if thinking is None:
        return chat
    if not thinking and (chat.template is None or not {"enable_thinking", "thinking"} & chat.template.names):
        logger.info("without effect here: enable_thinking false (the chat template has no such switch)")
        return chat
    return make(prefill=form.reply_prefix or "", thinking=thinking)


def template_of(settings: Settings, form: Format) -> str | None:
    """The chat template that the settings name; None: the model's own."""
    model, engine = settings.model, settings.explorer.rollout_model
    if form.raw:
        return _PLAIN
    if model.chat_template_path is not None:
        return _text(model.chat_template_path)
    return form.chat_template or model.custom_chat_template or engine.chat_template


def thinking_of(settings: Settings, form: Format) -> bool | None:
    """Whether the template is told to think; None: it is left alone."""
    model, engine = settings.model, settings.explorer.rollout_model
    found = (form.enable_thinking, model.enable_thinking, engine.enable_thinking)
    return next((x for x in found if x is not None), None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template_path: {path} can not be read: {error}") from error


def plan_of(settings: Settings, n: int, seed: int) -> Plan:
    """How episodes are played; the chat is added once there is a tokenizer."""
    model, explorer = settings.model, settings.explorer
    params = SamplingParams(
        max_tokens=model.max_response_tokens, temperature=model.temperature, top_p=model.top_p, top_k=model.top_k
    )
    length = model.max_model_len
    if length is None and model.max_prompt_tokens is not None:
        length = model.max_prompt_tokens + model.max_response_tokens
    return Plan(
        n=n,
        params=params,
        seed=seed,
        max_turns=explorer.max_turns,
        max_total_tokens=explorer.max_total_tokens,
        max_length=length,
        concurrency=explorer.concurrency,
        deadline=explorer.max_timeout,
        attempts=1 + _check.integer("explorer.max_retry_times", explorer.max_retry_times, low=0),
        share=1.0 - _check.real("explorer.over_rollout.ratio", explorer.over_rollout.ratio, low=0.0, below=1.0),
        progress=False,
    )


def cut_of(settings: Settings) -> dict[str, Any]:
    """top_p and top_k of the episodes that train: those of the task set, where there is one and it says so."""
    own, model = settings.buffer.explorer_input.taskset, settings.model
    found = {"top_p": model.top_p, "top_k": model.top_k}
    if own is not None:
        given = {name: getattr(own.rollout_args, name) for name in found}
        found |= {name: value for name, value in given.items() if value is not None}
    return found


def reference_of(settings: Settings, policy: Any, start: str | None) -> Sampler:
    """The policy that the run began with, frozen: the base model, or the weights of ``start``."""
    if start is None:
        found: Sampler = policy.base_sampler().result()
        return found
    return rlkit.sampler(backend_of(settings), path=start, **_frozen(settings))


def teacher_of(settings: Settings, tokenizer: Tokenizer, stages: Any = None) -> Sampler:
    """The teacher: ``explorer.auxiliary_models[0]``.

    Args:
        settings: of the run.
        tokenizer: the policy's.
        stages: names of earlier stages -> their saved paths, for "stage:<name>".

    Raises:
        ConfigError: there is none, or it has another tokenizer.
    """
    where = "explorer.auxiliary_models[0]"
    given: Teacher = settings.explorer.auxiliary_models[0]
    name = given.backend or backend_of(settings)
    path = stage_path(f"{where}.path", given.path, stages or {})
    options = dict(given.options) if name != backend_of(settings) else {**_frozen(settings), **given.options}
    if given.model_path is not None:
        options["model"] = given.model_path
    teacher = rlkit.sampler(name, **options) if path is None else rlkit.runs.sampler(path, **options)
    problem = same_tokenizer(tokenizer, teacher.tokenizer)
    if problem:
        teacher.close()
        text = "the teacher scores the policy's tokens, so both need one tokenizer"
        raise ConfigError(_check.problem(where, problem, "the policy's tokenizer", text))
    return teacher


def critic_of(settings: Settings) -> tuple[str, dict[str, Any]]:
    """The critic's name and options, for ``Run.critic``.

    Raises:
        ConfigError: there is no model for it.
    """
    path, name = settings.model.critic_model_path, backend_of(settings)
    if path == "toy" or (path is None and name == "toy"):
        return "toy", {}
    if path is None and name != "local":
        expected = "a model that this machine runs, or toy"
        raise ConfigError(
            _check.problem("model.critic_model_path", "is not given", expected, "the backend has no critics")
        )
    kept = {key: value for key, value in settings.options.items() if key in ("device", "micro_batch_tokens")}
    found = {"model": path or settings.model.model_path, "lora": _lora(settings), **kept}
    if settings.explorer.rollout_model.dtype is not None:
        found["dtype"] = settings.explorer.rollout_model.dtype
    return "local", found


def stage_path(where: str, given: str | None, stages: Any) -> str | None:
    """A path; of an earlier stage where it says so."""
    if given is None or not given.startswith("stage:"):
        return given
    name = given.removeprefix("stage:")
    if name not in stages:
        raise ConfigError(
            _check.problem(where, f"is {given!r}", "an earlier stage: " + (", ".join(stages) or "none is"))
        )
    found: str = stages[name]
    return found


def _frozen(settings: Settings) -> dict[str, Any]:
    """Options of a sampler of the policy's own kind."""
    kept = ("model", "base_url", "api_key", "dtype", "device", "client", "tokenizer", "project")
    return {name: value for name, value in options_of(settings).items() if name in kept}
