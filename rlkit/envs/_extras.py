"""Packages that adapters need, imported when they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from rlkit.errors import ConfigError


def package(adapter: str, module: str, install: str) -> ModuleType:
    """``module``, or a ConfigError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        text = f"rlkit.envs.{adapter}: module {module!r} can not be imported ({error}); install it with {install}"
        raise ConfigError(text) from error
