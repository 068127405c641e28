"""Logprobs on the wire: of the chat API, of the completions API, and of vLLM's prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from rlkit.backends.protocol import Tokenizer
from rlkit.gateway.dialects.call import Json
from rlkit.gateway.dialects.spelling import spell
from rlkit.gateway.types import Choice, Reply

__all__ = ["chat_logprobs", "finite", "prompt_logprobs", "text_logprobs", "token_name"]

Top: TypeAlias = Sequence[Mapping[int, float]] | None


def finite(logprob: float) -> float:
    """Return a logprob as JSON can have it: -9999 for what has no probability, as vLLM writes it."""
    return max(float(logprob), -9999.0) if math.isfinite(logprob) else -9999.0


def token_name(token: int) -> str:
    """Return how vLLM names a token where its text would not tell which it is."""
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
        top: alternatives to each token; None: nobody asked.
        first: how many tokens at the beginning have nothing before them, and so no logprob: 1 of a prompt, else 0.
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
    """Return vLLM's ``prompt_logprobs``: per token, by id, None for the first; None where nobody asked."""
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
    """Return the place of a token among the most probable, from 1; None: it is not among them."""
    return next((i + 1 for i, (other, _) in enumerate(_ranked(top)) if other == token), None)
