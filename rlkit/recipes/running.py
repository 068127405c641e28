"""Settings of how a run goes: episodes, saving, synchronisation, and where its numbers go."""

# ruff: noqa: RUF009  # defaults are fields, or frozen

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from rlkit.recipes.keys import mapped, own, refused, unused

__all__ = ["Explorer", "Log", "Monitor", "OverRollout", "RolloutModel", "Synchronizer", "Teacher", "Trainer"]

_NO_CLUSTER = "there are no engines and workers: a backend samples and trains"
_ONE_PROCESS = "one process, or a service, does the training"
_BY_ITSELF = "set by itself"
_SCORES = "teachers score, they do not write"


@attrs.frozen
class _Engine:
    """What engines that serve a model can be told."""

    trust_remote_code: Any = refused("code that comes with a model is not run")
    external_model_config: Any = refused("a model behind an address has no logprobs to learn from")
    enable_multimodal: Any = refused("text only")
    enable_return_routed_experts: Any = refused("no backend records routers")
    rope_scaling: Any = refused("the model's own is used")
    rope_theta: Any = refused("the model's own is used")
    engine_type: Any = unused(_NO_CLUSTER)
    engine_num: Any = unused(_NO_CLUSTER)
    engine_id: Any = unused(_NO_CLUSTER)
    tensor_parallel_size: Any = unused(_NO_CLUSTER)
    data_parallel_size: Any = unused(_NO_CLUSTER)
    pipeline_parallel_size: Any = unused(_NO_CLUSTER)
    enable_expert_parallel: Any = unused(_NO_CLUSTER)
    gpu_per_engine: Any = unused(_NO_CLUSTER)
    gpu_memory_utilization: Any = unused("options.micro_batch_tokens and options.max_rows bound the memory")
    use_v1: Any = unused(_NO_CLUSTER)
    enforce_eager: Any = unused(_NO_CLUSTER)
    enable_prefix_caching: Any = unused("a group's prompt is computed once")
    enable_chunked_prefill: Any = unused(_NO_CLUSTER)
    extra_engine_args: Any = unused(_NO_CLUSTER)
    enable_prompt_truncation: Any = unused("prompts are never truncated")
    enable_history: Any = unused("trajectories are stored")
    enable_openai_api: Any = unused("environments are played by rlkit.rollouts")
    enable_log_requests: Any = unused("environments are played by rlkit.rollouts")
    enable_auto_tool_choice: Any = unused("rlkit.tools reads calls")
    tool_call_parser: Any = unused("rlkit.tools reads calls")
    reasoning_parser: Any = unused("rlkit.chat does it")
    api_key: Any = unused("environments are played by rlkit.rollouts")
    base_port: Any = unused(_NO_CLUSTER)
    nnodes: Any = unused(_NO_CLUSTER)
    node_rank: Any = unused(_NO_CLUSTER)
    weight_sync_buffer_size: Any = unused("a sampler is a snapshot of the policy")
    sync_method: Any = unused("a sampler is a snapshot of the policy")
    ray_namespace: Any = unused(_NO_CLUSTER)
    ray_actor_name: Any = unused(_NO_CLUSTER)
    bundle_indices: Any = unused(_NO_CLUSTER)
    cuda_visible_devices: Any = unused("options.device")
    checkpoint_job_dir: Any = unused(_BY_ITSELF)
    enable_lora: Any = unused(_BY_ITSELF)
    enable_runtime_lora_updating: Any = unused(_BY_ITSELF)
    lora_modules: Any = unused(_BY_ITSELF)
    lora_kwargs: Any = unused(_BY_ITSELF)
    logprobs: Any = unused("every sample has its logprobs")


