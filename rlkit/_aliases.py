"""What other libraries call things, and the answer to whoever writes it here: a name, or a sentence."""

from __future__ import annotations

from collections.abc import Container, Mapping

_BOUNDS = (
    "the bounds are on the ratio itself here: for 0.2 write clip_low_threshold=1 - 0.2 and clip_high_threshold=1 + 0.2"
)
_KL = "add a KL with rlkit.losses.with_kl(loss, coef=...), or to the rewards with rlkit.advantages.kl_penalty"
_GROUP = "a group is a row of the rewards: give them as [prompts, samples], or use rlkit.advantages.by_group"

_SAMPLING = (
    "max_tokens max_new_tokens stop temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
)

_Answers = Mapping[str, str]  # answer -> the names that get it


def _by_name(answers: _Answers) -> dict[str, str]:
    return {name: answer for answer, names in answers.items() for name in names.split()}


_ARGUMENTS: Mapping[str, _Answers] = {
    "Adam": {
        "learning_rate": "lr",
        "write beta1= and beta2=": "betas",
        "eps": "epsilon",
        "grad_clip_norm": "max_grad_norm max_norm grad_clip clip_grad clip_grad_norm gradient_clip_norm",
        "weight_decay": "wd",
    },
    "SamplingParams": {
        "max_tokens": "max_new_tokens max_length max_completion_length max_completion_tokens max_response_tokens",
        "n belongs to the call: sampler.sample(prompt, params, n=8)": (
            "n num_generations num_return_sequences num_samples"
        ),
        "a seed belongs to the call: sampler.sample(prompt, params, seed=0)": "seed",
        "temperature=0 is greedy, anything above samples": "do_sample",
        "stop": "stop_strings stop_sequences stop_token_ids",
        "the model's end tokens stop by themselves; stop= names further ones": "eos_token_id",
        "every sample has its logprobs": "logprobs",
        "repetition_penalty": "rep_penalty",
        "frequency_penalty": "freq_penalty",
    },
    "Lora": {
        "rank": "r lora_r lora_rank",
        "alpha": "lora_alpha",
        "there is no dropout here": "lora_dropout dropout",
        "target_modules": "modules lora_target_modules",
    },
    "StepResult": {
        "write terminated= (it came to an end of its own) or truncated= (it was cut off)": "done",
        "observation": "obs",
    },
    "Plan": {
        "n": "num_generations group_size num_samples",
        "max_turns": "max_steps",
        "params": "sampling_params",
        "give it in params=rlkit.SamplingParams(...)": _SAMPLING,
    },
    "connect": {
        "model": "model_name model_id base_model model_path model_name_or_path pretrained_model_name_or_path",
        "lora": "peft_config lora_config",
        "dtype": "torch_dtype",
        "max_length": "max_seq_length",
        "folder": "output_dir save_dir",
        "resume_from": "checkpoint",
        "it belongs to each step: policy.optim_step(rlkit.Adam(learning_rate=...))": "lr learning_rate",
        "write lora=rlkit.Lora(rank=..., alpha=...)": "r rank lora_rank lora_r lora_alpha alpha",
    },
    "estimators": {
        "eps": "epsilon",
        _GROUP: "group_size num_generations n",
        "scale": "scale_rewards normalize norm_adv_by_std_in_grpo",
        "gamma": "discount",
        "lam": "lmbda lambda_ gae_lambda",
        "bootstrap_value": "last_value next_value",
        "rewards": "reward",
        _KL: "beta kl_coef",
    },
    "losses": {
        _BOUNDS: (
            "clip_eps eps_clip epsilon epsilon_low epsilon_high clip_epsilon eps_low clip_ratio clip_ratio_low "
            "clip_ratio_high clip_range cliprange eps_high"
        ),
        "dual_clip": "delta clip_ratio_c",
        _KL: "beta kl_coef kl_beta kl_loss_coef",
        "add an entropy with rlkit.losses.with_entropy(loss, coef=...)": "entropy_coef entropy_coeff ent_coef",
        "give the datums weights=, which rlkit.advantages.token_weights computes": "loss_agg_mode",
    },
    "assign": {
        "estimator": "adv_estimator advantage_estimator advantage",
        "kl_coef": "beta kl_beta kl_loss_coef kl_ctrl",
        "kl_estimator": "kl_penalty kl_loss_type",
        "reference": "ref ref_policy ref_model reference_policy ref_worker",
        "rewards": "reward token_level_rewards token_level_scores",
        "weights": "loss_agg_mode",
        "settings of the estimator go into config={...}": "gamma lam eps norm_adv_by_std_in_grpo scale num_repeat",
    },
    "sample": {
        "it belongs to the params: rlkit.SamplingParams(...)": _SAMPLING,
        "n": "num_samples num_return_sequences num_generations",
        "params": "sampling_params",
    },
    "forward_backward": {"loss": "loss_fn", "config": "loss_fn_config", "data": "datums batch"},
    "optim_step": {"params": "adam_params", "write optim_step(rlkit.Adam(learning_rate=...))": "lr learning_rate"},
}

