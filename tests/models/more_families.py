"""Architectures that rlkit was not written with in mind: those of 2025 and 2026, and odd older ones."""

from __future__ import annotations

from typing import Any

from tests.models.family import (
    EXPERTS,
    GPT2,
    LATENT,
    LENGTH,
    LINEAR,
    MIXED,
    NAMES,
    NO_EXPERTS,
    SHARED,
    SOUND,
    TOWER,
    WINDOW,
    Family,
)

PICKED = 80  # tokens that sparse attention picks from: it begins to pick beyond, so that the context ends there
INDEX = {"index_topk": PICKED, "index_n_heads": 2, "index_head_dim": 8}
WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": MIXED}
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
STATES = {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4}
KIMI = LATENT | SPARSE | STATES | {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24}
KIMI |= {"num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1}
SHARES = {"shared_expert_intermediate_size": 24}
INKLING = {"sliding_window_size": WINDOW, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
NGRAMS = {"ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "ngram_size": 3}
NGRAMS |= {"make_ngram_vocab_size_divisible_by": 2, "split_ngram_parts": 2, "hc_count": 2, "hc_lowrank": 8}
NGRAMS |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

MORE = {
    "afmoe": Family("afmoe", EXPERTS | WINDOWED | {"num_shared_experts": 1, "num_dense_layers": 1}, note=NAMES),
    "aria_text": Family(
        "aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}, note=NO_EXPERTS
    ),
    "axk1": Family("axk1", SHARED | LATENT | SPARSE, note=NO_EXPERTS),
    "axk2": Family("axk2", SHARED | LATENT | SPARSE | INDEX | {"gated_norm_rank": 4}, "padded", NO_EXPERTS),
    "bailing_hybrid": Family("bailing_hybrid", KIMI, "padded", NO_EXPERTS),
    "biogpt": Family("biogpt"),
    "bitnet": Family("bitnet"),
    "codegen": Family("codegen", GPT2 | {"n_ctx": LENGTH, "rotary_dim": 4, "n_inner": 48}, "padded"),
    "cohere2_moe": Family("cohere2_moe", EXPERTS | WINDOWED | SPARSE | {"num_shared_experts": 1}, note=NAMES),
    "ctrl": Family("ctrl", GPT2 | {"dff": 48}),
    "dbrx": Family(
        "dbrx",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": LENGTH}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}}
        | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
    ),
    "deepseek_v4": Family(
        "deepseek_v4",
        SHARED
        | INDEX
        | {"q_lora_rank": 12, "o_lora_rank": 8, "qk_rope_head_dim": 4, "sliding_window": WINDOW}
        # and compressed keys
        | {"num_key_value_heads": 1, "o_groups": 2, "hc_mult": 2},
        "padded",
        NO_EXPERTS,
    ),
    "doge": Family("doge", {"sliding_window": None, "keep_window_size": PICKED}, "padded"),
    "dots1": Family("dots1", SHARED | WINDOWED | {"max_window_layers": 1}, note=NAMES),
    "dots3_note_text": Family(
        "dots3_note_text",
        SHARED | LATENT | INDEX | SPARSE | {"sliding_window": WINDOW, "shared_experts_intermediate_size": 24},
        "padded",
        NO_EXPERTS,
    ),
    "exaone_moe": Family(
        "exaone_moe",
        EXPERTS | WINDOWED | SPARSE | {"num_shared_experts": 1, "n_group": 1, "topk_group": 1},
        note=NAMES,
    ),
    "falcon_mamba": Family("falcon_mamba", {"state_size": 8, "time_step_rank": 4}, "equal", gain=3.0),
    "flex_olmo": Family("flex_olmo", EXPERTS, note=NO_EXPERTS),
    "flint": Family("flint", EXPERTS | SHARES | {"sliding_window": WINDOW}),
    "glm4_moe_lite": Family("glm4_moe_lite", SHARED | LATENT | SPARSE, note=NAMES),
    "gptj": Family("gptj", GPT2 | {"rotary_dim": 4, "n_inner": 48}, "padded"),
    "gpt_neox_japanese": Family("gpt_neox_japanese", {"intermediate_multiple_size": 2}, "padded"),
    "granite_swa": Family("granite_swa", WINDOWED),
    "granitemoe_swa": Family("granitemoe_swa", WINDOWED | {"num_local_experts": 4}, note=NO_EXPERTS),
    "granitemoeshared": Family(
        "granitemoeshared", {"num_local_experts": 4, "shared_intermediate_size": 24}, note=NO_EXPERTS
    ),
    "helium": Family("helium"),
    "hrm_text": Family("hrm_text"),
    "hy_v3": Family("hy_v3", EXPERTS | SPARSE | {"num_shared_experts": 1}, note=NO_EXPERTS),
    "hy_v4": Family("hy_v4", SHARED | LATENT | SPARSE | INDEX, "padded", NO_EXPERTS),
    "hyperclovax": Family("hyperclovax"),
    "inkling_text": Family("inkling_text", SHARED | INKLING | SPARSE | {"layer_types": None}, "padded", NO_EXPERTS),
    "inkling2_text": Family("inkling2_text", SHARED | INKLING | {"layer_types": None}, "padded", NO_EXPERTS),
    "internlm3": Family("internlm3"),
    "iquestcoder": Family("iquestcoder"),
    "jais2": Family("jais2"),
    "jetmoe": Family(
        "jetmoe",
        {"num_local_experts": 4, "kv_channels": 8},
        note=NO_EXPERTS,
        without=("num_attention_heads",),
    ),
    "kimi_linear": Family("kimi_linear", KIMI, "padded", NO_EXPERTS),
    "kolibri1": Family("kolibri1", LOCAL | WINDOWED | SHARES, note=NO_EXPERTS),
    "laguna": Family(
        "laguna", EXPERTS | WINDOWED | SHARES | SPARSE | {"num_attention_heads_per_layer": [4, 4]}, note=NAMES
    ),
    "lfm3": Family("lfm3", {"layer_types": ["conv", "full_attention"]}, "padded"),
    "longcat_flash": Family(
        "longcat_flash",
        LATENT
        | {"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2, "num_layers": 2}
        | {"expert_ffn_hidden_size": 24, "ffn_hidden_size": 48},
        note=NAMES,
    ),
    "mellum": Family("mellum", LOCAL | WINDOWED | SPARSE | {"moe_intermediate_size": 24}, note=NAMES),
    "mimo_v2_flash": Family("mimo_v2_flash", SHARED | WINDOWED | SPARSE | {"v_head_dim": 8}, note=NO_EXPERTS),
    "minicpm3": Family("minicpm3", LATENT, gain=4.0),
    "minimax_m3_vl_text": Family(
        "minimax_m3_vl_text",
        LOCAL
        | SPARSE
        | {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8, "index_topk_blocks": 2}
        | {"index_local_blocks": 1, "layer_types": ["full_attention", "minimax_m3_sparse"]},
        "equal",
        NO_EXPERTS,
    ),
    "ministral": Family("ministral", WINDOWED),
    "olmo_hybrid": Family("olmo_hybrid", LINEAR, "padded"),
    "openai-gpt": Family("openai-gpt", GPT2, "padded"),
    "persimmon": Family("persimmon"),
    "phi4_multimodal": Family(
        "phi4_multimodal",  # its own towers for images and sound have 800 million weights
        {"sliding_window": WINDOW, "vision_config": TOWER | {"crop_size": 16}, "audio_config": SOUND},
    ),
    "qwen2_moe, window": Family(
        "qwen2_moe",
        EXPERTS | SHARES | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        note=NO_EXPERTS,
    ),
    "qwen4_exp_text": Family(
        "qwen4_exp_text",
        EXPERTS | LINEAR | SHARES | NGRAMS | {"indexer_compress_ratio": 1, "output_gate_type": "sigmoid"},
        "padded",
        NO_EXPERTS,
    ),
    "rwkv": Family("rwkv", {"attention_hidden_size": 32, "context_length": LENGTH}, "equal", gain=3.0),
    "solar_open": Family("solar_open", SHARED, note=NAMES),
    "vaultgemma": Family("vaultgemma", WINDOWED),
    "xglm": Family("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}, "padded"),
    "xlstm": Family("xlstm", {"num_blocks": 2, "num_heads": 4, "embedding_dim": 32}, "uncached", gain=3.0),
    "youtu": Family("youtu", LATENT, gain=4.0),
    "zamba": Family(
        "zamba",
        {"num_hidden_layers": 3, "attention_head_dim": 16, "n_mamba_heads": 2, "attn_layer_period": 2}
        | {"attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_state": 8, "use_mamba_kernels": False},
        "padded",
        gain=3.0,
    ),
    "zaya": Family(
        "zaya",
        EXPERTS | {"num_experts_per_tok": 1, "sliding_window": None, "router_hidden_size": 8},
        "padded",
        NO_EXPERTS,
    ),
    "cpmant": Family("cpmant", {"dim_head": 8, "dim_ff": 48}, "refused", "not causal"),
}
