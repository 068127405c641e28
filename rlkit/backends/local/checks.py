"""The checks of ``LocalBackend``'s options, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs

from rlkit import _check
from rlkit.backends import saves
from rlkit.backends.checking import Start
from rlkit.backends.engine import SamplingEngine
from rlkit.backends.local.checkpoint import lora_of
from rlkit.backends.local.distributed.settings import Processes, processes_of
from rlkit.backends.local.model.base import check_dtype
from rlkit.backends.local.model.defaults import default_dtype
from rlkit.backends.local.model.device import device_of
from rlkit.backends.local.training.rows import existing_folder
from rlkit.backends.protocol import Sampler
from rlkit.backends.sampling import entropy_of
from rlkit.backends.vllm.settings import Vllm, check_served, vllm_of
from rlkit.errors import ConfigError
from rlkit.types import Lora

if TYPE_CHECKING:
    import torch

__all__ = ["Checked", "check_options", "checked_sampler"]


@attrs.frozen(eq=False)
class Checked:
    """What the options of ``LocalBackend`` come to, before anything is loaded.

    Attributes:
        start: the saved state that it starts from.
        saved: its folder and what stands in it; None: it starts from anew.
        resumed: what stands in it, of a run that is resumed.
        model, lora: what is asked for, or what was saved.
        entropy: ``seed``, or a fresh one.
        dtype, device: in which the base is computed, and where.
        rows_in: ``offload_folder``.
        vllm: what samples, where vLLM does.
    """

    start: Start
    saved: tuple[Path, dict[str, Any]] | None
    resumed: Mapping[str, Any]
    model: str
    lora: Lora
    entropy: int
    dtype: str
    device: torch.device
    rows_in: Path | None
    vllm: Vllm | None


def check_options(
    *,
    model: str | None = None,
    lora: Lora | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
    resume_from: str | None = None,
    init_from: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    merge: bool | Literal["auto"] = "auto",
    micro_batch_tokens: int | None = None,
    offload_folder: str | Path | None = None,
    max_rows: int | None = None,
    prefix_mb: int = 512,
    cuda_graphs: bool | None = None,
    sampler: SamplingEngine | Vllm | str | Sequence[str] | None = None,
    processes: int | Processes | None = None,
    shard: bool = False,
) -> Checked:
    """Check the options of ``LocalBackend``, which has the same, as far as that needs neither model nor server.

    Raises:
        ConfigError, CheckpointError: as ``LocalBackend`` does.
    """
    start = Start.of("connect", model, lora, folder, resume_from, init_from)
    _check_computing(merge, micro_batch_tokens, max_rows, prefix_mb, cuda_graphs)
    rows_in = existing_folder(offload_folder)
    vllm = _checked_engine(sampler, (merge, max_rows, prefix_mb, cuda_graphs))
    _check_shard(shard, processes_of(processes), merge, cuda_graphs)
    saved = saves.read(start.path, backend="local") if start.path is not None else None
    model = _model_of(model, saved[1] if saved is not None else {})
    lora = lora_of(saved[1], lora) if saved is not None else lora or Lora()
    check_served(lora, vllm, sampler)
    place, resumed = device_of(device), saved[1] if saved is not None and start.resumes else {}
    if dtype is None:
        dtype = str(resumed.get("dtype") or default_dtype(place))
    check_dtype(dtype)
    return Checked(start, saved, resumed, model, lora, entropy_of(seed), dtype, place, rows_in, vllm)


def _check_computing(
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


def _check_shard(shard: object, processes: Processes | None, merge: object, cuda_graphs: object) -> None:
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


def _checked_engine(sampler: object, own: tuple[object, ...]) -> Vllm | None:
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


def _model_of(model: str | None, state: Mapping[str, Any]) -> str:
    """Return the model, or the one that a saved state names."""
    name = state.get("model") if model is None else model
    if name is None:
        raise ConfigError("model: give a directory, a hub id, or 'smollm2-135m-instruct'")
    return cast("str", name)
