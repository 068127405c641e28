"""``open_sampler``: a policy that a server has already, without a trainer."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from rlkit import _check
from rlkit._runtime import warn
from rlkit._seeds import SeedStream, resolve_seed
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.tokenizers import tokenizer_from
from rlkit.backends.vllm._client import Json, Model, VllmClient, check_url
from rlkit.backends.vllm._probe import TEXTS, check_logprobs_mode, different_tokenizer, differing_scores
from rlkit.backends.vllm._sampler import EventLoop, VllmSampler
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["longest", "named_model", "open_sampler"]

_HUB = re.compile(r"[\w.-]+/[\w.-]+")


@attrs.frozen(eq=False, weakref_slot=True)
class _Remote:
    """A model of one server that somebody else runs."""

    client: VllmClient
    model: Model

    @property
    def name(self) -> str:
        return f"{self.model.name} at {self.client.url}"

    async def generate(self, body: Json) -> Json:
        draws = {"max_tokens": self.model.least} if "prompt_logprobs" in body else {}
        return await self.client.generate({**body, **draws, "model": self.model.name})


def open_sampler(
    url: str,
    *,
    tokenizer: str | Path | Tokenizer | PreTrainedTokenizerBase | None = None,
    model: str | None = None,
    key: str | None = None,
    seed: int | None = None,
    version: int = 0,
    deadline: float = 1800.0,
) -> VllmSampler:
    """Open a sampler of what a server of vLLM, or a gateway of rlkit, serves: a teacher, a judge, a finished policy.

    Args:
        url: where it listens. vLLM has to be started with ``--logprobs-mode processed_logprobs --generation-config
            vllm``.
        tokenizer: the model's: a folder, a hub id, or one that is open already; None: that of the folder or hub id
            which the server names as its model's. It has to make the tokens that the server makes of a text.
        model: its name there, or that of an adapter; None: the base model.
        key: its API key.
        seed: of requests that bring none; None for a fresh one.
        version: what its samples say.
        deadline: seconds that an answer may take.

    Raises:
        ConfigError: it serves no such model, or has another tokenizer; or an argument is out of range.
        UnsupportedError: it has no /v1/completions, or does not answer with token ids there.
        BackendError: it cannot be reached, or its logprobs are not those of the distribution that it draws from.
    """
    check_url("open_sampler(url)", url)
    _check.integer("open_sampler(version)", version, low=0)
    seeds = SeedStream(resolve_seed(seed))
    client = VllmClient(url, key=key, deadline=_check.real("open_sampler(deadline)", deadline, above=0.0))
    loop = EventLoop("rlkit-vllm")
    loop.at_end.append(client.close)
    try:
        served = named_model(loop.submit(client.models()).result(), model, client.url)
        words = _tokenizer_of(served, client.url) if tokenizer is None else tokenizer_from(tokenizer)
        remote = _Remote(client, served)
        problem = loop.submit(_check_server(remote, words)).result()
        if problem:
            warn(problem)
    except BaseException:
        loop.close()
        raise
    length, scored = longest(served, 2**31)
    weakref.finalize(remote, loop.close, wait=False)
    return VllmSampler(remote, loop, tokenizer=words, max_length=length, scored=scored, version=version, seeds=seeds)


async def _check_server(remote: _Remote, tokenizer: Tokenizer) -> str:
    """Raise where a sampler would give wrong numbers, as the first request would show; return what to warn of.

    A gateway has the logprobs of its sampler, which was checked, and would record what is drawn to check them again.
    """
    tokens = [await remote.client.encode(remote.model, text) for text in TEXTS]
    other = different_tokenizer(tokenizer, TEXTS, tokens)
    if other:
        raise ConfigError(f"{remote.client.url}: {other}; set tokenizer= to that of its model")
    probe = remote.generate, remote.name, tokenizer.encode(TEXTS[0]), tokenizer
    if remote.model.least:
        await check_logprobs_mode(*probe)
    return await differing_scores(*probe) if remote.model.parent is not None else ""


def _tokenizer_of(model: Model, where: str) -> Tokenizer:
    """Return the tokenizer of a folder or hub id that a server names.

    Raises:
        ConfigError: it names none that can be read here.
    """
    if model.root is None or not (Path(model.root).is_dir() or _HUB.fullmatch(model.root)):
        raise ConfigError(
            f"{where}: the server names {model.root!r} as its model's folder, which this machine does not have; set "
            "tokenizer= to a folder, a hub id or a tokenizer"
        )
    return tokenizer_from(model.root)


def named_model(models: list[Model], name: str | None, where: str) -> Model:
    """Return the model of that name, or the first that is not an adapter.

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
