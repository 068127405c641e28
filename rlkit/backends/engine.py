"""The interface between a trainer and its sampling engine: vLLM over HTTP, another process, another device."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import numpy as np

from rlkit._rows import TokenIds
from rlkit._runtime import Resource
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.errors import BackendError
from rlkit.futures import Future
from rlkit.types import Lora, Sample, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rlkit.backends.sampling import SeedStream
    from rlkit.futures import Future

__all__ = [
    "ADAPTER",
    "LiveEngine",
    "LoraAdapter",
    "OpensEngine",
    "SamplingEngine",
    "SuccessiveSampler",
    "TrainedPolicy",
    "TrainerLogprobs",
]

ADAPTER = "adapter_model.safetensors"


@attrs.frozen(eq=False)
class LoraAdapter:
    """A LoRA in peft's own format, which vLLM, SGLang and transformers load.

    Attributes:
        tensors: on the CPU, "base_model.model.MODULE.lora_A.weight" [r, in] and "...lora_B.weight" [out, r].
        config: what is in ``adapter_config.json``.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, object]

    def save(self, folder: str | Path) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``, which peft's ``from_pretrained`` reads."""
        from safetensors.torch import save_file

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.tensors), target / ADAPTER, metadata={"format": "pt"})
        text = json.dumps(dict(self.config), indent=2, sort_keys=True)
        (target / "adapter_config.json").write_text(text, "utf-8")


@runtime_checkable
class SamplingEngine(Protocol):
    """Samples what a trainer trains: ``rlkit.connect("local", sampler=engine)``.

    The trainer calls it from one thread, in the order of the user's calls: for ``policy.sampler()`` it asks for
    ``sampler(version)``; where that is None it calls ``load_adapter`` and asks again. Versions grow by 1 with every
    optimizer step. What the engine raises is raised by the future of ``policy.sampler()``, and training goes on.
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


@runtime_checkable
class LiveEngine(Protocol):
    """An engine whose running requests take a newer adapter."""

    def live_sampler(
        self, first: Sampler, update: Callable[[SuccessiveSampler], Future[int]]
    ) -> SuccessiveSampler | None:
        """Return a live sampler of these (see ``SuccessiveSampler``) whose ``switches`` is "token".

        None where that cannot be; then running requests end under the policy with which they began.
        """


class TrainerLogprobs(Protocol):
    """The trainer's logprobs float32 [T] of tokens [T], entry 0 is 0, by the policy as it is now."""

    def __call__(self, tokens: np.ndarray, temperature: float = 1.0, scale: float = 1.0) -> np.ndarray:
        """Return the logprobs, with the adapter multiplied by ``scale``."""


@attrs.frozen(kw_only=True)
class TrainedPolicy:
    """What a trainer says of its policy to settings that open an engine for it.

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
            given: what the user gave, for messages.
        """

    def open(self, policy: TrainedPolicy) -> SamplingEngine:
        """Return the engine of a loaded policy; called in the thread that trains."""


class SuccessiveSampler(Resource):
    """A ``LiveSampler`` over snapshots, each of which serves the requests that are made while it is the newest.

    Args:
        first: the policy as it is.
        update: takes a snapshot of the policy as of its call and, when that is there, calls ``become`` with it; the
            future gives its version.
        switches: "token" where no request of theirs is running when ``become`` is called.
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

    def become(self, sampler: Sampler) -> int:
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

    def __getattr__(self, name: str) -> Any:  # ``top_logprobs`` and what else the backend's samplers have
        newest = None if name.startswith("_") else self._newest
        if newest is None:
            raise AttributeError(name)
        return getattr(newest, name)

    def _open(self) -> Sampler:
        if self._newest is None:
            raise BackendError("this sampler is closed")
        return self._newest
