"""Packages that are missing or imported on first use, warnings at the user's line, what has to be closed, loopback,
torchrun.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import ipaddress
import os
import shlex
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any, ClassVar, NoReturn, Self

from rlkit.errors import ConfigError, MissingPackageError

__all__ = [
    "PACKAGE",
    "VERSION",
    "Resource",
    "command",
    "follow_torchrun",
    "has_torch",
    "is_loopback",
    "lazy_names",
    "missing",
    "torchrun_world_size",
    "warn",
]

VERSION = "0.1.0"
PACKAGE = Path(__file__).parent
ROOT = PACKAGE.resolve().parent
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun and its like set
_NAME = "rlkit-lm"  # of the distribution; "rlkit" on PyPI is another project


def command(*extras: str) -> str:
    """Return the ``pip install`` command for some extras: of the checkout that rlkit runs from, else by name.

    >>> command("report").startswith("pip install ")
    True
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{ROOT}{wanted}')}"
    return f"pip install '{_NAME}{wanted}'"


@cache
def has_torch() -> bool:
    """Return whether torch can be imported."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own.

    >>> is_loopback("localhost"), is_loopback("127.8.0.1"), is_loopback("::1"), is_loopback("example.org")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def torchrun_world_size() -> int | None:
    """Return how many processes torchrun started, or None where it did not start several.

    Raises:
        ConfigError: RANK and WORLD_SIZE, of the environment, are not a place among so many.
    """
    told = [os.environ.get(name, "") for name in _TORCHRUN]
    if not all(told):
        return None
    rank, size = (int(text) if text.isdecimal() else -1 for text in told[:2])
    if not 0 <= rank < size:
        what = f"RANK is {told[0]!r} and WORLD_SIZE {told[1]!r}"
        raise ConfigError("torchrun's environment", what, "a rank from 0, and how many ranks there are")
    return None if size == 1 else size  # some clusters tell it to all that they start


def follow_torchrun() -> None:
    """Under torchrun: in all processes but the first do what that one says, and leave the program with it."""
    if torchrun_world_size() is not None:
        resolve_name("rlkit.backends.local.distributed.follower:follow_torchrun")()


def missing(what: str, package: str, *extras: str) -> MissingPackageError:
    """Return the error of ``what`` that needs a package which is not installed, with the command that installs it."""
    return MissingPackageError(f"{what} needs {package}: {command(*extras)}")


def lazy_names(
    package: str, places: Mapping[str, str], *, renamed: bool = False
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports some of its names on first use.

    Args:
        package: its ``__name__``.
        places: name -> the module that defines it.
        renamed: whether the ``__module__`` of each becomes the package, where users import it from.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(places[name]), name)
        if renamed:
            value.__module__ = package
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *places})


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn as ``warnings.warn`` does, at the user's line; in a thread that rlkit started, at the line of rlkit."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and _package(frame) in ("rlkit", "torch", "attr"):  # no_grad, attrs.evolve
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=2 if frame is None or _package(frame) == "threading" else level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


class Resource(ABC):
    """A context manager that closes itself, and cannot be pickled or copied."""

    _instead: ClassVar[str] = "open a separate one in each process"

    @abstractmethod
    def close(self) -> None:
        """Free what it holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        what = f"a {type(self).__name__} holds threads, connections or memory, and cannot be pickled or copied"
        raise TypeError(f"{what}; {self._instead}")
