"""What other libraries call things, and the answer to whoever writes it here: a name, or a sentence."""

from __future__ import annotations

from collections.abc import Container, Mapping

_BOUNDS = (
    "the bounds are on the ratio itself here: for 0.2 write clip_low_threshold=1 - 0.2 and clip_high_threshold=1 + 0.2"
)
_KL = "add a KL with rlkit.losses.with_kl(loss, coef=...), or to the rewards with rlkit.advantages.kl_penalty"
_GROUP = "a group is a row of the rewards: give them as [prompts, samples], or use rlkit.advantages.by_group"
_N = "n belongs to the call: sampler.sample(prompt, params, n=8)"
_SAMPLING = "give it in params=rlkit.SamplingParams(...)"
_ADAM = "it belongs to each step: policy.optim_step(rlkit.Adam(learning_rate=...))"
_LORA = "write lora=rlkit.Lora(rank=..., alpha=...)"

ALIASES: Mapping[str, Mapping[str, str]] = {
    "Adam": {
        "lr": "learning_rate",
        "betas": "write beta1= and beta2=",
        "epsilon": "eps",
        "max_grad_norm": "grad_clip_norm",
        "max_norm": "grad_clip_norm",
        "grad_clip": "grad_clip_norm",
        "clip_grad": "grad_clip_norm",
        "clip_grad_norm": "grad_clip_norm",
        "gradient_clip_norm": "grad_clip_norm",
        "wd": "weight_decay",
    },
    "SamplingParams": {
        "max_new_tokens": "max_tokens",
        "max_length": "max_tokens",
        "max_completion_length": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "max_response_tokens": "max_tokens",
        "n": _N,
        "num_generations": _N,
        "num_return_sequences": _N,
        "num_samples": _N,
        "seed": "a seed belongs to the call: sampler.sample(prompt, params, seed=0)",
        "do_sample": "temperature=0 is greedy, anything above samples",
        "stop_strings": "stop",
        "stop_sequences": "stop",
        "stop_token_ids": "stop",
        "eos_token_id": "the model's end tokens stop by themselves; stop= names further ones",
        "logprobs": "every sample has its logprobs",
    },
    "Lora": {
        "r": "rank",
        "lora_r": "rank",
        "lora_rank": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "there is no dropout here",
        "dropout": "there is no dropout here",
        "modules": "target_modules",
        "lora_target_modules": "target_modules",
    },
    "StepResult": {
        "done": "write terminated= (it came to an end of its own) or truncated= (it was cut off)",
        "obs": "observation",
    },
    "Plan": {
        "num_generations": "n",
        "group_size": "n",
        "num_samples": "n",
        "max_steps": "max_turns",
        "sampling_params": "params",
        **dict.fromkeys(("temperature", "max_tokens", "max_new_tokens", "top_p", "top_k", "stop"), _SAMPLING),
    },
    "connect": {
        "model_name": "model",
        "model_id": "model",
        "base_model": "model",
        "model_path": "model",
        "model_name_or_path": "model",
        "pretrained_model_name_or_path": "model",
        "peft_config": "lora",
        "lora_config": "lora",
        "torch_dtype": "dtype",
        "max_seq_length": "max_length",
        "output_dir": "folder",
        "save_dir": "folder",
        "checkpoint": "resume_from",
        "lr": _ADAM,
        "learning_rate": _ADAM,
        **dict.fromkeys(("r", "rank", "lora_rank", "lora_r", "lora_alpha", "alpha"), _LORA),
    },
    "estimators": {
        "epsilon": "eps",
        "group_size": _GROUP,
        "num_generations": _GROUP,
        "n": _GROUP,
        "scale_rewards": "scale",
        "normalize": "scale",
        "norm_adv_by_std_in_grpo": "scale",
        "discount": "gamma",
        "lmbda": "lam",
        "lambda_": "lam",
        "gae_lambda": "lam",
        "last_value": "bootstrap_value",
        "next_value": "bootstrap_value",
        "reward": "rewards",
        "beta": _KL,
        "kl_coef": _KL,
    },
    "losses": {
        **dict.fromkeys(
            (
                *("clip_eps", "eps_clip", "epsilon", "epsilon_low", "epsilon_high", "clip_epsilon", "eps_low"),
                *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_range", "cliprange", "eps_high"),
            ),
            _BOUNDS,
        ),
        "delta": "dual_clip",
        "clip_ratio_c": "dual_clip",
        **dict.fromkeys(("beta", "kl_coef", "kl_beta", "kl_loss_coef"), _KL),
        **dict.fromkeys(
            ("entropy_coef", "entropy_coeff", "ent_coef"),
            "add an entropy with rlkit.losses.with_entropy(loss, coef=...)",
        ),
        "loss_agg_mode": "give the datums weights=, which rlkit.advantages.token_weights computes",
    },
}


