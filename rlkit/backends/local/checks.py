"""The checks of ``LocalBackend``'s options, before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlkit import _check
from rlkit.backends.engine import SamplingEngine
from rlkit.backends.local.distributed.settings import Processes
from rlkit.backends.protocol import Sampler
from rlkit.backends.vllm.settings import Vllm, vllm_of
from rlkit.errors import ConfigError

__all__ = ["check_computing", "check_shard", "checked_engine", "checked_sampler", "model_of"]


def check_computing(
    merge: object, micro_batch_tokens: object, max_rows: object, prefix_mb: object, cuda_graphs: object
) -> None:
    """Raise ConfigError where one is out of range."""
    for name, value in (("micro_batch_tokens", micro_batch_tokens), ("max_rows", max_rows)):
        if value is not None:
            _check.integer(name, value, low=1)
    _check.integer("prefix_mb", prefix_mb, low=0)
    if cuda_graphs is not None:
        _check.flag("cuda_graphs", cuda_graphs)
    if merge not in (True, False, "auto") or (isinstance(merge, int) and not isinstance(merge, bool)):
        raise ConfigError(_check.problem("merge", f"got {_check.shown(merge)}", "True, False or 'auto'"))


def check_shard(shard: object, processes: Processes | None, merge: object, cuda_graphs: object) -> None:
    """Raise ConfigError where weights cannot be shared out, or what is asked for beside it needs them whole."""
    if not _check.flag("shard", shard):
        return
    if processes is None:
        raise ConfigError(
            "shard", "got True on one process", "several to share the weights", "give processes=2 or more"
        )
    if merge is True:
        raise ConfigError(
            "merge", "got True with shard=True", "False or 'auto'", "a merged copy is as large as the weights"
        )
    if cuda_graphs:
        raise ConfigError(
            "cuda_graphs", "got True with shard=True", "None or False", "graphs know the place of weights that stay"
        )


def checked_engine(sampler: object, own: tuple[object, ...]) -> Vllm | None:
    """Return what ``sampler=`` says about vLLM, if it does, after it was checked beside what is of own sampling."""
    vllm = vllm_of(sampler)
    if sampler is not None:
        if vllm is None:
            _check.members("connect(sampler)", sampler, SamplingEngine, "or 'vllm', a URL, or several")
        if own != ("auto", None, 512, None):
            raise ConfigError("connect: merge, max_rows, prefix_mb and cuda_graphs do nothing with sampler=")
    return vllm


def checked_sampler(call: str, sampler: Sampler | None) -> Sampler:
    """Return what an engine gave, once it has the methods of a sampler."""
    _check.members(f"the sampling engine's {call}", sampler, Sampler, "from a SamplingEngine")
    return cast("Sampler", sampler)


def model_of(model: str | None, state: Mapping[str, Any]) -> str:
    """Return the model, or the one that a saved state names."""
    name = state.get("model") if model is None else model
    if name is None:
        raise ConfigError("model: give a directory, a hub id, or 'smollm2-135m-instruct'")
    return cast("str", name)
