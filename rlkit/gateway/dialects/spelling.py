"""Tokens as text, one by one or in pieces, so that what is joined again is the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import attrs
import numpy as np

from rlkit.backends.protocol import Tokenizer
from rlkit.gateway.types import Choice

__all__ = ["Kind", "Part", "matched_stop", "parts", "pieces", "reasoning_tokens", "spell"]

Kind: TypeAlias = Literal["reasoning", "content", "call"]

_MOST = 32  # parts of a stream: a client sees it grow, and a long answer costs no more events than a short one
_WINDOW = 32  # tokens; garbage that never ends in a whole character is not held back for longer


def spell(
    tokenizer: Tokenizer, tokens: np.ndarray, cuts: Sequence[int] | None = None, *, skip_special: bool = False
) -> list[str]:
    """Return the text that each token, or each piece of them, adds.

    A character of several tokens belongs to the last of them: the others add nothing.

    Args:
        tokenizer: of the policy.
        tokens: int64 [n].
        cuts: where pieces end, ascending, the last is n; None: after every token.
        skip_special: leave control tokens out.

    >>> from rlkit.backends.toy.tokenizer import ByteTokenizer
    >>> spell(ByteTokenizer(), np.array([*"aé".encode(), 257]))
    ['a', '', 'é', '<|im_end|>']
    """
    texts: list[str] = []
    start, written = 0, ""  # what tokens[start:] have given so far
    ends = range(1, tokens.size + 1) if cuts is None else cuts
    for end in ends:
        now = tokenizer.decode(tokens[start:end], skip_special)
        held = now.endswith("\ufffd") and end < tokens.size and end - start < _WINDOW
        whole = now[:-1] if held else now
        texts.append(whole[len(written) :])
        if held:
            written = max(written, whole, key=len)
        else:  # the last token stays as context: some tokenizers drop the space of a first one
            start = end - 1
            written = tokenizer.decode(tokens[start:end], skip_special)
    return texts


@attrs.frozen
class Part:
    """A part of a streamed answer.

    Attributes:
        kind: what ``text`` belongs to.
        text: the next characters of the reasoning, the content, or a call's arguments.
        call: which call.
        tokens: those of the sample that are reported with it; the slices of all parts are the sample.
    """

    kind: Kind
    text: str
    call: int
    tokens: slice


def parts(choice: Choice, tokenizer: Tokenizer, arguments: Sequence[str]) -> list[Part]:
    """Return a choice in parts, at least one; ``arguments`` are the JSON texts of its calls.

    Where the content is all that was said, each part is what its tokens spell. Otherwise markers and calls stand
    between the texts, and the tokens are dealt out evenly, in order.
    """
    n = choice.sample.tokens.size
    if choice.reasoning is None and not choice.calls and choice.content == choice.text:
        cuts = sorted({n * (i + 1) // _MOST for i in range(_MOST)} - {0}) or [0]
        texts = spell(tokenizer, choice.sample.tokens, cuts, skip_special=True) if n else [""]
        texts = _clipped(texts, choice.text)
        if "".join(texts) == choice.text:
            starts = [0, *cuts[:-1]]
            return [Part("content", text, 0, slice(a, b)) for text, a, b in zip(texts, starts, cuts, strict=True)]
    said: list[tuple[Kind, str, int]] = [("reasoning", text, 0) for text in pieces(choice.reasoning or "")]
    said += [("content", text, 0) for text in pieces(choice.content)]
    said += [("call", text, i) for i, whole in enumerate(arguments) for text in pieces(whole) or [""]]
    said = said or [("content", "", 0)]
    bounds = [n * i // len(said) for i in range(len(said) + 1)]
    return [Part(*each, slice(bounds[i], bounds[i + 1])) for i, each in enumerate(said)]


def pieces(text: str) -> list[str]:
    """Return a text in at most 16 pieces, none of them empty.

    >>> pieces("reinforcement")
    ['reinforc', 'ement']
    """
    size = max(8, -(-len(text) // 16))
    return [text[i : i + size] for i in range(0, len(text), size)]


def matched_stop(choice: Choice, tokenizer: Tokenizer, stops: Sequence[str] | Sequence[int]) -> str | int | None:
    """Return which of ``stops``, texts or token ids, ended a choice; None: none of them."""
    tokens = choice.sample.tokens
    if choice.sample.stop_reason != "stop" or not tokens.size:
        return None
    spoken = tokenizer.decode(tokens)  # what a prefill began is in the text, and not in the tokens
    told = next(k for k in range(min(len(spoken), len(choice.text)), -1, -1) if choice.text.endswith(spoken[:k]))
    behind = spoken[told:]
    raw = tokenizer.decode(tokens[-1:], skip_special=False)
    for stop in stops:
        if isinstance(stop, str) and (stop in behind or stop == raw):
            return stop
        if isinstance(stop, int) and stop == int(tokens[-1]):
            return stop
    return None


def reasoning_tokens(choice: Choice, tokenizer: Tokenizer) -> int:
    """Return how many tokens a choice begins with until all of its reasoning is said."""
    if not choice.reasoning:
        return 0
    texts = spell(tokenizer, choice.sample.tokens)
    end = "".join(texts).find(choice.reasoning) + len(choice.reasoning)
    ends = np.cumsum([len(text) for text in texts])
    return min(int(np.searchsorted(ends, end)) + 1, len(texts))


def _clipped(texts: Sequence[str], whole: str) -> list[str]:
    """Return the texts without what goes beyond ``whole``: the text that ended it."""
    left, clipped = len(whole), []
    for text in texts:
        clipped.append(text[:left])
        left -= len(clipped[-1])
    return clipped
