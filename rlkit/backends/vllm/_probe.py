"""Whether a server samples the policy that is trained: a few logprobs of both, at every change of version."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import attrs
import numpy as np

from rlkit.backends.protocol import Tokenizer
from rlkit.backends.samplers import TrainerLogprobs
from rlkit.backends.vllm._client import Json, read_samples, read_scores, sample_request, score_request
from rlkit.errors import BackendError
from rlkit.types import SamplingParams

__all__ = ["TEXTS", "Ask", "Probe", "check_logprobs_mode", "different_tokenizer", "differing_scores"]

Ask: TypeAlias = Callable[[Json], Awaitable[Json]]
"""Return the answer to a request of one model at one server."""

_TEXT = "The answer is 42, since 6 * 7 = 42. Next question: why is the sky blue? It scatters"
# A server's tokenizer is compared by these.
TEXTS = ("Hello, world! 12345 + 67.89 = ?\n\tdef f(x):\n        return x\n", "Übergröße, naïve café 你好世界")
_LENGTH = 24  # tokens
_TEMPERATURE = 0.7  # of what is sampled
_ALIKE = 0.03  # nats on average by which one policy's logprobs may differ between decoding and prompts, in bfloat16
_REMEDY = "start the server with --logprobs-mode processed_logprobs"
_SCALES = (0.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0)


@attrs.frozen(eq=False)
class Seen:
    """What a server gave.

    Attributes:
        scored: float32 [T], logprobs of the probe's text.
        text: int64 [P + n], a prompt and what it sampled.
        sampled: float32 [n], the logprobs that it reported, at temperature 0.7.
    """

    scored: np.ndarray
    text: np.ndarray
    sampled: np.ndarray


class Probe:
    """Compares servers with a trainer.

    Args:
        trainer: its logprobs.
        tokenizer: for a text that is like those that the model knows.
        tolerance: mean absolute difference at most.
        scale: of the adapter, alpha / rank.
        rank: of it.
    """

    def __init__(
        self, trainer: TrainerLogprobs, tokenizer: Tokenizer, tolerance: float, *, scale: float, rank: int
    ) -> None:
        self.tokens = tokenizer.encode(_TEXT)[:_LENGTH]
        self._tokenizer = tokenizer
        self._trainer = trainer
        self._tolerance = tolerance
        self._scales = dict.fromkeys([*_SCALES, 1 / scale, math.sqrt(rank), rank, 1 / math.sqrt(rank), 1 / rank])
        self._earlier: tuple[int, np.ndarray] | None = None

    def expected(self, scale: float = 1.0) -> np.ndarray:
        """Return the trainer's logprobs float32 [T] of the probe's text."""
        return self._trainer(self.tokens, 1.0, scale)

    @property
    def is_telling(self) -> bool:
        """Return whether the adapter, as it is now, changes so much that a server without it can be told."""
        return _distance(self.expected(), self.expected(0.0)) > 10 * self._tolerance

    async def look(self, ask: Ask, where: str, version: int) -> Seen:
        """Ask a server for what ``check`` wants to see."""
        params = SamplingParams(max_tokens=8, temperature=_TEMPERATURE, stop=())
        drawn = sample_request(self.tokens, params, 1, version, params.max_tokens, self._tokenizer)
        scored, sampled = await ask(score_request(self.tokens, 0)), await ask(drawn)
        vocabulary = self._tokenizer.vocab_size
        (sample,) = read_samples(sampled, where, self.tokens, params, 1, version, vocabulary)
        logprobs = read_scores(scored, where, self.tokens, 0)[0]
        return Seen(logprobs, np.concatenate([self.tokens, sample.tokens]), sample.logprobs)

    async def recheck(self, ask: Ask, where: str, expected: np.ndarray) -> None:
        """Check a policy of a server that came back, without asking the trainer, which may have gone on.

        Raises:
            BackendError: its logprobs of the probe's text are others than ``expected``.
        """
        scored = read_scores(await ask(score_request(self.tokens, 0)), where, self.tokens, 0)[0]
        off = _distance(scored, expected)
        if not off <= self._tolerance:
            raise BackendError(
                f"{where}: after a restart its logprobs differ from the trainer's by {off:.2g} nats on average: its "
                "base model or its options changed"
            )
        await check_logprobs_mode(ask, where, self.tokens, self._tokenizer)

    def check(self, where: str, seen: Seen, version: int, scale: float = 1.0) -> None:
        """Check one server after a change of version; called where the trainer computes.

        Args:
            where: which, for messages.
            seen: what it gave.
            version: of the policy.
            scale: 0: it was asked for the base model.

        Raises:
            BackendError: its logprobs are not the trainer's; the message describes them.
        """
        wanted = self.expected(scale)
        off = _distance(seen.scored, wanted)
        if not off <= self._tolerance:
            raise BackendError(f"{where}: {self._diagnosis(seen.scored, off, version, scale)}")
        n = seen.sampled.size
        off = _distance(seen.sampled, self._trainer(seen.text, _TEMPERATURE, scale)[-n:])
        if not off <= self._tolerance:
            raw = _distance(seen.sampled, self._trainer(seen.text, 1.0, scale)[-n:]) <= self._tolerance
            what = "are untempered" if raw else f"differ by {off:.2g} nats"
            raise BackendError(
                f"{where}: the logprobs of tokens sampled at temperature {_TEMPERATURE} {what}: they do not belong "
                f"to the sampled distribution; {_REMEDY}"
            )
        if scale:
            self._earlier = version, wanted

    def _diagnosis(self, scored: np.ndarray, off: float, version: int, scale: float) -> str:
        of = f"version {version}" if scale else "the base model"
        head = f"its logprobs of {of} differ from the trainer's by {off:.2g} nats on average"
        limit = max(off / 10, self._tolerance)

        def like(values: np.ndarray) -> bool:
            return _distance(scored, values) <= limit

        if scale and like(self._trainer(self.tokens, 1.0, 0.0)):
            return f"{head}, and equal the base model's: the server does not use the adapter"
        if scale and self._earlier is not None and like(self._earlier[1]):
            return f"{head}, and equal those of version {self._earlier[0]}: the server does not use the new adapter"
        for times in self._scales if scale else ():
            if times != 1.0 and like(self._trainer(self.tokens, 1.0, times)):
                return f"{head}, and equal those of {times:.3g} times the adapter: its scale (alpha / rank) is wrong"
        for temperature in _TEMPERATURES:
            if like(self._trainer(self.tokens, temperature, scale)):
                return f"{head}, and equal those of logits divided by the temperature {temperature:g}"
        return (
            f"{head}: its base model, dtype or numerics differ; Vllm(tolerance=) sets the limit ({self._tolerance:g})"
        )


async def check_logprobs_mode(ask: Ask, where: str, tokens: np.ndarray, tokenizer: Tokenizer) -> None:
    """Check that a server's logprobs are those of the distribution that it draws from, without knowing its model.

    Where one token alone is left to draw from, its logprob is 0.

    Raises:
        BackendError: they are not.
    """
    params = SamplingParams(max_tokens=4, temperature=_TEMPERATURE, top_k=1, stop=())
    answer = await ask(sample_request(tokens, params, 1, 0, params.max_tokens, tokenizer))
    (sample,) = read_samples(answer, where, tokens, params, 1, 0, tokenizer.vocab_size)
    if sample.logprobs.min() < -1e-3:
        raise BackendError(
            f"{where}: with top_k=1 every token is certain, but one has the logprob {sample.logprobs.min():.2g}: its "
            f"logprobs do not belong to the sampled distribution; {_REMEDY}"
        )


async def differing_scores(ask: Ask, where: str, tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return what tells that a server scores by another policy than it samples from; "" where nothing does.

    It needs no model here: the logprobs that a text was drawn with are those that it is scored with. Some versions of
    vLLM leave an adapter of the head out of the latter.
    """
    params = SamplingParams(max_tokens=8, stop=())
    drawn = await ask(sample_request(tokens, params, 1, 0, params.max_tokens, tokenizer))
    (sample,) = read_samples(drawn, where, tokens, params, 1, 0, tokenizer.vocab_size)
    text = np.concatenate([tokens, sample.tokens])
    off = _distance(read_scores(await ask(score_request(text, 0)), where, text, 0)[0][tokens.size :], sample.logprobs)
    if off <= _ALIKE:
        return ""
    return (
        f"{where}: logprobs of a sampled text and of the same text as a prompt differ by {off:.2g} nats on average: it "
        "scores without a part of the adapter, such as that of the head; merge it, or do not score"
    )


def different_tokenizer(tokenizer: Tokenizer, texts: Sequence[str], tokens: Sequence[Sequence[int]]) -> str:
    """Describe how a server's tokenizer differs; "" where it does not."""
    for text, ids in zip(texts, tokens, strict=True):
        mine = tokenizer.encode(text).tolist()
        if mine != list(ids):
            first = next(
                (i for i, (a, b) in enumerate(zip(mine, ids, strict=False)) if a != b), min(len(mine), len(ids))
            )
            theirs, ours = list(ids)[first : first + 3], mine[first : first + 3]
            return f"it has another tokenizer: in {text!r}, tokens {first}... are {theirs} there and {ours} here"
    return ""


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).mean()) if np.isfinite(a).all() else math.inf
