"""Settings of what is learnt: the algorithm, the optimizer, and the policy itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from rlkit.recipes.hints import HINT
from rlkit.recipes.keys import with_keys

__all__ = ["Algorithm", "LoraConfig", "Model", "Optimizer", "Tinker"]


@attrs.frozen
@with_keys
class Optimizer:
    """AdamW and its learning rate."""

    lr: float = 1e-6
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.01
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    warmup_style: Literal["constant", "cosine", "linear"] | None = None
    optimizer_type: Literal["adam", "adamw"] = "adam"
    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float | None = None


@attrs.frozen
@with_keys
class Algorithm:
    """Which algorithm, and what of it is to be different: see ``rlkit.recipes.algorithms``."""

    algorithm_type: str = "ppo"
    repeat_times: int | None = None
    optimizer: Optimizer = Optimizer()
    critic_lr: float | None = None
    advantage_fn: str | None = None
    advantage_fn_args: Mapping[str, Any] | None = None
    policy_loss_fn: str | None = None
    policy_loss_fn_args: Mapping[str, Any] | None = None
    kl_penalty_fn: str | None = None
    kl_penalty_fn_args: Mapping[str, Any] | None = None
    kl_loss_fn: str | None = None
    kl_loss_fn_args: Mapping[str, Any] | None = None
    entropy_loss_fn: str | None = None
    entropy_loss_fn_args: Mapping[str, Any] | None = None
    loss_agg_mode: str | None = None
    bypass_old_logprobs: bool = True
    sample_strategy: Literal["default", "warmup", "mix", "staleness_control"] | None = None
    sample_strategy_args: Mapping[str, object] | None = None
    hint: str = HINT
    correction: str = "auto"


@attrs.frozen
@with_keys
class Tinker:
    """The policy on a Tinker service."""

    enable: bool = False
    base_model: str | None = None
    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None


@attrs.frozen
@with_keys
class LoraConfig:
    """The adapter of the local backend."""

    name: str | None = None
    lora_rank: int = 32
    lora_alpha: float = 32
    target_modules: str | Sequence[str] = "all-linear"
    train_unembed: bool = True


@attrs.frozen
@with_keys
class Model:
    """The policy, and how it is talked to."""

    model_path: str | None = None
    critic_model_path: str | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int = 64
    max_model_len: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    custom_chat_template: str | None = None
    chat_template_path: str | None = None
    enable_thinking: bool | None = None
    tinker: Tinker = Tinker()
    lora_configs: Sequence[LoraConfig] | None = None
