"""Workload W: 8 prompts of 37 to 78 tokens, 8 completions of 64 tokens each, on SmolLM2-135M-Instruct, LoRA rank 32."""

from __future__ import annotations

import numpy as np

MODEL = "smollm2-135m-instruct"
RANK, GROUP, TOKENS = 32, 8, 64
LENGTHS = (37, 43, 49, 55, 60, 66, 72, 78)
TEXT = (
    "A library should be small enough to be read in an afternoon and right enough to be trusted for a year. Take the "
    "numbers below, add them one after the other, and say at each step what you have so far. When you are done, give "
    "the sum alone on the last line, so that anyone who checks it finds it at once. The numbers are "
)


def prompts(tokenizer) -> list[np.ndarray]:
    """Eight prompts of exactly ``LENGTHS`` tokens, all different from their first word on."""
    words = ["Today", "Now", "Here", "Please", "First", "Then", "Next", "Last"]
    return [np.asarray(tokenizer.encode(word + " " + TEXT))[:n] for word, n in zip(words, LENGTHS, strict=True)]


def completions(vocab_size: int) -> list[np.ndarray]:
    """64 completions of 64 fixed tokens, so that both sides train on the same ones."""
    rng = np.random.default_rng(0)
    return [rng.integers(100, vocab_size - 100, TOKENS) for _ in range(len(LENGTHS) * GROUP)]


def advantages() -> np.ndarray:
    """One advantage per completion."""
    return np.random.default_rng(1).normal(size=len(LENGTHS) * GROUP)