_FREEZE = "sampling is a frozen policy's: policy.sampler().result().sample(prompt, params, n=8)"
_DECODE = "policy.tokenizer.decode(sample.tokens)"
_OUTPUT = "output.metrics['loss:sum']"
_TRAINER: Mapping[str, str] = {
    **dict.fromkeys(("model", "parameters", "state_dict", "train", "eval"), "save(name) writes the weights"),
    **dict.fromkeys(("backward", "train_step"), "call forward_backward(data, loss), then optim_step(rlkit.Adam())"),
    **dict.fromkeys(("step", "zero_grad", "optimizer"), "call optim_step(rlkit.Adam()), which clears the gradient"),
}

ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "sample": {
        **dict.fromkeys(("text", "completion", "response", "content"), f"its text is {_DECODE}"),
        **dict.fromkeys(("token_ids", "completion_ids", "ids"), "they are sample.tokens"),
        "prompt_ids": "they are sample.prompt",
        "finish_reason": "it is sample.stop_reason",
        **dict.fromkeys(("log_probs", "logprob"), "they are sample.logprobs"),
    },
    "output": {
        "loss": f"it is {_OUTPUT}, a sum over tokens",
        "log_probs": "they are output.logprobs, and output.selected for the policy's own tokens",
    },
    "critic": {
        **_TRAINER,
        **dict.fromkeys(("sampler", "base_sampler", "sample"), "a critic has values; sample from the policy"),
    },
    "policy": {
        **_TRAINER,
        **dict.fromkeys(("sample", "generate", "chat"), _FREEZE),
        "save_pretrained": "save(name) returns a path; `rlkit checkpoints RUN --export FOLDER` makes an adapter of it",
        "push_to_hub": "save(name) returns a path; `rlkit checkpoints RUN --export FOLDER` makes an adapter of it",
        **dict.fromkeys(("encode", "decode"), "call policy.tokenizer.encode and policy.tokenizer.decode"),
    },
    "sampler": {
        **dict.fromkeys(("generate", "chat", "completions"), "call sample(prompt, params, n=8)"),
        **dict.fromkeys(("forward_backward", "optim_step", "save"), "a sampler is frozen; train the policy it is of"),
    },
    "tokenizer": {
        "batch_decode": "decode one at a time: [tokenizer.decode(s.tokens) for s in samples]",
        "batch_encode": "encode one at a time: [tokenizer.encode(text) for text in texts]",
        "encode_plus": "call encode(text)",
        **dict.fromkeys(("eos_token_id", "pad_token_id"), "the end tokens are tokenizer.eos_ids; nothing is padded"),
        "convert_ids_to_tokens": "call decode([token], skip_special=False) for each",
        "convert_tokens_to_ids": "call encode(text, special=True)",
    },
}

CALLS: Mapping[str, Mapping[str, str]] = {
    "sample": {
        **dict.fromkeys(
            ("max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "stop"),
            "it belongs to the params: rlkit.SamplingParams(...)",
        ),
        **dict.fromkeys(("num_samples", "num_return_sequences", "num_generations"), "n"),
        "sampling_params": "params",
    },
    "forward_backward": {
        "loss_fn": "loss",
        "loss_fn_config": "config",
        **dict.fromkeys(("datums", "batch"), "data"),
    },
    "optim_step": {
        "adam_params": "params",
        **dict.fromkeys(("lr", "learning_rate"), "write optim_step(rlkit.Adam(learning_rate=...))"),
    },
}


_OWN_TOKENS = "a loss is called with the policy's own tokens alone, so there is nothing to mask"

INPUTS: Mapping[str, str] = {  # of losses
    **dict.fromkeys(("ref_logprobs", "ref_logps", "ref_log_prob", "reference_logps"), "reference_logprobs"),
    **dict.fromkeys(("old_logps", "old_log_prob", "old_log_probs"), "sampling_logprobs"),
    **dict.fromkeys(("logps", "log_prob", "log_probs"), "logprobs"),
    **dict.fromkeys(("mask", "loss_mask", "response_mask", "completion_mask"), _OWN_TOKENS),
    "weight": "weights",
    "advantage": "advantages",
}


def answer(kind: str, name: str, known: Container[str]) -> str:
    """Return a hint about ``name``, "" without one; a hint that is itself a name must be among the ``known``."""
    found = (ALIASES.get(kind) or CALLS.get(kind, {})).get(name, "")
    if found.isidentifier():
        return f"; write {found}=" if found in known else ""
    return f"; {found}" if found else ""


def input_hint(name: str) -> str:
    """Return what an input of a loss is called here, where other libraries call it ``name``; "" where none does."""
    known = INPUTS.get(name, "")
    return f"; rlkit calls it {known!r}" if known.isidentifier() else f"; {known}" if known else ""
