"""Architectures as small random models: windows and other thresholds shorter than the sequences, heads tied or not."""

from __future__ import annotations

from tests.models.family import (
    DYNAMIC,
    EXPERTS,
    GPT2,
    LATENT,
    LENGTH,
    LINEAR,
    LLAMA3,
    MAMBA,
    MIXED,
    NAMES,
    NO_EXPERTS,
    SHARED,
    TOWER,
    WINDOW,
    YARN,
    Family,
    longrope,
)
from tests.models.more_families import MORE

__all__ = ["FAMILIES"]

FAMILIES = {
    "llama": Family("llama"),
    "llama, tied": Family("llama", {"tie_word_embeddings": True}),
    "llama, biases": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, rope llama3": Family("llama", {"rope_parameters": LLAMA3}),
    "llama, rope yarn": Family("llama", {"rope_parameters": YARN}),
    "llama, rope dynamic": Family("llama", {"rope_parameters": DYNAMIC}),
    "llama, rope longrope": Family("llama", longrope()),
    "mistral": Family("mistral", {"sliding_window": None}),
    "mistral, window": Family("mistral", {"sliding_window": WINDOW}),
    "mistral, window beyond the context": Family("mistral", {"sliding_window": 2 * LENGTH}),
    "qwen2": Family("qwen2"),
    "qwen2, window": Family("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": Family("qwen3", {"tie_word_embeddings": True}),
    "qwen3, window": Family("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "ministral3": Family(
        "ministral3", {"sliding_window": None, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}
    ),
    "ministral3, window": Family(
        "ministral3", {"sliding_window": WINDOW, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}
    ),
    "gemma": Family("gemma", {"tie_word_embeddings": True}),
    "phi": Family("phi"),
    "phi3": Family("phi3", {"sliding_window": None}),
    "phi3, window": Family("phi3", {"sliding_window": WINDOW}, "packed"),
    "phi3, rope longrope": Family("phi3", longrope(sliding_window=2 * LENGTH)),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    "smollm3, window": Family(
        "smollm3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "granite": Family("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
    "glm": Family("glm"),
    "glm4": Family("glm4"),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense"),
    "ernie4_5": Family("ernie4_5"),
    "gpt2": Family("gpt2", GPT2 | {"tie_word_embeddings": True}),
    "gpt_neox": Family("gpt_neox"),
    "starcoder2": Family("starcoder2", {"sliding_window": None}),
    "starcoder2, window": Family("starcoder2", {"sliding_window": WINDOW}, "packed"),
    "nemotron": Family("nemotron"),
    "opt": Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "tie_word_embeddings": True}),
    "cohere": Family("cohere", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "gpt_bigcode": Family("gpt_bigcode", GPT2),
    "diffllama": Family("diffllama"),
    "seed_oss": Family("seed_oss"),
    "apertus": Family("apertus"),
    "arcee": Family("arcee"),
    "nanochat": Family("nanochat"),
    "stablelm": Family("stablelm"),
    "gpt_neo": Family(
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
        "padded",
    ),
    "mpt": Family("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": LENGTH}, "padded"),
    "falcon": Family(
        "falcon", {"new_decoder_architecture": False, "multi_query": True}, "padded", without=("head_dim",)
    ),
    "falcon, alibi": Family("falcon", {"alibi": True}, "padded", without=("head_dim",)),
    "bloom": Family("bloom", {"n_layer": 2, "n_head": 4}, "padded"),
    "gemma2": Family("gemma2", {"sliding_window": WINDOW}, "packed"),
    "gemma3_text": Family("gemma3_text", {"sliding_window": WINDOW, "layer_types": MIXED}, "packed"),
    "gemma3, with a vision tower": Family(
        "gemma3",
        {"text_config": {"sliding_window": WINDOW, "layer_types": MIXED}, "mm_tokens_per_image": 4}
        | {"vision_config": TOWER, "image_token_index": 290, "boi_token_index": 291, "eoi_token_index": 292},
        "packed",
        "the tower gets no adapter",
    ),
    "gemma3n_text": Family(
        "gemma3n_text",
        {"sliding_window": WINDOW, "layer_types": MIXED, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8}
        | {
            "vocab_size_per_layer_input": 300,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        "packed",
    ),
    "gemma3n_text, shared keys": Family(
        "gemma3n_text",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED * 2,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 8,
        }
        | {
            "vocab_size_per_layer_input": 300,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        "packed",
    ),
    "gemma4_text": Family(
        "gemma4_text",
        {"sliding_window": WINDOW, "layer_types": MIXED, "hidden_size_per_layer_input": 8, "per_layer_config": {}}
        | {"vocab_size_per_layer_input": 300, "global_head_dim": 8},
        "packed",
    ),
    "gemma4_text, shared keys": Family(
        "gemma4_text",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED * 2,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 8,
            "per_layer_config": {},
        }
        | {"vocab_size_per_layer_input": 300, "global_head_dim": 8},
        "packed",
        gain=5.0,
    ),
    "olmo3": Family("olmo3", {"sliding_window": WINDOW, "layer_types": MIXED}, "packed"),
    "cohere2": Family("cohere2", {"sliding_window": WINDOW, "layer_types": MIXED}, "packed"),
    "cwm": Family("cwm", {"sliding_window": WINDOW, "layer_types": MIXED, "rope_parameters": LLAMA3}, "packed"),
    "exaone4": Family("exaone4", {"sliding_window": WINDOW, "layer_types": MIXED}, "packed"),
    "modernbert-decoder": Family(
        "modernbert-decoder", {"local_attention": WINDOW, "layer_types": MIXED, "num_key_value_heads": None}, "packed"
    ),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "sliding_window": None}, note=NO_EXPERTS),
    "mixtral, window": Family("mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}, "packed", NO_EXPERTS),
    "qwen2_moe": Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}, note=NO_EXPERTS),
    "qwen3_moe": Family("qwen3_moe", EXPERTS, note=NO_EXPERTS),
    "qwen3_moe, window": Family(
        "qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW}, note=NO_EXPERTS
    ),
    "olmoe": Family("olmoe", EXPERTS, note=NO_EXPERTS),
    "granitemoe": Family("granitemoe", {"num_local_experts": 4}, note=NO_EXPERTS),
    "minimax_m2": Family("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}, note=NO_EXPERTS),
    "phimoe": Family("phimoe", {"num_local_experts": 4, "sliding_window": None}, note=NO_EXPERTS),
    "gpt_oss": Family(
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": MIXED}
        | {"rope_parameters": YARN},
        "packed",
        NO_EXPERTS,
    ),
    "llama4_text": Family(
        "llama4_text",
        {
            "num_local_experts": 4,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
        }
        | {"no_rope_layer_interval": 2, "floor_scale": 16},
        "equal",
        NO_EXPERTS,
    ),
    "llama4_text, chunks beyond the context": Family(
        "llama4_text",
        {"num_local_experts": 4, "attention_chunk_size": 2 * LENGTH, "interleave_moe_layer_step": 2, "floor_scale": 16}
        | {"no_rope_layer_interval": 2, "intermediate_size_mlp": 48},
        "equal",
        NO_EXPERTS,
    ),
    "glm4_moe": Family("glm4_moe", SHARED, note=NAMES),
    "deepseek_v2": Family("deepseek_v2", {**SHARED, **LATENT}, note=NAMES),
    "deepseek_v3": Family("deepseek_v3", {**SHARED, **LATENT}, note=NAMES),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
        note=NAMES,
    ),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}, note=NAMES),
    "qwen3_next": Family("qwen3_next", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 24}, "padded", NAMES),
    "qwen3_5_text": Family("qwen3_5_text", LINEAR, "padded"),
    "qwen3_5_moe_text": Family(
        "qwen3_5_moe_text", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 24}, "padded", NO_EXPERTS
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {**MAMBA, "num_local_experts": 4, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
        "padded",
        NO_EXPERTS,
    ),
    "falcon_h1": Family("falcon_h1", {**MAMBA, "mamba_d_ssm": 64}, "padded"),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "padded"),
    "lfm2_moe": Family(
        "lfm2_moe", {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "padded", NO_EXPERTS
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16}
        | {"ssm_state_size": 8, "n_groups": 1, "chunk_size": 16},
        "padded",
    ),
    "bamba": Family("bamba", {**MAMBA, "attn_layer_indices": [1]}, "padded"),
    "minimax": Family(
        "minimax",
        {"num_local_experts": 4, "block_size": 16, "layer_types": ["linear_attention", "full_attention"]},
        "equal",
        NO_EXPERTS,
    ),
    "jamba": Family(
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4}
        | {"use_mamba_kernels": False},
        "padded",
        NO_EXPERTS,
    ),
    "mamba": Family("mamba", {"state_size": 8, "time_step_rank": 4}, "equal", gain=3.0),
    "mamba2": Family(
        "mamba2", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}, "padded"
    ),
    "zamba2": Family(
        "zamba2",
        {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4}
        | {"mamba_headdim": 16, "chunk_size": 16, "kv_channels": 8, "use_mamba_kernels": False},
        "padded",
        gain=3.0,
    ),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]},
        "equal",
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        {**SHARED, **LATENT, "index_topk": 80, "index_n_heads": 2, "index_head_dim": 8},
        "padded",
        NAMES,
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa",
        {**SHARED, **LATENT, "index_topk": 80, "index_n_heads": 2, "index_head_dim": 8},
        "padded",
        NAMES,
    ),
}
FAMILIES |= MORE
