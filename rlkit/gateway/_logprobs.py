"""Logprobs of a completion and of its prompt: asked of the sampler, and as the APIs write them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import attrs
import numpy as np

from rlkit.backends.protocol import PromptLogprobs, Sampler, Tokenizer, TopK
from rlkit.errors import DataError, RlkitError
from rlkit.futures import Future
from rlkit.gateway._types import Choice, GatewayError, Json, Reply, Request

__all__ = ["add_logprobs", "chat_logprobs", "decode_each", "find_matched_stop", "prompt_logprobs", "text_logprobs"]

_WINDOW = 32  # tokens; bytes that never complete a character are not held back for longer
T = TypeVar("T")


async def add_logprobs(sampler: Sampler, request: Request, reply: Reply) -> Reply:
    """Return the reply with the requested logprobs and alternatives: the policy's own, at temperature 1.

    If a prompt needs the same number of alternatives as its completions (as in lm-eval's requests), one pass scores
    both.

    Raises:
        GatewayError: 400 where the sampler gives no alternatives or refuses the tokens, 503 where it fails.
    """
    size, k, of_prompt = int(reply.prompt.size), request.top_logprobs or 0, request.prompt_logprobs
    shared = k > 0 and of_prompt == k
    logprobs: np.ndarray | None = None
    top: Sequence[Mapping[int, float]] | None = None
    if of_prompt is not None and not shared:
        logprobs = await _wait(lambda: sampler.logprobs(reply.prompt))
        top = await _find_alternatives(sampler, reply.prompt, of_prompt) if of_prompt else None
    choices = list(reply.choices)
    for i, choice in enumerate(choices if k else ()):
        text = np.concatenate([reply.prompt, choice.sample.tokens])
        if shared and i == 0:
            logprobs, rows = await _score_with_alternatives(sampler, text, k)
            logprobs, top = logprobs[:size], rows[:size]
        else:
            rows = await _find_alternatives(sampler, text, k)
        choices[i] = attrs.evolve(choice, top=rows[size:])
    return attrs.evolve(reply, choices=choices, prompt_logprobs=logprobs, prompt_top=top)


async def _score_with_alternatives(
    sampler: Sampler, tokens: np.ndarray, k: int
) -> tuple[np.ndarray, list[Mapping[int, float]]]:
    """Return each token's own logprob [T] and its alternatives, in one pass where the sampler supports it."""
    if not isinstance(sampler, PromptLogprobs):
        return await _wait(lambda: sampler.logprobs(tokens)), await _find_alternatives(sampler, tokens, k)
    logprobs, ids, best = await _wait(lambda: sampler.prompt_logprobs(tokens, k))
    return logprobs, _by_id(ids, best)


async def _find_alternatives(sampler: Sampler, tokens: np.ndarray, k: int) -> list[Mapping[int, float]]:
    """Return ``k`` alternatives for each token, id -> logprob, the most probable first."""
    if not isinstance(sampler, TopK):
        what = "this policy's sampler does not support top_logprobs"
        raise GatewayError(400, f"{what}; ask for logprobs without top_logprobs", param="top_logprobs")
    return _by_id(*await _wait(lambda: sampler.top_logprobs(tokens, k)))


async def _wait(submit: Callable[[], Future[T]]) -> T:
    try:
        return await (await asyncio.to_thread(submit))
    except DataError as error:
        raise GatewayError(400, str(error)) from error
    except RlkitError as error:
        raise GatewayError(503, f"the policy cannot be scored: {error}", code="sampler") from error


def _by_id(ids: np.ndarray, logprobs: np.ndarray) -> list[Mapping[int, float]]:
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]


