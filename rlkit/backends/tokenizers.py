"""Whether two models read the same tokens: a teacher, a critic and a policy have to."""

from __future__ import annotations

import numpy as np

from rlkit.backends.protocol import Tokenizer

__all__ = ["same_tokenizer"]

_PROBES = (
    "Hello, world! 12345 + 67.89 = ?\n\tdef f(x):\n        return x  # comment\n",
    "Übergröße, naïve café — “quotes” … 你好世界 \U0001f600 Привет مرحبا <think>\\boxed{1}</think>",
)


def same_tokenizer(one: Tokenizer, two: Tokenizer, *, ends: bool = True) -> str:
    """Return what tells two tokenizers apart, in words; "" where nothing does.

    Compared are how some texts in several scripts are encoded, the end tokens, and what a thousand ids decode to. Sizes
    of vocabularies are not: models of one family pad theirs differently.

    Args:
        one, two: the tokenizers.
        ends: whether the end tokens have to be the same.

    >>> import rlkit
    >>> same_tokenizer(rlkit.connect("toy").tokenizer, rlkit.connect("toy").tokenizer)
    ''
    """
    for text in _PROBES:
        if one.encode(text).tolist() != two.encode(text).tolist():
            return "encodes texts otherwise"
    if ends and set(one.eos_ids) != set(two.eos_ids):
        return f"has the end tokens {sorted(two.eos_ids)}, not {sorted(one.eos_ids)}"
    for token in np.unique(np.linspace(0, min(one.vocab_size, two.vocab_size) - 1, 1000).astype(int)).tolist():
        if one.decode([token], skip_special=False) != two.decode([token], skip_special=False):
            return f"has another text for token {token}"
    return ""
