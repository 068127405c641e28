"""torch, imported when something of it is first used, so that what is said about losses needs no torch.

In a module: ``if TYPE_CHECKING: import torch`` and ``else: from rlkit._lazy import torch``.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

from rlkit._install import command
from rlkit.errors import MissingPackageError

__all__ = ["has_torch", "missing", "torch"]


@cache
def has_torch() -> bool:
    """Whether torch can be imported."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:
        return False


def missing(what: str, package: str, *extras: str) -> MissingPackageError:
    """Return the error of ``what`` that needs a package which is not installed, with the command that installs it."""
    return MissingPackageError(f"{what} needs {package}: {command(*extras)}")


class _Torch:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by doctest, inspect and the like
            raise AttributeError(name)
        try:
            value = getattr(importlib.import_module("torch"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise missing("computing a loss here", "torch", "torch") from error
        setattr(self, name, value)
        return value


torch: Any = _Torch()
