"""What the benchmarks of the local backend compute: SmolLM2-135M-Instruct, LoRA of rank 32 on all layers but the head.

W is a GRPO step of 8 prompts of 37 to 78 tokens with 8 completions each; "long" has one prompt of 512 tokens and 16
completions. Completions have 64 tokens, on every side.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

MODEL = "smollm2-135m-instruct"
RANK, TOKENS = 32, 64
CASES = {  # lengths of the prompts, completions of each, tokens of a completion
    "warm-up": ((16,), 2, 4),
    "W": ((37, 43, 49, 55, 60, 66, 72, 78), 8, TOKENS),
    "long": ((512,), 16, TOKENS),
}
TEXT = (
    "A library should be small enough to be read in an afternoon and right enough to be trusted for a year. Take the "
    "numbers below, add them one after the other, and say at each step what you have so far. When you are done, give "
    "the sum alone on the last line, so that anyone who checks it finds it at once. The numbers are "
)


def prompts(encode, lengths) -> list[np.ndarray]:
    """Prompts of exactly ``lengths`` tokens, those of one call all different from their first word on."""
    return [np.asarray(encode(f"{number} " + TEXT * 16))[:n] for number, n in enumerate(lengths, 10)]


def completion(vocab_size: int, seed: int) -> np.ndarray:
    """64 fixed tokens, so that all sides train on the same ones."""
    return np.random.default_rng(seed).integers(100, vocab_size - 100, TOKENS)


def texts(vocab_size: int, lengths) -> list[tuple[np.ndarray, np.ndarray]]:
    """A prompt and a completion of each of ``lengths``, fixed tokens."""
    draw = [np.random.default_rng(k).integers(100, vocab_size - 100, sum(pair)) for k, pair in enumerate(lengths)]
    return [(tokens[:prompt], tokens[prompt:]) for tokens, (prompt, _) in zip(draw, lengths, strict=True)]


def pairs(vocab_size: int, lengths) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two completions behind each prompt: (prompt, chosen, rejected) tokens, chosen and rejected in turn."""
    rows = []
    for k, (prompt, *completions) in enumerate(lengths):
        draw = np.random.default_rng(k)
        begin = draw.integers(100, vocab_size - 100, prompt)
        rows += [(begin, draw.integers(100, vocab_size - 100, n)) for n in completions]
    return rows


def cut(model: Path, folder: Path, kind: str, layers: int = 10, **settings) -> Path:
    """The first layers of a Llama as another architecture that reads the same weights."""
    import transformers

    source = transformers.AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
    shape = {
        name: value for name, value in source.config.to_dict().items() if name not in ("model_type", "layer_types")
    }
    config = transformers.AutoConfig.for_model(kind, **{**shape, "num_hidden_layers": layers, **settings})
    made = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    weights = {name: x for name, x in source.state_dict().items() if name in made.state_dict()}
    made.load_state_dict(weights, strict=True)
    made.save_pretrained(folder)
    for file in Path(model).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def advantage(seed: int) -> float:
    """Of a completion."""
    return float(np.random.default_rng(seed).normal())


def hybrid(folder: Path, tokenizer: Path) -> Path:
    """A model like Qwen3.5 with random weights: 6 layers of width 512, 4 of them linear attention."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).save_pretrained(folder)
    linear = {f"linear_num_{kind}_heads": 8 for kind in ("key", "value")}
    linear |= {f"linear_{kind}_head_dim": 128 for kind in ("key", "value")}
    config = transformers.AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=49152,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=[*["linear_attention"] * 3, "full_attention", "linear_attention", "full_attention"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **linear,
    )
    transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)
    return folder
