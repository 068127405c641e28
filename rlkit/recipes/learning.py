"""Settings of what is learnt: the algorithm, the optimizer, and the policy itself."""

# ruff: noqa: RUF009  # defaults are fields, or frozen

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from rlkit.recipes.hints import HINT
from rlkit.recipes.keys import mapped, own, refused, unused

__all__ = ["Algorithm", "LoraConfig", "Model", "Optimizer", "Tinker"]

_ONE_PROCESS = "one process, or a service, does the training"
_BY_ITSELF = "set by itself"


@attrs.frozen
class Optimizer:
    """AdamW and its learning rate."""

    lr: float = 1e-6
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.01
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    warmup_style: Literal["constant", "cosine", "linear"] | None = mapped(None, "lr_scheduler_type, by its older name")
    optimizer_type: Literal["adam", "adamw"] = mapped("adam", "AdamW, by either name")
    betas: Sequence[float] = (0.9, 0.999)
    eps: float = own(1e-8, "AdamW's")
    weight_decay: float = 0.01
    clip_grad: float | None = mapped(None, "trainer.grad_clip, by another name")


@attrs.frozen
class Algorithm:
    """Which algorithm, and what of it is to be different: see ``rlkit.recipes.algorithms``."""

    algorithm_type: str = "ppo"
    repeat_times: int | None = mapped(None, "episodes per task; null: the algorithm's own")
    optimizer: Optimizer = Optimizer()
    critic_lr: float | None = own(None, "the critic's learning rate; null: the policy's")
    advantage_fn: str | None = mapped(None, "a name in rlkit.advantages.registry, or Trinity's name")
    advantage_fn_args: Mapping[str, Any] | None = mapped(None, "rlkit's names of settings, or Trinity's")
    policy_loss_fn: str | None = mapped(None, "a name in rlkit.losses.registry, or Trinity's name")
    policy_loss_fn_args: Mapping[str, Any] | None = mapped(None, "rlkit's names of settings, or Trinity's")
    kl_penalty_fn: str | None = mapped(None, "k1, k2, k3 or abs, taken off the rewards; null and none: no penalty")
    kl_penalty_fn_args: Mapping[str, Any] | None = None
    kl_loss_fn: str | None = mapped(None, "a name in rlkit.losses.kl.registry; null: k2, with coefficient 0")
    kl_loss_fn_args: Mapping[str, Any] | None = mapped(None, "kl_coef, 0 unless given; the reference is then not asked")
    entropy_loss_fn: str | None = mapped(None, "default: the sampled estimate; exact: needs the whole distribution")
    entropy_loss_fn_args: Mapping[str, Any] | None = mapped(None, "entropy_coef, 0 unless given")
    loss_agg_mode: str | None = mapped(None, "a mode of rlkit.advantages.token_weights, over each optimizer step")
    bypass_old_logprobs: bool = mapped(
        True, "false: ratios are to the policy before the step's first update; of decoupled_ppo too if it is named"
    )
    rollout_correction: Any = refused("a loop of your own can use rlkit.corrections")
    sample_strategy: Literal["default", "warmup", "mix", "staleness_control"] | None = mapped(
        None, "what the algorithm says; synchronizer says how stale a batch is, which staleness_control may bound"
    )
    sample_strategy_args: Mapping[str, Any] | None = mapped(
        None, "expert_data_ratio and sft_dataset_name, of mix and chord; max_staleness, of staleness_control"
    )
    hint: str = own(HINT, "sdpo: what the policy is told before it scores its answers, with {answer} in it")
    enable_router_replay: Any = refused("no backend records routers")


@attrs.frozen
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
class LoraConfig:
    """The adapter of the local backend."""

    name: str | None = None
    lora_rank: int = 32
    lora_alpha: float = 32
    target_modules: str | Sequence[str] = mapped("all-linear", "all-linear, or names of modules")
    path: Any = refused("init_from takes what a run saved")
    base_model_name: Any = unused("model.model_path")
    lora_dtype: Any = unused("adapters are float32")
    exclude_modules: Any = refused("name the modules in target_modules instead")
    is_dummy: Any = unused(_BY_ITSELF)


@attrs.frozen
class Model:
    """The policy, and how it is talked to."""

    model_path: str | None = None
    critic_model_path: str | None = mapped(None, "of ppo's critic, run locally; toy for a small one; null: model_path")
    max_prompt_tokens: int | None = mapped(
        None, "with max_response_tokens the longest episode; prompts are not truncated, those too long are left out"
    )
    max_response_tokens: int = 64
    max_model_len: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    custom_chat_template: str | None = None
    chat_template_path: str | None = None
    enable_thinking: bool | None = None
    tinker: Tinker = Tinker()
    lora_configs: Sequence[LoraConfig] | None = mapped(None, "one; without any, a LoRA of rank 32 and not all weights")
    trust_remote_code: Any = refused("code that comes with a model is not run")
    min_response_tokens: Any = refused("an answer ends where the policy ends it")
    repetition_penalty: Any = unused("it would not be the policy that is trained")
    enable_prompt_truncation: Any = unused("prompts are never truncated")
    logprobs: Any = unused("every sample has its logprobs")
    fully_sharded_loras: Any = unused(_ONE_PROCESS)
    max_cpu_loras: Any = unused(_ONE_PROCESS)
    rope_scaling: Any = refused("the model's own is used")
    rope_theta: Any = refused("the model's own is used")
    external_model: Any = refused("a policy that can not be trained; rlkit.sampler takes one for a teacher")
