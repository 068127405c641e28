"""The protocols of a backend: ``TrainerBackend``, its ``Sampler``, ``Critic``, and small ones for further abilities.

Calls return at once and take effect in the order in which they were made. Their value is a future: ``.result()`` or
``await`` it. You may make further calls before you read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, Self, TypeAlias, runtime_checkable

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit._check import TokenIds
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Sample, SamplingParams

__all__ = [
    "Capabilities",
    "Config",
    "Critic",
    "LiveSampler",
    "LiveSampling",
    "LossLike",
    "PromptLogprobs",
    "Route",
    "Routes",
    "Sampler",
    "SavedSamplers",
    "Storage",
    "TargetLogprobs",
    "Tokenizer",
    "TopK",
    "TrainerBackend",
]

LossLike: TypeAlias = str | Callable[..., object]
Config: TypeAlias = Mapping[str, object]
"""Keyword-only settings of a loss, by name."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back, without a batch dimension."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the model's end tokens; there may be several."""

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary: ids are in [0, vocab_size)."""

    @property
    def chat_template(self) -> str | None:
        """Return the model's own template, or None."""

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return int64 [T]. Special-token strings in ``text`` become control tokens only with ``special=True``."""

    def decode(self, tokens: TokenIds, skip_special: bool = True) -> str:
        """Return the text of int [T]."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **variables: object
    ) -> np.ndarray:
        """Return int64 [T]: the messages as the model's template renders them."""


@runtime_checkable
class Sampler(Protocol):
    """A frozen policy (rule R5). A context manager; freed on ``close()`` or when it is forgotten."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""

    @property
    def max_length(self) -> int:
        """Return the longest prompt + completion, in tokens."""

    @property
    def version(self) -> int:
        """Return the optimizer steps that the policy had taken at this snapshot."""

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """Draw ``n`` completions of ``prompt`` (1-D ints, not text), each with its own random stream.

        Sample i of a request with ``seed`` draws from SeedSequence([seed, i]); without one the request takes the
        next seed of the backend's own stream, in call order.
        """

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """Return float32 [T]: log p(token i | tokens before i); entry 0 is 0."""

    def close(self) -> None:
        """Free the snapshot; later calls raise."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class TrainerBackend(Protocol):
    """A policy that can be trained. A context manager.

    A call checks its arguments at once, and raises there. If an accepted training call fails later, it changes nothing,
    its future raises, and the calls made after it are refused with ``TrainerFailed`` until one of these errors has been
    read.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""

    @property
    def max_length(self) -> int:
        """Return the longest datum, in tokens."""

    @property
    def version(self) -> int:
        """Return the optimizer steps that the policy has taken, as far as they have been carried out."""

    def forward(
        self,
        data: Sequence[Datum],
        loss: LossLike | None = None,
        *,
        config: Config | None = None,
        want: Sequence[str] = (),
    ) -> Future[ForwardBackwardOutput]:
        """Return logprobs and, with ``loss``, its value; no gradient.

        The logprobs are at each datum's temperature, where 0 counts as 1. ``want`` names further outputs of each
        token's distribution: "entropy", "sum_p2" or "sum_p2_logp".
        """

    def forward_backward(
        self, data: Sequence[Datum], loss: LossLike, *, config: Config | None = None, want: Sequence[str] = ()
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of the summed loss to the accumulated gradient, all or nothing.

        A name means the backend's native implementation, a callable exactly that code (rule R4). ``config`` sets
        the loss's keyword-only settings.
        """

    def optim_step(self, params: Adam) -> Future[Mapping[str, float]]:
        """Apply the accumulated gradient and clear it; the metrics have "grad_norm:mean" where it is known.

        Raises:
            BackendError: no gradient is accumulated.
        """

    def sampler(self) -> Future[Sampler]:
        """Take a snapshot of the policy as of this call."""

    def base_sampler(self) -> Future[Sampler]:
        """Return a sampler of the base model, before any training."""

    def save(self, name: str, *, optimizer: bool = True, sampler: bool = False) -> Future[str]:
        """Write the weights, and with ``optimizer`` its state. The path is unique, and only it opens the state again.

        Args:
            name: a label in the path: letters, digits, dot, dash and underscore.
            optimizer: whether the path can be given to ``resume_from=``, and not only to ``init_from=``.
            sampler: whether a service also saves weights to sample from.

        Raises:
            BackendError: a gradient is accumulated and would be lost.
        """

    def discard(self) -> Future[None]:
        """Drop the accumulated gradient, and accept calls again after a failure.

        Raises:
            BackendError: a service holds the gradient and cannot drop it, or its state is unknown.
        """

    def close(self) -> None:
        """Finish the submitted calls, and end the backend."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Critic(Protocol):
    """A value model that can be trained, independent of the policy's backend. A context manager."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the policy's tokenizer."""

    @property
    def max_length(self) -> int:
        """Return the longest datum, in tokens."""

    @property
    def version(self) -> int:
        """Return the optimizer steps that the critic has taken, as far as they have been carried out."""

    def values(self, data: Sequence[Datum]) -> Future[list[np.ndarray]]:
        """Return one float32 [T] per datum: entry i is V before token i, 0 wherever the mask is False."""

    def forward_backward(
        self, data: Sequence[Datum], loss: LossLike = "value_clipped", *, config: Config | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a loss of ``values`` to the accumulated gradient, all or nothing.

        ``outputs["values"]`` are the values before the update; logprobs are not computed.
        """

    def optim_step(self, params: Adam) -> Future[Mapping[str, float]]:
        """Apply the accumulated gradient and clear it."""

    def save(self, name: str, *, optimizer: bool = True) -> Future[str]:
        """Write the state; the returned path is for ``resume_from=`` or ``init_from=``."""

    def discard(self) -> Future[None]:
        """Drop the accumulated gradient, and accept calls again after a failure."""

    def close(self) -> None:
        """Finish the submitted calls, and end the critic."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


# Small protocols. A caller asks with ``isinstance`` whether a backend or sampler has the ability.


@attrs.frozen
class Route:
    """How a loss reaches a service.

    Attributes:
        kind: "hosted": one call of a loss that the service has. "composed": several, whose gradients add up. "client":
            its gradient is computed here, after a forward pass, and sent as the weights of a cross entropy.
        calls: the service's calls, in order.
        why: the reason why no earlier kind of that list applies; "" for the first.
    """

    kind: Literal["hosted", "composed", "client"]
    calls: tuple[str, ...]
    why: str = ""


@runtime_checkable
class Routes(Protocol):
    """A backend that runs losses elsewhere and says how."""

    def route(self, data: Sequence[Datum], loss: LossLike, *, config: Config | None = None) -> Route:
        """Return the way that ``forward_backward`` with these arguments takes; send nothing."""


@runtime_checkable
class TopK(Protocol):
    """A sampler that gives the most probable tokens."""

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """Return (ids int64 [T, k], logprobs float32 [T, k]), the best first. Row i is about token i; row 0 is 0."""


@runtime_checkable
class PromptLogprobs(Protocol):
    """A sampler that gives a text's own logprobs and the most probable tokens in a single pass."""

    def prompt_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return (the logprobs of ``logprobs`` [T], the ids and the logprobs of ``TopK.top_logprobs`` [T, k])."""


@runtime_checkable
class TargetLogprobs(Protocol):
    """A sampler that scores given alternatives at every position."""

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """Return float32 [T, K]: log p(targets[i, k] | tokens before i); 0 in row 0 and where a target is -1."""


@runtime_checkable
class Storage(Protocol):
    """A backend whose saved states lie on a service."""

    def saved(self) -> Future[list[str]]:
        """Return the paths of this run's saved states, oldest first."""

    def delete(self, path: str) -> Future[None]:
        """Remove a saved state."""

    def expire(self, path: str, seconds: int | None) -> Future[None]:
        """Schedule the removal of a saved state in ``seconds``; None keeps it."""


