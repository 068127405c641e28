"""Packages that adapters need, imported when they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from rlkit.errors import ConfigError

_lock = threading.Lock()


def package(adapter: str, module: str, install: str) -> ModuleType:
    """Import ``module``, or raise a ConfigError that says what to install.

    A file of the user's own that has the package's name, such as a script gem.py that plays GEM's games, does not hide
    the package.
    """
    top = module.partition(".")[0]
    try:
        with _lock:
            if top not in sys.modules and (spec := _behind_a_file(top)) is not None:
                _load(top, spec)
        return importlib.import_module(module)
    except ImportError as error:
        text = f"rlkit.envs.{adapter}: module {module!r} cannot be imported ({error}); install it with {install}"
        loaded = sys.modules.get(top)
        if loaded is not None and not hasattr(loaded, "__path__"):
            text += f"; {top!r} has been imported from {getattr(loaded, '__file__', None)}, which needs another name"
        raise ConfigError(text) from error


def _behind_a_file(top: str) -> ModuleSpec | None:
    """Where the package of that name is, if a single file of that name stands before it in the search."""
    try:
        first = importlib.util.find_spec(top)
    except ValueError:  # the main module of a debugger or notebook may have no spec
        return None
    if first is None or first.submodule_search_locations is not None or first.origin is None:
        return None
    folder = Path(first.origin).resolve().parent
    spec = PathFinder.find_spec(top, [entry for entry in sys.path if Path(entry).resolve() != folder])
    return spec if spec is not None and spec.submodule_search_locations is not None else None


def _load(top: str, spec: ModuleSpec) -> None:
    module = importlib.util.module_from_spec(spec)
    sys.modules[top] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[top]
        raise
