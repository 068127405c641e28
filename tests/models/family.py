"""What an architecture is tested as: a small random model, with settings that several of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from tests.models.build import tokenizer

LENGTH = 96  # the context
MOST = 2 * 10**6  # weights
WINDOW = 24


@attrs.frozen
class Family:
    """An architecture.

    Attributes:
        model_type: transformers' name of it.
        settings: of its config, beside ``SHAPE``.
        layout: in which it is computed: "packed", "padded", "equal", "uncached" or "refused".
        note: why, or what gets no adapter.
        without: what of ``SHAPE`` its config does not take.
        gain: times which its matrices are as large as the library makes them, so that attention looks at single tokens.
    """

    model_type: str
    settings: dict[str, Any] = attrs.field(factory=dict)
    layout: str = "packed"
    note: str = ""
    without: tuple[str, ...] = ()
    gain: float = 8.0


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
ROPE = {"rope_theta": 10000.0}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "head_dim": 8}


def build(family: Family, folder: Path) -> Path:
    """Writes the model, in float32, with random weights from a fixed seed, and a tokenizer."""
    import torch
    import transformers as tf

    size = tokenizer(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = {**SHAPE, "vocab_size": size, **family.settings}
        if "text_config" in family.settings:  # beside a tower for images
            settings = {**family.settings, "text_config": SHAPE | {"vocab_size": size} | family.settings["text_config"]}
        config = tf.AutoConfig.for_model(
            family.model_type, **{k: settings[k] for k in settings if k not in family.without}
        )
        model = tf.AutoModelForCausalLM.from_config(config)
        assert model.num_parameters() < MOST, f"{family.model_type}: {model.num_parameters()} weights"  # a tower's?
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "A_log" in name:  # of a decay, which is to stay one
                    continue
                if parameter.ndim > 1:
                    parameter.mul_(family.gain)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))  # norms that are not ones, biases that are not 0
    model.save_pretrained(folder)
    return folder


def longrope(**more: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 5.0, 6.0, 7.0]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 48, **factors, **ROPE}
    return {"rope_parameters": rope, "original_max_position_embeddings": 48, **more}


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 24, **ROPE}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, **ROPE}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **ROPE}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_n_groups": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
TOWER |= {"patch_size": 4}
SOUND = {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2}
SOUND |= {"nemo_conv_channels": 16, "depthwise_separable_out_channel": 16, "ext_pw_out_channel": 16}

NO_EXPERTS = "experts get no adapter"
NAMES = "experts get no adapter, nor dense layers of the same names"
