"""``connect``: a trainer by name, and ``sampler``: a frozen policy without a trainer."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from rlkit import _check
from rlkit.backends.early import resolve_class
from rlkit.backends.options import LocalOptions
from rlkit.backends.protocol import LossLike, Sampler, Tokenizer, TrainerBackend
from rlkit.backends.samplers import reference_logprobs
from rlkit.errors import ConfigError
from rlkit.registry import Registry

__all__ = ["LossLike", "Sampler", "Tokenizer", "TrainerBackend", "connect", "reference_logprobs", "registry", "sampler"]

registry = Registry("backend", entry_point_group="rlkit.backends")
registry.update(
    toy="rlkit.backends.toy:ToyBackend",
    local="rlkit.backends.local:LocalBackend",
    tinker="rlkit.backends.tinker:TinkerBackend",
)


def connect(name: str, **options: object) -> TrainerBackend:
    """Open a trainer: ``"toy"``, ``"local"``, ``"tinker"``, or what a package adds to the group ``rlkit.backends``.

    Args:
        name: of the backend.
        options: by name. All backends take:

            - model: what to train; "toy" ignores it.
            - lora: ``rlkit.Lora``; None is ``Lora()``, an adapter of rank 32, and never training of all weights. "toy"
              ignores it.
            - seed: of everything random in it; None for a fresh one.
            - folder: where ``save`` writes.
            - resume_from: a saved path, weights and optimizer.
            - init_from: a saved path, weights only; the adapter's shape comes from there.

            "toy" takes max_length too. "local" takes what ``help(rlkit.backends.local.LocalBackend)`` lists. "tinker"
            takes base_url, api_key, project, client, tokenizer, max_length, deadline and off_temperature too: see
            ``help(rlkit.backends.tinker.TinkerBackend)``.

    Raises:
        UnknownNameError: no such backend.
        ConfigError: an option is unknown, of the wrong type or out of range, or a package is missing.

    >>> with connect("toy", seed=0) as policy:
    ...     policy.tokenizer.decode(policy.tokenizer.encode("hello"))
    'hello'
    """
    make = resolve_class(registry, name, options, LocalOptions, "connect")
    _check.check_keywords(f"connect({name!r})", make, options)
    backend: TrainerBackend = make(**options)
    hint = f"rlkit.sampler({name!r}) opens a sampler" if hasattr(make, "open_sampler") else ""
    _check.require_protocol(f"connect({name!r})", backend, TrainerBackend, hint)
    return backend


def sampler(name: str, *, model: str | None = None, path: str | None = None, **options: Any) -> Sampler:
    """Open a frozen policy without a trainer: a teacher, a reference, a finished policy.

    Args:
        name: as in ``connect``, or the URL of a server of vLLM, or of a gateway; its options are those of
            ``rlkit.backends.vllm.open_sampler``.
        model: the base model; at a URL, the name of what it serves, None for its base model.
        path: what ``save`` returned; None is the base model itself. ``rlkit.runs.sampler`` opens a run's policy.
        options: as in ``connect``, without ``init_from`` and ``resume_from``.
    """
    if isinstance(name, str) and name.lower().startswith(("http://", "https://")):
        if path is not None:
            raise ConfigError(
                "rlkit.sampler(path)", "is given together with a URL", "model=, the name of the served model"
            )
        open_sampler = import_module("rlkit.backends.vllm").open_sampler  # relies on this
        _check.check_keywords("rlkit.sampler(url)", open_sampler, options)
        served: Sampler = open_sampler(name, model=model, **options)
        return served
    taken = {"init_from", "resume_from"} & options.keys()
    if taken:
        raise ConfigError(f"rlkit.sampler: got {min(taken)}=; a sampler takes path=, the path that save() returned")
    if isinstance(path, (str, os.PathLike)) and (Path(path) / "checkpoints").is_dir():
        expected = "a path that save() returned; rlkit.runs.sampler opens a run's newest policy"
        raise ConfigError("rlkit.sampler(path)", f"{path} is the folder of a run", expected)
    given = options if model is None else {**options, "model": model}
    given = given if path is None else {**given, "init_from": path}
    make = resolve_class(registry, name, given, LocalOptions, "connect")
    if hasattr(make, "open_sampler"):  # it samples without a trainer, and needs none of a trainer's methods
        opened: Sampler = make.open_sampler(model=model, path=path, **options)
        _check.require_protocol(f"rlkit.sampler({name!r})", opened, Sampler)
        return opened
    if model is not None:
        options["model"] = model
    backend = connect(name, **options) if path is None else connect(name, init_from=path, **options)
    return (backend.base_sampler() if path is None else backend.sampler()).result()
