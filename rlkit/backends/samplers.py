"""Samplers made of samplers: the interface to a sampling engine, a live sampler, and logprobs of a reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import numpy as np

from rlkit import _check
from rlkit._check import TokenIds
from rlkit._runtime import Resource
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.errors import BackendError, DataError
from rlkit.futures import Future
from rlkit.types import Datum, Lora, Sample, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit._seeds import SeedStream

__all__ = [
    "ADAPTER",
    "LoraAdapter",
    "OpensEngine",
    "SamplingEngine",
    "SuccessiveSampler",
    "TrainedPolicy",
    "TrainerLogprobs",
    "reference_logprobs",
]

ADAPTER = "adapter_model.safetensors"


@attrs.frozen(eq=False)
class LoraAdapter:
    """A LoRA in peft's own format, which vLLM, SGLang and transformers load.

    Attributes:
        tensors: on the CPU, "base_model.model.MODULE.lora_A.weight" [r, in] and "...lora_B.weight" [out, r].
        config: the content of ``adapter_config.json``.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, object]

    def save(self, folder: str | Path) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``, which peft's ``from_pretrained`` reads."""
        from safetensors.torch import save_file

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.tensors), target / ADAPTER, metadata={"format": "pt"})
        (target / "adapter_config.json").write_text(json.dumps(dict(self.config), indent=2, sort_keys=True), "utf-8")


@runtime_checkable
class SamplingEngine(Protocol):
    """An engine that samples a trainer's policy: ``rlkit.connect("local", sampler=engine)``.

    The trainer calls it from one thread, in the order of the user's calls: for ``policy.sampler()`` it asks for
    ``sampler(version)``; where that is None it calls ``load_adapter`` and asks again. Versions grow by 1 with every
    optimizer step. The future of ``policy.sampler()`` raises the engine's errors, and training goes on.
    """

    def load_adapter(self, adapter: LoraAdapter, version: int) -> None:
        """Make the policy of ``version`` ready. The engine may keep the tensors; no one else writes to them."""

    def sampler(self, version: int) -> Sampler | None:
        """Return a sampler of that version, or None where it is not loaded, or no longer.

        A sampler is a snapshot (rule R5): a version that is still sampled from stays loaded, also with a later one.
        """

    def base_sampler(self) -> Sampler:
        """Return a sampler of the base model."""

    def close(self) -> None:
        """Free everything; called when the trainer is closed. Idempotent."""


class TrainerLogprobs(Protocol):
    """The trainer's logprobs float32 [T] of tokens [T], entry 0 is 0, by the policy as it is now."""

    def __call__(self, tokens: np.ndarray, temperature: float = 1.0, scale: float = 1.0) -> np.ndarray:
        """Return the logprobs, with the adapter multiplied by ``scale``."""


@attrs.frozen(kw_only=True)
class TrainedPolicy:
    """A trainer's description of its policy, for settings that open an engine for it.

    Attributes:
        model: a folder or a hub id.
        dtype: of the base.
        device: where it trains, as torch spells it.
        lora: the adapter's shape.
        modules: last parts of the names of the modules that have it.
        head: whether the output head is one of them.
        tokenizer, max_length: of the model.
        seeds: of requests that bring none.
        logprobs: the trainer's own.
        trial: a context in which the adapter changes every module's output by about the given share; the adapter.
    """

    model: str
    dtype: str
    device: str
    lora: Lora
    modules: Sequence[str]
    head: bool
    tokenizer: Tokenizer
    max_length: int
    seeds: SeedStream
    logprobs: TrainerLogprobs
    trial: Callable[[float], AbstractContextManager[LoraAdapter]]


@runtime_checkable
class OpensEngine(Protocol):
    """Settings of an engine that is opened for a policy, such as ``rlkit.backends.vllm.Vllm``."""

    def check(self, lora: Lora, given: object) -> None:
        """Raise ConfigError where it cannot sample such an adapter; called before anything is loaded.

        Args:
            lora: the adapter's shape.
            given: the user's value, for messages.
        """

    def open(self, policy: TrainedPolicy) -> SamplingEngine:
        """Return the engine of a loaded policy; called in the thread that trains."""


class SuccessiveSampler(Resource):
    """A ``LiveSampler`` over snapshots, each of which serves the requests that are made while it is the newest.

    Args:
        first: the policy as it is.
        update: takes a snapshot of the policy as of its call and, when that is there, calls ``switch_to`` with it; the
            future gives its version.
        switches: "token" where no request is running when ``switch_to`` is called.
    """

    def __init__(
        self,
        first: Sampler,
        update: Callable[[SuccessiveSampler], Future[int]],
        switches: Literal["token", "request"] = "request",
    ) -> None:
        self._newest: Sampler | None = first
        self._update = update
        self.switches: Literal["token", "request"] = switches
        self.tokenizer: Tokenizer = first.tokenizer
        self.max_length = first.max_length
        self.version = first.version

    def switch_to(self, sampler: Sampler) -> int:
        """Send later requests to ``sampler``, and return its version; from any thread."""
        if self._newest is not None:
            self._newest, self.version = sampler, sampler.version
        return sampler.version

    def update(self) -> Future[int]:
        """See ``LiveSampler.update``."""
        self._open()
        return self._update(self)

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``."""
        return self._open().sample(prompt, params, n=n, seed=seed)

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``."""
        return self._open().logprobs(tokens, temperature=temperature)

    def close(self) -> None:
        """Release the policy; earlier requests are still answered."""
        self._newest = None

    def __getattr__(self, name: str) -> Any:  # ``top_logprobs`` and other methods of the backend's samplers
        newest = None if name.startswith("_") else self._newest
        if newest is None:
            raise AttributeError(name)
        return getattr(newest, name)

    def _open(self) -> Sampler:
        newest = self._newest  # once: another thread may close it
        if newest is None:
            raise BackendError("this sampler is closed")
        return newest


