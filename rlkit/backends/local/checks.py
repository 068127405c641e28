"""What the options of the local backend come to, before any work."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import attrs

from rlkit import _check
from rlkit._seeds import resolve_seed
from rlkit.backends import saves
from rlkit.backends.early import device_of, no_model
from rlkit.backends.local.checkpoint import lora_of
from rlkit.backends.local.model.hub import announces_tied, located
from rlkit.backends.local.model.memory import default_dtype
from rlkit.backends.options import LocalOptions, ModelOptions, takes
from rlkit.backends.protocol import Sampler
from rlkit.backends.samplers import OpensEngine, SamplingEngine
from rlkit.errors import ConfigError
from rlkit.types import Lora

if TYPE_CHECKING:
    import torch

    from rlkit.backends.local.distributed.settings import Processes

__all__ = ["ResolvedOptions", "check_options", "check_sampler", "read_processes", "resolve_local", "resolve_model"]

AnyOptions = TypeVar("AnyOptions", bound=ModelOptions)

_OWN_SAMPLING = ("merge", "merged_copies", "max_rows", "prefix_mb", "cuda_graphs")


@attrs.frozen(eq=False, kw_only=True)
class ResolvedOptions(Generic[AnyOptions]):
    """The options as resolved before anything is loaded.

    Attributes:
        options: with what is known of the next three, and what a resumed run keeps.
        model, lora, dtype: what is asked for, or what was saved.
        device: where the base is computed.
        entropy: ``seed``, or a fresh one.
        saved: the folder of the saved state and what is in it; None: it starts anew.
        resumes: with the optimizer, too.
        engine: what samples instead of this process, or the settings that open it.
        processes: that train and sample together; None: this one alone.
    """

    options: AnyOptions
    model: str
    lora: Lora
    dtype: str
    device: torch.device
    entropy: int
    saved: tuple[Path, dict[str, Any]] | None
    resumes: bool
    engine: OpensEngine | SamplingEngine | None = None
    processes: Processes | None = None


@takes(LocalOptions)
def check_options(**options: Any) -> ResolvedOptions[LocalOptions]:
    """Check the options of ``connect("local")``, as far as that needs neither model nor server.

    Raises:
        ConfigError, CheckpointError: as ``LocalBackend`` does.
    """
    return resolve_local(LocalOptions(**options))


def resolve_local(options: LocalOptions) -> ResolvedOptions[LocalOptions]:
    """Return what the options come to. See ``check_options``."""
    engine, processes = _read_engine(options), read_processes(options)
    _check_shard(options, processes)
    resolved = resolve_model(options, "local")
    if isinstance(engine, OpensEngine):
        lora = resolved.lora
        untied = lora.train_unembed is None and announces_tied(resolved.model) is False
        engine.check(attrs.evolve(lora, train_unembed=True) if untied else lora, options.sampler)
    return attrs.evolve(resolved, engine=engine, processes=processes)


def resolve_model(options: AnyOptions, backend: str) -> ResolvedOptions[AnyOptions]:
    """Return what the options that name a model and a saved state come to.

    Args:
        options: of the user.
        backend: the name that its saved states have.
    """
    path, resumes = options.start()
    saved = saves.read(path, backend=backend) if path is not None else None
    state = saved[1] if saved is not None else {}
    name = state.get("model") if options.model is None else options.model
    if name is None:
        raise no_model()
    lora = lora_of(state, options.lora) if saved is not None else options.lora or Lora()
    if resumes:
        options = options.resumed(state)
    place, model = device_of(options.device), located(name)
    dtype = options.dtype or default_dtype(place)
    return ResolvedOptions(
        options=attrs.evolve(options, model=model, lora=lora, dtype=dtype),
        model=model,
        lora=lora,
        dtype=dtype,
        device=place,
        entropy=resolve_seed(options.seed),
        saved=saved,
        resumes=resumes,
    )


# The short forms of two options, ``processes=2`` and ``sampler="vllm"``, are turned into objects that are told to open
# by functions which are found by name: what one process needs imports neither several processes nor vLLM's client.


def read_processes(options: LocalOptions) -> Processes | None:
    """Return what ``processes=`` asks for; None: this process alone."""
    read = resolve_name("rlkit.backends.local.distributed.settings:read_processes")
    return cast("Processes | None", read(options.processes))


def _read_engine(options: LocalOptions) -> OpensEngine | SamplingEngine | None:
    """Return what ``sampler=`` asks for, once it is one; options of this process's own sampling do nothing then."""
    engine = options.sampler
    if isinstance(engine, (str, list, tuple)):
        engine = resolve_name("rlkit.backends.vllm.settings:read_sampler")(engine)
    if engine is None:
        return None
    if isinstance(engine, type) or not isinstance(engine, OpensEngine):
        _check.require_protocol("connect(sampler)", engine, SamplingEngine, "or 'vllm', a URL, or several")
    _check_own_sampling(options, "sampler=")
    return cast("OpensEngine | SamplingEngine", engine)


def _check_own_sampling(options: LocalOptions, given: str) -> None:
    """Raise ConfigError where an option of this process's sampling is set, which does not sample with ``given``."""
    fields = attrs.fields_dict(LocalOptions)
    if any(getattr(options, name) != fields[name].default for name in _OWN_SAMPLING):
        named = f"{', '.join(_OWN_SAMPLING[:-1])} and {_OWN_SAMPLING[-1]}"
        raise ConfigError(f"connect: {named} have no effect with {given}; omit them")


def _check_shard(options: LocalOptions, processes: Processes | None) -> None:
    """Raise ConfigError where weights cannot be shared out, or another option needs them whole."""
    if not options.shard:
        return
    if processes is None:
        raise ConfigError(
            "shard", "got True with one process", "several, which share the weights", "give processes=2 or more"
        )
    _check_own_sampling(options, "shard=True")


def check_sampler(call: str, sampler: Sampler | None) -> Sampler:
    """Return what an engine gave, once it has the methods of a sampler."""
    _check.require_protocol(f"the sampling engine's {call}", sampler, Sampler, "from a SamplingEngine")
    return cast("Sampler", sampler)