@attrs.frozen
class RolloutModel(_Engine):
    """The engine that samples."""

    dtype: Literal["float32", "bfloat16"] | None = mapped(None, "of the local backend's base, for both jobs")
    seed: int | None = mapped(None, "of the whole run, unless seed says another")
    enable_thinking: bool | None = mapped(None, "model.enable_thinking")
    chat_template: str | None = mapped(None, "model.custom_chat_template")
    ignore_eos: Any = refused("an answer ends where the policy ends it")
    min_response_tokens: Any = refused("an answer ends where the policy ends it")
    temperature: Any = refused("model.temperature, or a task set's, says it")
    top_p: Any = refused("model.top_p says it")
    top_k: Any = refused("model.top_k says it")
    repetition_penalty: Any = unused("it would not be the policy that is trained")
    model_path: Any = unused("model.model_path")
    name: Any = unused(_NO_CLUSTER)
    max_model_len: Any = unused("model.max_model_len")
    max_prompt_tokens: Any = unused("model.max_prompt_tokens")
    max_response_tokens: Any = unused("model.max_response_tokens")


@attrs.frozen
class Teacher(_Engine):
    """A frozen model: the first of explorer.auxiliary_models is the teacher."""

    model_path: str | None = None
    name: str | None = None
    backend: str | None = own(None, "null: the policy's")
    path: str | None = own(None, "what a save returned, a run's folder, or stage:<name> for what that ended with")
    options: Mapping[str, Any] = own(attrs.Factory(dict), "arguments of rlkit.sampler")
    dtype: Any = unused("options.dtype")
    max_model_len: Any = unused("the model's own")
    max_prompt_tokens: Any = unused("the model's own")
    max_response_tokens: Any = unused(_SCORES)
    min_response_tokens: Any = unused(_SCORES)
    seed: Any = unused(_SCORES)
    enable_thinking: Any = unused(_SCORES)
    chat_template: Any = unused(_SCORES)
    ignore_eos: Any = unused(_SCORES)
    temperature: Any = unused("it scores at the temperature that the policy sampled at")
    top_p: Any = unused(_SCORES)
    top_k: Any = unused(_SCORES)
    repetition_penalty: Any = unused(_SCORES)


@attrs.frozen
class OverRollout:
    """Waiting for most episodes only."""

    ratio: float = mapped(0.0, "Plan.share = 1 - ratio: what is sampled then depends on timing")
    wait_after_min: Any = unused("the rest is given up at once")
    return_partial_tasks: Any = unused("groups of at least two episodes are kept")


@attrs.frozen
class Explorer:
    """How episodes are played, and how often is evaluated."""

    rollout_model: RolloutModel = RolloutModel()
    auxiliary_models: Sequence[Teacher] = mapped((), "the first is the teacher of on_policy_distill and jsd")
    eval_interval: int = mapped(100, "evaluates before every so many steps, and at the end")
    eval_on_startup: bool = True
    bench_on_latest_checkpoint: bool = False
    max_timeout: float = mapped(1800.0, "Plan.deadline")
    max_retry_times: int = mapped(2, "Plan.attempts, less the first")
    max_turns: int = own(16, "Plan.max_turns")
    max_total_tokens: int | None = own(None, "Plan.max_total_tokens")
    concurrency: int = own(128, "episodes at a time")
    over_rollout: OverRollout = OverRollout()
    name: Any = unused(_ONE_PROCESS)
    runner_per_model: Any = unused("concurrency says how many episodes run at a time")
    runner_num: Any = unused("concurrency says how many episodes run at a time")
    runner_prepare_concurrency: Any = unused("concurrency says how many episodes run at a time")
    runner_prepare_max_retries: Any = unused("max_retry_times")
    concurrent_mode: Any = unused("plain environments run in threads, asynchronous ones in a loop")
    max_repeat_times_per_runner: Any = unused(_NO_CLUSTER)
    env_vars: Any = unused("set them before the program starts")
    dynamic_timeout: Any = refused("max_timeout is fixed, so that long answers are not cut off by short ones")
    runner_state_report_interval: Any = unused("the log and the metrics say how far it is")
    max_inflight_batches: Any = unused("synchronizer.sync_offset says how far ahead is sampled")
    proxy_port: Any = unused("rlkit serve is a program of its own")
    listen_address: Any = unused("rlkit serve is a program of its own")
    service_status_check_interval: Any = unused("rlkit serve is a program of its own")
    min_running_model_num: Any = unused("rlkit serve is a program of its own")
    db_url: Any = unused("rlkit serve is a program of its own")