@runtime_checkable
class SavedSamplers(Protocol):
    """A backend that also samples from saved states, without another trainer."""

    def saved_sampler(self, path: str) -> Future[Sampler]:
        """Open a sampler of the state that ``save`` wrote at ``path``; the backend's samplers share the base model."""


@runtime_checkable
class LiveSampler(Sampler, Protocol):
    """A sampler that is not a snapshot: ``update`` gives it a newer policy while its requests run.

    ``Sample.versions`` says which version drew each token; the logprobs are those of the distributions drawn from.
    """

    @property
    def switches(self) -> Literal["token", "request"]:
        """Return the unit that a single policy draws as a whole, "token" or "request".

        "token": running requests go on under the newer policy. "request": they end under the policy with which they
        began, and later requests take the newer one.
        """

    def update(self) -> Future[int]:
        """Take the policy as of this call, as ``TrainerBackend.sampler`` does; return its version once it is loaded.

        Running requests pause between two tokens until the weights are there. If it already has that version, nothing
        happens. An update that fails changes nothing.
        """


@runtime_checkable
class LiveSampling(Protocol):
    """A backend that samples its policy while it is trained."""

    def live_sampler(self, *, recompute: bool = False) -> Future[LiveSampler]:
        """Return a sampler that begins with the policy as of this call.

        Args:
            recompute: at an update, recompute the keys and values (recurrent states) of running requests. Then each
                token's distribution is exactly that of its version. Otherwise they may be kept, which costs nothing:
                newer weights then draw a token over keys and values that older weights computed. The logprobs are those
                of the distribution that was drawn from, so that ratios to it are right in either case.

        Source: PipelineRL, arXiv:2509.19128, which keeps them; AReaL, arXiv:2505.24298, which recomputes them.
        """


@runtime_checkable
class Capabilities(Protocol):
    """A backend that lists the abilities of its service."""

    def capabilities(self) -> Mapping[str, object]:
        """Return its abilities: "models", name -> longest context; "sampling_options", names of ``SamplingParams``."""
