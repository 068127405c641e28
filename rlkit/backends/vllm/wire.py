"""What is said on vLLM's wire: a request for samples or for logprobs, and what the answer to it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from rlkit._ratios import HIGHEST
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.vllm.client import Json, integers
from rlkit.errors import BackendError, UnsupportedError
from rlkit.types import Sample, SamplingParams

__all__ = ["read_samples", "read_scores", "sample_request", "score_request", "seed_of"]

Entries: TypeAlias = Mapping[str, Mapping[str, object]]

_HOTTEST = 2.0
_COLDEST = 0.01  # vLLM takes a lower temperature for this one


def seed_of(seed: int) -> int:
    """Return the number that a server's generator starts from.

    vLLM gives sample i of a request the seed + i, so that requests with seeds 1 and 2 would have all samples but one
    in common; these numbers are far apart.
    """
    word = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    return word >> 2  # and below 2**63 with every i


def sample_request(
    prompt: np.ndarray, params: SamplingParams, n: int, seed: int, max_tokens: int, tokenizer: Tokenizer
) -> dict[str, object]:
    """Return the body of a request for completions.

    Args:
        prompt: int64 [P].
        params: how they are drawn.
        n: how many.
        seed: of the request.
        max_tokens: that fit.
        tokenizer: for the end tokens.

    Raises:
        UnsupportedError: vLLM would sample otherwise than the params say.
    """
    if 0 < params.temperature < _COLDEST:
        raise UnsupportedError(f"sample(params): temperature={params.temperature}: vLLM has 0, and {_COLDEST} or more")
    if params.temperature > _HOTTEST:
        raise UnsupportedError(f"sample(params): temperature={params.temperature}: vLLM has {_HOTTEST:g} at most")
    how: dict[str, object] = {
        "n": n,
        "seed": seed_of(seed),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logprobs": 0,  # of the sampled tokens, and no alternatives
        "skip_special_tokens": False,  # stop texts may have them
        "ignore_eos": params.stop == (),
    }
    if params.truncates:
        how |= {"top_p": params.top_p, "top_k": max(params.top_k, 0), "min_p": params.min_p}
    if params.stop != ():
        ids = [x for x in params.stop or () if isinstance(x, int)]
        how["stop_token_ids"] = list(dict.fromkeys([*ids, *tokenizer.eos_ids]))
        how["stop"] = [x for x in params.stop or () if isinstance(x, str)]
    return {"token_ids": prompt.tolist(), "sampling_params": how}


def score_request(tokens: np.ndarray, top: int) -> dict[str, object]:
    """Return the body of a request for the logprobs of ``tokens`` [T] themselves, and of the ``top`` best beside."""
    how = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}  # one token is always sampled
    return {"token_ids": tokens.tolist(), "sampling_params": how}


def read_samples(
    answer: Json, where: str, prompt: np.ndarray, params: SamplingParams, n: int, version: int, vocab_size: int
) -> list[Sample]:
    """Return the completions that an answer holds.

    Raises:
        BackendError: it is not the answer to such a request.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != n:
        raise BackendError(f"{where}: {len(choices) if isinstance(choices, list) else 'no'} choices; expected {n}")
    samples: list[Sample | None] = [None] * n
    for choice in cast("list[Json]", choices):
        index = choice.get("index")
        tokens = integers(choice.get("token_ids"), f"{where}: token_ids")
        if max(tokens, default=0) >= vocab_size:
            raise BackendError(f"{where}: token {max(tokens)}; the tokenizer has {vocab_size}: it is another model's")
        content = (choice.get("logprobs") or {}).get("content")  # type: ignore[attr-defined]
        logprobs = [_logprob(entry, where) for entry in content or ()]
        reason = choice.get("finish_reason")
        if not isinstance(index, int) or not 0 <= index < n or len(logprobs) != len(tokens):
            raise BackendError(f"{where}: choice {index!r} has {len(tokens)} tokens and {len(logprobs)} logprobs")
        if reason not in ("stop", "length"):
            raise BackendError(f"{where}: a completion ended by {reason!r}; expected 'stop' or 'length'")
        if max(logprobs, default=0.0) > HIGHEST:
            what = f"choice {index} has the logprob {max(logprobs)}, and a logprob is at most 0"
            raise BackendError(f"{where}: {what}; start the server with --logprobs-mode processed_logprobs")
        array = np.minimum(np.array(logprobs, np.float32), 0.0)
        samples[index] = Sample(prompt, tokens, array, reason, **params.drawn_with, version=version)
    if any(sample is None for sample in samples):
        raise BackendError(f"{where}: two choices have one index")
    return cast("list[Sample]", samples)


def read_scores(answer: Json, where: str, tokens: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logprobs float32 [T] of the tokens themselves, and ids int64 and logprobs float32 [T, top] of the best.

    Raises:
        BackendError: it is not the answer to such a request.
    """
    rows = answer.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != tokens.size:
        raise BackendError(f"{where}: prompt_logprobs are not there for each of {tokens.size} tokens")
    logprobs, ids = np.zeros(tokens.size, np.float32), np.zeros((tokens.size, top), np.int64)
    best = np.zeros((tokens.size, top), np.float32)
    for i, row in enumerate(cast("Sequence[Entries]", rows[1:]), 1):
        entry = row.get(str(tokens[i]))
        if entry is None:
            raise BackendError(f"{where}: prompt_logprobs[{i}] has no token {tokens[i]}, which stands there")
        logprobs[i] = _logprob(entry, where)
        ranked = sorted(((_logprob(entry, where), int(token)) for token, entry in row.items()), key=lambda x: -x[0])
        if len(ranked) < top:
            raise BackendError(f"{where}: prompt_logprobs[{i}] has {len(ranked)} alternatives; expected {top}")
        for k, (value, token) in enumerate(ranked[:top]):
            best[i, k], ids[i, k] = value, token
    return logprobs, ids, best


def _logprob(entry: object, where: str) -> float:
    value = entry.get("logprob") if isinstance(entry, Mapping) else None
    if not isinstance(value, (int, float)):
        raise BackendError(f"{where}: {str(entry)[:100]} is no logprob")
    return float(value)
