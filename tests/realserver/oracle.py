"""The same model and adapter in torch and peft, the losses again, and torch's AdamW."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

ALPHA = 32.0  # of every adapter of the API


def model(base: str, adapter: Path):
    """The base with what the server saved for sampling. The file names no modules, so they are read off the tensors."""
    import peft
    import transformers
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == ALPHA
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = peft.LoraConfig(r=settings["r"], lora_alpha=ALPHA, lora_dropout=0.0, target_modules=modules)
    found = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    result = peft.set_peft_model_state_dict(found, tensors)
    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora" in name]
    return found.eval()


def logprobs(model, tokens, targets) -> torch.Tensor:
    """[N]: of ``targets`` after each of ``tokens``, with its graph."""
    logits = model(input_ids=torch.as_tensor(np.array(tokens))[None]).logits[0]
    return logits.log_softmax(-1).gather(1, torch.as_tensor(np.array(targets))[:, None])[:, 0]


def losses(name, config, lp, inputs) -> torch.Tensor:
    """[N]: the API's losses, token by token, as its documentation has them."""
    x = {key: torch.as_tensor(np.asarray(value, np.float32)) for key, value in inputs.items()}
    if name == "cross_entropy":
        return -x["weights"] * lp
    ratio, a = (lp - x["logprobs"]).exp(), x["advantages"]
    if name == "importance_sampling":
        return -ratio * a
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "cispo":
        return -ratio.clamp(low, high).detach() * lp * a
    assert name == "ppo"
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a)


def optimizer(model, params):
    """torch's AdamW with the settings of a ``tinker.AdamParams``."""
    betas = (params.beta1, params.beta2)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=params.learning_rate, betas=betas, eps=params.eps, weight_decay=params.weight_decay
    )
