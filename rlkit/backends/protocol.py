"""The protocol that every backend implements, and the small optional ones.

Calls return at once and take effect in the order in which they were made. ``.result()`` or ``await`` a future to
read it; both keep further work in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit._rows import TokenIds
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Sample, SamplingParams

__all__ = [
    "Capabilities",
    "ChecksOptions",
    "Config",
    "LiveSampler",
    "LiveSampling",
    "LossLike",
    "MaskedLogprobs",
    "OpensSamplers",
    "PromptLogprobs",
    "Route",
    "Routes",
    "Sampler",
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
    """A policy that can be trained. A context manager."""

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
        """Return logprobs and, with ``loss``, its value; no gradient. ``want`` asks for further outputs by name."""

    def forward_backward(
        self, data: Sequence[Datum], loss: LossLike, *, config: Config | None = None, want: Sequence[str] = ()
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of the summed loss to what is accumulated, all or nothing.

        A name means the backend's native implementation, a callable exactly that code (rule R4). ``config`` sets
        the loss's keyword-only settings.
        """

    def optim_step(self, params: Adam) -> Future[Mapping[str, float]]:
        """Apply the accumulated gradient and clear it; "grad_norm:mean" where known."""

    def sampler(self) -> Future[Sampler]:
        """Take a snapshot of the policy as of this call."""

    def base_sampler(self) -> Future[Sampler]:
        """Return a sampler of the base model, without what was trained."""

    def save(self, name: str, *, optimizer: bool = True, sampler: bool = False) -> Future[str]:
        """Write the state; ``name`` is a label, the returned path is unique and the only handle."""

    def discard(self) -> Future[None]:
        """Drop the accumulated gradient, and accept calls again after a failure.

        Raises:
            BackendError: a service holds the gradient and cannot drop it, or its state is not known.
        """

    def close(self) -> None:
        """Finish what was submitted, and end the backend."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


@attrs.frozen
class Route:
    """How a loss reaches a service.

    Attributes:
        kind: "hosted": one call of a loss that the service has. "composed": several, whose gradients add up.
            "server": the loss itself is sent and runs there. "client": its gradient is taken here, after a forward
            pass, and sent as the weights of a cross entropy.
        calls: the service's calls, in order.
        why: why not one before it in that list; "" for the first.
    """

    kind: Literal["hosted", "composed", "server", "client"]
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
        """Return (ids int64 [T, k], logprobs float32 [T, k]), most probable first; row i: about token i, row 0: 0."""


@runtime_checkable
class PromptLogprobs(Protocol):
    """A sampler that gives a text's own logprobs and the most probable tokens in one pass."""

    def prompt_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return what ``logprobs`` does [T], and the two of ``TopK.top_logprobs`` [T, k]."""


@runtime_checkable
class TargetLogprobs(Protocol):
    """A sampler that scores given alternatives at every position."""

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """Return float32 [T, K]: log p(targets[i, k] | tokens before i); 0 in row 0 and where a target is -1."""


@runtime_checkable
class MaskedLogprobs(Protocol):
    """A sampler that computes the logprobs of a part of a text for less than those of all of it."""

    def masked_logprobs(self, tokens: TokenIds, mask: ArrayLike, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """Return float32 [T]: ``logprobs`` where ``mask`` [T] is true, else 0."""


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
    """A backend that samples from saved states besides its own policy, without another trainer."""

    def saved_sampler(self, path: str) -> Future[Sampler]:
        """Open a sampler of what ``save`` wrote at ``path``; it shares the base and what samples from it."""


@runtime_checkable
class LiveSampler(Sampler, Protocol):
    """A sampler that is not a snapshot: its policy becomes a newer one when ``update`` is called, while requests run.

    Each sample says which version drew each of its tokens (``Sample.versions``), and has the logprobs of the
    distributions that they were drawn from.
    """

    @property
    def switches(self) -> Literal["token", "request"]:
        """Return what one policy draws whole: a "token" (running requests go on under the newer one), or a "request".

        Then those that run end under the policy with which they began, and later ones take the newer.
        """

    def update(self) -> Future[int]:
        """Take the policy as of this call, as ``TrainerBackend.sampler`` does; return its version once it is there.

        Requests that run pause between two tokens until the weights are there. Where the version is the one that it
        has, nothing happens. What fails changes nothing.
        """


@runtime_checkable
class LiveSampling(Protocol):
    """A backend that samples its policy while it is trained."""

    def live_sampler(self, *, recompute: bool = False) -> Future[LiveSampler]:
        """Return a sampler that begins with the policy as of this call.

        Args:
            recompute: at an update compute the keys and values (recurrent states) of running requests anew. Then each
                token's distribution is exactly that of its version. Without it they may be kept, which costs nothing:
                a token is then drawn from the newer weights over what older ones computed of the tokens before. The
                logprobs are those of that distribution, so that ratios to it are right in either case.

        Source: PipelineRL, arXiv:2509.19128, which keeps them; AReaL, arXiv:2505.24298, which computes them anew.
        """


@runtime_checkable
class OpensSamplers(Protocol):
    """A name of ``rlkit.backends.registry`` that samples without a trainer; it needs no trainer's methods.

    >>> class Echo:  # registered as "echo", rlkit.sampler("echo", path="x") calls this
    ...     @classmethod
    ...     def open_sampler(cls, *, model=None, path=None, **options): ...
    >>> isinstance(Echo, OpensSamplers)
    True
    """

    def open_sampler(self, *, model: str | None = None, path: str | None = None, **options: Any) -> Sampler:
        """Return a sampler of what ``path`` names, or of the base model; called on the class. See ``rlkit.sampler``."""


@runtime_checkable
class ChecksOptions(Protocol):
    """A name of ``rlkit.backends.registry`` that checks the values of its options by themselves.

    ``rlkit train --check`` asks it, and ``rlkit train`` before any work.
    """

    def check_options(self, **options: Any) -> object:
        """Raise ConfigError where ``rlkit.connect`` would before it loads anything; called on the class."""


@runtime_checkable
class Capabilities(Protocol):
    """A backend that says what its service offers."""

    def capabilities(self) -> Mapping[str, object]:
        """Return its abilities: "models", name -> longest context; "server_losses", whether it runs losses; ..."""
