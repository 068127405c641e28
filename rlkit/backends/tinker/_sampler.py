"""A frozen policy on the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._check import TokenIds
from rlkit._runtime import Resource
from rlkit._seeds import SeedStream
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.requests import check_prompt, check_request, check_targets
from rlkit.backends.tinker import _requests
from rlkit.backends.trainer import Inner
from rlkit.errors import BackendError, UnsupportedError
from rlkit.futures import Future, join_all
from rlkit.types import OPTIONAL_OPTIONS, Sample, SamplingParams

if TYPE_CHECKING:
    from tinker import SamplingClient, types

    from rlkit.backends.tinker.session import Session

__all__ = ["OffTemperature", "TinkerSampler"]

OffTemperature: TypeAlias = Literal["raise", "rescore", "keep"]
T = TypeVar("T")
U = TypeVar("U")
_SEED_LIMIT = 2**31 - 2**16  # servers count on from a seed, sample by sample, some of them in 32 bits


@attrs.define(eq=False, repr=False, slots=False)
class TinkerSampler(Resource):
    """A snapshot, or the base model: the protocol over the SDK's sampling client, with a deadline for each request.

    It also has ``top_logprobs`` (``TopK``) and ``target_logprobs`` (``TargetLogprobs``).
    """

    client: SamplingClient
    _seeds: SeedStream
    tokenizer: Tokenizer = attrs.field(kw_only=True)
    max_length: int = attrs.field(kw_only=True)
    version: int = attrs.field(kw_only=True)
    _session: Session = attrs.field(kw_only=True)
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
            seed=number if number < _SEED_LIMIT and seed is not None else _folded(number),
            stop=self._stop(params),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )
        sent = self.client.sample(_prompt(array), n, options).future()

        def finish(response: types.SampleResponse) -> list[Sample]:
            return [self._sample(array, sequence, params) for sequence in response.sequences]

        rescored = params.temperature not in (0.0, 1.0) and self._off_temperature == "rescore"
        asked = self._request("sample", sent, finish, then=self._rescored if rescored else None)
        return Future.wrap(asked, on_cancel=sent.cancel)  # which the SDK tells the service

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """Return float32 [T]. See ``Sampler.logprobs``.

        Raises:
            UnsupportedError: at a temperature other than 1, which the service cannot score at.
        """
        self._check_open()
        array = check_prompt("logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        if _check.temperature("logprobs(temperature)", temperature, zero=False) != 1.0:
            raise UnsupportedError(
                f"logprobs(temperature={temperature}): the service scores at temperature 1 only; sample and score at "
                "1, or connect with off_temperature='rescore' and score at 1"
            )
        sent = self.client.compute_logprobs(_prompt(array)).future()
        return Future.wrap(self._scored(array, sent), on_cancel=sent.cancel)

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """Return (ids, logprobs), each [T, k]. See ``TopK``."""
        self._check_open()
        array = check_prompt("top_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        _check.integer("top_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")

        def finish(response: types.SampleResponse) -> tuple[np.ndarray, np.ndarray]:
            top = response.topk_prompt_logprobs_np
            if top is None:
                raise UnsupportedError("top_logprobs: the service returned none; this model may not support them")
            ids = np.zeros((array.size, k), np.int64)
            logprobs = np.zeros((array.size, k), np.float32)
            rows = min(top.token_ids.shape[0], array.size)
            width = min(k, top.token_ids.shape[1])
            ids[1:rows, :width] = top.token_ids[1:rows, :width]
            logprobs[1:rows, :width] = top.logprobs[1:rows, :width]
            return ids, logprobs

        return self._prefill("top_logprobs", array, finish, include_prompt_logprobs=True, topk_prompt_logprobs=k)

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """Return float32 [T, K]. See ``TargetLogprobs``."""
        from tinker import types

        self._check_open()
        array = check_prompt("target_logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        wanted = check_targets(targets, array.size, self.tokenizer.vocab_size)
        if array.size == 1 or (wanted[1:] < 0).all():
            return Future.of(np.zeros(wanted.shape, np.float32))

        def finish(response: types.SampleResponse) -> np.ndarray:
            if response.target_prompt_logprobs is None:
                raise UnsupportedError("target_logprobs: the service returned none; this model may not support them")
            logprobs = np.zeros(wanted.shape, np.float32)
            logprobs[1:] = np.where(wanted[1:] >= 0, response.target_prompt_logprobs.to_numpy(), 0.0)
            return logprobs

        asked = types.TensorData.from_numpy(wanted[1:])
        return self._prefill("target_logprobs", array, finish, target_prompt_logprobs=asked)

    def close(self) -> None:
        """Refuse later calls; the service forgets the snapshot with the session."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<TinkerSampler version {self.version}>"

    def _stop(self, params: SamplingParams) -> list[str] | list[int] | None:
        """Return the service's stop list, which takes the place of the end tokens; rlkit's are in addition to them."""
        eos = [int(x) for x in self.tokenizer.eos_ids]
        if params.stop is None:  # a server other than the hosted one may not know the end tokens
            return eos if eos and not self._session.hosted else None
        if not params.stop:
            return []
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

    def _rescored(self, samples: list[Sample]) -> Inner[list[Sample]]:
        """Return the samples with untempered logprobs of this snapshot."""
        texts = [np.concatenate([s.prompt, s.tokens]) for s in samples]
        parts = [self._scored(text, self.client.compute_logprobs(_prompt(text)).future()) for text in texts]

        def finish(_: object) -> list[Sample]:
            return [attrs.evolve(s, logprobs=x.result()[s.prompt.size :]) for s, x in zip(samples, parts, strict=True)]

        return self._request("sample", join_all(parts), finish)

    def _scored(self, array: np.ndarray, sent: Inner[list[float | None]]) -> Inner[np.ndarray]:
        def finish(values: Sequence[float | None]) -> np.ndarray:
            logprobs = np.array([0.0 if x is None else x for x in values], np.float32)
            if logprobs.size == array.size - 1:  # some servers leave out the first token, which has none
                logprobs = np.concatenate([np.zeros(1, np.float32), logprobs])
            if logprobs.shape != array.shape:
                raise BackendError(f"logprobs: the service returned {logprobs.size} for {array.size} tokens")
            logprobs[0] = 0.0
            return logprobs

        return self._request("logprobs", sent, finish)

    def _prefill(
        self, call: str, array: np.ndarray, finish: Callable[[types.SampleResponse], T], **options: object
    ) -> Future[T]:
        from tinker import types

        params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=0)
        inner = self.client.sample(_prompt(array), 1, params, **options).future()
        return Future.wrap(self._request(call, inner, finish), on_cancel=inner.cancel)

    def _request(
        self, call: str, inner: Inner[U], finish: Callable[[U], T], then: Callable[[T], Inner[T]] | None = None
    ) -> Inner[T]:
        return _requests.within(self._session.seconds, call, inner, finish, then, link=self._session.link)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the sampler is closed")


def _prompt(array: np.ndarray) -> types.ModelInput:
    from tinker import types

    return types.ModelInput.from_ints(array.tolist())


def _folded(seed: int) -> int:
    """Return a seed of any size as one that the service takes."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]) % _SEED_LIMIT
