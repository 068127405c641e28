"""Tokens as text, and logprobs on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import attrs
import numpy as np

from rlkit.backends.protocol import Tokenizer
from rlkit.gateway.dialects.body import Json
from rlkit.gateway.types import Choice, Reply

__all__ = ["Part", "chat_logprobs", "matched_stop", "parts", "prompt_logprobs", "reasoning_tokens", "text_logprobs"]

Kind: TypeAlias = Literal["reasoning", "content", "call"]

_MOST = 32  # parts of a stream: a client sees it grow, and a long answer costs no more events than a short one
_WINDOW = 32  # tokens; bytes that never complete a character are not held back for longer


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

    >>> from rlkit.backends.tokenizers import ByteTokenizer
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
        kind: the kind of ``text``.
        text: the next characters of the reasoning, the content, or a call's arguments.
        call: which call.
        tokens: the sample's tokens that are reported with it; the slices of all parts make the sample.
    """

    kind: Kind
    text: str
    call: int
    tokens: slice


def parts(choice: Choice, tokenizer: Tokenizer, arguments: Sequence[str]) -> list[Part]:
    """Return a choice in parts, at least one; ``arguments`` are the JSON texts of its calls.

    If the content is the whole text, each part is the text of its tokens. Otherwise markers and calls are between
    the texts, and the tokens are distributed evenly, in order.
    """
    if choice.reasoning is None and not choice.calls and choice.content == choice.text:
        whole = _split_text(choice, tokenizer)
        if "".join(part.text for part in whole) == choice.text:
            return whole
    n = choice.sample.tokens.size
    said: list[tuple[Kind, str, int]] = [("reasoning", text, 0) for text in pieces(choice.reasoning or "")]
    said += [("content", text, 0) for text in pieces(choice.content)]
    said += [("call", text, i) for i, whole in enumerate(arguments) for text in pieces(whole) or [""]]
    said = said or [("content", "", 0)]
    bounds = [n * i // len(said) for i in range(len(said) + 1)]
    return [Part(*each, slice(bounds[i], bounds[i + 1])) for i, each in enumerate(said)]


def _split_text(choice: Choice, tokenizer: Tokenizer) -> list[Part]:
    """Return the parts of a choice's text, each of them the text of its tokens, without the stop text."""
    n, left = choice.sample.tokens.size, len(choice.text)
    cuts = sorted({n * (i + 1) // _MOST for i in range(_MOST)} - {0}) or [0]
    texts = spell(tokenizer, choice.sample.tokens, cuts, skip_special=True) if n else [""]
    made = []
    for text, start, end in zip(texts, [0, *cuts[:-1]], cuts, strict=True):
        made.append(Part("content", text[:left], 0, slice(start, end)))
        left -= len(made[-1].text)
    return made


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
    spoken = tokenizer.decode(tokens)  # a prefill is in the text, and not in the tokens
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
    """Return how many of a choice's first tokens hold its reasoning."""
    if not choice.reasoning:
        return 0
    texts = spell(tokenizer, choice.sample.tokens)
    end = "".join(texts).find(choice.reasoning) + len(choice.reasoning)
    ends = np.cumsum([len(text) for text in texts])
    return min(int(np.searchsorted(ends, end)) + 1, len(texts))


Top: TypeAlias = Sequence[Mapping[int, float]] | None


def finite(logprob: float) -> float:
    """Return a logprob as valid JSON: -9999 for probability 0, as vLLM writes it."""
    return max(float(logprob), -9999.0) if math.isfinite(logprob) else -9999.0


def token_name(token: int) -> str:
    """Return how vLLM names a token where its text would be ambiguous."""
    return f"token_id:{token}"


def _namer(tokenizer: Tokenizer, as_ids: bool) -> Callable[[int], str]:
    return token_name if as_ids else lambda token: tokenizer.decode([token], skip_special=False)


def chat_logprobs(choice: Choice, tokenizer: Tokenizer, *, as_ids: bool, ids: bool = False) -> list[Json]:
    """Return one entry per token of a choice, the end token included.

    Args:
        choice: what was sampled.
        tokenizer: spells tokens; a character of several tokens is the text of the last, and has no bytes.
        as_ids: name tokens by their ids instead.
        ids: add ``token_id`` to each entry, as vLLM's generate endpoint has it.
    """
    tokens = choice.sample.tokens
    texts = [token_name(token) for token in tokens.tolist()] if as_ids else spell(tokenizer, tokens)
    name = _namer(tokenizer, as_ids)

    def entry(text: str, token: int, logprob: float) -> Json:
        return {
            "token": text,
            **({"token_id": token} if ids else {}),
            "logprob": finite(logprob),
            "bytes": None if as_ids or not text or "\ufffd" in text else list(text.encode()),
        }

    entries = []
    for i, (text, token) in enumerate(zip(texts, tokens.tolist(), strict=True)):
        best = [] if choice.top is None else [entry(name(x), x, value) for x, value in _ranked(choice.top[i])]
        entries.append({**entry(text, token, float(choice.sample.logprobs[i])), "top_logprobs": best})
    return entries


def text_logprobs(
    tokenizer: Tokenizer, tokens: np.ndarray, logprobs: np.ndarray, top: Top, *, first: int = 0, as_ids: bool = False
) -> dict[str, list[object] | None]:
    """Return the logprobs object of the completions API.

    Args:
        tokenizer: spells tokens.
        tokens: int64 [n].
        logprobs: float32 [n].
        top: alternatives to each token; None: not requested.
        first: how many tokens at the beginning have no predecessor, and so no logprob: 1 for a prompt, else 0.
        as_ids: name tokens by their ids instead of their texts.
    """
    ids = tokens.tolist()
    texts = [token_name(token) for token in ids] if as_ids else spell(tokenizer, tokens)
    offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
    values: list[object] = [finite(x) for x in logprobs.tolist()]
    best: list[object] | None = None
    if top is not None:
        name = _namer(tokenizer, as_ids)
        best = []
        for i, alternatives in enumerate(top):
            named: Json = {}
            for token, value in _ranked({**alternatives, ids[i]: float(logprobs[i])}):
                named.setdefault(name(token), finite(value))  # two tokens of one text: the more probable
            best.append(named)
        best[:first] = [None] * first
    values[:first] = [None] * first
    return {"tokens": [*texts], "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}


def prompt_logprobs(reply: Reply, tokenizer: Tokenizer) -> list[Json | None] | None:
    """Return vLLM's ``prompt_logprobs``: per token, by id, None for the first; None where not requested."""
    if reply.prompt_logprobs is None:
        return None
    name = _namer(tokenizer, as_ids=False)
    rows: list[Json | None] = [None]
    for i in range(1, reply.prompt.size):
        top = {} if reply.prompt_top is None else reply.prompt_top[i]
        row: Json = {}
        for token, value in {int(reply.prompt[i]): float(reply.prompt_logprobs[i]), **top}.items():
            row[str(token)] = {"logprob": finite(value), "rank": _rank(token, top), "decoded_token": name(token)}
        rows.append(row)
    return rows


def _ranked(values: Mapping[int, float]) -> list[tuple[int, float]]:
    return sorted(values.items(), key=lambda each: -each[1])


def _rank(token: int, top: Mapping[int, float]) -> int | None:
    """Return the place of a token among the most probable, from 1; or None."""
    return next((i + 1 for i, (other, _) in enumerate(_ranked(top)) if other == token), None)