@attrs.frozen
class Trainer:
    """Saving and clipping."""

    save_interval: int = mapped(10, "0: only after the last step; also when the run is stopped")
    max_checkpoints_to_keep: int = mapped(2, "the latest so many; 0 keeps all")
    grad_clip: float = 1.0
    epochs: int = own(1, "passes over what was sampled for a step")
    total_steps: int | None = mapped(None, "buffer.total_steps, by another name")
    critic_warmup: int = mapped(0, "steps in which only the critic learns")
    name: Any = unused(_ONE_PROCESS)
    trainer_type: Any = unused("the backend is named by backend, or by model.tinker.enable")
    trainer_strategy: Any = unused(_ONE_PROCESS)
    trust_remote_code: Any = refused("code that comes with a model is not run")
    trainer_config: Mapping[str, Any] = mapped(
        attrs.Factory(dict), "veRL's own; of it critic.optim.lr and critic.cliprange_value have their effect"
    )
    trainer_config_path: Any = unused("veRL's own")
    enable_preview: Any = unused("trajectories are stored")
    save_hf_checkpoint: Any = unused("rlkit.backends.local.export writes one")
    save_strategy: Any = unused("saves are whole or not there")
    use_dynamic_bsz: Any = unused("micro-batches are formed by options.micro_batch_tokens, and change no result")
    max_token_len_per_gpu: Any = unused("options.micro_batch_tokens")
    use_remove_padding: Any = unused("padding counts nowhere")
    balance_batch: Any = unused(_ONE_PROCESS)
    ulysses_sequence_parallel_size: Any = unused(_ONE_PROCESS)
    fix_actor_microbatch_loss_scale: Any = unused("micro-batches change no result")
    param_offload: Any = unused(_ONE_PROCESS)
    optimizer_offload: Any = unused(_ONE_PROCESS)
    grad_offload: Any = unused(_ONE_PROCESS)
    offload_policy: Any = unused(_ONE_PROCESS)
    megatron: Any = unused(_ONE_PROCESS)


@attrs.frozen
class Synchronizer:
    """When the sampler takes the trained weights."""

    sync_interval: int = mapped(1, "every so many steps a fresh snapshot samples")
    sync_offset: int = mapped(0, "how many steps sampling is ahead of training")
    explorer_sync_interval: int | None = mapped(None, "sync_interval, by another name")
    trainer_sync_interval: int | None = mapped(None, "sync_interval, by another name")
    sync_method: Any = unused("a sampler is a snapshot of the policy")
    sync_style: Any = unused("it is fixed: which snapshot samples does not depend on timing")
    sync_timeout: Any = unused("nothing is waited for that could be late")
    wait_for_checkpoint: Any = unused("a sampler is a snapshot of the policy")
    group_name: Any = unused(_NO_CLUSTER)
    explorer_world_size: Any = unused(_BY_ITSELF)
    ray_namespace: Any = unused(_NO_CLUSTER)


@attrs.frozen
class Monitor:
    """Where metrics go, beside metrics.jsonl."""

    monitor_type: str | None = mapped(None, "a name in rlkit.tracking.registry")
    monitor_args: Mapping[str, Any] | None = mapped(None, "arguments of the tracker")
    trajectories: bool = own(True, "whether they are stored, in trajectories.jsonl")
    detailed_stats: Any = unused("evaluations have means, intervals and pass@k")
    enable_ray_timeline: Any = unused(_NO_CLUSTER)
    cache_dir: Any = unused("the run's folder")


@attrs.frozen
class Log:
    """Python's logging."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    group_by_node: Any = unused(_ONE_PROCESS)
    save_dir: Any = unused("the run's folder")