_TRAINER: _Answers = {
    "save(name) writes the weights": "model parameters state_dict train eval",
    "call forward_backward(data, loss), then optim_step(rlkit.Adam())": "backward train_step",
    "call optim_step(rlkit.Adam()), which clears the gradient": "step zero_grad optimizer",
}

_MEMBERS: Mapping[str, _Answers] = {
    "sample": {
        "its text is policy.tokenizer.decode(sample.tokens)": "text completion response content",
        "they are sample.tokens": "token_ids completion_ids ids",
        "they are sample.prompt": "prompt_ids",
        "it is sample.stop_reason": "finish_reason",
        "they are sample.logprobs": "log_probs logprob",
    },
    "output": {
        "it is output.metrics['loss:sum'], a sum over tokens": "loss",
        "they are output.logprobs, and output.selected for the policy's own tokens": "log_probs",
    },
    "critic": {**_TRAINER, "a critic has values; sample from the policy": "sampler base_sampler sample"},
    "policy": {
        **_TRAINER,
        "sampling is a frozen policy's: policy.sampler().result().sample(prompt, params, n=8)": "sample generate chat",
        "save(name) returns a path; `rlkit checkpoints RUN --export FOLDER` makes an adapter of it": (
            "save_pretrained push_to_hub"
        ),
        "call policy.tokenizer.encode and policy.tokenizer.decode": "encode decode",
    },
    "sampler": {
        "call sample(prompt, params, n=8)": "generate chat completions",
        "a sampler is frozen; train the policy it is of": "forward_backward optim_step save",
    },
    "tokenizer": {
        "decode one at a time: [tokenizer.decode(s.tokens) for s in samples]": "batch_decode",
        "encode one at a time: [tokenizer.encode(text) for text in texts]": "batch_encode",
        "call encode(text)": "encode_plus",
        "the end tokens are tokenizer.eos_ids; nothing is padded": "eos_token_id pad_token_id",
        "call decode([token], skip_special=False) for each": "convert_ids_to_tokens",
        "call encode(text, special=True)": "convert_tokens_to_ids",
    },
}

_INPUTS: _Answers = {  # of losses
    "reference_logprobs": "ref_logprobs ref_logps ref_log_prob reference_logps",
    "sampling_logprobs": "old_logps old_log_prob old_log_probs",
    "logprobs": "logps log_prob log_probs",
    "a loss is called with the policy's own tokens alone, so there is nothing to mask": (
        "mask loss_mask response_mask completion_mask"
    ),
    "weights": "weight",
    "advantages": "advantage",
}

VALUES = _by_name({"k1": "kl", "k2": "mse", "k3": "low_var_kl"})  # of estimators of a KL
ALIASES = {kind: _by_name(answers) for kind, answers in _ARGUMENTS.items()}
ATTRIBUTES = {kind: _by_name(answers) for kind, answers in _MEMBERS.items()}
INPUTS = _by_name(_INPUTS)


def answer(kind: str, name: str, known: Container[str]) -> str:
    """Return a hint about ``name``, "" without one; a hint that is itself a name must be among the ``known``."""
    hint = ALIASES.get(kind, {}).get(name, "")
    if hint.isidentifier():
        return f"; write {hint}=" if hint in known else ""
    return f"; {hint}" if hint else ""


def input_hint(name: str) -> str:
    """Return what an input of a loss is called here, where other libraries call it ``name``; "" where none does."""
    known = INPUTS.get(name, "")
    return f"; rlkit calls it {known!r}" if known.isidentifier() else f"; {known}" if known else ""
