"""Checks of the local backend's options that come before transformers is imported, and mostly before torch is."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from rlkit import _check
from rlkit._runtime import has_torch, missing
from rlkit.backends.hub import hub_source
from rlkit.errors import ConfigError
from rlkit.registry import Registry

if TYPE_CHECKING:
    import torch

    from rlkit.backends.options import ModelOptions

__all__ = ["SMOLLM2", "check_local", "check_model", "device_of", "no_model", "resolve_class"]

SMOLLM2 = "smollm2-135m-instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


def resolve_class(
    registry: Registry, name: str, options: Mapping[str, object], kind: type[ModelOptions], call: str
) -> Any:
    """Return the entry ``name`` of a registry of backends or critics, after a check of the options of "local".

    Raises:
        UnknownNameError: the registry has no such name.
        MissingPackageError: a package is not installed.
        ConfigError: as for ``check_local``.
    """
    if name == "local" and isinstance(dict.get(registry, name), str):  # not imported yet; registry.get would
        check_local(options, kind)
    try:
        return registry.resolve(name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("torch", "transformers", "peft", "safetensors"):
            raise
        raise missing(f"{call}({name!r})", package, "local") from error


def check_local(options: Mapping[str, Any], kind: type[ModelOptions]) -> None:
    """Check the options of a call that opens something of the local backend, whose import takes seconds.

    Args:
        options: of the call; one that the class lacks is left to the import, which names it.
        kind: their class.

    Raises:
        ConfigError: no model is given, it is not a model, the device is not on this machine, or an option is out of
            range.
    """
    if not has_torch():
        return  # the import says what to install
    known = options.keys() <= attrs.fields_dict(kind).keys()
    if options.get("model") is not None:
        hub_source(check_model(options["model"]), "model", "config.json")
    elif options.get("resume_from") is None and options.get("init_from") is None and known:
        raise no_model()
    if known:
        kind(**options)
    if isinstance(options.get("device"), str):
        device_of(options["device"])


def no_model() -> ConfigError:
    """Return the error of a call without a model."""
    return ConfigError(f"model: give a directory, a hub id, or {SMOLLM2!r}")


def check_model(model: object) -> str:
    """Return the name of a model, once it is that of a directory with a ``config.json``, a hub id, or ``SMOLLM2``.

    Raises:
        ConfigError: it is none of these.
    """
    good = isinstance(model, (str, os.PathLike)) and os.fspath(model)
    _check.require(good, "model", model, f"a directory, a hub id, or {SMOLLM2!r}")
    name = os.fspath(cast("str | os.PathLike[str]", model))
    if name.lower() == SMOLLM2:
        return SMOLLM2
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError("model", f"the directory {name!r} has no config.json", "a saved model")
        return str(path)
    if path.exists():
        raise ConfigError("model", f"{name!r} is a file", "the directory of a saved model")
    if _HUB_ID.fullmatch(name) is None or isinstance(model, os.PathLike):
        hint = f"did you mean {SMOLLM2!r}?" if difflib.get_close_matches(name.lower(), [SMOLLM2]) else ""
        raise ConfigError("model", f"no directory {name!r}", "one that exists, or a hub id owner/name", hint)
    return name


def device_of(device: str | None) -> torch.device:
    """Return the device under its only name: "cuda" becomes "cuda:0", or the current one.

    Args:
        device: its name; None is a GPU of CUDA if the machine has one, else the CPU.

    Raises:
        ConfigError: no device has that name, or this machine lacks it.

    >>> device_of("cpu:0")
    device(type='cpu')
    """
    import torch

    try:
        named = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    except (RuntimeError, TypeError) as error:
        what = f"got {_check.describe(device)}, a device type that torch does not know"
        raise ConfigError("device", what, f"one of {_listed()}") from error
    if (named.index or 0) >= _devices().get(named.type, 0):
        raise ConfigError("device", f"got {device!r}", f"one of {_listed()}", _why_none(named.type))
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(named.type, named.index or 0)


def _devices() -> dict[str, int]:
    """Return how many devices of each kind torch finds here."""
    import torch

    found = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if torch.accelerator.is_available():  # XPU, or a package's
        found.setdefault(torch.accelerator.current_accelerator().type, torch.accelerator.device_count())
    return {kind: count for kind, count in found.items() if count}


def _listed() -> str:
    names = []
    for kind, count in _devices().items():
        names += [kind] if count == 1 and kind in ("cpu", "mps") else [f"{kind}:{i}" for i in range(count)]
    return ", ".join(names)


def _why_none(kind: str) -> str:
    """Return why torch finds no device of a kind; "" if it finds some."""
    import torch

    built = {
        "cuda": torch.version.cuda or torch.version.hip,
        "mps": torch.backends.mps.is_built(),
        "xpu": getattr(torch.version, "xpu", None),
    }
    if kind in _devices() or kind not in built:
        return ""
    build, name = f"torch {torch.__version__}", kind.upper()
    if not built[kind]:
        return f"{build} is built without {name}; install a build from pytorch.org that has it"
    return f"{build} is built with {name} but finds no device; check its driver"
