"""The common part of samplers: check requests, and recognise the end of a completion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._check import TokenIds
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import DataError, UnsupportedError
from rlkit.types import OPTIONAL_OPTIONS, SAMPLING_OPTIONS, SamplingParams

__all__ = ["Stop", "check_mask", "check_prompt", "check_request", "check_targets", "round_up"]


def check_prompt(where: str, tokens: TokenIds, vocab_size: int, max_length: int) -> np.ndarray:
    """Return int64 [1 <= P <= max_length], or a DataError naming the index."""
    array = _check.token_ids(where, tokens, vocab_size=vocab_size, low_length=1)
    if array.size > max_length:
        raise DataError(where, f"has {array.size} tokens", f"at most {max_length}", "the model's context")
    return array


def check_request(
    prompt: TokenIds,
    params: SamplingParams,
    n: int,
    seed: int | None,
    *,
    vocab_size: int,
    max_length: int,
    lacks: Collection[str] = (),
) -> np.ndarray:
    """Return the prompt, after all of ``sample``'s arguments were checked.

    Args:
        prompt, params, n, seed: as in ``Sampler.sample``.
        vocab_size, max_length: of the model.
        lacks: the options that this sampler lacks: "min_p", "repetition_penalty", ...

    Raises:
        DataError, ConfigError: an argument is of the wrong type or out of range.
        UnsupportedError: the params use an option that it lacks.
    """
    _check.require(isinstance(params, SamplingParams), "sample(params)", params, "rlkit.SamplingParams(...)")
    for name in lacks:
        value = getattr(params, name)
        if value != OPTIONAL_OPTIONS[name]:
            there = ", ".join(x for x in (*SAMPLING_OPTIONS, "stop") if x not in lacks)
            raise UnsupportedError(f"sample(params): {name}={value}: this sampler has no such option; it has {there}")
    _check.integer("sample(n)", n, low=1, why="the number of completions")
    _check.optional(_check.integer, "sample(seed)", seed, low=0)
    if params.stop and not isinstance(params.stop[0], str):
        _check.token_ids("SamplingParams.stop", params.stop, vocab_size=vocab_size)
    array = check_prompt("sample(prompt)", prompt, vocab_size, max_length)
    if array.size == max_length:
        what = f"has {array.size} tokens, which fill the model's context"
        raise DataError("sample(prompt)", what, f"at most {max_length - 1}", "leave room for one token")
    return array


def check_targets(targets: ArrayLike, size: int, vocab_size: int) -> np.ndarray:
    """Return the targets of ``target_logprobs`` as int64 [size, K].

    Raises:
        DataError: another shape, or ids outside of the vocabulary that are not -1.
    """
    where = "target_logprobs(targets)"
    array = _check.as_array(where, targets, "int [T, K]")
    if array.dtype.kind != "i" or array.ndim != 2 or len(array) != size or array.shape[1] == 0:
        raise DataError(where, f"is {_check.describe(array)}", f"int [{size}, K]")
    if array.max() >= vocab_size or array.min() < -1:
        raise DataError(where, f"spans [{array.min()}, {array.max()}]", "ids of the vocabulary, or -1 for none")
    return np.ascontiguousarray(array, np.int64)


def check_mask(mask: ArrayLike, size: int) -> np.ndarray:
    """Return the mask of ``masked_logprobs`` as bool [size].

    Raises:
        DataError: another shape, or other numbers than 0 and 1.
    """
    where = "masked_logprobs(mask)"
    array = _check.as_array(where, mask, "bool [T]")
    if array.shape != (size,) or array.dtype.kind not in "biu" or not np.isin(array, (0, 1)).all():
        raise DataError(where, f"is {_check.describe(array)}", f"bool [{size}]", "one for each token")
    return array.astype(bool)


# The characters of each tokenizer's tokens, as far as they are known, for all requests.
_CHARACTERS: WeakKeyDictionary[Tokenizer, dict[int, frozenset[str]]] = WeakKeyDictionary()


class Stop:
    """Recognise the end of a completion.

    Text is decoded only after a token that may complete a stop string: one whose text has the last character of such
    a string, or a part of a character's bytes; or the token after such a one, since some tokenizers write the space
    that ends a word once another token follows.

    Args:
        stop: as in ``SamplingParams``.
        tokenizer: for the end tokens and for text.
    """

    def __init__(self, stop: tuple[str, ...] | tuple[int, ...] | None, tokenizer: Tokenizer) -> None:
        ids = [x for x in stop or () if isinstance(x, int)]
        self._ids = frozenset(ids) if stop == () else frozenset([*ids, *tokenizer.eos_ids])
        self._texts = [x for x in stop or () if isinstance(x, str)]
        self._ends = {"\ufffd", *(x[-1] for x in self._texts)}
        # The rest is for tokens that join differently at the start of a text.
        self._longest = max(map(len, self._texts), default=0) + 8
        self._tokenizer = tokenizer
        try:
            self._known = _CHARACTERS.setdefault(tokenizer, {})
        except TypeError:  # a tokenizer that has no hash, or takes no weak references
            self._known = {}

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of ``tokens`` ends the completion."""
        last = tokens[-1]
        if last in self._ids:
            return True
        if not self._texts or all(self._ends.isdisjoint(self._characters(token)) for token in tokens[-2:]):
            return False
        window = self._longest
        text = self._tokenizer.decode(tokens[-window:], skip_special=False)
        while len(text) < self._longest and window < len(tokens):  # tokens of parts of a character, or of no text
            window *= 2
            text = self._tokenizer.decode(tokens[-window:], skip_special=False)
        return any(x in text for x in self._texts)

    def _characters(self, token: int) -> frozenset[str]:
        """Return the characters that a token adds to a text: of two in a row, since the first may lose its space."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = frozenset(self._tokenizer.decode([token, token], skip_special=False))
        return found


def round_up(x: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is >= x."""
    return -(-x // multiple) * multiple
