"""``open_sampler``: a policy that a server has already, without a trainer."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from rlkit import _check
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.sampling import SeedStream, entropy_of
from rlkit.backends.vllm.client import Json, Model, VllmClient
from rlkit.backends.vllm.loop import EventLoop
from rlkit.backends.vllm.sampler import VllmSampler
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["longest", "named_model", "open_sampler"]


@attrs.frozen(eq=False, weakref_slot=True)
class _Remote:
    """A model of one server that somebody else runs."""

    client: VllmClient
    model: str

    @property
    def name(self) -> str:
        return f"{self.model} at {self.client.url}"

    async def generate(self, body: Json) -> Json:
        return await self.client.generate({**body, "model": self.model})


def open_sampler(
    url: str,
    *,
    tokenizer: str | Path | Tokenizer | PreTrainedTokenizerBase,
    model: str | None = None,
    key: str | None = None,
    seed: int | None = None,
    version: int = 0,
    deadline: float = 1800.0,
) -> VllmSampler:
    """Open a sampler of what a server of vLLM, or a gateway of rlkit, serves: a teacher, a judge, a finished policy.

    Args:
        url: where it listens. vLLM has to be started with ``--enable-scale-out --logprobs-mode processed_logprobs``.
        tokenizer: the model's: a folder, a hub id, or one that is open already.
        model: its name there, or that of an adapter; None: the base model.
        key: its API key.
        seed: of requests that bring none; None for a fresh one.
        version: what its samples say.
        deadline: seconds that an answer may take.

    Raises:
        ConfigError: it serves no such model; or an argument is out of range.
        BackendError: it cannot be reached.
    """
    from rlkit.backends.transformers_tokenizer import tokenizer_from

    _check.require(isinstance(url, str), "open_sampler(url)", url, "a URL")
    _check.integer("open_sampler(version)", version, low=0)
    seeds, words = SeedStream(entropy_of(seed)), tokenizer_from(tokenizer)
    client = VllmClient(url, key=key, deadline=_check.real("open_sampler(deadline)", deadline, above=0.0))
    loop = EventLoop("rlkit-vllm")
    loop.at_end.append(client.close)
    try:
        served = named_model(loop.submit(client.models()).result(), model, client.url)
    except BaseException:
        loop.close()
        raise
    length, scored = longest(served, 2**31)
    remote = _Remote(client, served.name)
    weakref.finalize(remote, loop.close, wait=False)
    return VllmSampler(remote, loop, tokenizer=words, max_length=length, scored=scored, version=version, seeds=seeds)


def named_model(models: list[Model], name: str | None, where: str) -> Model:
    """Return the model of that name, or the first that is no adapter.

    Raises:
        ConfigError: there is none.
    """
    for model in models:
        if model.name == name or (name is None and model.parent is None):
            base = next((other for other in models if other.name == model.parent), model)
            return attrs.evolve(model, max_length=model.max_length or base.max_length)
    raise ConfigError(f"{where}: has no model {name!r}; it has {', '.join(model.name for model in models) or 'none'}")


def longest(model: Model, limit: int) -> tuple[int, int]:
    """Return the most tokens of a sample and of a text that is scored: one less than what the server computes."""
    length = limit if model.max_length is None else min(limit, model.max_length)
    return length, length if model.max_length is None else min(length, model.max_length - 1)