def reference_logprobs(
    sampler: Sampler, samples: Sequence[Sample | Datum], *, prefixes: Sequence[object] | None = None
) -> Future[list[np.ndarray]]:
    """Return the logprobs of the samples' own tokens under another policy, for a KL to it or for distillation.

    They are computed at the temperature that each was sampled at (greedy ones: at 1). With ``prefixes`` each sample is
    scored after some more tokens, such as a message with the right answer: the policy is then its own teacher.

    Args:
        sampler: the reference or teacher: ``policy.base_sampler()``, or ``rlkit.sampler(...)`` with a saved path.
        samples: samples, or datums, of which the masked-in tokens are scored.
        prefixes: token ids [P_i] put in front of each, one array per sample, which may be empty.

    Returns:
        A future of one float32 [n] for each, as ``sample.datum(reference_logprobs=...)`` and
        ``datum.with_inputs(reference_logprobs=...)`` take it.

    Raises:
        ConfigError: ``sampler`` has no logprobs.
        DataError: ``samples`` are of another type, the prefixes are of another number or no token ids, or a sample
            does not fit into the sampler's context together with its prefix.

    >>> import rlkit
    >>> policy = rlkit.connect("toy", seed=0)
    >>> samples = policy.sampler().result().sample([65], rlkit.SamplingParams(max_tokens=3), n=2).result()
    >>> found = reference_logprobs(policy.base_sampler().result(), samples).result()
    >>> [bool(np.allclose(lp, s.logprobs)) for lp, s in zip(found, samples)]  # nothing was trained yet
    [True, True]

    Source: none needed; the prefix is self-distillation's, arXiv:2601.18734 (OPSD) and arXiv:2601.20802 (SDPO).
    """
    expected = "a sampler, such as policy.base_sampler().result() gives"
    _check.require(callable(getattr(sampler, "logprobs", None)), "reference_logprobs(sampler)", sampler, expected)
    good, expected = isinstance(samples, Sequence) and not isinstance(samples, str), "a list of samples or datums"
    _check.require(good, "reference_logprobs(samples)", samples, expected, error=DataError)
    for i, each in enumerate(samples):
        good = isinstance(each, (Sample, Datum))
        _check.require(good, f"samples[{i}]", each, "a Sample or a Datum", error=DataError)
    datums = [each.datum() if isinstance(each, Sample) else each for each in samples]
    heads = [np.zeros(0, np.int64)] * len(datums) if prefixes is None else _check_prefixes(sampler, datums, prefixes)
    requests = [_request_logprobs(sampler, head, datum) for head, datum in zip(heads, datums, strict=True)]
    return Future.all(
        requests, lambda arrays: [d.select(x[head.size :]) for d, head, x in zip(datums, heads, arrays, strict=True)]
    )


def _request_logprobs(sampler: Sampler, head: np.ndarray, datum: Datum) -> Future[np.ndarray]:
    """Request the logprobs [P + T] of a datum after ``head``, at least those of its masked-in tokens."""
    tokens, temperature = np.concatenate([head, datum.tokens]), datum.temperature or 1.0
    if hasattr(sampler, "masked_logprobs"):  # cheaper than the logprobs of the whole text
        mask = np.concatenate([np.zeros(head.size, bool), datum.mask])
        requested: Future[np.ndarray] = sampler.masked_logprobs(tokens, mask, temperature=temperature)
        return requested
    return sampler.logprobs(tokens, temperature=temperature)


def _check_prefixes(sampler: Sampler, datums: Sequence[Datum], prefixes: Sequence[object]) -> list[np.ndarray]:
    _check.entries("reference_logprobs(prefixes)", prefixes, len(datums), "one per sample")
    size = sampler.tokenizer.vocab_size
    heads = [_check.token_ids(f"prefixes[{i}]", prefix, vocab_size=size) for i, prefix in enumerate(prefixes)]
    for i, (head, datum) in enumerate(zip(heads, datums, strict=True)):
        if head.size + len(datum) > sampler.max_length:
            what = f"has {head.size} tokens, but the sample has {len(datum)}"
            raise DataError(f"prefixes[{i}]", what, f"together <= {sampler.max_length}", "the context")
    return heads
