"""Rewards of an answer's form: repeated n-grams, and thinking that stands where it should."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from rlkit import _check
from rlkit._calls import answered
from rlkit.errors import ConfigError, DataError

__all__ = ["repetition_penalty", "think_format"]


@answered
def repetition_penalty(
    tokens: Sequence[Sequence[Hashable] | np.ndarray], *, ngram: int = 3, factor: float = 1.0
) -> np.ndarray:
    """Return the penalty of answers that repeat themselves, to be added: -factor (1 - unique / all n-grams).

    Args:
        tokens: token ids of each answer: a list of [n_i], or [N, n]. Lists of words work too.
        ngram: >= 1, how many tokens make an n-gram.
        factor: >= 0, the penalty of an answer that is one n-gram repeated for ever.

    Returns:
        float64 [N] in [-factor, 0]; 0 for answers of fewer than ``ngram`` tokens.

    Raises:
        DataError: tokens are no list of sequences.
        ConfigError: a setting is out of range.

    >>> repetition_penalty([[1, 2, 3, 4], [5, 5, 5, 5, 5]], ngram=2)  # 3 of 3 bigrams are unique, and 1 of 4
    array([ 0.  , -0.75])

    Source: "Demystifying long chain-of-thought reasoning", arXiv:2502.03373, appendix C.2. Peers: TRL's
    repetition_penalty_reward, whose max_penalty is -factor; open-r1 counts words.
    """
    ngram = _check.integer("ngram", ngram, low=1)
    factor = _check.real("factor", factor, low=0.0)
    rows = _each("tokens", tokens, "one sequence of token ids per answer")
    return np.array([0.0 - factor * _repeated(row, ngram) for row in rows])


@answered
def think_format(
    texts: Sequence[str], *, tags: tuple[str, str] = ("<think>", "</think>"), opened: bool = False
) -> np.ndarray:
    """1 for texts that begin with one block of thinking that ends, 0 for the others.

    Args:
        texts: the answers, with their tags.
        tags: how a block begins and ends.
        opened: whether the prompt ends with the opening tag already, as many chat templates do; it may not stand in
            the text again then.

    Returns:
        float64 [N].

    Raises:
        DataError: texts are no list of strings.
        ConfigError: tags are not two texts.

    >>> think_format(["<think>2 + 2 is 4</think>4", "<think>for ever", "so <think>late</think>4"])
    array([1., 0., 0.])
    >>> think_format(["2 + 2 is 4</think>4"], opened=True)
    array([1.])

    Source: none of its own; TRL's think_format_reward.
    """
    opened = _check.flag("opened", opened)
    if len(tags) != 2 or isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in tags):
        raise ConfigError("tags", f"got {_check.shown(tags)}", "two texts, how a block begins and ends")
    begin, end = tags
    scores = []
    for i, text in enumerate(_each("texts", texts, "one text per answer")):
        if not isinstance(text, str):
            raise DataError(f"texts[{i}]", f"is {_check.shown(text)}", "a text")
        begins = opened or text.startswith(begin)
        scores.append(float(begins and text.count(begin) == (not opened) and end in text))
    return np.array(scores)


def _each(where: str, value: Any, expected: str) -> list[Any]:
    rows = [] if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") else list(value)
    if not rows or not all(hasattr(row, "__len__") for row in rows):
        raise DataError(where, f"got {_check.shown(value)}", f"a list of at least one: {expected}")
    return rows


def _repeated(row: Sequence[Hashable], ngram: int) -> float:
    items = row.tolist() if isinstance(row, np.ndarray) else list(row)
    grams = list(zip(*(islice(items, i, None) for i in range(ngram)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
