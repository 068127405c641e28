"""Models with random weights for the self-check: no download, and shapes that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlkit import _check
from rlkit.backends.local.model.base import quiet
from rlkit.errors import ConfigError

__all__ = ["KINDS", "SHAPES", "build", "check_shape"]

SHAPES: dict[str, dict[str, int | bool]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}

# Each goes by other code: rlkit's own forward, the library's modules with windows, and with its cache.
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "Qwen3": ("qwen3", {}),
    "Gemma 3, windows": (
        "gemma3_text",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Qwen3.5, hybrid": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}


def build(shape: str, folder: Path, *, kind: str = "Qwen3", layers: int | None = None) -> Path:
    """Write a model with random weights, and a tokenizer of bytes.

    Args:
        shape: a key of ``SHAPES``.
        folder: where; it is made.
        kind: of architecture, a key of ``KINDS``.
        layers: another number of them.

    Raises:
        ConfigError: no such shape.
    """
    import transformers

    check_shape(shape)
    family, special = KINDS[kind]
    settings = SHAPES[shape] | special | ({} if layers is None else {"num_hidden_layers": layers})
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **settings, max_position_embeddings=4096, **ids)
    small = settings["hidden_size"] == SHAPES["tiny"]["hidden_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32 if small else torch.bfloat16)
        if small:
            with torch.no_grad():
                for parameter in model.parameters():  # far from uniform
                    parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    with quiet():
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
    return folder


def check_shape(shape: str) -> None:
    """Raise ConfigError where ``SHAPES`` has none of that name."""
    if shape not in SHAPES:
        raise ConfigError(_check.problem("shape", f"got {shape!r}", "one of " + ", ".join(SHAPES)))


def _tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|begin|>", "<|unknown|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": special[0], "unk_token": special[1], "eos_token": special[2], "pad_token": special[2]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