def decode_each(tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
    """Return the text that each token adds, control tokens included.

    A character of several tokens belongs to the last of them: the others add nothing.

    >>> from rlkit.backends.tokenizers import ByteTokenizer
    >>> decode_each(ByteTokenizer(), np.array([*"aé".encode(), 257]))
    ['a', '', 'é', '<|im_end|>']
    """
    texts: list[str] = []
    start, written = 0, ""  # what tokens[start:] have given so far
    for end in range(1, tokens.size + 1):
        now = tokenizer.decode(tokens[start:end], skip_special=False)
        held = now.endswith("\ufffd") and end < tokens.size and end - start < _WINDOW
        whole = now[:-1] if held else now
        texts.append(whole[len(written) :])
        if held:
            written = max(written, whole, key=len)
        else:  # the last token stays as context: some tokenizers drop the space of a first one
            start = end - 1
            written = tokenizer.decode(tokens[start:end], skip_special=False)
    return texts


def find_matched_stop(choice: Choice, tokenizer: Tokenizer, stops: Sequence[str] | Sequence[int]) -> str | int | None:
    """Return which of ``stops``, texts or token ids, ended a choice; None: none of them."""
    tokens = choice.sample.tokens
    if choice.sample.stop_reason != "stop" or not tokens.size:
        return None
    spoken = tokenizer.decode(tokens)  # a prefill is in the text, and not in the tokens
    told = next(k for k in range(min(len(spoken), len(choice.text)), -1, -1) if choice.text.endswith(spoken[:k]))
    raw = tokenizer.decode(tokens[-1:], skip_special=False)
    for stop in stops:
        if stop == int(tokens[-1]) or (isinstance(stop, str) and (stop in spoken[told:] or stop == raw)):
            return stop
    return None


def to_json_logprob(logprob: float) -> float:
    """Return a logprob as valid JSON: -9999 for probability 0, as vLLM writes it."""
    return max(float(logprob), -9999.0) if math.isfinite(logprob) else -9999.0


def chat_logprobs(choice: Choice, tokenizer: Tokenizer) -> list[Json]:
    """Return one entry per token of a choice, the end token included.

    A character of several tokens is the text of the last, and has no bytes.
    """

    def entry(text: str, logprob: float) -> Json:
        spelled = None if not text or "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": to_json_logprob(logprob), "bytes": spelled}

    tokens, entries = choice.sample.tokens, []
    for i, text in enumerate(decode_each(tokenizer, tokens)):
        best = [] if choice.top is None else [entry(_name(tokenizer, x), value) for x, value in _ranked(choice.top[i])]
        entries.append({**entry(text, float(choice.sample.logprobs[i])), "top_logprobs": best})
    return entries


def text_logprobs(
    tokenizer: Tokenizer,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    top: Sequence[Mapping[int, float]] | None,
    *,
    first: int = 0,
) -> dict[str, list[object] | None]:
    """Return the logprobs object of the completions API.

    Args:
        tokenizer: spells tokens.
        tokens: int64 [n].
        logprobs: float32 [n].
        top: alternatives to each token; None: not requested.
        first: how many tokens at the beginning have no predecessor, and so no logprob: 1 for a prompt, else 0.
    """
    texts = decode_each(tokenizer, tokens)
    offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
    values: list[object] = [to_json_logprob(x) for x in logprobs.tolist()]
    best: list[object] | None = None
    if top is not None:
        best = []
        for token, logprob, alternatives in zip(tokens.tolist(), logprobs.tolist(), top, strict=True):
            named: Json = {}
            for other, value in _ranked({**alternatives, token: logprob}):
                named.setdefault(_name(tokenizer, other), to_json_logprob(value))  # of one text the more probable
            best.append(named)
        best[:first] = [None] * first
    values[:first] = [None] * first
    return {"tokens": [*texts], "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}


def prompt_logprobs(reply: Reply, tokenizer: Tokenizer) -> list[Json | None] | None:
    """Return vLLM's ``prompt_logprobs``: per token, by id, None for the first; None where not requested."""
    if reply.prompt_logprobs is None:
        return None
    rows: list[Json | None] = [None]
    for i in range(1, reply.prompt.size):
        top = {} if reply.prompt_top is None else reply.prompt_top[i]
        ranks = {token: rank for rank, (token, _) in enumerate(_ranked(top), 1)}
        row: Json = {}
        for token, value in {int(reply.prompt[i]): float(reply.prompt_logprobs[i]), **top}.items():
            about = {"logprob": to_json_logprob(value), "rank": ranks.get(token)}
            row[str(token)] = {**about, "decoded_token": _name(tokenizer, token)}
        rows.append(row)
    return rows


def _name(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special=False)


def _ranked(values: Mapping[int, float]) -> list[tuple[int, float]]:
    return sorted(values.items(), key=lambda each: -each[1])
