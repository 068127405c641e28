"""``connect``: a trainer by name, and ``sampler``: a frozen policy without a trainer."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from rlkit import _check
from rlkit._calls import answered
from rlkit._lazy import missing
from rlkit.backends.options import LocalOptions, TinkerOptions, ToyOptions
from rlkit.backends.protocol import LossLike, OpensSamplers, Sampler, Tokenizer, TrainerBackend
from rlkit.backends.reference import reference_logprobs
from rlkit.errors import ConfigError
from rlkit.registry import Registry

__all__ = ["LossLike", "Sampler", "Tokenizer", "TrainerBackend", "connect", "reference_logprobs", "registry", "sampler"]

registry = Registry("backend", entry_point_group="rlkit.backends")
registry.update(
    toy="rlkit.backends.toy:ToyBackend",
    local="rlkit.backends.local:LocalBackend",
    tinker="rlkit.backends.tinker:TinkerBackend",
)


@overload
def connect(name: Literal["toy"], **options: Unpack[ToyOptions]) -> TrainerBackend: ...


@overload
def connect(name: Literal["local"], **options: Unpack[LocalOptions]) -> TrainerBackend: ...


@overload
def connect(name: Literal["tinker"], **options: Unpack[TinkerOptions]) -> TrainerBackend: ...


@overload
def connect(name: str, **options: object) -> TrainerBackend: ...


@answered
def connect(name: str, **options: object) -> TrainerBackend:
    """Open a trainer: ``"toy"``, ``"local"``, ``"tinker"``, or what a package adds to the group ``rlkit.backends``.

    Args:
        name: of the backend.
        options: by name. All backends take:

            - model: what to train.
            - lora: ``rlkit.Lora``, None for its defaults.
            - seed: of everything random in it; None for a fresh one.
            - folder: where ``save`` writes.
            - resume_from: a saved path, weights and optimizer.
            - init_from: a saved path, weights only; the adapter's shape comes from there.

            "toy" takes max_length too. "local" takes dtype, device, merge, micro_batch_tokens, offload_folder,
            max_rows, prefix_mb, cuda_graphs, sampler, processes and shard too: see
            ``help(rlkit.backends.local.LocalBackend)``. "tinker"
            takes base_url, api_key, project, client, tokenizer, max_length, deadline, off_temperature, server_losses,
            ttl, metadata, resend and optimizer too: see ``help(rlkit.backends.tinker.TinkerBackend)``.

    Raises:
        UnknownNameError: no such backend.
        ConfigError: an option is unknown, of the wrong type or out of range, or a package is missing.

    >>> with connect("toy", seed=0) as policy:
    ...     policy.tokenizer.decode(policy.tokenizer.encode("hello"))
    'hello'
    """
    make = _class_of(name)
    _check.options(f"connect({name!r})", make, options, kind="connect")
    backend: TrainerBackend = make(**options)
    hint = f"rlkit.sampler({name!r}) opens a sampler" if isinstance(make, OpensSamplers) else ""
    _check.members(f"connect({name!r})", backend, TrainerBackend, hint)
    return backend


@answered
def sampler(name: str, *, model: str | None = None, path: str | None = None, **options: Any) -> Sampler:
    """Open a frozen policy without a trainer: a teacher, a reference, a finished policy.

    Args:
        name: as in ``connect``, or the URL of a server of vLLM, or of a gateway, whose options are those of
            ``rlkit.backends.vllm.open_sampler``.
        model: the base model; at a URL, the name of what it serves, None for its base model.
        path: what ``save`` returned; None is the base model itself. ``rlkit.runs.sampler`` opens a run's policy.
        options: as in ``connect``, without ``init_from`` and ``resume_from``.
    """
    if isinstance(name, str) and name.startswith(("http://", "https://")):
        if path is not None:
            raise ConfigError(
                "rlkit.sampler(path)", "is given beside a URL", "model=, the name of what is served there"
            )
        open_sampler = import_module("rlkit.backends.vllm").open_sampler  # stands on this
        _check.options("rlkit.sampler(url)", open_sampler, options)
        served: Sampler = open_sampler(name, model=model, **options)
        return served
    taken = {"init_from", "resume_from"} & options.keys()
    if taken:
        raise ConfigError(f"rlkit.sampler: got {min(taken)}=; a sampler takes path=, what save() returned")
    if isinstance(path, (str, os.PathLike)) and (Path(path) / "checkpoints").is_dir():
        expected = "what save() returned; rlkit.runs.sampler opens a run's newest policy"
        raise ConfigError("rlkit.sampler(path)", f"{path} is a run's folder", expected)
    make = _class_of(name)
    if isinstance(make, OpensSamplers):
        opened = make.open_sampler(model=model, path=path, **options)
        _check.members(f"rlkit.sampler({name!r})", opened, Sampler)
        return opened
    if model is not None:
        options["model"] = model
    backend = connect(name, **options) if path is None else connect(name, init_from=path, **options)
    return (backend.base_sampler() if path is None else backend.sampler()).result()


def _class_of(name: str) -> Any:
    """Return what the registry has, or raise the error of the package that it lacks."""
    try:
        return registry.resolve(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "transformers", "peft", "safetensors"):
            raise
        raise missing(f"connect({name!r})", error.name.partition(".")[0], "local") from error
