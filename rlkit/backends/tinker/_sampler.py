"""A frozen policy on the service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._check import TokenIds
from rlkit._runtime import Resource
from rlkit._seeds import SeedStream
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.requests import check_prompt, check_request, check_targets
from rlkit.backends.tinker._calls import Calls
from rlkit.errors import BackendError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import OPTIONAL_OPTIONS, Sample, SamplingParams

if TYPE_CHECKING:
    from tinker import SamplingClient, types

__all__ = ["OffTemperature", "TinkerSampler"]

OffTemperature: TypeAlias = Literal["raise", "rescore", "keep"]
_SEED_LIMIT = 2**31 - 2**16  # servers count on from a seed, sample by sample, some of them in 32 bits


@attrs.define(eq=False, repr=False, slots=False)
class TinkerSampler(Resource):
    """A snapshot, or the base model: the protocol over the SDK's sampling client, with a deadline for each request.

    It also has ``top_logprobs`` (``TopK``) and ``target_logprobs`` (``TargetLogprobs``).
    """

    client: SamplingClient
    _seeds: SeedStream
    _calls: Calls
    tokenizer: Tokenizer = attrs.field(kw_only=True)
    max_length: int = attrs.field(kw_only=True)
    version: int = attrs.field(kw_only=True)
    _off_temperature: OffTemperature = attrs.field(kw_only=True)
    _closed: bool = attrs.field(default=False, init=False)

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """Draw ``n`` completions. See ``Sampler.sample``.

        The service draws sample i from a stream that it makes from ``seed`` and i. SkyRL's server takes the sum: seeds
        that are less than ``n`` apart share samples there. At a temperature other than 1 with
        ``off_temperature="rescore"`` the logprobs are the untempered ones, asked for once more.

        Raises:
            UnsupportedError: with min_p or a penalty, which the service does not have.
        """
        from tinker import types

        self._check_open()
        array = check_request(
            prompt,
            params,
            n,
            seed,
            vocab_size=self.tokenizer.vocab_size,
            max_length=self.max_length,
            lacks=tuple(OPTIONAL_OPTIONS),
        )
        number = self._seeds.of(seed, params)
        options = types.SamplingParams(
            max_tokens=min(params.max_tokens, self.max_length - array.size),
            seed=number if number < _SEED_LIMIT and seed is not None else _fold_seed(number),
            stop=self._stop(params),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )
        text = _prompt(array)
        rescored = params.temperature not in (0.0, 1.0) and self._off_temperature == "rescore"

        async def ask() -> list[Sample]:
            response = await self.client.sample(text, n, options)
            samples = [self._sample(array, sequence, params) for sequence in response.sequences]
            return list(await asyncio.gather(*map(self._rescore, samples))) if rescored else samples

        return self._calls.request("sample", ask)

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """Return float32 [T]. See ``Sampler.logprobs``.

        Raises:
            UnsupportedError: at a temperature other than 1, which the service cannot score at.
        """
        array = self._check_tokens("logprobs(tokens)", tokens)
        if _check.temperature("logprobs(temperature)", temperature, zero=False) != 1.0:
            raise UnsupportedError(
                f"logprobs(temperature={temperature}): the service scores at temperature 1 only; sample and score at "
                "1, or connect with off_temperature='rescore' and score at 1"
            )
        return self._calls.request("logprobs", lambda: self._score(array))

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """Return (ids, logprobs), each [T, k]. See ``TopK``."""
        array = self._check_tokens("top_logprobs(tokens)", tokens)
        _check.integer("top_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")

        async def ask() -> tuple[np.ndarray, np.ndarray]:
            options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": k}
            top = await self._prefill("top_logprobs", array, "topk_prompt_logprobs_np", **options)
            ids, logprobs = np.zeros((array.size, k), np.int64), np.zeros((array.size, k), np.float32)
            width = min(k, top.token_ids.shape[1])
            ids[1:, :width] = top.token_ids[1 : array.size, :width]
            logprobs[1:, :width] = top.logprobs[1 : array.size, :width]
            return ids, logprobs

        return self._calls.request("top_logprobs", ask)

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """Return float32 [T, K]. See ``TargetLogprobs``."""
        from tinker import types

        array = self._check_tokens("target_logprobs(tokens)", tokens)
        wanted = check_targets(targets, array.size, self.tokenizer.vocab_size)
        if array.size == 1 or (wanted[1:] < 0).all():
            return Future.of(np.zeros(wanted.shape, np.float32))

        async def ask() -> np.ndarray:
            options = {"target_prompt_logprobs": types.TensorData.from_numpy(wanted[1:])}
            found = await self._prefill("target_logprobs", array, "target_prompt_logprobs", **options)
            logprobs = np.zeros(wanted.shape, np.float32)
            logprobs[1:] = np.where(wanted[1:] >= 0, found.to_numpy(), 0.0)
            return logprobs

        return self._calls.request("target_logprobs", ask)

    def close(self) -> None:
        """Refuse later calls; the service forgets the snapshot with the session."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<TinkerSampler version {self.version}>"

    def _stop(self, params: SamplingParams) -> list[str] | list[int] | None:
        """Return the service's stop list, which takes the place of the end tokens; rlkit's are in addition to them."""
        if not params.stop:
            return None if params.stop is None else []
        eos = [int(x) for x in self.tokenizer.eos_ids]
        if not isinstance(params.stop[0], str):
            return list(dict.fromkeys([*params.stop, *eos]))
        ends = [self.tokenizer.decode(np.array([x]), skip_special=False) for x in eos]
        return list(dict.fromkeys([*params.stop, *(text for text in ends if text)]))

    def _sample(self, prompt: np.ndarray, sequence: types.SampledSequence, params: SamplingParams) -> Sample:
        if sequence.logprobs is None:
            raise BackendError("sample: the service returned no logprobs")
        return Sample(
            prompt=prompt,
            tokens=np.asarray(sequence.tokens, np.int64),
            logprobs=np.asarray(sequence.logprobs, np.float32),
            stop_reason="stop" if sequence.stop_reason == "stop" else "length",
            version=self.version,
            **params.sampling_options,
        )

    async def _rescore(self, sample: Sample) -> Sample:
        """Return the sample with untempered logprobs of this snapshot."""
        logprobs = await self._score(np.concatenate([sample.prompt, sample.tokens]))
        return attrs.evolve(sample, logprobs=logprobs[sample.prompt.size :])

    async def _score(self, tokens: np.ndarray) -> np.ndarray:
        values = await self.client.compute_logprobs(_prompt(tokens))
        logprobs = np.array([0.0 if x is None else x for x in values], np.float32)
        if logprobs.shape != tokens.shape:
            raise BackendError(f"logprobs: the service returned {logprobs.size} for {tokens.size} tokens")
        logprobs[0] = 0.0
        return logprobs

    async def _prefill(self, call: str, tokens: np.ndarray, field: str, **options: Any) -> Any:
        """Return a field of the answer to a request for scores of a prompt."""
        from tinker import types

        params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=0)
        found = getattr(await self.client.sample(_prompt(tokens), 1, params, **options), field)
        if found is None:
            raise UnsupportedError(f"{call}: the service returned none; this model may not support them")
        return found

    def _check_tokens(self, where: str, tokens: TokenIds) -> np.ndarray:
        self._check_open()
        return check_prompt(where, tokens, self.tokenizer.vocab_size, self.max_length)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the sampler is closed")


def _prompt(array: np.ndarray) -> types.ModelInput:
    from tinker import types

    return types.ModelInput.from_ints(array.tolist())


def _fold_seed(seed: int) -> int:
    """Return a seed of any size as one that the service takes."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]) % _SEED_LIMIT
