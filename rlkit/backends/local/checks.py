"""The checks of ``LocalBackend``'s options, before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlkit import _check
from rlkit.backends.engine import SamplingEngine
from rlkit.backends.protocol import Sampler
from rlkit.backends.vllm.settings import Vllm, vllm_of
from rlkit.errors import ConfigError

__all__ = ["check_computing", "checked_engine", "checked_sampler", "model_of"]


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


def checked_engine(sampler: object, own: tuple[object, ...]) -> Vllm | None:
    """Return what ``sampler=`` says about vLLM, if it does, after it was checked beside what is of own sampling."""
    vllm = vllm_of(sampler)
    if sampler is not None:
        if vllm is None:
            _check.members("connect(sampler)", sampler, SamplingEngine)
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
