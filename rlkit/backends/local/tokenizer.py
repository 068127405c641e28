"""The model's own tokenizer: see ``rlkit.backends.transformers_tokenizer``, which needs no torch."""

from __future__ import annotations

from rlkit.backends.transformers_tokenizer import LocalTokenizer

__all__ = ["LocalTokenizer"]
